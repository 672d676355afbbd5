"""The systemd unit: systemd takes it, and what it says fits the archiver."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from archiver.cli import EXIT_CONFIG
from archiver.settings.load import load

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "dfe-archiver.service"
EXPOSURE_MAX = 2.0
"""Of `systemd-analyze security`, from 0 (closed) to 10."""


def _section(name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser[name])


def test_it_starts_the_archiver_with_its_configuration() -> None:
    program, *arguments = _section("Service")["ExecStart"].split()
    assert Path(program).name == "dfe-archiver"
    assert arguments == ["run", "--config", "/etc/dfe-archiver/archiver.yaml"]


def test_it_leaves_time_to_stop_and_does_not_repeat_a_wrong_configuration() -> None:
    """[D6], [O1]"""
    service = _section("Service")
    settings = load(ROOT / "config" / "scale.yaml", {}).settings
    assert int(service["TimeoutStopSec"]) > settings.shutdown_timeout_secs + settings.kafka.drain_timeout_secs
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == str(EXIT_CONFIG)


def test_the_single_configuration_writes_only_where_the_unit_lets_it() -> None:
    service = _section("Service")
    settings = load(ROOT / "config" / "single.yaml", {}).settings
    state = Path("/var/lib") / service["StateDirectory"]
    assert settings.destination.path is not None
    assert settings.destination.path.is_relative_to(state)
    assert settings.buffer.spool_dir.is_relative_to(state)


def test_it_may_open_as_many_files_as_the_largest_example_wants() -> None:
    """[B3]"""
    wanted = load(ROOT / "config" / "scale.yaml", {}).settings.archive.max_open_files
    assert int(_section("Service")["LimitNOFILE"]) >= wanted + 64


@pytest.mark.servers
def test_systemd_takes_it_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    # the program has to be there
    unit.write_text(UNIT.read_text().replace("/opt/dfe-archiver/bin/dfe-archiver", sys.executable))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [analyze, "security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout[-500:]
