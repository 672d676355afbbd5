"""Fixtures every suite shares: real servers of the session, where logs go, what needs a server."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.kafka import QUICK_RETURN, KafkaServer

LOGS = Path(__file__).parent / "logs"
LOGS_KEPT = 20
PR_SET_PDEATHSIG = 1

SERVER_FIXTURES = frozenset({"kafka", "weak_kafka", "secure_kafka"})
"""A test that asks for one of these carries the mark `servers` without saying so."""


LONGEST_FIRST = ("chaos", "integration", "contract", "sim", "unit")
"""Folders in their order: where workers share files out, short ones come last, so that all end together."""


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker end with the process that gives it its tests, however that one ends."""
    if hasattr(config, "workerinput") and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server, so that `make test-fast` can leave it out; put long files first."""
    here = Path(__file__).parent
    for item in items:
        fixtures = SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if fixtures or here / "integration" in item.path.parents:
            item.add_marker(pytest.mark.servers)
    items.sort(
        key=lambda item: [here / folder in item.path.parents for folder in LONGEST_FIRST], reverse=True
    )


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
    with KafkaServer(tmp_path_factory.mktemp("kafka"), log_dir, short_lived=True) as server:
        yield server


@pytest.fixture(scope="session")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[KafkaServer]:
    """A broker with a SASL_SSL listener beside the plain one."""
    root = tmp_path_factory.mktemp("secure-kafka")
    with KafkaServer(root, log_dir, name="secure-kafka", secure=True, short_lived=True) as server:
        yield server


@pytest.fixture(scope="session")
def _weak_kafka(
    servers_wanted: None, tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> Iterator[KafkaServer]:
    with KafkaServer(
        tmp_path_factory.mktemp("weak-kafka"),
        log_dir,
        name="weak-kafka",
        properties=QUICK_RETURN,
        short_lived=True,
    ) as server:
        yield server


@pytest.fixture
def weak_kafka(_weak_kafka: KafkaServer) -> Iterator[KafkaServer]:
    """A broker to freeze, kill and restart: the next test finds it running and thawed."""
    yield _weak_kafka
    _weak_kafka.thaw()
    if not _weak_kafka.server.running:
        _weak_kafka.start()
