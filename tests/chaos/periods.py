"""How often each record can have been read by the members of a group: the bound of its copies [D7].

A member that is given a partition reads from the committed offset on, and archives what it reads at
most once. So a record has no more copies than there were periods in which a member had its partition
and may have come by: from the committed offset at the period's beginning to the log's end when it was
over. Commits are seen by a watcher that asks the broker, the log's end by what was produced, and the
periods by what the members tell in their logs; the archive is not asked.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

WATCH_SECS = 0.2
ASK_SECS = 5.0
LAG_SECS = 1.0
"""How much later than it happened something may be told in a log or seen by the watcher."""


class Produced(Protocol):
    """What the load tells: `offsets[n]` of record `n`, which is in partition `n % partitions`."""

    offsets: array[int]
    partitions: int


@dataclass(frozen=True)
class Look:
    """One look at the group: when, what was committed, how many records had been produced."""

    began: float
    ended: float
    committed: Mapping[int, int]
    produced: int


@dataclass(frozen=True)
class Period:
    """A member had a partition: from a committed offset on, until so many records had been produced."""

    partition: int
    committed: int
    produced: int


class Watcher:
    """Looks at a group's commits all the time, from a thread of its own; times are the wall clock's."""

    def __init__(self, bootstrap: str, group: str, topic: str, load: Produced) -> None:
        self.looks: list[Look] = []
        self._load = load
        self._wanted = [KafkaPartition(topic, partition) for partition in range(load.partitions)]
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False, "log_level": 0}
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def _run(self) -> None:
        while not self._ended.wait(WATCH_SECS):
            began = time.time()
            try:
                answers = self._consumer.committed(self._wanted, timeout=ASK_SECS)
            except KafkaException:  # a look less makes the bound wider, not wrong
                continue
            committed = {a.partition: a.offset for a in answers if a.offset >= 0}
            self.looks.append(Look(began, time.time(), committed, len(self._load.offsets)))
        self._consumer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()


def periods(
    members: Iterable[tuple[str, Sequence[float]]], looks: Sequence[Look], produced: int
) -> list[Period]:
    """All periods of a group. Per member: its whole log, and when it was killed or has ended."""
    found = []
    for log, ends in members:
        for partition, began, ended in _held(log, ends):
            found.append(_period(partition, began, ended, looks, produced))
    return found


def _held(log: str, ends: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Partition, and from when to when the member had it; a life that ends takes all of them."""
    holding: dict[int, float] = {}
    changes = sorted([*_changes(log), *((end, "ended", ()) for end in ends)], key=lambda change: change[0])
    for when, kind, partitions in changes:
        if kind == "assigned":
            for partition in partitions:
                holding.setdefault(partition, when)
            continue
        for partition in list(holding) if kind == "ended" else partitions:
            if partition in holding:
                yield partition, holding.pop(partition), when
    for partition, began in holding.items():
        yield partition, began, float("inf")


def _changes(log: str) -> Iterator[tuple[float, str, Sequence[int]]]:
    for line in log.splitlines():
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        if told.get("event") == "rebalanced":
            when = datetime.fromisoformat(told["timestamp"]).timestamp()
            yield when, told["kind"], [int(name.rpartition("/")[2]) for name in told["partitions"]]


def _period(partition: int, began: float, ended: float, looks: Sequence[Look], produced: int) -> Period:
    before = bisect_left(looks, began - LAG_SECS, key=lambda look: look.ended)
    after = bisect_right(looks, ended + LAG_SECS, key=lambda look: look.began)
    committed = looks[before - 1].committed.get(partition, 0) if before else 0
    return Period(partition, committed, looks[after].produced if after < len(looks) else produced)


def reads(load: Produced, produced: int, having: Iterable[Period]) -> array[int]:
    """Per record, in how many periods it can have been read."""
    counted = array("H", bytes(2 * produced))
    for period in having:
        numbers = range(period.partition, produced, load.partitions)
        first = bisect_left(numbers, period.committed, key=lambda n: load.offsets[n])
        for n in numbers[first : bisect_left(numbers, period.produced)]:
            counted[n] += 1
    return counted
