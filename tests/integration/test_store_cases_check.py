"""What `check` and a start say of each object store, and what a start refuses before anything connects."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from archiver import cli
from tests.harness.daemon import REPOSITORY, merged
from tests.harness.fault_proxy import Answer, FaultProxy
from tests.harness.kafka import KafkaServer
from tests.integration.cases import settings_for
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import PREFIX, SCHEMES, MakeSide, StoreSide

STORES = ("s3", "gs", "az")


def check(folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Exit status and lines of `dfe-archiver check`."""
    for name in os.environ:
        if name.startswith(("DFE_ARCHIVER_", "KAFKA_", "S3_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    config = folder / "archiver.yaml"
    config.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(cli.commands, ["check", "--config", str(config)])
    return result.exit_code, result.output.splitlines()


@pytest.fixture
def base(kafka: KafkaServer, topic: str, tmp_path: Path) -> dict[str, Any]:
    """Settings of which everything but the store is well."""
    kafka.create_topic(topic)
    spool = {"buffer": {"spool_dir": str(tmp_path / "spool"), "min_free_disk_bytes": "64MiB"}}
    return settings_for(kafka, topic, spool)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_check_says_of_a_store_that_is_well_whether_it_replaces_objects(
    scheme: str, base: dict[str, Any], make_side: MakeSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[O1], [S3]: one screen, status 0, and nothing but the reserved key is in the bucket afterwards."""
    side = make_side(scheme)
    status, lines = check(tmp_path, merged(base, side.settings()), monkeypatch)
    assert status == 0, lines
    assert len(lines) <= 10
    assert all(line.startswith("ok ") for line in lines)
    (store,) = [line for line in lines if " store: " in line]
    assert f"{scheme}://{side.bucket}/{PREFIX} can be written" in store
    assert ("would replace objects" if scheme == "gs" else "refuses to replace objects") in store
    assert side.names() == [f"{PREFIX}/.dfe-archiver-probe"]


def wrong(side: StoreSide, what: str) -> dict[str, Any]:
    """Settings of a store with one thing wrong with it."""
    if what == "denied":
        side.proxy.fail(side.denied(), when=side.brings_bytes, times=None)
    if what == "credentials" and side.scheme == "gs":
        # the server asks for none: what Google answers to a token it does not know
        body = json.dumps({"error": {"code": 401, "message": "Invalid Credentials"}}).encode()
        side.proxy.fail(Answer(401, body, {"Content-Type": "application/json"}), times=None)
    elif what == "credentials":
        name = "secret_access_key" if side.scheme == "s3" else "account_key"
        return side.settings(**{name: "bm90aGluZyB3ZSBrbm93IG9m"})
    return side.settings()


@pytest.mark.parametrize("scheme", STORES)
@pytest.mark.parametrize(
    ("what", "kind", "way_out"),
    [
        ("credentials", "credentials", "check "),
        ("missing", "missing_bucket", "create the "),
        ("denied", "access_denied", "allow |grant "),
    ],
)
def test_check_says_what_is_wrong_with_a_store_and_the_way_out(
    scheme: str,
    what: str,
    kind: str,
    way_out: str,
    base: dict[str, Any],
    make_side: MakeSide,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[O1], [S6]: status 1, one failed line, no archive file, no traceback."""
    side = make_side(scheme, create=what != "missing")
    status, lines = check(tmp_path, merged(base, wrong(side, what)), monkeypatch)
    assert status == 1
    assert len(lines) <= 10
    (failed,) = [line for line in lines if line.startswith("FAILED")]
    if (scheme, what) == ("az", "credentials"):
        kind, way_out = "access_denied", "allow "  # the service itself says AuthenticationFailed
    assert f"FAILED  store: {scheme}://{side.bucket}/{PREFIX}: {kind}: " in failed
    assert re.search(rf"\((?:{way_out})", failed), failed
    assert "Traceback" not in "".join(lines)


# --- refused at start -------------------------------------------------------------------------


class Unwanted:
    """A broker's and a store's address at which nobody must call."""

    def __init__(self, broker: socket.socket, store: FaultProxy) -> None:
        self._broker, self._store = broker, store
        self.bootstrap = f"127.0.0.1:{broker.getsockname()[1]}"
        self.endpoint = store.endpoint

    def calls(self) -> int:
        """How many have called."""
        called = self._store.connections
        self._broker.setblocking(False)
        try:
            self._broker.accept()[0].close()
        except BlockingIOError:
            return called
        return called + 1


@pytest.fixture
def unwanted() -> Iterator[Unwanted]:
    with socket.create_server(("127.0.0.1", 0)) as broker, FaultProxy() as store:
        yield Unwanted(broker, store)


GOOD: dict[str, dict[str, Any]] = {
    "s3": {"s3": {"access_key_id": "id", "secret_access_key": "the-secret"}},
    "minio": {"minio": {"access_key": "id", "secret_key": "the-secret"}},
    "gs": {"gcs": {}},
    "az": {"azure": {"account_name": "acme", "account_key": "dGhlLXNlY3JldA=="}},
}
SECTION = {"s3": "s3", "minio": "minio", "gs": "gcs", "az": "azure"}

BAD = [
    ("s3", {"s3": {"endpoint": "127.0.0.1:9000"}}, "write https://127.0.0.1:9000, or http://127.0.0.1:9000"),
    ("minio", {"minio": {"endpoint": "minio:9000"}}, "write https://minio:9000, or http://minio:9000"),
    ("gs", {"gcs": {"endpoint": "gcs:4443"}}, "write https://gcs:4443, or http://gcs:4443"),
    ("az", {"azure": {"endpoint": "azurite:10000/acme"}}, "write https://azurite:10000/acme, or http://"),
    ("s3", {"s3": {"bucket": "other"}}, "s3.bucket=other disagrees with archive.destination=s3://bucket/p"),
    ("minio", {"minio": {"bucket": "other"}}, "minio.bucket=other disagrees with archive.destination="),
    ("s3", {"archive": {"destination": "s3://bucket/a/../b"}}, "empty segment, . or .."),
    ("gs", {"archive": {"destination": "gs://bucket/../b"}}, "empty segment, . or .."),
    ("az", {"archive": {"destination": "az://bucket//p"}}, "leading slash"),
    ("s3", {"archive": {"destination": "s3://"}}, "names no bucket"),
    ("s3", {"archive": {"destination": "s4://bucket/p"}}, "file:///path, s3://bucket/prefix, minio://"),
    ("s3", {"archive": {"destination": "s3a://bucket/p"}}, "did you mean s3://?"),
    ("s3", {"archive": {"destination": "s3://id:the-secret@bucket/p"}}, "into section s3"),
    ("s3", {"s3": {"acess_key_id": "x"}}, "s3.access_key_id"),
    ("minio", {"minio": {"secret_access_key": "x"}}, "minio.secret_key"),
    ("gs", {"gcs": {"credentials": "x"}}, "gcs.credentials_path"),
    ("az", {"azure": {"acount_name": "x"}}, "azure.account_name"),
    ("s3", {"s3": {"secret_access_key": None}}, "s3.access_key_id is set without s3.secret_access_key"),
    ("s3", {"s3": {"access_key_id": None}}, "s3.secret_access_key is set without s3.access_key_id"),
    ("minio", {"minio": {"secret_key": None}}, "minio.access_key is set without minio.secret_key"),
    ("minio", {"minio": {"endpoint": None}}, "minio.endpoint is required"),
    ("az", {"azure": {"account_name": None}}, "azure.account_name is unset"),
    ("az", {"azure": {"account_key": "not base64!"}}, "azure.account_key is not base64"),
    ("az", {"azure": {"sas_token": "sig=x"}}, "keep one of them"),
    (
        "az",
        {"azure": {"account_name": None, "account_key": None, "endpoint": None, "connection_string": "x"}},
        "azure.connection_string",
    ),
    ("az", {"archive": {"destination": "az://No_Container/p"}}, "no container name"),
    ("gs", {"gcs": {"credentials_path": "/nowhere/key.json"}}, "cannot be read (no such file or directory)"),
    ("gs", {"gcs": {"credentials_path": "HERE"}}, "is not a JSON file with credentials"),
    ("gs", {"gcs": {"service_account_key": "the-secret"}}, "is not the JSON text of a key"),
]


@pytest.mark.parametrize(("scheme", "bad", "words"), BAD)
def test_a_start_with_a_bad_store_section_is_refused_before_anything_connects(
    scheme: str, bad: dict[str, Any], words: str, unwanted: Unwanted, tmp_path: Path
) -> None:
    """[S1], [S8], [C4]: one problem, one line that tells it, status 2, no secret in it."""
    if bad == {"gcs": {"credentials_path": "HERE"}}:
        bad = {"gcs": {"credentials_path": str(tmp_path / "archiver.yaml")}}
    settings = merged(
        {
            "kafka": {"brokers": unwanted.bootstrap, "topics": ["events"]},
            "archive": {"destination": f"{scheme}://bucket/p"},
            "buffer": {"spool_dir": str(tmp_path / "spool")},
            "metrics": {"listen": "127.0.0.1:0"},
            SECTION[scheme]: {"endpoint": unwanted.endpoint},
        },
        merged(GOOD[scheme], bad),
    )
    config = tmp_path / "archiver.yaml"
    config.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "archiver", "run", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    head, *problems = said.splitlines()
    assert head == "dfe-archiver: 1 problem with the configuration"
    assert len(problems) == 1
    assert words in problems[0]
    assert "the-secret" not in said
    assert unwanted.calls() == 0


# --- imports ----------------------------------------------------------------------------------

SDKS = {
    "boto3": {"s3"},
    "botocore": {"s3"},
    "google.cloud.storage": {"gs"},
    "google.auth": {"gs"},
    "azure.core": {"az"},
    "azure.storage.blob": {"az"},
    "azure.identity": set(),
    "grpc": {"gs"},
}


@pytest.mark.parametrize("scheme", ["file", *STORES])
def test_a_start_imports_the_sdk_of_its_own_scheme_alone(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """The running daemon's own imports, as the interpreter reports them; `file://` needs no SDK at all."""
    kafka.create_topic(topic)
    settings = settings_for(kafka, topic)
    if scheme != "file":
        settings = merged(settings, make_side(scheme).settings())
    daemon = make_daemon(settings, env={"PYTHONPROFILEIMPORTTIME": "1"}).start()
    assert daemon.stop() == 0
    lines = re.findall(r"^import time:.*\| +(\S+)$", daemon.output(), re.MULTILINE)
    imported = {name for name in SDKS if name in lines}
    assert "confluent_kafka" in lines
    assert imported == {name for name, schemes in SDKS.items() if scheme in schemes}
    if scheme == "file":
        assert len(lines) < 1_500, "a start that needs no SDK has grown"
