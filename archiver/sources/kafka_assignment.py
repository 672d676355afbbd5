"""The client's assignment, in the words of whichever rebalance protocol the group speaks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import confluent_kafka as ck

from archiver.domain.batch import TopicPartition
from archiver.errors import SourceFatalError
from archiver.sources.kafka_offsets import client_partition


class Assignment:
    """Which partitions the client reads and where each goes on. Offsets are always explicit.

    Cooperative protocols add and remove; an eager one replaces the whole, so that moving one
    partition means to assign all of them again where they stand.
    """

    def __init__(
        self, consumer: ck.Consumer, attach: Callable[[Iterable[TopicPartition]], None], *, eager: bool
    ) -> None:
        self._consumer = consumer
        self._attach = attach
        self._eager = eager
        self._next: dict[TopicPartition, int] = {}
        self._untouched: set[TopicPartition] = set()

    def add(self, starts: Mapping[TopicPartition, int]) -> None:
        """Answer an assignment; to be called for an empty one too."""
        self._next.update(starts)
        self._untouched.update(starts)
        self._attach(self._next)
        if self._eager:
            self._assign_all()
        else:
            self._consumer.incremental_assign([client_partition(p, offset) for p, offset in starts.items()])

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Answer a revocation or a loss."""
        for partition in partitions:
            self._next.pop(partition, None)
            self._untouched.discard(partition)
        if self._eager:
            self._consumer.unassign()
        else:
            self._consumer.incremental_unassign([client_partition(p) for p in partitions])

    def move(self, starts: Mapping[TopicPartition, int]) -> None:
        """Read these on at other offsets, outside of a rebalance."""
        self._next.update(starts)
        self._untouched.update(starts)
        self._attach(self._next)
        if self._eager:
            self._assign_all()
            return
        self._consumer.incremental_unassign([client_partition(p) for p in starts])
        self._consumer.incremental_assign([client_partition(p, offset) for p, offset in starts.items()])

    def passed(self, partition: TopicPartition, first: int, offset: int) -> None:
        """Records from `first` on have been handed out, and with them everything below `offset`.

        Raises `SourceFatalError` where they come again or out of order: no mark could be trusted then.
        """
        if first < self._next[partition]:
            raise SourceFatalError(
                f"the Kafka client handed out {partition.topic}/{partition.partition} from offset {first} on "
                f"after {self._next[partition]}: a restart reads again from the committed offset"
            )
        self._next[partition] = offset
        self._untouched.discard(partition)

    def untouched(self, partition: TopicPartition) -> bool:
        """Whether nothing has been handed out of it since it was told where to go on."""
        return partition in self._untouched

    def position(self, partition: TopicPartition) -> int:
        """Where the partition goes on, as far as was handed out; gaps are not passed."""
        return self._next[partition]

    def let_flow(self, flowing: Collection[TopicPartition]) -> None:
        """Pause or resume every partition, explicitly: the client remembers pauses across assignments.

        Follows every change of the assignment, and ends once the client has carried that out: stopping to
        fetch takes a partition's queue away from the feed, so it is attached again here.
        """
        resumed = [client_partition(p) for p in self._next if p in flowing]
        paused = [client_partition(p) for p in self._next if p not in flowing]
        if resumed:
            self._consumer.resume(resumed)
        if paused:
            self._consumer.pause(paused)
        self._attach(self._next)

    def _assign_all(self) -> None:
        self._consumer.assign([client_partition(p, offset) for p, offset in self._next.items()])
