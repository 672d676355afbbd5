"""Cases from the field: wrong secrets at log level debug, on every store and towards Kafka (c32)."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from typer.testing import CliRunner

from archiver import cli
from tests.harness.answering import Answer, Answering
from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import settings_for, value
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import MakeSide, everything_said, with_store

DEBUG = {
    "log": {"level": "debug"},
    "archive": {"roll_interval_secs": 0.5},
    "buffer": {"flush_age_secs": 0.2},
    "shutdown_timeout_secs": 1,
}


def spellings(secret: str) -> Iterator[str]:
    """How a secret might stand in a URL, in JSON, in a repr or in a header."""
    yield from (secret, quote(secret), quote(secret, safe=""), quote_plus(secret))
    yield from (json.dumps(secret)[1:-1], repr(secret)[1:-1])
    yield base64.b64encode(secret.encode()).decode().rstrip("=")


def assert_silent(said: Mapping[str, str], hidden: list[str]) -> None:
    """None of the secrets stands in any of the texts."""
    for where, text in said.items():
        for secret in hidden:
            for spelling in spellings(secret):
                assert spelling not in text, f"a secret in {where}"


def commands(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `check` and `config show` print for the daemon's configuration."""
    monkeypatch.chdir(daemon.root)
    runner, config = CliRunner(), ["--config", str(daemon.config_path)]
    checked = runner.invoke(cli.commands, ["check", *config])
    assert checked.exit_code == 1
    assert "FAILED" in checked.output
    shown = runner.invoke(cli.commands, ["config", "show", *config])
    assert shown.exit_code == 0
    return {"check": checked.output, "config show": shown.output}


def wrong_secrets(kind: str, side: Any, folder: Path, token_url: str) -> tuple[dict[str, Any], list[str]]:
    """Options of a store section that nobody accepts, and what of them must stay unseen."""
    word = "s3cr3t/+" + secrets.token_hex(16) + "=&%"
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    match kind:
        case "s3":
            return {"secret_access_key": word, "session_token": f"{word}token"}, [word, f"{word}token"]
        case "minio":
            return {"secret_key": word}, [word]
        case "az account_key":
            return {"account_key": key}, [key]
        case "az sas_token":
            signature = base64.b64encode(secrets.token_bytes(32)).decode()
            sas = f"sv=2023-11-03&sr=c&sp=rcw&se=2099-01-01T00:00:00Z&sig={quote(signature, safe='')}"
            return {"account_key": None, "sas_token": sas}, [signature, sas]
        case "az connection_string":
            text = f"DefaultEndpointsProtocol=http;AccountName={side.server.account};AccountKey={key};"
            text += f"BlobEndpoint={side.proxy.endpoint}/{side.server.account};"
            unset = dict.fromkeys(("account_key", "account_name", "endpoint"))
            return {**unset, "connection_string": text}, [key, text]
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "project_id": "archive",
        "private_key_id": secrets.token_hex(20),
        "private_key": private.decode(),
        "client_email": "archiver@archive.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_url,
    }
    lines = [line for line in private.decode().splitlines() if not line.startswith("-----")]
    if kind == "gs credentials_path":
        path = folder / "key.json"
        path.write_text(json.dumps(account))
        return {"credentials_path": str(path)}, lines
    return {"service_account_key": json.dumps(account)}, [*lines, str(account["private_key_id"])]


@pytest.mark.parametrize(
    "kind",
    [
        "s3",
        "minio",
        "gs service_account_key",
        "gs credentials_path",
        "az account_key",
        "az sas_token",
        "az connection_string",
    ],
)
def test_c32_a_wrong_secret_of_a_store_is_nowhere_to_be_read(
    kind: str,
    kafka: KafkaServer,
    topic: str,
    make_daemon: MakeDaemon,
    make_side: MakeSide,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """[S7]: log at debug, `/`, `/status`, `/metrics`, `/readyz`, `check`, `config show`."""
    kafka.create_topic(topic)
    side = make_side(kind.split()[0])
    kafka.produce(topic, [value("a", n, 30_000) for n in range(20)])
    with Answering(lambda request: Answer(400, b'{"error": "invalid_grant"}')) as tokens:
        options, hidden = wrong_secrets(kind, side, tmp_path, f"{tokens.url}/token")
        daemon = make_daemon(with_store(settings_for(kafka, topic, DEBUG), side, **options)).launch()
        wait_until(lambda: failed_attempts(daemon) >= 2, 30, "refused uploads")
        said = {"log and HTTP": everything_said(daemon), **commands(daemon, monkeypatch)}
        assert daemon.stop() == 0
    said["log"] = daemon.output()
    assert '"level": "debug"' in said["log"]
    assert ("********" in said["config show"]) == (kind != "gs credentials_path")
    for where in ("log and HTTP", "check"):
        assert "access_denied" in said[where] or "credentials" in said[where]
    assert_silent(said, hidden)


def failed_attempts(daemon: Daemon) -> float:
    try:
        return daemon.metrics().total("upload_retries_total")
    except OSError:
        return 0


def test_c32_a_wrong_password_of_kafka_is_nowhere_to_be_read(
    secure_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[S7]: SASL, with librdkafka's own debugging on beside ours."""
    access = secure_kafka.secure_listener
    assert access is not None
    secret = "s3cr3t/+" + secrets.token_hex(16) + "=&%"
    section = {
        "brokers": access.bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_user": access.user,
        "sasl_password": secret,
        "ssl_ca_location": str(access.ca_location),
        "client": {"debug": "security,broker,conf"},
    }
    daemon = make_daemon(merged(settings_for(secure_kafka, topic, DEBUG), {"kafka": section})).launch()
    wait_until(lambda: "uthentication" in daemon.output(), 30, "a refused login")
    said = {"log and HTTP": everything_said(daemon), **commands(daemon, monkeypatch)}
    assert daemon.stop() == 0
    said["log"] = daemon.output()
    assert "********" in said["config show"]
    assert_silent(said, [secret])
