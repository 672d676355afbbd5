"""The deterministic world around the unchanged pipeline: one seed, one schedule.

A broker with a consumer group, a spool that fills and breaks, a store that fails, hangs, loses
answers and refuses, dead letters, a clock that jumps, and a kill at any call into the world. Every
choice comes from one random generator, so a seed repeats its schedule exactly.

The invariants are checked where they could break: when a commit reaches the broker, when a file
leaves the spool, when an object is put; and at the end of a schedule.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from archiver.bounds import Bounds
from archiver.domain.batch import RecordBatch, Span, TopicPartition
from archiver.domain.keys import KeyMaker, KeyTemplate
from archiver.domain.ledger import OffsetLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.events import Event
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import (
    BrokerView,
    DeadLettersFailed,
    DeadLettersWritten,
    FileSealed,
    FrameWritten,
    PartitionListener,
    RefusedFile,
    Result,
    RollRequested,
    SealFailed,
    UploadState,
    WriteFailed,
)
from archiver.uploads import UploadSchedule


class Violation(AssertionError):
    """An invariant does not hold."""


class Killed(BaseException):
    """The process is gone, in the middle of whatever it did."""


@dataclass(frozen=True)
class Record:
    """One produced record; its value names it, so that copies can be found anywhere."""

    partition: TopicPartition
    offset: int
    value: bytes | None
    route: str


@dataclass
class Faults:
    """How likely each fault is at each chance, in thousandths. Drawn per schedule."""

    kill: int = 0
    revoke: int = 0
    lose: int = 0
    commit_refused: int = 0
    commit_late: int = 0
    put_transient: int = 0
    put_lost_answer: int = 0
    put_refused: int = 0
    put_hangs: int = 0
    key_taken: int = 0
    write_no_space: int = 0
    write_error: int = 0
    seal_fails: int = 0
    file_vanishes: int = 0
    clock_jumps: int = 0
    dead_letters_fail: int = 0
    stop: int = 0
    ops_roll: int = 0
    recreate: int = 0

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """A few kinds at once, some of them heavy: rare everywhere finds less."""
        faults = cls()
        for name, most in (
            ("kill", 6),
            ("revoke", 60),
            ("lose", 25),
            ("commit_refused", 500),
            ("commit_late", 500),
            ("put_transient", 600),
            ("put_lost_answer", 300),
            ("put_refused", 150),
            ("put_hangs", 300),
            ("key_taken", 200),
            ("write_no_space", 150),
            ("write_error", 60),
            ("seal_fails", 200),
            ("file_vanishes", 10),
            ("clock_jumps", 30),
            ("dead_letters_fail", 500),
            ("stop", 4),
            ("ops_roll", 30),
            ("recreate", 15),
        ):
            if rng.random() < 0.35:
                setattr(faults, name, rng.randint(1, most))
        return faults


@dataclass
class SpoolFile:
    """A file in the simulated spool: frames of values."""

    frames: list[list[bytes]] = field(default_factory=list)
    broken: bool = False
    sealed: bool = False

    def values(self) -> list[bytes]:
        return [value for frame in self.frames for value in frame]

    def size(self) -> int:
        return sum(len(value) for value in self.values()) // 2 + 3 * len(self.frames)


class World:
    """Everything outside the pipeline, and the clock."""

    def __init__(self, seed: int, story: list[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.story = story
        self.now = 1000.0
        self.wall_offset = 1_790_000_000.0
        self.faults = Faults.draw(self.rng)
        self.calm = False
        self.broker = SimBroker(self)
        self.store = SimStore(self)
        self.spool: dict[int, SpoolFile] = {}
        self.dead: set[bytes] = set()
        self.process: Process | None = None
        self.restarts = 0

    def note(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:10.3f}  {text}")

    def chance(self, fault: str) -> bool:
        """Whether a fault strikes now. Never after the faults have stopped."""
        likely: int = getattr(self.faults, fault)
        return not self.calm and likely > 0 and self.rng.randrange(1000) < likely

    def may_die(self) -> None:
        if self.chance("kill"):
            self.note("KILL")
            raise Killed

    def sleep(self, secs: float) -> None:
        self.now += secs
        if self.chance("clock_jumps"):
            self.wall_offset += self.rng.choice([-7200.0, -30.0, 30.0, 7200.0])
            self.note("wall clock jumps")

    # the Clock, Disk and Emit ports
    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_offset + self.now

    def free_bytes(self) -> int:
        return 1 << 40

    def emit(self, event: Event) -> None:
        if self.story is not None and event.message:
            self.note(f"event: {event}")


class SimBroker:
    """Topics' logs, the group's commits and who owns what."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.world = world
        count = rng.randint(1, 4)
        self.partitions = [TopicPartition("t" if i % 2 else "u", i) for i in range(count)]
        self.orgs = [f"org{i}" for i in range(rng.choice([1, 2, 5, 12]))]
        self.logs: dict[TopicPartition, list[Record]] = {p: [] for p in self.partitions}
        self.ends: dict[TopicPartition, int] = dict.fromkeys(self.partitions, 0)
        self.committed: dict[TopicPartition, int] = {}
        self.owned: set[TopicPartition] = set()
        self.to_produce = rng.randint(20, 160)
        self.generation = 0
        self.deleted: list[Record] = []

    def produce(self, most: int) -> None:
        """Append records, with gaps and tombstones."""
        rng = self.world.rng
        for _ in range(min(most, self.to_produce)):
            self.to_produce -= 1
            partition = rng.choice(self.partitions)
            offset = self.ends[partition] + (rng.randint(1, 3) if rng.random() < 0.1 else 0)
            self.logs[partition].append(self._record(partition, offset))
            self.ends[partition] = offset + 1
            if rng.random() < 0.08:
                self.ends[partition] += 1  # a transaction's marker

    def _record(self, partition: TopicPartition, offset: int) -> Record:
        rng = self.world.rng
        name = f"{partition.topic}:{partition.partition}:{self.generation}:{offset}"
        kind = rng.randrange(20)
        default = f"{partition.topic}/default"
        if kind == 0:
            return Record(partition, offset, None, default)
        if kind == 1:
            return Record(partition, offset, f"not json {name}".encode(), default)
        if kind == 2:
            return Record(partition, offset, f'{{"n":"{name}"}}'.encode(), default)
        org = rng.choice(self.orgs)
        if kind == 3:
            value = f'{{"_org_id":"{org}",\n "n":"{name}"}}'
            return Record(partition, offset, value.encode(), f"{partition.topic}/{org}")
        value = f'{{"_org_id":"{org}","n":"{name}"}}'
        return Record(partition, offset, value.encode(), f"{partition.topic}/{org}")

    def recreate(self, partition: TopicPartition) -> None:
        """The topic is deleted and made again: the log and its commits are gone."""
        self.generation += 1
        self.deleted += self.logs[partition]
        self.logs[partition] = []
        self.ends[partition] = 0
        self.committed.pop(partition, None)

    def commit(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker takes a commit: the place where a wrong mark would lose records."""
        for partition, mark in marks.items():
            if partition not in self.owned:
                raise Violation(f"commit of {partition} at {mark}, which is not ours")
            if mark < self.committed.get(partition, 0):
                raise Violation(f"commit of {partition} goes back to {mark}")
            if mark > self.ends[partition]:
                raise Violation(f"commit of {partition} at {mark} is beyond the end")
            for record in self.logs[partition]:
                if record.offset >= mark:
                    break
                if record.value is not None and not self.world.store.durable(record.value):
                    raise Violation(f"commit of {partition} at {mark} passes {record} which is nowhere")
            self.committed[partition] = mark
        self.world.note(f"committed {marks}")

    def somebody_else_works(self) -> None:
        """Other members archive and commit what they own."""
        rng = self.world.rng
        for partition in self.partitions:
            if partition in self.owned or rng.random() < 0.5:
                continue
            start = self.committed.get(partition, 0)
            records = [record for record in self.logs[partition] if record.offset >= start]
            part = records[: rng.randint(0, 5)]
            for record in part:
                if record.value is not None:
                    self.world.store.put_foreign(record)
            if part:
                self.committed[partition] = part[-1].offset + 1


class SimSource:
    """ports.Source over the broker, for one life of the process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = world.broker
        self.listener: PartitionListener | None = None
        self.position: dict[TopicPartition, int] = {}
        self.delivered: set[TopicPartition] = set()
        self.paused = False
        self.stopped = False
        self.in_flight: tuple[float, dict[TopicPartition, int], str] | None = None

    def start(self, listener: PartitionListener) -> None:
        self.listener = listener

    def take(self, timeout_secs: float) -> Sequence[RecordBatch]:
        world = self.world
        world.may_die()
        self.broker.produce(world.rng.randint(0, 8))
        self.broker.somebody_else_works()
        self._answer_commit()
        self._rebalance()
        if self.chance_of_request("ops_roll"):
            assert world.process is not None
            world.process.inbox.put(RollRequested())
        batches = [] if self.paused or self.stopped else self._batches()
        world.sleep(0.001 if batches else timeout_secs)
        return batches

    def chance_of_request(self, name: str) -> bool:
        return self.world.chance(name)

    def _batches(self) -> list[RecordBatch]:
        rng = self.world.rng
        batches = []
        for partition in rng.sample(sorted(self.position), min(len(self.position), rng.randint(0, 2))):
            start = self.position[partition]
            records = [r for r in self.broker.logs[partition] if r.offset >= start][: rng.randint(1, 8)]
            if records:
                self.position[partition] = records[-1].offset + 1
                self.delivered.add(partition)
                values = [r.value for r in records]
                batches.append(RecordBatch(partition, values, [r.offset for r in records]))
        return batches

    def _rebalance(self) -> None:
        assert self.listener is not None
        rng, owned = self.world.rng, self.broker.owned
        if owned and self.world.chance("lose"):
            gone = frozenset(owned)
            self._forget(gone)
            self.broker.somebody_else_works()
            self.world.note(f"lost {set(gone)}")
            self.listener.lost(gone)
        elif owned and self.world.chance("revoke"):
            gone = frozenset(rng.sample(sorted(owned), rng.randint(1, len(owned))))
            self.world.note(f"revoke {set(gone)}")
            self.listener.revoked(gone)
            self._forget(gone)
        if owned and self.world.chance("recreate"):
            self._recreate(rng.choice(sorted(owned)))
        free = [p for p in self.broker.partitions if p not in owned]
        if free and (self.world.calm or rng.random() < 0.2):
            got = rng.sample(free, rng.randint(1, len(free)))
            self.world.note(f"assign {got}")
            for partition in got:
                owned.add(partition)
                self.position[partition] = self.broker.committed.get(partition, 0)
            self.listener.assigned({p: self.broker.committed.get(p) for p in got})

    def _recreate(self, partition: TopicPartition) -> None:
        assert self.listener is not None
        self.world.note(f"recreated {partition}")
        self.broker.recreate(partition)
        self._forget(frozenset([partition]))
        self.broker.owned.add(partition)
        self.position[partition] = 0
        self.listener.restarted(frozenset([partition]))

    def _forget(self, gone: frozenset[TopicPartition]) -> None:
        for partition in gone:
            self.broker.owned.discard(partition)
            self.position.pop(partition, None)
            self.delivered.discard(partition)
        if self.in_flight is not None and gone & set(self.in_flight[1]):
            self.in_flight = (self.in_flight[0], self.in_flight[1], "refused")

    def positions(self) -> Mapping[TopicPartition, int]:
        """Like librdkafka's: gaps at the end are passed once nothing is left before them."""
        found = {}
        for partition in self.delivered:
            rest = [r.offset for r in self.broker.logs[partition] if r.offset >= self.position[partition]]
            if not rest:
                self.position[partition] = self.broker.ends[partition]
            found[partition] = self.position[partition]
        return found

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        self.world.may_die()
        if self.in_flight is not None:
            return False
        for partition in marks:
            if partition not in self.broker.owned:
                raise Violation(f"commit offered for {partition}, which is not ours")
        outcome = "refused" if self.world.chance("commit_refused") else "taken"
        wait = self.world.rng.uniform(0, 8) if self.world.chance("commit_late") else 0.001
        if outcome == "taken":
            self.broker.commit(marks)
        self.in_flight = (self.world.now + wait, dict(marks), outcome)
        return True

    def _answer_commit(self) -> None:
        assert self.listener is not None
        if self.in_flight is not None and self.world.now >= self.in_flight[0]:
            _, marks, outcome = self.in_flight
            self.in_flight = None
            if outcome == "taken":
                self.listener.commit_confirmed(marks)
            else:
                self.listener.commit_failed(marks, "refused")

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        self.world.may_die()
        self.world.sleep(self.world.rng.uniform(0, max(timeout_secs, 0)))
        if self.world.chance("commit_refused"):
            return False
        self.broker.commit(marks)
        return True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return None

    def queued_bytes(self) -> int:
        return 0

    def stop_taking(self) -> None:
        self.stopped = True

    def close(self, timeout_secs: float) -> None:
        self.broker.owned.clear()


class SimStore:
    """Objects by key: create-only, with answers that get lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, tuple[str, list[bytes]]] = {}
        self.stored: Counter[bytes] = Counter()
        self.keys_used: dict[str, str] = {}
        self.foreign = 0

    def durable(self, value: bytes) -> bool:
        return self.stored[value] > 0 or value in self.world.dead

    def put_foreign(self, record: Record) -> None:
        assert record.value is not None
        self.foreign += 1
        self._store(f"{record.route}/foreign-{self.foreign}", "foreign", [record.value])

    def _store(self, key: str, nonce: str, values: list[bytes]) -> None:
        self.objects[key] = (nonce, values)
        self.stored.update(values)

    def put(self, sealed: SealedFile, outcome: str) -> StoreError | None:
        """One attempt with an outcome drawn at its start."""
        key = str(sealed.key)
        used_by = self.keys_used.setdefault(key, sealed.nonce)
        if used_by != sealed.nonce:
            raise Violation(f"key {key} is used for two files")
        if outcome == "transient":
            return TransientStoreError("server", "simulated", whole_store=self.world.rng.random() < 0.7)
        if outcome == "refused":
            return RefusedError("too_large", "simulated")
        file = self.world.spool.get(sealed.file_id)
        if file is None:
            return DamagedFileError("the sealed file is gone")
        if outcome == "taken" and key not in self.objects:
            self._store(key, "foreign", [])
        there = self.objects.get(key)
        if there is not None and there[0] != sealed.nonce:
            return KeyTakenError(key)
        if there is None:
            self._store(key, sealed.nonce, file.values())
            self.world.note(f"stored {key}: {len(file.values())} records")
        return TransientStoreError("timeout", "answer lost") if outcome == "lost" else None


class SimInbox:
    """Results, and the place where simulated workers get their turns."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.results: deque[Result] = deque()
        self.work: Callable[[], None] = lambda: None

    def put(self, result: Result) -> None:
        self.results.append(result)

    def drain(self) -> list[Result]:
        for _ in range(self.world.rng.randint(0, 4)):
            self.work()
        return self._take()

    def wait(self, timeout_secs: float) -> list[Result]:
        self.world.may_die()
        for _ in range(self.world.rng.randint(1, 6)):
            self.work()
        if not self.results:
            self.world.sleep(timeout_secs)
            self.work()
        return self._take()

    def _take(self) -> list[Result]:
        taken = list(self.results)
        self.results.clear()
        return taken


class SimWriters:
    """ports.Writers: two queues; a turn carries out the head of one."""

    def __init__(self, world: World, inbox: SimInbox) -> None:
        self.world = world
        self.inbox = inbox
        self.queues: tuple[deque[Callable[[], None]], ...] = (deque(), deque())

    def turn(self) -> bool:
        queues = [queue for queue in self.queues if queue]
        if not queues:
            return False
        self.world.rng.choice(queues).popleft()()
        return True

    def _queue(self, file_id: int, command: Callable[[], None]) -> None:
        self.queues[file_id % 2].append(command)

    def append(self, file_id: int, chunk: int, values: list[bytes]) -> None:
        if not values:
            raise Violation("an empty frame")
        self._queue(file_id, lambda: self._append(file_id, chunk, values))

    def _append(self, file_id: int, chunk: int, values: list[bytes]) -> None:
        file = self.world.spool.setdefault(file_id, SpoolFile())
        no_space, error = self.world.chance("write_no_space"), self.world.chance("write_error")
        if file.broken or no_space or error:
            file.broken = True
            self.inbox.put(WriteFailed(file_id, chunk, file.size(), no_space or not error, "simulated"))
            return
        file.frames.append(list(values))
        self.inbox.put(FrameWritten(file_id, chunk, file.size()))

    def seal(self, file_id: int) -> None:
        self._queue(file_id, lambda: self._seal(file_id))

    def _seal(self, file_id: int) -> None:
        file = self.world.spool.get(file_id)
        if file is None:
            raise Violation(f"seal of file {file_id}, which is not in the spool")
        if self.world.chance("seal_fails"):
            self.inbox.put(SealFailed(file_id, self.world.rng.random() < 0.8, "simulated"))
            return
        if not file.frames:
            self.inbox.put(SealFailed(file_id, False, "there is no frame in it to seal"))
            return
        file.sealed = True
        self.inbox.put(FileSealed(file_id, file.size(), Checksums(crc32=0), f"uploads/{file_id}"))
        if self.world.chance("file_vanishes"):
            self.world.note(f"file {file_id} vanishes")
            self.world.spool.pop(file_id, None)

    def discard(self, file_id: int) -> None:
        self._queue(file_id, lambda: self._discard(file_id))

    def _discard(self, file_id: int) -> None:
        self.world.spool.pop(file_id, None)

    def label(self, file_id: int, key: ObjectKey) -> None:
        pass

    def close(self, timeout_secs: float) -> None:
        pass


class SimUploader:
    """The real schedule, with attempts that end when the seed says so."""

    def __init__(self, world: World, inbox: SimInbox) -> None:
        self.world = world
        counter = iter(range(1 << 20))
        self.schedule = UploadSchedule(
            inbox,
            world.emit,
            self._remove,
            lambda: f"{world.restarts:04x}{next(counter):08x}",
            world.rng,
            in_flight_max=world.rng.randint(1, 4),
        )
        self.running: list[tuple[float, SealedFile, str]] = []

    def submit(self, sealed: SealedFile) -> None:
        self.schedule.add(sealed, self.world.now)

    def abandon(self, file_id: int) -> None:
        self.schedule.abandon(file_id)

    def state(self) -> UploadState:
        return self.schedule.state()

    def close(self, timeout_secs: float) -> None:
        pass

    def _remove(self, sealed: SealedFile) -> None:
        """A file leaves the spool: its records must be durable, or nobody may count on them."""
        file = self.world.spool.pop(sealed.file_id, None)
        process = self.world.process
        assert process is not None
        if file is None or sealed.file_id not in process.archiver.files:
            return
        for value in file.values():
            if not self.world.store.durable(value) and process.archiver.files[sealed.file_id].held:
                raise Violation(f"sealed file {sealed.file_id} removed before it is durable")

    def turn(self) -> bool:
        world = self.world
        if (sealed := self.schedule.begin(world.now)) is not None:
            self.running.append((world.now + self._latency(), sealed, self._outcome()))
            return True
        ready = [attempt for attempt in self.running if attempt[0] <= world.now]
        if not ready:
            return False
        attempt = world.rng.choice(ready)
        self.running.remove(attempt)
        self.schedule.end(attempt[1], world.store.put(attempt[1], attempt[2]), world.now)
        return True

    def _latency(self) -> float:
        return self.world.rng.uniform(5, 60) if self.world.chance("put_hangs") else 0.01

    def _outcome(self) -> str:
        for fault, outcome in (
            ("put_transient", "transient"),
            ("put_lost_answer", "lost"),
            ("put_refused", "refused"),
            ("key_taken", "taken"),
        ):
            if self.world.chance(fault):
                return outcome
        return "stored"


class SimDeadLetters:
    """Fails now and then, retries, and has the records when it says so."""

    def __init__(self, world: World, inbox: SimInbox) -> None:
        self.world = world
        self.inbox = inbox
        self.waiting: list[RefusedFile] = []

    def submit(self, refused: RefusedFile) -> None:
        self.waiting.append(refused)

    def abandon(self, file_id: int) -> None:
        self.waiting = [refused for refused in self.waiting if refused.sealed.file_id != file_id]
        self.world.spool.pop(file_id, None)

    def turn(self) -> bool:
        if not self.waiting:
            return False
        refused = self.world.rng.choice(self.waiting)
        file = self.world.spool.get(refused.sealed.file_id)
        if self.world.chance("dead_letters_fail"):
            self.inbox.put(DeadLettersFailed(refused.sealed.file_id, "simulated", will_retry=True))
            return True
        self.waiting.remove(refused)
        if file is not None:
            self.world.dead.update(file.values())
            self.world.spool.pop(refused.sealed.file_id)
            self.inbox.put(DeadLettersWritten(refused.sealed.file_id))
        return True

    def close(self, timeout_secs: float) -> None:
        pass


class Process:
    """One life of the archiver, from start to stop or kill."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world = world
        world.process = self
        world.spool.clear()  # offsets are held: leftovers are removed at start
        self.inbox = SimInbox(world)
        self.source = SimSource(world)
        self.writers = SimWriters(world, self.inbox)
        self.uploader = SimUploader(world, self.inbox)
        self.dead_letters = SimDeadLetters(world, self.inbox)
        self.inbox.work = self._work
        ids = iter(range(1 << 20))
        self.archiver = Archiver(
            Parts(
                source=self.source,
                ledger=OffsetLedger(),
                router=Router(["_org_id"], "default", with_topic=True),
                keys=KeyMaker(
                    KeyTemplate("{year}/{hour}"), "jsonl", lambda _: f"{world.restarts:02x}{next(ids):02x}"
                ),
                writers=self.writers,
                uploader=self.uploader,
                dead_letters=self.dead_letters,
                inbox=self.inbox,
                clock=world,
                disk=world,
                emit=world.emit,
                publish=lambda _: None,
                beat=lambda _: None,
            ),
            policy,
        )

    def _work(self) -> None:
        """One worker, chosen by the seed, does one thing."""
        workers = [self.writers.turn, self.uploader.turn, self.dead_letters.turn]
        self.world.rng.shuffle(workers)
        for turn in workers:
            if turn():
                return


def draw_policy(rng: random.Random) -> Policy:
    """Bounds small enough to be met often."""
    return Policy(
        roll=RollPolicy(rng.choice([60, 400, 10_000]), rng.choice([0.3, 3.0, 60.0])),
        flush=FlushPolicy(rng.choice([1, 100, 1000]), rng.choice([1, 5, 100]), rng.choice([0.1, 1.0, 20.0])),
        bounds=Bounds(
            memory_bytes_max=rng.choice([6_000, 30_000, 1 << 20]),
            spool_bytes_max=rng.choice([400, 2_000, 1 << 20]),
            free_bytes_min=0,
        ),
        codec="none",
        commit_interval_secs=rng.choice([0.01, 0.3, 5.0]),
        drain_timeout_secs=rng.choice([0.5, 20.0]),
        shutdown_timeout_secs=rng.choice([0.5, 20.0]),
    )


__all__ = ["Killed", "Process", "Record", "Span", "Violation", "World", "draw_policy"]
