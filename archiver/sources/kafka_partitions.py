"""The partitions that are ours: where each goes on, which of them flow, and what is said of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import confluent_kafka as ck

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.ports import Clock, Emit, PartitionListener
from archiver.sources.kafka_assignment import Assignment
from archiver.sources.kafka_commits import Commits
from archiver.sources.kafka_offsets import client_partition
from archiver.sources.kafka_starts import NEW, Found, Starts, Wanted

ASSIGN_ANSWER_SECS = 5.0
"""How long a rebalance waits for each answer about start offsets; then it goes on without them."""
RETRY_ANSWER_SECS = 1.0
RETRY_SECS = 1.0


@dataclass(frozen=True, slots=True)
class _Move:
    """Where a partition was made to go on, and which record came first instead, if one did."""

    start: int
    first_seen: int | None = None


class Partitions:
    """Keeps three things in step: the client's assignment, the commits, and what the listener knows.

    `active` are those the listener has been told of. A partition is pending while the broker has not
    said where it goes on: a new one is then ours but not active yet, and a pending one is paused.
    """

    def __init__(
        self,
        assignment: Assignment,
        starts: Starts,
        commits: Commits,
        listener: PartitionListener,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.active: set[TopicPartition] = set()
        self.pending: dict[TopicPartition, Wanted] = {}
        self.readable: list[ck.TopicPartition] = []
        """Those whose position in the client means something, in the client's words."""
        self._assignment = assignment
        self._starts = starts
        self._commits = commits
        self._listener = listener
        self._emit = emit
        self._clock = clock
        self._flows = True
        self._retry_at = 0.0
        self._first_marks: dict[TopicPartition, int] = {}
        self._missing: set[TopicPartition] = set()
        self._moved: dict[TopicPartition, _Move] = {}

    def add(self, partitions: Sequence[TopicPartition], *, leaving: bool) -> None:
        """Answer an assignment: every partition gets an explicit start, or waits for one."""
        wanted = dict.fromkeys(() if leaving else partitions, NEW)
        found = self._starts.find(wanted, ASSIGN_ANSWER_SECS)
        self.pending.update({p: NEW for p in wanted if p not in found})
        # those that could not be placed are paused, whatever offset stands here
        offsets = {p: place.start.offset for p, place in found.items()}
        self._assignment.add({p: offsets.get(p, ck.OFFSET_END) for p in partitions})
        self._begin(found)
        self.set_flow()

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Answer a revocation or a loss, once the listener has been told."""
        self.active.difference_update(partitions)
        self._missing.difference_update(partitions)
        for partition in partitions:
            self.pending.pop(partition, None)
            self._first_marks.pop(partition, None)
            self._moved.pop(partition, None)
        self._commits.dropped(frozenset(partitions))
        self._assignment.remove(partitions)
        self.set_flow()

    def let_flow(self, flows: bool) -> None:
        """Pause or resume them all, now and later."""
        if flows != self._flows:
            self._flows = flows
            self.set_flow()

    def set_flow(self) -> None:
        """Tell the client, explicitly for each of them."""
        self._make_readable()
        flowing = self.active - self.pending.keys() - self._missing
        self._assignment.let_flow(flowing if self._flows else ())

    def _make_readable(self) -> None:
        """A position is believed once a record has shown it, where the client was told to go elsewhere."""
        readable = self.active - self.pending.keys() - self._missing - self._moved.keys()
        self.readable = [client_partition(partition) for partition in readable]

    def hand_out(self, batches: Sequence[RecordBatch]) -> Sequence[RecordBatch]:
        """Keep where each partition goes on; returns the batches that may be handed out.

        A client was seen to go on at its earlier position in a topic made anew, though it had been moved to
        the beginning. So where the first record behind a move comes from further up, the partition is moved
        there once more; a gap that is there again is the log's own, of transactions or compaction.
        """
        good, again = [], dict[TopicPartition, int]()
        for batch in batches:
            partition, first = batch.partition, batch.offsets[0]
            if partition in again:
                continue
            move = self._moved.get(partition)
            if move is not None and first > move.start and first != move.first_seen:
                self._moved[partition] = _Move(move.start, first)
                again[partition] = move.start
                continue
            if move is not None:
                del self._moved[partition]
                self._make_readable()
            self._assignment.passed(partition, first, batch.offsets[-1] + 1)
            good.append(batch)
        if again:
            self._assignment.move(again)
            self.set_flow()
        return good

    def unreadable(
        self, partition: TopicPartition, offset: int, rewritten: Literal["log_truncated"] | None
    ) -> None:
        """The broker does not have `offset`, at which one of ours wanted to go on."""
        if partition in self.active:
            self.pending[partition] = Wanted(offset, rewritten)
            self.set_flow()

    def compare_ids(self, ids: Mapping[str, str | None], counts: Mapping[str, int]) -> None:
        """A topic made anew keeps its partitions assigned and its positions, but means other records.

        It may have fewer partitions: those that are not there wait, assigned, until they are.
        """
        missing = set[TopicPartition]()
        for partition in self.active:
            now, before = ids.get(partition.topic), self._commits.ids.get(partition)
            if now is None or before is None or now == before:
                continue
            if partition.partition < counts.get(partition.topic, 0):
                self._missing.discard(partition)
                self.pending[partition] = Wanted(self._assignment.position(partition), "topic_recreated")
            else:
                missing.add(partition)
        self._without(frozenset(missing - self._missing))

    def _without(self, missing: frozenset[TopicPartition]) -> None:
        """Nobody brings their records again, and no broker takes commits for them."""
        if missing:
            self._missing |= missing
            self._commits.dropped(missing)
            self._listener.restarted(missing)
            self.set_flow()

    def place_pending(self) -> bool:
        """Ask again where partitions go on that could not be placed, or that cannot be read on.

        True if some of them go on now.
        """
        if not self.pending or self._clock.monotonic() < self._retry_at:
            return False
        found = self._starts.find(self.pending, RETRY_ANSWER_SECS)
        self._retry_at = self._clock.monotonic() + RETRY_SECS
        if not found:
            return False
        wanted = {partition: self.pending.pop(partition) for partition in found}
        self._assignment.move({partition: place.start.offset for partition, place in found.items()})
        self._moved.update({partition: _Move(place.start.offset) for partition, place in found.items()})
        self._begin({p: place for p, place in found.items() if wanted[p].position is None})
        self._go_on({p: place for p, place in found.items() if wanted[p].position is not None})
        self.set_flow()
        return True

    def commit_first_marks(self) -> None:
        """Commit at once where reading began if the next start could not find out again [D9].

        That is the end that `latest` chose for a new group, and the beginning of a log that was written
        anew: a commit that the broker still holds would fit it again as soon as it has grown.
        """
        if self._first_marks and self._commits.start(self._first_marks):
            self._first_marks = {}

    def _begin(self, found: Mapping[TopicPartition, Found]) -> None:
        """New partitions of ours, placed."""
        for partition, place in found.items():
            self._tell(partition, place)
            self.active.add(partition)
            self._commits.assigned(partition, place.committed, place.topic_id)
            if place.only_known_here:
                self._first_marks[partition] = place.start.offset
        if found:
            self._listener.assigned({partition: place.committed for partition, place in found.items()})

    def _go_on(self, found: Mapping[TopicPartition, Found]) -> None:
        """Partitions that stay ours and are read on elsewhere."""
        anew = frozenset(partition for partition, place in found.items() if place.start.anew)
        for partition, place in found.items():
            self._tell(partition, place)
            if partition in anew:
                self._starts.forget(partition)
                self._commits.assigned(partition, None, place.topic_id)
                self._first_marks[partition] = place.start.offset
        if anew:
            self._listener.restarted(anew)

    def _tell(self, partition: TopicPartition, place: Found) -> None:
        for event in place.events(partition):
            self._emit(event)
