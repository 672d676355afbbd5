"""gRPC as the pipeline sees it: pushes that are answered once they are queued, and nothing to commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.errors import SourceFatalError
from archiver.ports import BrokerView, PartitionListener
from tests.sim.group import draw_value
from tests.sim.world import Record, Violation, World

PUSHED = TopicPartition("", 0)
QUEUE_RECORDS_MAX = 24


class Senders:
    """They push until an answer comes; what was answered is the archive's to keep [G1]."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.orgs = [f"org{i}" for i in range(world.rng.choice([1, 2, 5, 12]))]
        self.to_come = world.rng.randint(20, 160)
        self.answered: list[Record] = []

    def push(self, queue: deque[bytes], most: int) -> None:
        """As many as there is room for; the others stay with their senders [G2]."""
        for _ in range(min(most, self.to_come, QUEUE_RECORDS_MAX - len(queue))):
            self.to_come -= 1
            number = len(self.answered)
            value, org = draw_value(self.world, self.orgs, f"p{number}")
            assert value is not None
            self.answered.append(Record(PUSHED, number, value, org))
            queue.append(value)


class SimPushSource:
    """ports.Source for one life of the process."""

    def __init__(self, world: World, senders: Senders) -> None:
        self.world = world
        self.queue: deque[bytes] = deque()
        self.dead = False
        self._senders = senders
        self._next = 0
        self._paused = self._stopped = False

    def start(self, listener: PartitionListener) -> None:
        """Nothing to be told: there are no partitions."""

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        world = self.world
        world.may_die()
        if not self._stopped and not self.dead:
            self._senders.push(self.queue, world.rng.randint(0, 8))
        fault = "dies_in_drain" if self._stopped else "source_fatal"
        self.dead = self.dead or world.chance(fault)
        if self.dead:
            raise SourceFatalError("simulated: the listener has died")
        if (self._paused and not self._stopped) or not self.queue:
            world.sleep(1.0 if world.calm else timeout_secs)
            return ()
        world.sleep(0.001)
        values = [self.queue.popleft() for _ in range(min(len(self.queue), world.rng.randint(1, 8)))]
        first, self._next = self._next, self._next + len(values)
        return (RecordBatch(PUSHED, values, range(first, self._next)),)

    def positions(self) -> Mapping[TopicPartition, int]:
        return {}

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        raise Violation("a commit for a source without offsets")

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        raise Violation("a commit for a source without offsets")

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return None

    def queued_bytes(self) -> int:
        return sum(map(len, self.queue))

    def stop_taking(self) -> None:
        self._stopped = True

    def close(self, timeout_secs: float) -> None:
        """Nobody to leave."""

    def die(self) -> None:
        """Nothing is on its way."""
