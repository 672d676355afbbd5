"""Hours of a quiet life in minutes: `python -m tests.soak.hours --destinations 20000 --hours 10`.

Each destination gets one record a minute. The loop, the router, the keys, the ledger, the upload
schedule, the snapshots and the telemetry are the real ones; the clock, Kafka, the disk and the store are
made up and keep nothing. What is left growing from hour to hour is the archiver's own.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import secrets
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil

from archiver.bounds import Bounds
from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.keys import KeyMaker, KeyTemplate
from archiver.domain.ledger import OffsetLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import (
    BrokerView,
    FileSealed,
    FrameWritten,
    PartitionListener,
    RefusedFile,
    UploadState,
)
from archiver.snapshot import Snapshot
from archiver.telemetry.telemetry import Telemetry
from archiver.uploads import UploadSchedule
from bench.offline import HandClock, InstantInbox

MIB = 1 << 20
MINUTE_SECS = 60
HOUR_SECS = 3600
PARTITIONS = 4
BATCH_RECORDS = 500
FRAME_BYTES_A_RECORD = 40
UPLOADS_IN_FLIGHT = 8
FLUSH_SECS = 30.0
LOOKS = 4
EARLY_HOUR = 1
GROWTH_MAX = 0.005
"""Share by which blocks and objects may grow from the first hour to the last."""
OBJECTS_MORE = 1
"""For each destination, whose file is at another moment of its life; one left of each file is far more."""
BLOCK_BYTES = 64
FULL_HOUR = 1_800_000_000.0
RSS_GROWTH_MAX = 0.05
"""The same of resident memory, of which the allocator keeps more than is used."""


class _Source:
    """Kafka with one record a minute for each destination; a commit is answered in the next take."""

    def __init__(self, clock: HandClock, destinations: int) -> None:
        self.records = 0
        self._clock = clock
        self._destinations = destinations
        self._minute = self._first = self._batches = 0
        self._positions = dict.fromkeys((TopicPartition("events", p) for p in range(PARTITIONS)), 0)
        self._asked: Mapping[TopicPartition, int] | None = None
        self._listener: PartitionListener | None = None
        self.committed: dict[TopicPartition, int] = {}

    def start(self, listener: PartitionListener) -> None:
        self._listener = listener
        listener.assigned(dict.fromkeys(self._positions))

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        """The next destinations of the minute; each comes from another partition the minute after."""
        if self._asked is not None and self._listener is not None:
            marks, self._asked = self._asked, None
            self.committed.update(marks)
            self._listener.commit_confirmed(marks)
        first, last = self._first, min(self._first + BATCH_RECORDS, self._destinations)
        self._clock.now += MINUTE_SECS * (last - first) / self._destinations
        values = [b'{"_org_id":"org-%d","minute":%d}' % (d, self._minute) for d in range(first, last)]
        partition = TopicPartition("events", (self._batches + self._minute) % PARTITIONS)
        offset = self._positions[partition]
        self._positions[partition] = offset + len(values)
        self.records += len(values)
        self._first, self._batches = last, self._batches + 1
        if last == self._destinations:
            self._first, self._batches, self._minute = 0, 0, self._minute + 1
        return (RecordBatch(partition, values, range(offset, offset + len(values))),)

    def positions(self) -> Mapping[TopicPartition, int]:
        return self._positions

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        if self._asked is not None:
            return False
        self._asked = dict(marks)
        return True

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        self.committed.update(marks)
        return True

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return None

    def queued_bytes(self) -> int:
        return 0

    def pause(self) -> None:
        raise AssertionError("a quiet life meets no bound")

    def resume(self) -> None: ...
    def stop_taking(self) -> None: ...
    def close(self, timeout_secs: float) -> None: ...


class _Writers:
    """Writes and seals at once, and keeps of a file its size."""

    def __init__(self, inbox: InstantInbox) -> None:
        self._inbox = inbox
        self._sizes: dict[int, int] = {}

    def append(self, file_id: int, chunk: int, lines: list[bytes]) -> None:
        size = self._sizes[file_id] = self._sizes.get(file_id, 0) + FRAME_BYTES_A_RECORD * len(lines)
        self._inbox.put(FrameWritten(file_id, chunk, size))

    def seal(self, file_id: int) -> None:
        size = self._sizes.pop(file_id)
        self._inbox.put(FileSealed(file_id, size, Checksums(crc32=0), f"uploads/{file_id}"))

    def discard(self, file_id: int) -> None: ...
    def label(self, file_id: int, key: ObjectKey) -> None: ...
    def close(self, timeout_secs: float) -> None: ...


class _Uploader:
    """The real schedule over a store that takes everything at once; `turn` is its threads."""

    def __init__(self, clock: HandClock, inbox: InstantInbox, telemetry: Telemetry) -> None:
        self.objects = 0
        self._clock = clock
        self._schedule = UploadSchedule(
            inbox,
            telemetry.emit,
            lambda sealed: None,
            lambda: secrets.token_hex(6),
            random.Random(1),
            UPLOADS_IN_FLIGHT,
        )

    def submit(self, sealed: SealedFile) -> None:
        self._schedule.add(sealed, self._clock.now)

    def turn(self) -> None:
        while (sealed := self._schedule.begin(self._clock.now)) is not None:
            self._schedule.end(sealed, None, self._clock.now)
            self.objects += 1

    def abandon(self, file_id: int) -> None:
        self._schedule.abandon(file_id)

    def state(self) -> UploadState:
        return self._schedule.state()

    def close(self, timeout_secs: float) -> None: ...


class _NoDeadLetters:
    def submit(self, refused: RefusedFile) -> None:
        raise AssertionError("nothing is refused")

    def abandon(self, file_id: int) -> None: ...
    def close(self, timeout_secs: float) -> None: ...


class _Disk:
    def free_bytes(self) -> int:
        return 1 << 40


@dataclass(frozen=True)
class Sample:
    """What the process holds after so many simulated hours; `traced` is 0 unless memory is traced."""

    hour: float
    rss: int
    blocks: int
    objects: int
    traced: int
    files: int
    records: int

    def __str__(self) -> str:
        traced = f"  traced {self.traced / MIB:7.1f} MiB" if self.traced else ""
        return (
            f"hour {self.hour:5.2f}  rss {self.rss / MIB:7.1f} MiB{traced}  blocks {self.blocks:,}  "
            f"objects {self.objects:,}  files {self.files:,}  records {self.records:,}"
        )


class Hours:
    """One archiver and its made-up surroundings."""

    def __init__(self, destinations: int, log: TextIO) -> None:
        self.clock = HandClock(FULL_HOUR)
        self._began = self.clock.now
        inbox = InstantInbox()
        self.telemetry = Telemetry(
            level="info",
            log_format="json",
            stream=log,
            monotonic=self.clock.monotonic,
            wall=self.clock.wall,
        )
        self.source = _Source(self.clock, destinations)
        self.uploader = _Uploader(self.clock, inbox, self.telemetry)
        snapshot = Snapshot(
            memory_bytes_max=256 * MIB,
            uploads_in_flight_max=UPLOADS_IN_FLIGHT,
            ready_needs_store=True,
            store_problem=lambda: None,
            started_at_unix=self.clock.wall(),
        )
        writer_ids = random.Random(2)
        parts = Parts(
            source=self.source,
            ledger=OffsetLedger(),
            router=Router(["_org_id"], "default", with_topic=True),
            keys=KeyMaker(
                KeyTemplate("{year}/{month}/{day}/{hour}"),
                "jsonl.zst",
                lambda digits: f"{writer_ids.getrandbits(4 * digits):0{digits}x}",
            ),
            writers=_Writers(inbox),
            uploader=self.uploader,
            dead_letters=_NoDeadLetters(),
            inbox=inbox,
            clock=self.clock,
            disk=_Disk(),
            emit=self.telemetry.emit,
            publish=partial(_publish, self.telemetry, snapshot),
            beat=lambda now: None,
        )
        policy = Policy(
            roll=RollPolicy(128 * MIB, HOUR_SECS),
            flush=FlushPolicy(1 * MIB, 100_000, FLUSH_SECS),
            bounds=Bounds(256 * MIB, 20 << 30, 1 << 30),
            codec="zstd",
            commit_interval_secs=5.0,
            drain_timeout_secs=20.0,
            shutdown_timeout_secs=20.0,
        )
        self.archiver = Archiver(parts, policy)
        self.archiver.start()

    def until(self, hour: float) -> None:
        """Turn until so many hours have passed."""
        while self.clock.now < self._began + hour * HOUR_SECS:
            self.archiver.turn()
            self.uploader.turn()

    def sample(self) -> Sample:
        """What it holds at the emptiest of some moments: between them buffers fill and files close."""
        looks = [self._look()]
        for _ in range(LOOKS - 1):
            self.archiver.turn()
            self.uploader.turn()
            looks.append(self._look())
        return min(looks, key=lambda look: look.blocks)

    def _look(self) -> Sample:
        self.telemetry.flush()
        gc.collect()
        return Sample(
            hour=(self.clock.now - self._began) / HOUR_SECS,
            rss=psutil.Process().memory_info().rss,
            blocks=sys.getallocatedblocks(),
            objects=len(gc.get_objects()),
            traced=tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0,
            files=len(self.archiver.files),
            records=self.source.records,
        )

    def close(self) -> None:
        """Stop; everything that was read must be committed then."""
        self.archiver.roll_all("shutdown")
        for _ in range(3):  # frames, seals, uploads
            self.archiver.settle(self.archiver.parts.inbox.drain())
            self.uploader.turn()
        self.archiver.settle(self.archiver.parts.inbox.drain())
        left = len(self.archiver.files)
        self.archiver.stop("done")
        status = self.archiver.finish()
        self.telemetry.close()
        read = sum(self.source.positions().values())
        committed = sum(self.source.committed.values())
        if status or left or committed != read:
            raise AssertionError(f"status {status}, {left} files left, committed {committed} of {read}")


def _publish(telemetry: Telemetry, snapshot: Snapshot, archiver: Archiver) -> float:
    telemetry.status.publish(snapshot.of(archiver))
    return 1.0


def run(destinations: int, hours: Iterable[float]) -> list[Sample]:
    """Samples at those hours, in rising order."""
    samples = []
    with Path(os.devnull).open("w") as log:
        life = Hours(destinations, log)
        for hour in hours:
            life.until(hour)
            samples.append(life.sample())
            print(samples[-1], flush=True)
        life.close()
    return samples


def growth(samples: Sequence[Sample], destinations: int, *, rss: bool = True) -> list[str]:
    """What has grown from the first sample to the last, a line each."""
    first, last = samples[0], samples[-1]
    more = OBJECTS_MORE * destinations
    bounds = {
        "blocks": (GROWTH_MAX, more),
        "objects": (GROWTH_MAX, more),
        "traced": (GROWTH_MAX, more * BLOCK_BYTES),
    }
    if rss:
        bounds["rss"] = (RSS_GROWTH_MAX, 0)
    found = []
    for what, (share, constant) in bounds.items():
        before, after = getattr(first, what), getattr(last, what)
        if after > before * (1 + share) + constant:
            found.append(f"{what}: {before:,} in hour {first.hour:.0f}, {after:,} in hour {last.hour:.0f}")
    return found


def kinds() -> Counter[str]:
    """How many objects there are of each type."""
    return Counter(type(each).__name__ for each in gc.get_objects())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.hours")
    parser.add_argument("--destinations", type=int, default=20_000)
    parser.add_argument("--hours", type=int, default=10)
    parser.add_argument("--trace", action="store_true", help="trace memory: twice as slow")
    args: Any = parser.parse_args(argv)
    if args.trace:
        tracemalloc.start()
    started = time.monotonic()
    middle = [hour for hour in (args.hours // 2,) if EARLY_HOUR < hour < args.hours]
    # a quarter past, so that the hour's files have all been opened
    samples = run(args.destinations, [hour + 0.25 for hour in (EARLY_HOUR, *middle, args.hours)])
    problems = growth(samples, args.destinations)
    print(f"{samples[-1].records:,} records in {time.monotonic() - started:.0f} s")
    print(*problems or ["no growth"], sep="\n")
    if problems:
        print(*kinds().most_common(10), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
