"""Fixtures every suite shares: real servers of the session, where logs go, what needs a server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.kafka import KafkaServer

LOGS = Path(__file__).parent / "logs"
LOGS_KEPT = 20

SERVER_FIXTURES = frozenset({"kafka", "own_kafka", "secure_kafka"})
"""A test that asks for one of these carries the mark `servers` without saying so."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server, so that `make test-fast` can leave it out."""
    integration = Path(__file__).parent / "integration"
    for item in items:
        fixtures = SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if fixtures or integration in item.path.parents:
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="session")
def log_dir() -> Path:
    """Where the output of the servers of this test run is kept; those of the last runs stay."""
    for old in sorted(LOGS.glob("*"))[:-LOGS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    folder = LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="session")
def servers_wanted(request: pytest.FixtureRequest) -> None:
    """Skips a test that asks for a server while `-m` leaves servers out (parameters carry no mark)."""
    if "not servers" in request.config.getoption("markexpr"):
        pytest.skip("needs a server: make test")


@pytest.fixture(scope="session")
def kafka(
    servers_wanted: None, tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> Iterator[KafkaServer]:
    """The session's broker. Shared: use topics and groups of your own, and leave it running and thawed."""
    with KafkaServer(tmp_path_factory.mktemp("kafka"), log_dir) as server:
        yield server


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[KafkaServer]:
    """A broker with a SASL_SSL listener beside the plain one."""
    root = tmp_path_factory.mktemp("secure-kafka")
    with KafkaServer(root, log_dir, name="secure-kafka", secure=True) as server:
        yield server


@pytest.fixture
def own_kafka(tmp_path: Path, log_dir: Path, request: pytest.FixtureRequest) -> Iterator[KafkaServer]:
    """A broker of this test alone, to freeze, kill and restart."""
    with KafkaServer(tmp_path / "kafka", log_dir, name=f"kafka-{request.node.name}"[:80]) as server:
        yield server
