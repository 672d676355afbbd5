"""What `check` says of the machine itself, beside a running archiver too."""

from __future__ import annotations

from pathlib import Path

from archiver.check import check
from archiver.settings.models import Settings
from archiver.spool import SpoolDirectory


def test_a_spool_that_a_running_archiver_holds_is_fine_and_said_to_be_held(tmp_path: Path) -> None:
    """[O1]: `check` is run beside a running archiver too, where the spool is as it should be."""
    settings = Settings.model_validate(
        {
            "transport": "grpc",
            "archive": {"destination": f"file://{tmp_path}/archive"},
            "buffer": {"spool_dir": str(tmp_path / "spool"), "min_free_disk_bytes": "1"},
        }
    )
    lines: list[str] = []
    held = SpoolDirectory.acquire(settings.buffer.spool_dir)
    try:
        assert check(settings, lines.append) == 0
    finally:
        held.release()
    assert lines[1].startswith("ok      spool: a running archiver holds it, another cannot start. ")
    lines.clear()
    assert check(settings, lines.append) == 0
    assert " is writable, " in lines[1]
