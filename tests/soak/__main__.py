"""Steady load for long: `python -m tests.soak --minutes 60`.

Every minute it tells resident memory, open files, threads and the spool, and at the end their slopes
after the first tenth; more than the bounds allow is a failure, and so is a record that is not archived.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.archive import Folder, check, temporary_root
from tests.chaos.load import Load
from tests.harness.daemon import Daemon
from tests.harness.kafka import KafkaServer
from tests.harness.process import wait_until

TOPIC = "soak"
MIB = 1024 * 1024
RSS_SLOPE_MAX = 4 * MIB
"""Bytes a minute that resident memory may grow in the mean: an allocator settles slower than that."""


@dataclass(frozen=True)
class Sample:
    """What one process holds; bytes and counts."""

    secs: float
    rss: int
    files: int
    threads: int
    spool: int
    produced: int

    def __str__(self) -> str:
        return (
            f"{self.secs / 60:6.1f} min  rss {self.rss / MIB:7.1f} MiB  open files {self.files:4}  "
            f"threads {self.threads:3}  spool {self.spool / MIB:6.2f} MiB  produced {self.produced:,}"
        )


def sample(daemon: Daemon, load: Load, started: float) -> Sample:
    """Look at the process now."""
    process = psutil.Process(daemon.pid)
    spool = 0
    for path in (daemon.root / "spool").rglob("*.jsonl*"):
        if path.exists():
            spool += path.stat().st_size if path.exists() else 0
    return Sample(
        time.monotonic() - started,
        process.memory_info().rss,
        process.num_fds(),
        process.num_threads(),
        spool,
        len(load.offsets),
    )


def slope(samples: Sequence[Sample], what: str) -> float:
    """Least squares, per minute."""
    times = [each.secs / 60 for each in samples]
    values = [float(getattr(each, what)) for each in samples]
    middle, level = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - middle) ** 2 for t in times)
    if not spread:
        return 0.0
    return sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / spread


def run(root: Path, log_dir: Path, minutes: float, per_sec: int, every_secs: float) -> list[str]:
    """The whole of it; what is wrong, a line each."""
    with KafkaServer(root / "kafka", log_dir) as kafka:
        kafka.create_topic(TOPIC, 4)
        settings = {
            "kafka": {"brokers": kafka.bootstrap, "topics": [TOPIC], "group_id": TOPIC},
            "archive": {"roll_interval_secs": 20, "roll_size_bytes": "4MiB"},
            "buffer": {"flush_age_secs": 5, "max_bytes": "64MiB"},
        }
        daemon = Daemon(root / "daemon", log_dir, settings, name="soak")
        with daemon, Load(kafka, TOPIC, partitions=4, orgs=40, per_sec=per_sec) as load:
            load.go()
            samples = _watch(daemon, load, minutes, every_secs)
            produced = load.end()
            wait_until(lambda: not kafka.lag(TOPIC, TOPIC), 120, "lag 0")
            status = daemon.stop()
        verdict = check(load, produced, Folder(root / "daemon" / "archive"), [])
    print(verdict)
    return _problems(samples, status, verdict.missing + verdict.foreign + verdict.duplicates)


def _watch(daemon: Daemon, load: Load, minutes: float, every_secs: float) -> list[Sample]:
    started = time.monotonic()
    samples: list[Sample] = []
    while time.monotonic() - started < minutes * 60:
        time.sleep(every_secs)
        samples.append(sample(daemon, load, started))
        print(samples[-1], flush=True)
    return samples


def _problems(samples: list[Sample], status: int | None, wrong_records: int) -> list[str]:
    steady = samples[len(samples) // 10 :]
    slopes = {what: slope(steady, what) for what in ("rss", "files", "threads", "spool")}
    print("slopes a minute: " + ", ".join(f"{what} {value:,.1f}" for what, value in slopes.items()))
    problems = []
    if status != 0:
        problems.append(f"the daemon ended with {status}")
    if wrong_records:
        problems.append(f"{wrong_records} records are missing, foreign or double")
    if slopes["rss"] > RSS_SLOPE_MAX:
        problems.append("resident memory grows")
    # handles come and go with files; a leak shows over many minutes
    if len(steady) > 8 and (slopes["files"] > 1 or slopes["threads"] > 0.1):
        problems.append("open files or threads grow")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--per-sec", type=int, default=5_000)
    parser.add_argument("--every-secs", type=float, default=60)
    args = parser.parse_args()
    root = temporary_root()
    log_dir = Path(__file__).parents[1] / "logs" / f"soak-{time.strftime('%Y%m%d-%H%M%S')}"
    problems = run(root, log_dir, args.minutes, args.per_sec, args.every_secs)
    print(*problems, sep="\n")
    if not problems:
        shutil.rmtree(root)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
