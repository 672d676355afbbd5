"""The two sides of a comparison, each as whole processes: records, seconds, CPU and peak memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.daemon import Daemon

TUNED = ("-X", "queued.min.messages=10000000", "-X", "queued.max.messages.kbytes=2000000")
"""What makes kcat's pipe fast: a prefetch queue without practical bound."""


@dataclass(frozen=True)
class Run:
    """One side once. `secs` from process start to the last byte archived; memory in bytes."""

    records: int
    secs: float
    cpu_secs: float
    peak_bytes: int
    archived_bytes: int

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.records / self.secs


def kcat_pipe(bootstrap: str, topic: str, records: int, root: Path, compress: str, *, tuned: bool) -> Run:
    """`kcat | <compress>` into one file."""
    root.mkdir(parents=True, exist_ok=True)
    target = root / "all"
    command = ["kcat", "-C", "-b", bootstrap, "-t", topic, "-o", "beginning", "-e", "-q"]
    command += list(TUNED) if tuned else []
    line = " ".join(command) + f" | {compress} > {target}"
    started, before = time.perf_counter(), os.times()
    pipe = subprocess.Popen(["sh", "-c", line])
    peak = _watch_tree(pipe.pid)
    pipe.wait()
    secs, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    size = target.stat().st_size
    shutil.rmtree(root)
    return Run(records, secs, cpu, peak(), size)


def archiver(
    bootstrap: str, topic: str, records: int, root: Path, settings: Mapping[str, Any] | None = None
) -> Run:
    """The daemon, from its start until it has stopped with everything archived and committed."""
    base: dict[str, Any] = {
        "kafka": {"brokers": bootstrap, "topics": [topic], "group_id": f"bench-{uuid.uuid4().hex[:8]}"},
        "archive": {"roll_interval_secs": 3600},
        "shutdown_timeout_secs": 120,
        "log": {"level": "warning"},
    }
    for section, values in (settings or {}).items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, Mapping) else values
    daemon = Daemon(root, root / "logs", base)
    started, before = time.perf_counter(), os.times()
    daemon.launch()
    peak = _watch_tree(daemon.pid)
    while _consumed(daemon) < records:
        time.sleep(0.05)
        if time.perf_counter() - started > 600:
            raise TimeoutError(daemon.output()[-2000:])
    status = daemon.stop(timeout=150)
    secs, after = time.perf_counter() - started, os.times()
    if status != 0:
        raise RuntimeError(f"the archiver ended with {status}: {daemon.output()[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    archive = root / "archive"
    size = sum(f.stat().st_size for f in archive.rglob("*") if f.is_file())
    shutil.rmtree(root)
    return Run(records, secs, cpu, peak(), size)


def _consumed(daemon: Daemon) -> float:
    try:
        return daemon.metrics().total("records_consumed_total")
    except OSError:
        return 0


def _watch_tree(pid: int) -> Any:
    """Peak resident memory of a process and its children, sampled; call the result to stop and get it."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            peak[0] = max(peak[0], sum(_rss(p) for p in _tree(pid)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def finish() -> int:
        stop.set()
        thread.join()
        return peak[0]

    return finish


def _tree(pid: int) -> list[int]:
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += _tree(int(child))
    return found


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
