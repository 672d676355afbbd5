"""Kafka as the pipeline sees it: logs, the group's commits and generations, and a source over them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.errors import SourceFatalError
from archiver.ports import BrokerView, PartitionListener
from tests.sim.storage import SimStore
from tests.sim.world import Record, Violation, World

FAULTS_OF_THE_SOURCE = (
    "kill",
    "freeze",
    "source_fatal",
    "lose",
    "revoke",
    "recreate",
    "topic_deleted",
    "topic_returns",
    "retention",
)

_offset = attrgetter("offset")


class SimBroker:
    """Topics' logs, the group's commits, and in which generation each partition is ours."""

    def __init__(self, world: World, store: SimStore) -> None:
        rng = world.rng
        self.world = world
        self.store = store
        self.partitions = [TopicPartition("t" if i % 2 else "u", i) for i in range(rng.randint(1, 4))]
        self.orgs = [f"org{i}" for i in range(rng.choice([1, 2, 5, 12]))]
        self.logs: dict[TopicPartition, list[Record]] = {p: [] for p in self.partitions}
        self.ends = dict.fromkeys(self.partitions, 0)
        self.starts = dict.fromkeys(self.partitions, 0)
        self.committed: dict[TopicPartition, int] = {}
        self.ids = dict.fromkeys(self.partitions, 1)
        """Which topic it is under its name; those that are deleted are left out."""
        self.deleted: dict[TopicPartition, int] = {}
        """The ids that they had."""
        self.epochs: dict[TopicPartition, int] = {}
        """Partitions that are ours, with the generation in which they were given to us."""
        self.generation = 0
        self.to_come = rng.randint(20, 160)
        self.gone: list[Record] = []
        """Records that the broker has no longer."""

    def produce(self, most: int) -> None:
        """Append records, with gaps, tombstones and transaction markers."""
        if not self.to_come:
            return
        world, draw = self.world, self.world.rng.random
        for _ in range(min(most, self.to_come)):
            self.to_come -= 1
            partition = self.partitions[world.below(len(self.partitions))]
            offset = self.ends[partition] + (1 + world.below(3) if draw() < 0.1 else 0)
            name = f"{partition.topic}:{partition.partition}:{self.ids[partition]}:{offset}"
            value, org = draw_value(self.world, self.orgs, name)
            self.logs[partition].append(Record(partition, offset, value, f"{partition.topic}/{org}"))
            self.ends[partition] = offset + 1
            if draw() < 0.08:
                self.ends[partition] += 1

    def behind(self, partition: TopicPartition, offset: int, most: int | None = None) -> list[Record]:
        """Records from an offset on."""
        log = self.logs[partition]
        first = bisect_left(log, offset, key=_offset)
        return log[first : None if most is None else first + most]

    def give(self, partitions: Sequence[TopicPartition]) -> None:
        """A rebalance gives us these."""
        self.generation += 1
        self.epochs.update(dict.fromkeys(partitions, self.generation))

    def take_away(self, partitions: Sequence[TopicPartition] | frozenset[TopicPartition]) -> None:
        """They are another member's from now on, whether we know it or not."""
        for partition in partitions:
            self.epochs.pop(partition, None)

    def commit(self, marks: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int]) -> bool:
        """A commit arrives: fenced by the generation, and the place where a wrong mark loses records."""
        if any(self.epochs.get(partition) != epochs.get(partition) for partition in marks):
            self.world.note(f"commit refused, another generation: {dict(marks)}")
            return False
        for partition, mark in marks.items():
            committed = self.committed.get(partition, 0)
            if mark < committed:
                raise Violation(f"commit of {partition} goes back to {mark}")
            if mark > self.ends[partition]:
                raise Violation(f"commit of {partition} at {mark} is beyond the end")
            if self.world.mode == "held":
                for record in self.behind(partition, committed):
                    if record.offset >= mark:
                        break
                    if record.value is not None and not self.store.durable(record.value):
                        raise Violation(f"commit of {partition} at {mark} passes {record} which is nowhere")
            self.committed[partition] = mark
        self.world.note(f"committed {dict(marks)}")
        return True

    def others_work(self) -> None:
        """Other members archive and commit what is theirs."""
        if len(self.epochs) == len(self.partitions):
            return
        for partition in self.partitions:
            if partition in self.epochs or self.world.rng.random() < 0.5:
                continue
            part = self.behind(partition, self.committed.get(partition, 0), self.world.below(6))
            for record in part:
                if record.value is not None:
                    self.store.put_foreign(record.route, record.value)
            if part:
                self.committed[partition] = part[-1].offset + 1

    def recreate(self, partition: TopicPartition) -> None:
        """The topic is deleted and made again at once."""
        self.delete(partition)
        self.make_anew(partition)

    def delete(self, partition: TopicPartition) -> None:
        """The topic is deleted: the log and its commits are gone, and nobody's."""
        self.gone += self.logs[partition]
        self.logs[partition] = []
        self.ends[partition] = self.starts[partition] = 0
        self.committed.pop(partition, None)
        self.take_away([partition])
        self.partitions.remove(partition)
        self.deleted[partition] = self.ids.pop(partition)

    def make_anew(self, partition: TopicPartition) -> None:
        """Another topic under the name of one that was deleted."""
        self.ids[partition] = self.deleted.pop(partition) + 1
        self.partitions.append(partition)

    def retain(self, partition: TopicPartition) -> None:
        """Retention removes the older half of what the log holds."""
        log = self.logs[partition]
        half = len(log) // 2
        self.gone += log[:half]
        del log[:half]
        self.starts[partition] = log[0].offset if log else self.ends[partition]

    def next_offset(self, partition: TopicPartition) -> int:
        """Where an assignment starts to read."""
        return max(self.committed.get(partition, 0), self.starts[partition])


