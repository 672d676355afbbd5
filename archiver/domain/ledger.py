"""Which offset is safe to commit: three answers for three promises, behind `ports.Ledger`.

Invariant of `OffsetLedger`, per partition: every record below `low_water` is durable, and
`low_water = min(first offset of every file that holds un-durable records) or position`.
State is one integer per (file, partition), never per record [D2].
"""

from __future__ import annotations

from collections.abc import Mapping

from archiver.domain.batch import TopicPartition


class _Partition:
    """State of one assignment of one partition. A new assignment gets a new object, so a file that
    was held under the old one can release nothing of the new one."""

    __slots__ = ("committed", "holds", "position")

    def __init__(self, committed: int | None) -> None:
        self.committed = committed
        self.position: int | None = None
        self.holds: dict[int, int] = {}

    def low_water(self) -> int | None:
        return min(self.holds.values(), default=self.position)


class OffsetLedger:
    """[D1]: an offset is committable once everything below it is durable."""

    reads_again = True
    """What is not durable is not committed."""

    def __init__(self) -> None:
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._held_by: dict[int, list[_Partition]] = {}
        self._holds = 0

    @property
    def holds(self) -> int:
        """How many pairs of a file and a partition hold something back now."""
        return self._holds

    def assign(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """Start anew for these partitions, with what the group has committed (None: nothing)."""
        self.drop(frozenset(committed))
        for partition, offset in committed.items():
            self._partitions[partition] = _Partition(offset)

    def drop(self, partitions: frozenset[TopicPartition]) -> None:
        """Forget revoked or lost partitions."""
        for partition in partitions:
            state = self._partitions.pop(partition, None)
            if state is not None:
                self._holds -= len(state.holds)
                state.holds.clear()

    def hold(self, file_id: int, partition: TopicPartition, first: int) -> None:
        """A file holds un-durable records of the partition from `first` on; called before `advance`.

        An earlier hold of the same file stays where it is lower.
        """
        state = self._partitions[partition]
        held = state.holds.get(file_id)
        if held is None:
            self._held_by.setdefault(file_id, []).append(state)
            state.holds[file_id] = first
            self._holds += 1
        elif first < held:
            state.holds[file_id] = first

    def advance(self, partition: TopicPartition, position: int) -> None:
        """Everything below `position` has been held or needs no archiving. Never moves back."""
        state = self._partitions.get(partition)
        if state is not None and (state.position is None or position > state.position):
            state.position = position

    def release(self, file_id: int) -> None:
        """The file's records are durable."""
        for state in self._held_by.pop(file_id, ()):
            if state.holds.pop(file_id, None) is not None:
                self._holds -= 1

    def low_water(self, partition: TopicPartition) -> int | None:
        """The lowest offset that is not durable; None before anything was delivered."""
        state = self._partitions.get(partition)
        return None if state is None else state.low_water()

    def position(self, partition: TopicPartition) -> int | None:
        """Next offset that will be taken; None before anything was delivered."""
        state = self._partitions.get(partition)
        return None if state is None else state.position

    def committed(self, partition: TopicPartition) -> int | None:
        """What the broker holds, as far as is known."""
        state = self._partitions.get(partition)
        return None if state is None else state.committed

    def partitions(self) -> list[TopicPartition]:
        """All that are assigned."""
        return list(self._partitions)

    def committable(self) -> dict[TopicPartition, int]:
        """Marks above what is committed, by partition."""
        marks: dict[TopicPartition, int] = {}
        for partition, state in self._partitions.items():
            mark = self._mark(state)
            if mark is not None and (state.committed is None or mark > state.committed):
                marks[partition] = mark
        return marks

    def _mark(self, state: _Partition) -> int | None:
        return state.low_water()

    def confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker holds these marks."""
        for partition, mark in marks.items():
            state = self._partitions.get(partition)
            if state is not None and (state.committed is None or mark > state.committed):
                state.committed = mark


class ReceiptLedger(OffsetLedger):
    """[D8]: an offset is committable as soon as its record has been received."""

    reads_again = False

    def _mark(self, state: _Partition) -> int | None:
        return state.position


class NoOffsetsLedger:
    """For a source without offsets: nothing is held back and nothing is ever committed."""

    reads_again = False
    holds = 0

    def assign(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """Nothing to keep."""

    def drop(self, partitions: frozenset[TopicPartition]) -> None:
        """Nothing to forget."""

    def hold(self, file_id: int, partition: TopicPartition, first: int) -> None:
        """Nothing to hold."""

    def advance(self, partition: TopicPartition, position: int) -> None:
        """Nothing to advance."""

    def release(self, file_id: int) -> None:
        """Nothing to release."""

    def low_water(self, partition: TopicPartition) -> int | None:
        """There is none."""
        return None

    def position(self, partition: TopicPartition) -> int | None:
        """There is none."""
        return None

    def committed(self, partition: TopicPartition) -> int | None:
        """There is none."""
        return None

    def partitions(self) -> list[TopicPartition]:
        """There are none."""
        return []

    def committable(self) -> dict[TopicPartition, int]:
        """Never anything."""
        return {}

    def confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        """Nothing to confirm."""
