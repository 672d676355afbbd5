"""One life of the archiver among the fakes, from start to stop or kill."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from archiver.bounds import Bounds
from archiver.domain.archive_file import FILE_BYTES, ArchiveFile
from archiver.domain.batch import TopicPartition
from archiver.domain.keys import WRITER_ID_DIGITS, KeyMaker, KeyTemplate
from archiver.domain.ledger import NoOffsetsLedger, OffsetLedger, ReceiptLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.domain.sealed import Checksums, SealedFile
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import Ledger, Result, RollRequested
from tests.sim.group import SimBroker, SimSource, freeze
from tests.sim.pushes import Senders, SimPushSource
from tests.sim.storage import SimDeadLetters, SimStore, SimUploader, SimWriters
from tests.sim.world import Violation, World, values_in

ROUTERS = {topic: Router(["_org_id"], "default", with_topic=topic) for topic in (True, False)}
"""Made once: compiling one takes longer than half a schedule, and it keeps nothing but a cache."""


class SimInbox:
    """Results, and the place where simulated workers get their turns."""

    def __init__(self, world: World, broker: SimBroker | None) -> None:
        self.world = world
        self._broker = broker
        self._results: list[Result] = []
        self.work: Callable[[], bool] = lambda: False
        self.operate: Callable[[], None] = lambda: None

    def put(self, result: Result) -> None:
        self._results.append(result)

    def drain(self) -> list[Result]:
        self._work(self.world.below(5))
        self.operate()
        return self._take()

    def wait(self, timeout_secs: float) -> list[Result]:
        self.world.may_die()
        freeze(self.world, self._broker)
        self._work(1 + self.world.below(6))
        if not self._results:
            # a busy machine wakes it late, now and then
            self.world.sleep(timeout_secs if self.world.rng.random() < 0.6 else 10 * timeout_secs)
            self.work()
        self.operate()
        return self._take()

    def _work(self, times: int) -> None:
        for _ in range(times):
            if not self.work():
                return

    def _take(self) -> list[Result]:
        taken, self._results = self._results, []
        return taken


class Outside:
    """What outlives a process: the broker or the senders, and the store."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = SimStore(world)
        pushes = world.mode == "pushes"
        self.senders = Senders(world) if pushes else None
        self.broker = None if pushes else SimBroker(world, self.store)
        self.dead_letters_off = world.chance("dead_letters_off")

    @contextmanager
    def nothing_new(self) -> Iterator[None]:
        """Nobody produces or pushes meanwhile."""
        origin = self.broker or self.senders
        assert origin is not None
        later, origin.to_come = origin.to_come, 0
        try:
            yield
        finally:
            origin.to_come = later


