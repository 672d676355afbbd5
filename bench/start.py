"""How long a start takes, what it imports, and how long a stop takes with many open files."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from bench import sides
from bench.compare import Case, Figures
from bench.context import Context
from bench.workload import Workload
from tests.harness.daemon import REPOSITORY, Daemon, merged

START_TARGET_SECS = 1.0
IMPORTS_SHOWN = 20

_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)$")


def start(context: Context) -> list[Case]:
    """Process start to the first poll, to `/readyz`, and to the first record; file:// and s3://."""
    topic = context.topic(Workload(records=10_000))
    compared = {
        "file://": lambda: _starts(topic, context.fresh(), {}),
        "s3://": lambda: _starts(topic, context.fresh(), context.s3_settings()),
    }
    return [context.compare("start", compared, target_first_poll_secs=START_TARGET_SECS)]


def _starts(topic: sides.Topic, root: Path, settings: dict[str, object]) -> Figures:
    base = sides.bench_settings(topic, f"bench-{uuid.uuid4().hex[:8]}") | {"log": {"level": "info"}}
    daemon = Daemon(root, root / "logs", merged(base, settings))
    began_wall, began = time.time(), time.perf_counter()
    daemon.launch()
    try:
        ready, first_record = _seen(daemon, began)
        polled = _logged_at(daemon, "archiver started") - began_wall
        stopping = time.perf_counter()
        daemon.stop()
        return {
            "first_poll_secs": polled,
            "ready_secs": ready,
            "first_record_secs": first_record,
            "stop_secs": time.perf_counter() - stopping,
        }
    finally:
        daemon.kill()


def _seen(daemon: Daemon, began: float) -> tuple[float, float]:
    """Seconds from `began` until it calls itself ready, and until it has taken a record."""
    ready = first_record = 0.0
    while not ready or not first_record:
        time.sleep(0.005)
        if not first_record and sides.consumed(daemon):
            first_record = time.perf_counter() - began
        with suppress(OSError):
            if not ready and daemon.get("/readyz")[0] == 200:
                ready = time.perf_counter() - began
        if time.perf_counter() - began > sides.RUN_TIMEOUT_SECS or not daemon.server.running:
            raise RuntimeError(f"the archiver does not start: {daemon.server.tail()}")
    return ready, first_record


def _logged_at(daemon: Daemon, message: str) -> float:
    """Unix time of a log line; the loop's first poll follows that of the start at once."""
    for line in daemon.logs():
        if message in line.values():
            stamp = next(line[key] for key in ("timestamp", "time", "ts") if key in line)
            return datetime.fromisoformat(str(stamp)).timestamp()
    raise RuntimeError(f"no line says {message!r}: {daemon.server.tail()}")


def imports(context: Context) -> list[Case]:
    """Milliseconds of the dearest imports of a start with file:// and Kafka, and their sum."""
    cases = []
    for name, modules in {
        "core": "archiver.cli, archiver.app, archiver.sources.kafka",
        "core and s3": "archiver.cli, archiver.app, archiver.sources.kafka, archiver.stores.s3",
    }.items():
        found: dict[str, dict[str, float]] = {}
        case = context.compare(name, {"python": partial(_import_times, modules, found)})
        dearest = sorted(found["packages"].items(), key=lambda item: -item[1])[:IMPORTS_SHOWN]
        case.params["packages_ms"] = {package: round(ms, 1) for package, ms in dearest}
        cases.append(case)
    return cases


def _import_times(modules: str, found: dict[str, dict[str, float]]) -> Figures:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {modules}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    packages = found["packages"] = import_table(done.stderr)
    return {"import_ms": sum(packages.values()), "modules": float(done.stderr.count("import time:") - 1)}


def import_table(importtime: str) -> dict[str, float]:
    """Milliseconds spent in each top-level package's own modules, from `-X importtime`."""
    packages: dict[str, float] = {}
    for line in importtime.splitlines():
        if match := _IMPORT.match(line):
            package = match[4].split(".")[0]
            packages[package] = packages.get(package, 0.0) + int(match[1]) / 1000
    return packages


def stop(context: Context) -> list[Case]:
    """SIGTERM to the end of the process with 500 open files."""
    topic = context.topic(Workload(records=200_000, orgs=500))
    compared = {
        "file://": lambda: _stops(topic, context.fresh(), {}),
        "s3://": lambda: _stops(topic, context.fresh(), context.s3_settings()),
    }
    return [context.compare("500 open files", compared)]


def _stops(topic: sides.Topic, root: Path, settings: dict[str, object]) -> Figures:
    run = sides.archiver(topic, root, settings)
    return {"stop_secs": run.stop_secs, "files_per_sec": 500 / run.stop_secs}
