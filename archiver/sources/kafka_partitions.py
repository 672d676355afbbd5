"""The partitions that are ours: where each goes on, which of them flow, and what is said of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import confluent_kafka as ck

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.events import OffsetsSkipped
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
    """Where a partition was made to go on, and which record came first instead, if one did.

    `again` where it was read before: what the log lacks there is said then.
    """

    start: int
    again: bool
    first_seen: int | None = None


def _moved(place: Found, wanted: Wanted, before: _Move | None) -> _Move:
    """What came first after the move `before` counts only while it is the same log from the same offset."""
    start = place.start.offset
    if before is not None and before.start == start and not (wanted.rewritten or place.start.anew):
        return before
    return _Move(start, again=wanted.position is not None)


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

    def placed(self) -> dict[TopicPartition, int]:
        """Where those that were placed again go on, until a record shows their position in the client.

        All below was handed out, or said to be skipped: no commit needs to wait for a record.
        """
        ours = self.active - self.pending.keys() - self._missing
        return {
            p: self._assignment.position(p) for p, move in self._moved.items() if move.again and p in ours
        }

    def hand_out(self, batches: Sequence[RecordBatch]) -> Sequence[RecordBatch]:
        """Keep where each partition goes on; returns the batches that may be handed out.

        Where the first record behind a move comes from further up, the partition is placed once more, and the
        broker is asked again where its log begins. A gap that is still there is the log's own (transactions,
        compaction) and is said.
        """
        good, again = [], set[TopicPartition]()
        for batch in batches:
            partition, first = batch.partition, batch.offsets[0]
            if partition in again:
                continue
            move = self._moved.get(partition)
            if move is not None and first > move.start and first != move.first_seen:
                self._moved[partition] = replace(move, first_seen=first)
                self._place_again(partition, move.start)
                again.add(partition)
                continue
            if move is not None:
                self._arrived(partition, move, first)
            self._assignment.passed(partition, first, batch.offsets[-1] + 1)
            self._not_again(partition)
            good.append(batch)
        if again:
            self.set_flow()
        return good

    def _not_again(self, partition: TopicPartition) -> None:
        """An error of the same take is noticed before its records: placing must not go back behind them."""
        wanted = self.pending.get(partition)
        if wanted is not None and wanted.position is not None:
            position = max(wanted.position, self._assignment.position(partition))
            self.pending[partition] = replace(wanted, position=position)

    def _arrived(self, partition: TopicPartition, move: _Move, first: int) -> None:
        """The client reads where it was told to, as its first record shows."""
        del self._moved[partition]
        self._make_readable()
        if move.again and first > move.start:
            self._emit(OffsetsSkipped(*partition, move.start, first, "not_in_log"))

    def unreadable(
        self, partition: TopicPartition, offset: int, rewritten: Literal["log_truncated"] | None
    ) -> None:
        """The broker does not have `offset`, at which the client wanted to go on with one of ours.

        The event may be older than the last move, since librdkafka gives such an error no version that would
        drop it, and its offset one of another log: in a topic made anew that offset fits again as soon as the
        topic has grown. So it counts only once records have been handed out since. The partition is placed
        again in any case: behind an old event, too, the fetching may have stopped.
        """
        if partition not in self.active:
            return
        position = self._assignment.position(partition)
        if not self._assignment.untouched(partition):
            position = max(position, offset)  # the client's also passes gaps
        self._place_again(partition, position, rewritten)
        self.set_flow()

    def _place_again(
        self, partition: TopicPartition, position: int, rewritten: Literal["log_truncated"] | None = None
    ) -> None:
        """What is known already of a log that was rewritten stays known."""
        wanted = self.pending.get(partition)
        if wanted is None or wanted.rewritten is None:
            self.pending[partition] = Wanted(position, rewritten, self._commits.ids.get(partition))

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
        for partition, place in found.items():
            self._moved[partition] = _moved(place, wanted[partition], self._moved.get(partition))
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