def draw_value(world: World, orgs: Sequence[str], name: str) -> tuple[bytes | None, str]:
    """A value that carries its name, and the last segment of its route; one in twenty is a tombstone."""
    kind = world.below(20)
    if kind == 0 and world.mode != "pushes":
        return None, "default"
    if kind == 1:
        return f"not json {name}".encode(), "default"
    if kind == 2:
        return f'{{"n":"{name}"}}'.encode(), "default"
    org = orgs[world.below(len(orgs))]
    if kind == 3 and world.mode != "pushes":
        return f'{{"_org_id":"{org}",\n "n":"{name}"}}'.encode(), org
    return f'{{"_org_id":"{org}","n":"{name}"}}'.encode(), org


@dataclass(slots=True)
class _Commit:
    """One commit on its way: when it arrives, when its answer does, and what the answer is."""

    arrives_at: float
    answers_at: float
    marks: dict[TopicPartition, int]
    epochs: dict[TopicPartition, int]
    outcome: str
    arrived: bool = False
    taken: bool = False


class SimSource:
    """ports.Source over the broker, for one life of the process."""

    def __init__(self, world: World, broker: SimBroker) -> None:
        self.world = world
        self.broker = broker
        self.delivered: set[TopicPartition] = set()
        """Partitions of ours that have delivered something since they were given to us."""
        self.owned: dict[TopicPartition, int] = {}
        """What we have been told is ours, and the generation: may be older than the broker's."""
        self._ids: dict[TopicPartition, int] = {}
        """Which topics those are, as far as we know."""
        self._listener: PartitionListener | None = None
        self._position: dict[TopicPartition, int] = {}
        self._paused = self._stopped = self._in_callback = False
        self._sent: _Commit | None = None
        self.values_held: Callable[[TopicPartition], set[bytes]] = lambda _: set()
        self.promise_ends: Callable[[TopicPartition], None] = lambda _: None

    def start(self, listener: PartitionListener) -> None:
        self._listener = listener

    @contextmanager
    def _callback(self) -> Iterator[PartitionListener]:
        assert self._listener is not None
        self._in_callback = True
        try:
            yield self._listener
        finally:
            self._in_callback = False

    # --- records ----------------------------------------------------------------------------

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        if self._in_callback:
            raise Violation("records are taken inside a callback")
        world = self.world
        struck = world.struck(FAULTS_OF_THE_SOURCE)
        if "kill" in struck:
            world.die()
        if "freeze" in struck:
            freeze(world, self.broker)
        self.broker.produce(world.below(9))
        self.broker.others_work()
        if self._sent is not None:
            self._serve_commit()
        self._rebalance(struck)
        if "source_fatal" in struck:
            raise SourceFatalError("simulated")
        batches = () if self._paused or self._stopped else self._batches()
        world.sleep(0.001 if batches else 1.0 if world.calm else timeout_secs)
        return batches

    def _batches(self) -> list[RecordBatch]:
        world = self.world
        batches = []
        owned = list(self._position)
        for partition in world.rng.sample(owned, min(len(owned), world.below(3))) if owned else ():
            records = self.broker.behind(partition, self._position[partition], 1 + world.below(8))
            if records:
                self._position[partition] = records[-1].offset + 1
                self.delivered.add(partition)
                values = [record.value for record in records]
                batches.append(RecordBatch(partition, values, [record.offset for record in records]))
        return batches

    def left(self, partition: TopicPartition) -> bool:
        """Whether there is something to take of a partition of ours."""
        return bool(self.broker.behind(partition, self._position[partition], 1))

    def positions(self) -> Mapping[TopicPartition, int]:
        """Like librdkafka's: gaps at the end are passed once nothing is left before them."""
        if self._in_callback:
            raise Violation("positions are asked for inside a callback")
        found = {}
        for partition in self.delivered:
            if self._is_there(partition) and not self.broker.behind(partition, self._position[partition], 1):
                self._position[partition] = self.broker.ends[partition]
            found[partition] = self._position[partition]
        return found

    # --- the group ----------------------------------------------------------------------------

    def _rebalance(self, struck: Collection[str]) -> None:
        world, broker = self.world, self.broker
        self._notice_eviction()
        if struck:
            self._suffer(struck)
        if broker.ids != self._ids:
            self._notice_topics()
        if len(broker.epochs) == len(broker.partitions) or self._stopped:
            return
        free = [p for p in broker.partitions if p not in broker.epochs and p not in self.owned]
        if free and (world.calm or world.rng.random() < 0.2):
            self._assign(world.rng.sample(free, 1 + world.below(len(free))))

    def _suffer(self, struck: Collection[str]) -> None:
        world, broker = self.world, self.broker
        if self.owned and "lose" in struck:
            broker.take_away(list(self.owned))
            broker.others_work()
            self._notice_eviction()
        if self.owned and "revoke" in struck:
            self._revoke(world.rng.sample(list(self.owned), 1 + world.below(len(self.owned))))
        if self.owned and "recreate" in struck:
            partition = world.rng.choice(list(self.owned))
            if self._is_there(partition):
                self._recreate(partition)
        if len(broker.partitions) > 1 and "topic_deleted" in struck:
            partition = world.rng.choice(broker.partitions)
            world.note(f"deleted {partition}")
            broker.delete(partition)
        if broker.deleted and "topic_returns" in struck:
            self._return(world.rng.choice(list(broker.deleted)))
        if "retention" in struck:
            self._retain(world.rng.choice(broker.partitions))

    def _notice_eviction(self) -> None:
        """The broker has given ours to others: we learn it now."""
        epochs = self.broker.epochs
        if epochs == self.owned:
            return
        gone = [p for p, epoch in self.owned.items() if epochs.get(p) != epoch and self._is_there(p)]
        if gone:
            self._lose(gone)

    def _is_there(self, partition: TopicPartition) -> bool:
        """Whether its topic is the one that we know under the name."""
        return self.broker.ids.get(partition) == self._ids[partition]

    def _return(self, partition: TopicPartition) -> None:
        """A deleted topic is made anew; who had it in the group has it still, but means the old one."""
        broker = self.broker
        self.world.note(f"made anew {partition}")
        broker.make_anew(partition)
        if partition in self.owned:
            broker.give([partition])

    def _notice_topics(self) -> None:
        """Some time later we learn that topics are gone, or are others."""
        world, broker = self.world, self.broker
        for partition in [p for p in self.owned if not self._is_there(p)]:
            if not world.calm and world.rng.random() < 0.7:
                continue
            if partition not in broker.ids:
                self._revoke([partition])
            elif partition in broker.epochs:
                self._restart(partition)
            else:
                self._lose([partition])

    def _still_there(self, partitions: list[TopicPartition]) -> frozenset[TopicPartition]:
        """Of partitions that go, those whose topic is there; where the broker is silent all seem to be."""
        gone = frozenset(p for p in partitions if not self._is_there(p))
        if not gone or self.world.rng.random() < 0.2:
            return frozenset(partitions)
        for partition in gone:
            self._owe(partition)
        with self._callback() as listener:
            listener.restarted(gone)
            listener.lost(gone)
        return frozenset(partitions) - gone

    def _owe(self, partition: TopicPartition) -> None:
        """Its log is gone: what we hold of it is nowhere else any more."""
        old = {record.value for record in self.broker.gone if record.partition == partition}
        self.world.owed.update(value for value in self.values_held(partition) if value in old)

    def _lose(self, partitions: list[TopicPartition]) -> None:
        self.world.note(f"lost {set(partitions)}")
        self.world.read_once = False
        there = self._still_there(partitions)
        self._forget(partitions)
        if there:
            with self._callback() as listener:
                listener.lost(there)

    def _revoke(self, partitions: list[TopicPartition]) -> None:
        world, gone = self.world, frozenset(partitions)
        world.note(f"revoke {set(gone)}")
        world.read_once = False
        if world.chance("evicted_in_drain"):
            self.broker.take_away(list(self.owned))
        if there := self._still_there(partitions):
            with self._callback() as listener:
                listener.revoked(there)
        self._forget(gone)
        self.broker.take_away(gone)
        self.broker.others_work()
        self._notice_eviction()

    def _assign(self, got: list[TopicPartition]) -> None:
        broker = self.broker
        self.world.note(f"assign {got}")
        broker.give(got)
        for partition in got:
            self.owned[partition] = broker.generation
            self._ids[partition] = broker.ids[partition]
            self._position[partition] = broker.next_offset(partition)
        with self._callback() as listener:
            listener.assigned({p: broker.committed.get(p) for p in got})

    def _recreate(self, partition: TopicPartition) -> None:
        """Deleted and made again under us."""
        self.world.note(f"recreated {partition}")
        self.broker.recreate(partition)
        self.broker.give([partition])
        self._restart(partition)

    def _restart(self, partition: TopicPartition) -> None:
        """It stays ours, and is read from the beginning."""
        self.world.note(f"restart {partition}")
        self.world.read_once = False
        self._owe(partition)
        self.delivered.discard(partition)
        self.owned[partition] = self.broker.epochs[partition]
        self._ids[partition] = self.broker.ids[partition]
        self._position[partition] = 0
        with self._callback() as listener:
            listener.restarted(frozenset([partition]))

    def _retain(self, partition: TopicPartition) -> None:
        self.broker.retain(partition)
        self.world.note(f"{partition} starts at {self.broker.starts[partition]} now")
        if partition in self._position:
            self._position[partition] = max(self._position[partition], self.broker.starts[partition])

    def _forget(self, gone: Collection[TopicPartition]) -> None:
        for partition in gone:
            self.promise_ends(partition)
            self.owned.pop(partition, None)
            self._ids.pop(partition, None)
            self._position.pop(partition, None)
            self.delivered.discard(partition)

    # --- commits ----------------------------------------------------------------------------

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        world = self.world
        world.may_die()
        if self._sent is not None:
            return False
        self._require_ours(marks)
        late = world.chance("commit_late")
        arrives = world.now + (world.rng.uniform(0, 4) if late else 0.0)
        answers = arrives + (world.rng.uniform(0, 8) if late else 0.001)
        outcome = "taken"
        if world.chance("commit_refused"):
            outcome = "refused"
        elif world.chance("commit_answer_lost"):
            outcome = "lost"
        epochs = {p: self.owned[p] for p in marks}
        self._sent = _Commit(arrives, answers, dict(marks), epochs, outcome)
        self._serve_commit()
        return True

    def _require_ours(self, marks: Mapping[TopicPartition, int]) -> None:
        for partition in marks:
            if partition not in self.owned:
                raise Violation(f"commit offered for {partition}, which is not ours")

    def _serve_commit(self) -> None:
        sent, now = self._sent, self.world.now
        if sent is None:
            return
        if now >= sent.arrives_at:
            self._arrive(sent)
        if now < sent.answers_at:
            return
        self._sent = None
        marks = {p: mark for p, mark in sent.marks.items() if self.owned.get(p) == sent.epochs[p]}
        if not marks:
            return
        with self._callback() as listener:
            if sent.taken and sent.outcome != "lost":
                listener.commit_confirmed(marks)
            else:
                listener.commit_failed(marks, "refused")

    def _arrive(self, sent: _Commit) -> None:
        if not sent.arrived:
            sent.arrived = True
            sent.taken = sent.outcome != "refused" and self.broker.commit(sent.marks, sent.epochs)

    def die(self) -> None:
        """A commit that has left the process may still arrive."""
        if self._sent is not None and self.world.rng.random() < 0.5:
            self._arrive(self._sent)

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        world = self.world
        world.may_die()
        self._require_ours(marks)
        if self._sent is not None:  # it went before on the same connection
            self._arrive(self._sent)
        world.sleep(world.rng.uniform(0, max(timeout_secs, 0)))
        if world.chance("commit_refused"):
            return False
        taken = self.broker.commit(marks, {p: self.owned[p] for p in marks})
        return taken and not world.chance("commit_answer_lost")

    # --- the rest ---------------------------------------------------------------------------

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return None

    def queued_bytes(self) -> int:
        return 0

    def stop_taking(self) -> None:
        self._stopped = True

    def close(self, timeout_secs: float) -> None:
        self.broker.take_away(list(self.owned))


def freeze(world: World, broker: SimBroker | None) -> None:
    """The process stands still for longer than its session; others take over and work meanwhile."""
    if not world.chance("freeze"):
        return
    world.note("frozen")
    world.sleep(100.0)
    world.frozen_at = world.now
    if broker is not None:
        broker.take_away(list(broker.epochs))
        for _ in range(3):
            broker.others_work()
