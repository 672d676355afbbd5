"""What memory grows with: records that are not durable yet (it must not), and destinations."""

from __future__ import annotations

import gc
import os
import shutil
import time
import tracemalloc
from functools import partial

from bench import sides
from bench.compare import Case, Figures
from bench.context import Context, say
from bench.machine import resident_bytes
from bench.offline import feed, offline_archiver, record_batches
from bench.workload import Workload
from tests.harness.daemon import Daemon, merged

HANDLES_MAX = 256
"""`ulimit -n` of the runs with many destinations: more than the archiver needs, fewer than they are."""

RSS_TARGETS_MB = {10_000: 400, 100_000: 1_000}

_PARTITIONS = 4


def held(context: Context) -> list[Case]:
    """Bytes that the loop's state holds for records that are written but not durable: 0 per record.

    The values themselves are in the spool by then. Buffers that are not full count, so small numbers
    of records show them.
    """
    cases = []
    for records in (10_000, 100_000, 1_000_000, 10_000_000):
        count = context.records(records)
        compared = {"archiver": partial(_held_by, count)}
        cases.append(context.compare(f"{count:,} records", compared, records=count))
    return cases


def _held_by(records: int) -> Figures:
    """Feeds the same batches again and again; the ledger keeps the highest position."""
    batches = record_batches(Workload(records=min(records, 100_000), partitions=_PARTITIONS))
    archiver = offline_archiver(_PARTITIONS)
    feed(archiver, batches[:20])  # the table of routes is made once
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    fed = 0
    while fed < records:
        feed(archiver, batches)
        fed += sum(len(batch.values) for batch in batches)
    archiver.roll_all("request")  # buffers become frames; the files stay, not durable
    archiver.settle(archiver.parts.inbox.drain())
    gc.collect()
    state = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"records": float(fed), "state_bytes": float(state), "bytes_per_record": state / fed}


# --- destinations ----------------------------------------------------------------------------------


def destinations(context: Context) -> list[Case]:
    """1,000 to 100,000 destinations with 256 file handles: memory, throughput, time to make them durable."""
    cases = []
    for count in (1_000, 10_000, 100_000):
        orgs = max(100, context.records(count)) if context.quick else count
        work = Workload(records=1_000_000, orgs=orgs)
        topic = context.topic(work)
        compared = {"archiver": partial(_many, topic, context)}
        cases.append(context.compare(f"{orgs:,} destinations", compared, destinations=orgs))
    for case in cases:
        _judge(case)
    return cases


def _judge(case: Case) -> None:
    target = RSS_TARGETS_MB.get(case.params["destinations"])
    if target is not None:
        peak = case.figure("archiver", "peak_mb").median
        case.params["target_peak_mb"] = target
        case.params["target_met"] = peak < target
        say(f"  {case.name}: peak {peak:,.0f} MB, target below {target} MB")


def _many(topic: sides.Topic, context: Context) -> Figures:
    """Taking records, and then the stop that makes every file durable, apart."""
    root = context.fresh()
    settings = merged(sides.bench_settings(topic, root.name), {"archive": {"max_open_files": HANDLES_MAX}})
    daemon = Daemon(root, root / "logs", settings, prefix=["prlimit", f"--nofile={HANDLES_MAX}"])
    began = time.perf_counter()
    daemon.launch()
    peak = handles = 0
    try:
        while (sides.consumed(daemon) or 0.0) < topic.records:
            peak = max(peak, resident_bytes(daemon.pid))
            handles = max(handles, _handles(daemon.pid))
            _alive(daemon, began)
            time.sleep(0.25)
        consumed_secs = time.perf_counter() - began
        stopping = _Stop(daemon)
        while stopping.running():
            peak = max(peak, resident_bytes(daemon.pid))
            time.sleep(0.25)
    finally:
        daemon.kill()
    stop_secs = time.perf_counter() - began - consumed_secs
    files = sum(1 for _ in (root / "archive").rglob("*.jsonl.zst"))
    shutil.rmtree(root)
    return {
        "rate": topic.records / consumed_secs,
        "peak_mb": peak / 1e6,
        "secs": consumed_secs,
        "stop_secs": stop_secs,
        "files": float(files),
        "files_per_sec": files / stop_secs,
        "handles": float(handles),
    }


def _alive(daemon: Daemon, began: float) -> None:
    if not daemon.server.running or time.perf_counter() - began > sides.RUN_TIMEOUT_SECS:
        raise RuntimeError(f"the archiver did not get there: {daemon.server.tail()}")


class _Stop:
    """SIGTERM, watched from outside; raises where the archiver does not end well."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._until = time.monotonic() + sides.RUN_TIMEOUT_SECS
        os.kill(daemon.pid, 15)

    def running(self) -> bool:
        """False once it has ended with status 0."""
        server = self._daemon.server
        if server.running and time.monotonic() < self._until:
            return True
        if server.running or server.returncode != 0:
            raise RuntimeError(f"the stop failed ({server.returncode}): {server.tail()}")
        return False


def _handles(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
