"""What docs/security.md says: Kafka over SASL_SSL, what a wrong password looks like, who may read files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from archiver.settings.models import Kafka
from archiver.sources.kafka_check import look
from tests.harness.archive import compare
from tests.harness.daemon import Daemon, wait_until
from tests.harness.kafka import KafkaServer, SecureListener, make_certificates
from tests.integration.conftest import MakeDaemon

NOBODY = 65_534


@pytest.fixture
def access(secure_kafka: KafkaServer) -> SecureListener:
    """The broker's SASL_SSL listener."""
    assert secure_kafka.secure_listener is not None
    return secure_kafka.secure_listener


def settings(access: SecureListener, topic: str, **kafka: Any) -> dict[str, Any]:
    """A daemon that logs in with what the harness gave the user; `kafka` changes it."""
    return {
        "kafka": {
            "brokers": access.bootstrap,
            "topics": [topic],
            "group_id": topic,
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_user": access.user,
            "sasl_password": access.password,
            "ssl_ca_location": str(access.ca_location),
        }
        | kafka,
        "log": {"level": "debug"},
    }


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"])
def test_records_are_archived_over_tls_with_a_password_that_is_seen_nowhere(
    mechanism: str, secure_kafka: KafkaServer, access: SecureListener, topic: str, make_daemon: MakeDaemon
) -> None:
    """[C7], [S7], c32: encrypted, authenticated, committed; log level debug."""
    values = [b'{"_org_id":"acme","n":%d}' % n for n in range(500)]
    secure_kafka.create_topic(topic)
    secure_kafka.produce(topic, values)
    daemon = make_daemon(settings(access, topic, sasl_mechanism=mechanism)).start()
    wait_until(lambda: daemon.metrics().total("records_consumed_total") == len(values), 30, "all taken")
    told = [daemon.get(path)[1] for path in ("/status", "/metrics", "/readyz")]
    assert daemon.stop() == 0
    comparison = compare({f"{topic}/acme": values}, daemon.archive())
    assert comparison.exact, comparison
    assert secure_kafka.committed(topic, topic) == {0: len(values)}
    assert not any(access.password in text for text in [*told, daemon.output()])


def refused(daemon: Daemon, word: str) -> str:
    """Start it and wait until readiness gives a reason with the word; the reason."""
    daemon.launch()
    reasons: list[str] = []

    def said() -> bool:
        try:
            code, body = daemon.get("/readyz")
        except OSError:
            return False
        reasons.append(body)
        return code == 503 and word in body.lower()

    wait_until(said, 30, f"a reason with {word!r}")
    return reasons[-1]


def test_a_wrong_password_is_a_reason_of_readiness_and_no_secret_of_any_output(
    access: SecureListener, topic: str, make_daemon: MakeDaemon
) -> None:
    """[O2], c32: alive, not ready, and the way out in the log."""
    wrong = "wrong-but-secret-8f3a"
    daemon = make_daemon(settings(access, topic, sasl_password=wrong))
    refused(daemon, "authentication")
    assert daemon.get("/healthz")[0] == 200
    wait_until(lambda: "kafka.sasl_password" in daemon.output(), 15, "the way out in the log")
    told = [daemon.get(path)[1] for path in ("/status", "/metrics", "/readyz", "/")]
    assert daemon.stop() == 0
    assert not any(secret in text for text in [*told, daemon.output()] for secret in (wrong, access.password))


@pytest.mark.parametrize("wrong", ["password", "authority"])
def test_check_does_not_wait_for_a_broker_that_refuses_the_login(
    wrong: str, access: SecureListener, topic: str, tmp_path: Path
) -> None:
    """[O1]: the first refusal is told, in a second or two and not after its whole time, with the way out."""
    said = settings(access, topic)["kafka"]
    if wrong == "password":
        said["sasl_password"] = "wrong-but-secret-8f3a"
    else:
        make_certificates(tmp_path / "other")
        said["ssl_ca_location"] = str(tmp_path / "other" / "ca.pem")
    started = time.monotonic()
    (finding,) = list(look(Kafka.model_validate(said), (), 60.0))
    assert time.monotonic() - started < 60 / 2
    ok, what, detail = finding
    assert (ok, what) == (False, "broker")
    assert detail.startswith(f"{access.bootstrap} refuses us: ")
    assert ("kafka.sasl_password" if wrong == "password" else "kafka.ssl_ca_location") in detail
    assert "wrong-but-secret" not in detail


def test_a_broker_of_another_authority_is_not_talked_to(
    access: SecureListener, topic: str, tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    """The certificate is verified: with another CA no password is sent, and readiness names TLS."""
    make_certificates(tmp_path / "other")
    daemon = make_daemon(settings(access, topic, ssl_ca_location=str(tmp_path / "other" / "ca.pem")))
    reason = refused(daemon, "certificate verify failed")
    assert access.password not in reason
    assert daemon.stop() == 0


@pytest.fixture
def as_nobody() -> list[str]:
    """What starts a program as another user, without capabilities; skips where that cannot be."""
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    prefix += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    started = subprocess.run([*prefix, sys.executable, "-c", "import confluent_kafka"], capture_output=True)
    if started.returncode != 0:
        pytest.skip(f"another user cannot start {sys.executable}")
    return prefix


def test_it_runs_as_a_user_who_may_write_spool_and_archive_alone(
    kafka: KafkaServer, topic: str, tmp_path: Path, make_daemon: MakeDaemon, as_nobody: list[str]
) -> None:
    """Not as root, without capabilities; what it writes in the spool is its owner's alone."""
    kafka.create_topic(topic)
    kafka.produce(topic, [b'{"_org_id":"acme"}'])
    daemon = make_daemon(
        {
            "kafka": {"brokers": kafka.bootstrap, "topics": [topic], "group_id": topic},
            "buffer": {"flush_age_secs": 1},
        },
        prefix=as_nobody,
    )
    for folder in ("spool", "archive"):
        (daemon.root / folder).mkdir(parents=True)
        os.chown(daemon.root / folder, NOBODY, NOBODY)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(parent.stat().st_mode | 0o055)
    daemon.start()
    spool = daemon.root / "spool"
    wait_until(lambda: any((spool / "open").iterdir()), 30, "an open file")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in spool.rglob("*")}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"
        assert path.stat().st_uid == NOBODY
    assert daemon.stop() == 0
    assert compare({f"{topic}/acme": [b'{"_org_id":"acme"}']}, daemon.archive()).exact
    archived = list((daemon.root / "archive").rglob("*.jsonl.zst"))
    assert archived and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in archived)
    written = {p for p in daemon.root.rglob("*") if p.stat().st_uid == NOBODY and p.is_file()}
    assert all(spool in path.parents or daemon.root / "archive" in path.parents for path in written)
