"""Fixtures of the integration suite: daemons that are stopped at the test's end, whatever happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.daemon import Daemon

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
