"""Fixtures of the integration suite: daemons that are stopped at the test's end, whatever happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.azurite import Azurite
from tests.harness.daemon import Daemon
from tests.harness.fakegcs import FakeGcs
from tests.harness.fault_proxy import FaultProxy
from tests.harness.seaweed import SeaweedFS
from tests.integration.cases import S3Side, name_of
from tests.integration.store_sides import AzureSide, GcsSide, MakeSide, MinioSide, SeaweedSide, StoreSide

MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def make_daemon(tmp_path: Path, log_dir: Path, request: pytest.FixtureRequest) -> Iterator[MakeDaemon]:
    """`make_daemon(settings, name="a", **options)`: a `Daemon`, not started, killed at the end.

    Several of one test share no directory; give two of them one `archive.destination` to share that.
    """
    daemons: list[Daemon] = []

    def make(settings: Mapping[str, Any], *, name: str = "archiver", **options: Any) -> Daemon:
        log_name = re.sub(r"[^\w.-]", "_", f"{request.node.name}-{name}")[-100:]
        daemon = Daemon(tmp_path / name, log_dir, settings, name=log_name, **options)
        daemons.append(daemon)
        return daemon

    yield make
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name of this test's own, also the name of its group; not created."""
    return name_of(request.node.name)


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[SeaweedFS]:
    """The session's S3 server; use buckets of your own."""
    with SeaweedFS(log_dir, tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_side(seaweed_server: SeaweedFS) -> Iterator[S3Side]:
    """A bucket of this test's own behind a proxy that fails as told."""
    with FaultProxy(seaweed_server.endpoint) as proxy:
        yield S3Side(seaweed_server, proxy)


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Azurite]:
    """The session's Azure server; use containers of your own."""
    with Azurite(log_dir, tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(log_dir: Path) -> Iterator[FakeGcs]:
    """The session's GCS server; use buckets of your own."""
    with FakeGcs(log_dir) as server:
        yield server


@pytest.fixture
def make_side(request: pytest.FixtureRequest) -> Iterator[MakeSide]:
    """`make_side("az")`: a bucket of this test's own, each behind a proxy of its own."""
    kinds: dict[str, tuple[str, Callable[..., StoreSide]]] = {
        "s3": ("seaweed_server", SeaweedSide),
        "minio": ("seaweed_server", MinioSide),
        "gs": ("gcs_server", GcsSide),
        "az": ("azurite_server", AzureSide),
    }
    with ExitStack() as stack:

        def make(scheme: str, *, create: bool = True) -> StoreSide:
            fixture, kind = kinds[scheme]
            server = request.getfixturevalue(fixture)
            proxy = stack.enter_context(FaultProxy(server.endpoint))
            return kind(server, proxy, create=create)

        yield make