class Process:
    """One life. What it leaves in the spool the next one finds, unless offsets are held."""

    def __init__(self, outside: Outside, policy: Policy) -> None:
        self.outside = outside
        self.world = world = outside.world
        world.lives += 1
        world.owed.clear()
        self.promised: set[bytes] = set()
        """Values that had been routed when the operator asked to close all files."""
        self.stop_asked_at: float | None = None
        self.inbox = SimInbox(world, outside.broker)
        self.source = self._source()
        self.writers = SimWriters(world, self.inbox, outside.store, self)
        self.uploader = SimUploader(world, self.inbox, outside.store, self)
        self.dead_letters = SimDeadLetters(
            world, self.inbox, outside.store, self, off=outside.dead_letters_off
        )
        self._workers = (self.writers.turn, self.uploader.turn, self.dead_letters.turn)
        self.inbox.work, self.inbox.operate = self._work, self._operate
        leftovers = self._leftovers()
        self.archiver = Archiver(
            Parts(
                source=self.source,
                ledger=self._ledger(),
                router=ROUTERS[outside.broker is not None],
                keys=self._keys(),
                writers=self.writers,
                uploader=self.uploader,
                dead_letters=self.dead_letters,
                inbox=self.inbox,
                clock=world,
                disk=world,
                emit=world.emit,
                publish=lambda _: 1.0,
                beat=lambda _: None,
            ),
            policy,
        )
        self.adopted_bytes = sum(sealed.size for sealed in leftovers)
        self.archiver.adopt(leftovers)

    def _source(self) -> SimSource | SimPushSource:
        if self.outside.senders is not None:
            return SimPushSource(self.world, self.outside.senders)
        assert self.outside.broker is not None
        source = SimSource(self.world, self.outside.broker)
        source.values_held, source.promise_ends = self.values_held, self._promise_ends
        return source

    def _ledger(self) -> Ledger:
        if self.world.mode == "pushes":
            return NoOffsetsLedger()
        return OffsetLedger() if self.world.mode == "held" else ReceiptLedger()

    def _keys(self) -> KeyMaker:
        """Writer ids of four digits are few: another life may draw the same [K4]."""
        ids = iter(range(1 << 20))
        own = 0xABC if self.world.chance("same_writer_id") else self.world.lives

        def new_id(digits: int) -> str:
            number = next(ids)
            if digits == WRITER_ID_DIGITS:
                return f"{own:04x}"
            return f"f{self.world.lives:05x}{number:06x}"

        return KeyMaker(KeyTemplate("{year}/{hour}"), "jsonl", new_id)

    def _leftovers(self) -> list[SealedFile]:
        """[D7]: removed where offsets are held, else to be uploaded under the keys they have."""
        world, found = self.world, [file for file in self.world.spool.values() if file.frames]
        world.spool.clear()
        if world.mode == "held":
            return []
        sealed = []
        for number, file in enumerate(found, 1):
            if file.key is None:
                raise Violation("a file with records but without a label")
            world.spool[-number] = file
            file.undeletable = False
            values = file.values()
            sealed.append(
                SealedFile(
                    file_id=-number,
                    path=Path("leftover"),
                    key=file.key,
                    size=file.size,
                    checksums=Checksums(crc32=0),
                    records=len(values),
                    raw_bytes=sum(map(len, values)),
                    codec="none",
                    nonce=file.nonce,
                )
            )
        return sealed

    def _operate(self) -> None:
        """An operator asks for something at any moment, also in a drain."""
        world = self.world
        if not world.likely:
            return
        if world.chance("ops_roll"):
            self.request_roll()
        if (
            self.archiver.state == "draining"
            and self.archiver.stop_asked_at is None
            and world.chance("stop_in_drain")
        ):
            self.ask_to_stop()

    def request_roll(self) -> None:
        """[R2]: what has been routed before is archived, however long the interval."""
        self.world.note("asked to roll")
        self.inbox.put(RollRequested())
        if self.world.endless:
            self.promised |= self._ours_in_files()

    def _ours_in_files(self) -> set[bytes]:
        """What files hold, without what lies in them beside it of partitions that have been let go of: that
        is the next owner's, or comes, and is routed, anew."""
        broker = self.outside.broker
        logs = broker.logs if broker is not None else {}
        place = {record.value: partition for partition, log in logs.items() for record in log}
        values = set[bytes]()
        for file in self.archiver.files.values():
            held = self._values_of(file)
            free = broker is None or file.kept
            values.update(held if free else (value for value in held if place.get(value) in file.held))
        return values

    def has_waiting_files(self) -> bool:
        """Whether a file waits for what its predecessor could not write."""
        return any(file.waits_for is not None for file in self.archiver.files.values())

    def waits_for_disk(self) -> bool:
        """Whether a write has failed and has not been tried again, with more to be written."""
        archiver = self.archiver
        return archiver.failures.waiting and any(file.lines for file in archiver.opened.values())

    def _promise_ends(self, partition: TopicPartition) -> None:
        """It is another's; when it comes back, its records are read, and routed, anew."""
        if self.promised and self.outside.broker is not None:
            self.promised.difference_update(r.value for r in self.outside.broker.logs[partition])

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        self.world.note("asked to stop")
        self.stop_asked_at = self.world.now
        self.archiver.stop("request")

    def _work(self) -> bool:
        """One worker, chosen by the seed, does one thing; False where none has anything to do."""
        first = self.world.below(3)
        workers = self._workers
        return workers[first]() or workers[first - 1]() or workers[first - 2]()

    def holds(self, file_id: int) -> bool:
        """Whether offsets of ours wait for this file."""
        file = self.archiver.files.get(file_id)
        return file is not None and bool(file.held)

    def in_memory(self) -> set[bytes]:
        """Values that are nowhere but in this process: they go with it."""
        values = self._buffered()
        if isinstance(self.source, SimPushSource):
            values.update(self.source.queue)
        return values

    def values(self) -> set[bytes]:
        """Values that this process has, in memory or in the spool, and has not abandoned."""
        return self.in_memory().union(*map(self._spooled, self.archiver.files))

    def routed(self) -> set[bytes]:
        """The same without those that wait to be taken."""
        return self._buffered().union(*map(self._spooled, self.archiver.files))

    def _buffered(self) -> set[bytes]:
        values = set[bytes]()
        for file in self.archiver.files.values():
            values.update(values_in(file.lines))
            for chunk in file.chunks:
                values.update(values_in(chunk.lines))
        return values

    def values_held(self, partition: TopicPartition) -> set[bytes]:
        """Values in files that hold back the partition: not those that were abandoned with it earlier."""
        values = set[bytes]()
        for file in self.archiver.files.values():
            if partition in file.held:
                values |= self._values_of(file)
        return values

    def _values_of(self, file: ArchiveFile) -> set[bytes]:
        """In its buffer, on the way to its writer, and in the spool."""
        values = {*values_in(file.lines), *self._spooled(file.file_id)}
        return values.union(*(values_in(chunk.lines) for chunk in file.chunks))

    def _spooled(self, file_id: int) -> list[bytes]:
        file = self.world.spool.get(file_id)
        return [] if file is None else file.values()

    def die(self) -> None:
        """The process is gone; what has left it may still arrive."""
        world = self.world
        self.source.die()
        self.uploader.die()
        world.kills += 1
        self.forget()

    def forget(self) -> None:
        """What memory held is lost with it: to be read again, or forgiven where it cannot be."""
        world = self.world
        if world.mode != "held":
            spooled = set[bytes]().union(*(file.values() for file in world.spool.values()))
            world.forgiven |= self.in_memory() - spooled


def draw_policy(rng: random.Random, *, small_disk: bool, endless: bool = False) -> Policy:
    """Bounds small enough to be met often; on a small disk one frame of all that memory holds fits."""
    return Policy(
        roll=RollPolicy(
            rng.choice([400, 10_000, 10_000] if endless else [60, 400, 10_000]),
            1e9 if endless else rng.choice([0.3, 3.0, 60.0]),
        ),
        flush=FlushPolicy(rng.choice([1, 100, 1000]), rng.choice([1, 5, 100]), rng.choice([0.1, 1.0, 20.0])),
        bounds=Bounds(
            memory_bytes_max=6_000 if small_disk else rng.choice([6 * FILE_BYTES, 30 * FILE_BYTES, 1 << 20]),
            spool_bytes_max=rng.choice([400, 2_000, 1 << 20]),
            free_bytes_min=1_000 if small_disk else 0,
        ),
        codec="none",
        commit_interval_secs=rng.choice([0.01, 0.3, 5.0]),
        drain_timeout_secs=rng.choice([0.5, 20.0]),
        shutdown_timeout_secs=rng.choice([0.5, 20.0]),
    )
