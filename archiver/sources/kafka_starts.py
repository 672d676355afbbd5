"""Finds out where partitions start: asks the broker, and lets `domain.offsets` decide."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import TopicPartition
from archiver.domain.offsets import LogRange, Reset, Start, start_offset
from archiver.events import Event, NoCommittedOffset, OffsetsSkipped
from archiver.sources.kafka_offsets import committed_offsets, log_ranges, topic_ids


@dataclass(frozen=True, slots=True)
class Wanted:
    """A partition to be placed: a new one, or one of ours that cannot be read on at `position`.

    `topic_id` is the id of the topic that this position was one of.
    """

    position: int | None = None
    rewritten: Literal["log_truncated", "topic_recreated"] | None = None
    topic_id: str | None = None


NEW = Wanted()


@dataclass(frozen=True, slots=True)
class Found:
    """Where a partition starts. `committed` is the group's commit where it means this very log."""

    start: Start
    log: LogRange
    committed: int | None
    topic_id: str | None
    at_first_start: bool

    @property
    def only_known_here(self) -> bool:
        """Whether another process, asking the broker before anything is committed, would start elsewhere.

        Further on than here, that is, and records in between would be nobody's.
        """
        unknown = self.committed is None and (
            self.at_first_start or self.start.reason == "committed_offset_vanished"
        )
        return unknown or self.start.anew

    def events(self, partition: TopicPartition) -> list[Event]:
        """What is to be said aloud about this start [D9]."""
        said: list[Event] = []
        start, log = self.start, self.log
        if start.skips and start.expected is not None:
            said.append(OffsetsSkipped(*partition, start.expected, start.offset, start.reason))
        elif start.reason == "no_committed_offset" and log.end > log.log_start:
            said.append(NoCommittedOffset(*partition, start.offset, log.log_start, log.end))
        return said


class Starts:
    """Remembers what this process has committed, and what existed when the group first started."""

    def __init__(self, consumer: ck.Consumer, admin: AdminClient, reset: Reset) -> None:
        self._consumer = consumer
        self._admin = admin
        self._reset = reset
        self._at_first_start: frozenset[TopicPartition] | None = None if reset == "latest" else frozenset()
        self._remembered: dict[TopicPartition, tuple[int, str | None]] = {}

    def remember(self, marks: Mapping[TopicPartition, int], ids: Mapping[TopicPartition, str | None]) -> None:
        """The broker holds these commits."""
        for partition, mark in marks.items():
            self._remembered[partition] = (mark, ids.get(partition))

    def forget(self, partition: TopicPartition) -> None:
        """Its log begins anew: what was committed says nothing about it."""
        self._remembered.pop(partition, None)

    def learn_first(self, existing: Collection[TopicPartition], timeout_secs: float) -> bool:
        """Before joining: does the group start for the first time? False if the broker did not say.

        A group that has committed nothing on any of our topics is new, and `latest` applies to what
        exists now. Asked once in the life of the process.
        """
        if self._at_first_start is None:
            committed = committed_offsets(self._consumer, existing, timeout_secs)
            if len(committed) < len(existing):
                return False
            new = all(offset is None for offset, _ in committed.values())
            self._at_first_start = frozenset(existing) if new else frozenset()
        return True

    def find(
        self, wanted: Mapping[TopicPartition, Wanted], timeout_secs: float
    ) -> dict[TopicPartition, Found]:
        """Those of the wanted partitions about which the broker said everything within the timeout.

        Each of the three questions may take the timeout; the first one without an answer ends it.
        """
        committed = committed_offsets(self._consumer, wanted, timeout_secs)
        ids = topic_ids(self._admin, {p.topic for p in committed}, timeout_secs)
        known = [p for p in committed if p.topic in ids]
        logs = log_ranges(self._admin, known, timeout_secs, committed_only=False)
        return {
            p: self._decide(p, wanted[p], log, *committed[p], topic_id=ids[p.topic])
            for p, log in logs.items()
        }

    def _decide(
        self,
        partition: TopicPartition,
        wanted: Wanted,
        log: LogRange,
        committed: int | None,
        committed_id: str | None,
        topic_id: str | None,
    ) -> Found:
        first = partition in (self._at_first_start or ())
        rewritten, vanished = wanted.rewritten, None
        if wanted.position is not None:
            expected: int | None = wanted.position
            if rewritten is None and _differ(wanted.topic_id, topic_id):
                rewritten = "topic_recreated"
        elif committed is None and (remembered := self._remembered.get(partition)) is not None:
            expected = None
            if _differ(remembered[1], topic_id):
                expected, rewritten = remembered[0], "topic_recreated"
            else:
                vanished = remembered[0]
        else:
            expected = committed
            if committed is not None and _differ(committed_id, topic_id):
                rewritten = "topic_recreated"
        start = start_offset(
            expected, log, reset=self._reset, at_first_start=first, rewritten=rewritten, vanished=vanished
        )
        return Found(start, log, None if start.anew else committed, topic_id, first)


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other
