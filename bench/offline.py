"""The archiver's own modules without broker, disk and store, for what is measured inside one process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from archiver.bounds import Bounds
from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.keys import KeyMaker, KeyTemplate
from archiver.domain.ledger import OffsetLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.domain.sealed import ObjectKey
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import FrameWritten, Result
from bench.workload import Workload, make_values

TAKE_RECORDS = 1_000


def record_batches(work: Workload, seed: int = 1) -> list[RecordBatch]:
    """Batches as the Kafka source hands them out: a thousand records of one partition each."""
    pool = make_values(work, random.Random(seed), work.distinct)
    made, offsets = [], [0] * work.partitions
    for number, start in enumerate(range(0, work.records, TAKE_RECORDS)):
        at = start % len(pool)
        values: Sequence[bytes | None] = pool[at : at + TAKE_RECORDS]
        partition = number % work.partitions
        first = offsets[partition]
        offsets[partition] = first + len(values)
        made.append(
            RecordBatch(TopicPartition("events", partition), values, list(range(first, first + len(values))))
        )
    return made


class HandClock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1_790_000_000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class InstantInbox:
    """Frames count as written the moment they are handed over."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()

    def put(self, result: Result) -> None:
        self._results.append(result)

    def drain(self) -> list[Result]:
        results = list(self._results)
        self._results.clear()
        return results

    def wait(self, timeout_secs: float) -> list[Result]:
        return self.drain()


class _Writers:
    """Everything is written at once, and compresses to 80 bytes a record."""

    def __init__(self, inbox: InstantInbox) -> None:
        self._inbox = inbox
        self._sizes: dict[int, int] = {}

    def append(self, file_id: int, chunk: int, values: list[bytes]) -> None:
        size = self._sizes[file_id] = self._sizes.get(file_id, 0) + 80 * len(values)
        self._inbox.put(FrameWritten(file_id, chunk, size))

    def seal(self, file_id: int) -> None: ...
    def discard(self, file_id: int) -> None: ...
    def label(self, file_id: int, key: ObjectKey) -> None: ...
    def close(self, timeout_secs: float) -> None: ...


class _Disk:
    def free_bytes(self) -> int:
        return 1 << 40


class _Nobody:
    """The parts that these measurements never reach: calling one would fail."""


def offline_archiver(partitions: int, *, fields: Sequence[str] = ("_org_id",)) -> Archiver:
    """The real loop, router and ledger; nothing is ever sealed, so nothing is ever durable."""
    inbox, nobody = InstantInbox(), _Nobody()
    unreached: Any = nobody
    parts = Parts(
        source=unreached,
        ledger=OffsetLedger(),
        router=Router(fields, "default", with_topic=True),
        keys=KeyMaker(KeyTemplate("{year}/{month}/{day}/{hour}"), "jsonl.zst", lambda digits: "0" * digits),
        writers=_Writers(inbox),
        uploader=unreached,
        dead_letters=unreached,
        inbox=inbox,
        clock=HandClock(),
        disk=_Disk(),
        emit=lambda event: None,
        publish=lambda archiver: 1.0,
        beat=lambda now: None,
    )
    policy = Policy(
        roll=RollPolicy(1 << 50, 1e9),
        flush=FlushPolicy(1 << 20, 100_000, 60.0),
        bounds=Bounds(1 << 40, 1 << 50, 0),
        codec="zstd",
        commit_interval_secs=5.0,
        drain_timeout_secs=20.0,
        shutdown_timeout_secs=20.0,
    )
    archiver = Archiver(parts, policy)
    committed: Mapping[TopicPartition, int | None] = {
        TopicPartition("events", partition): None for partition in range(partitions)
    }
    archiver.assigned(committed)
    return archiver


def feed(archiver: Archiver, batches: Sequence[RecordBatch]) -> None:
    """What a turn of the loop does between taking and rolling."""
    for batch in batches:
        archiver.register((batch,))
        archiver.settle(archiver.parts.inbox.drain())
