"""What `check` says of the machine itself, beside a running archiver too."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from archiver.check import check
from archiver.settings.models import Settings
from archiver.spool import SpoolDirectory
from archiver.telemetry.http import bind
from tests.harness.process import free_port


def test_a_spool_that_a_running_archiver_holds_is_fine_and_said_to_be_held(tmp_path: Path) -> None:
    """[O1]: `check` is run beside a running archiver too, where the spool is as it should be."""
    settings = Settings.model_validate(
        {
            "transport": "grpc",
            "grpc": {"listen": "127.0.0.1:0"},
            "metrics": {"listen": f"127.0.0.1:{free_port()}"},
            "archive": {"destination": f"file://{tmp_path}/archive"},
            "buffer": {"spool_dir": str(tmp_path / "spool"), "min_free_disk_bytes": "1"},
        }
    )
    lines: list[str] = []
    taken = bind(settings.metrics.listen)
    held = SpoolDirectory.acquire(settings.buffer.spool_dir)
    try:
        assert check(settings, lines.append) == 0
    finally:
        held.release()
        taken.close()
    assert lines[1].startswith("ok      spool: a running archiver holds it, another cannot start. ")
    assert lines[2].startswith(f"ok      port: {settings.metrics.listen} is taken, as it is while")
    lines.clear()
    assert check(settings, lines.append) == 0
    assert " is writable, " in lines[1]


@pytest.mark.parametrize("key", ["metrics.listen", "grpc.listen"])
def test_a_port_that_another_program_has_is_told_before_the_start(key: str, tmp_path: Path) -> None:
    """[O1]: no archiver holds the spool, so it is somebody else's."""
    section = key.split(".")[0]
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        settings = Settings.model_validate(
            {"transport": "grpc", "grpc": {"listen": "127.0.0.1:0"}, "metrics": {"listen": "127.0.0.1:0"}}
            | {section: {"listen": listen}}
            | {"archive": {"destination": f"file://{tmp_path}/archive"}}
            | {"buffer": {"spool_dir": str(tmp_path / "spool"), "min_free_disk_bytes": "1"}}
        )
        lines: list[str] = []
        assert check(settings, lines.append) == 1
    (failed,) = [line for line in lines if line.startswith("FAILED")]
    assert failed.startswith(f"FAILED  port: {key}={listen}: ")
    assert failed.endswith("choose another port or stop what uses it")


def test_what_is_said_of_a_store_is_one_sentence(tmp_path: Path) -> None:
    """[S3]: written, and what becomes of a second put, with how that is known in brackets."""
    settings = Settings.model_validate(
        {"transport": "grpc", "grpc": {"listen": "127.0.0.1:0"}, "metrics": {"listen": "127.0.0.1:0"}}
        | {"archive": {"destination": f"file://{tmp_path}/archive"}}
        | {"buffer": {"spool_dir": str(tmp_path / "spool"), "min_free_disk_bytes": "1"}}
    )
    lines: list[str] = []
    assert check(settings, lines.append) == 0
    assert lines[-1] == (
        f"ok      store: file://{tmp_path}/archive can be written and refuses to replace objects "
        f"(files under {tmp_path}/archive are linked, never replaced)"
    )
