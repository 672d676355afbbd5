"""The spool's writers, the uploads with the real schedule, the store and the dead letters, simulated."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.ports import (
    DeadLettersFailed,
    DeadLettersWritten,
    FileDamaged,
    FileSealed,
    FrameWritten,
    Inbox,
    RefusedFile,
    SealFailed,
    UploadState,
    WriteFailed,
)
from archiver.uploads import UploadSchedule
from tests.sim.world import SpoolFile, Violation, World, frame_size, values_in

OUTCOMES = {
    "put_transient": "transient",
    "put_lost_answer": "lost",
    "put_lies": "lies",
    "put_refused": "refused",
    "key_taken": "taken",
}
FAULTS_OF_A_PUT = tuple(OUTCOMES)

GROUP_MIN = 2
"""Few files wait at once here: a group of the real size would never come about."""


class Holder(Protocol):
    """Who may still count on a file of the spool."""

    def holds(self, file_id: int) -> bool:
        """Whether offsets of a partition of ours are held back by it."""
        ...

    def values(self) -> set[bytes]:
        """What the process has of records that it has not abandoned."""
        ...


@dataclass(slots=True)
class Stored:
    """An object: whose it is, what is in it, and whether the store has kept it as it was sent."""

    nonce: str
    values: list[bytes]
    whole: bool = True


class SimStore:
    """Objects by key: create-only, with lies that its adapter notices and answers that get lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, Stored] = {}
        self.stored: Counter[bytes] = Counter()
        self._keys_used: dict[tuple[str, str], str] = {}
        self._foreign = 0

    def durable(self, value: bytes) -> bool:
        """Whether it is archived, or a confirmed dead letter."""
        return self.stored[value] > 0 or value in self.world.dead

    def put_foreign(self, route: str, value: bytes) -> None:
        """Another member archives a record."""
        self._foreign += 1
        self._store(f"{route}/foreign-{self._foreign}", Stored("foreign", [value]))

    def _store(self, key: str, stored: Stored) -> None:
        self.objects[key] = stored
        if stored.whole:
            self.stored.update(stored.values)

    def put(self, sealed: SealedFile, file: SpoolFile | None, outcome: str) -> StoreError | None:
        """One attempt arrives, with an outcome drawn at its start. What `Store.put` would raise."""
        key = str(sealed.key)
        life, _, number = sealed.nonce.partition("-")
        if self._keys_used.setdefault((life, key), number) != number:
            raise Violation(f"key {key} is used for two files")
        if outcome == "transient" or self.world.now < self.world.outage_until:
            return TransientStoreError("server", "simulated", whole_store=self.world.rng.random() < 0.7)
        if outcome == "refused":
            return RefusedError("too_large", "simulated")
        if file is None:
            return DamagedFileError("the sealed file is gone")
        there = self.objects.get(key)
        if there is None and outcome == "taken":
            there = self.objects[key] = Stored("another", [])
        if there is not None and (there.nonce != sealed.nonce or not there.whole):
            return KeyTakenError(key)
        if there is None:
            values, whole = file.values(), outcome != "lies"
            self._store(key, Stored(sealed.nonce, values if whole else values[:-1], whole))
            self.world.note(f"stored {key}: {len(values)} records{'' if whole else ', damaged'}")
            if not whole:
                return TransientStoreError("integrity", "simulated", whole_store=False)
        return TransientStoreError("timeout", "answer lost") if outcome == "lost" else None


class SimWriters:
    """ports.Writers: two queues; a turn carries out the head of one."""

    def __init__(self, world: World, inbox: Inbox, store: SimStore, holder: Holder) -> None:
        self.world = world
        self._inbox = inbox
        self._store = store
        self._holder = holder
        self._life = world.lives
        self._stalled_until = 0.0
        self._queues: tuple[deque[Callable[[], None]], ...] = (deque(), deque())

    def turn(self) -> bool:
        """Carry out one command; False where there is none, or the disk stalls."""
        if not (self._queues[0] or self._queues[1]) or self.world.now < self._stalled_until:
            return False
        if self.world.chance("disk_stalls"):
            self._stalled_until = self.world.now + self.world.rng.uniform(0.5, 4.0)
        return self._carry_out()

    def _carry_out(self) -> bool:
        even, odd = self._queues
        if not (even or odd):
            return False
        queue = odd if not even or (odd and self.world.rng.random() < 0.5) else even
        queue.popleft()()
        return True

    def _queue(self, file_id: int, command: Callable[[], None]) -> None:
        self._queues[file_id % 2].append(command)

    def _file(self, file_id: int) -> SpoolFile:
        return self.world.spool.setdefault(file_id, SpoolFile(f"{self._life}-{file_id}"))

    def append(self, file_id: int, chunk: int, lines: list[bytes]) -> None:
        values = values_in(lines)
        if not values:
            raise Violation("an empty frame")
        self._queue(file_id, lambda: self._append(file_id, chunk, values))

    def _append(self, file_id: int, chunk: int, values: list[bytes]) -> None:
        world, file = self.world, self._file(file_id)
        if file.key is None:
            raise Violation(f"file {file_id} is written before it has a label")
        full = world.now < world.full_until or frame_size(values) > world.free_bytes()
        full = full or (not file.frames and world.inodes_used() >= world.inodes)
        no_space = full or world.chance("write_no_space")
        error = world.chance("write_error")
        if file.broken or no_space or error:
            file.broken = True
            self._inbox.put(WriteFailed(file_id, chunk, file.size, no_space or not error, "simulated"))
            return
        file.frames.append(list(values))
        file.size += frame_size(values)
        self._inbox.put(FrameWritten(file_id, chunk, file.size))

    def seal(self, file_id: int) -> None:
        self._queue(file_id, lambda: self._seal(file_id))

    def _seal(self, file_id: int) -> None:
        world, file = self.world, self.world.spool.get(file_id)
        if file is None:
            raise Violation(f"seal of file {file_id}, which is not in the spool")
        if world.chance("seal_fails"):
            self._inbox.put(SealFailed(file_id, world.rng.random() < 0.8, "simulated"))
            return
        if not file.frames:
            self._inbox.put(SealFailed(file_id, False, "there is no frame in it to seal"))
            return
        sealed = FileSealed(file_id, file.size, Checksums(crc32=0), f"uploads/{file_id}", file.nonce)
        self._inbox.put(sealed)
        if world.chance("file_vanishes"):
            world.note(f"file {file_id} vanishes")
            world.forgiven.update(file.values())
            world.owed.difference_update(file.values())
            del world.spool[file_id]

    def discard(self, file_id: int) -> None:
        self._queue(file_id, lambda: self._discard(file_id))

    def _discard(self, file_id: int) -> None:
        file = self.world.spool.pop(file_id, None)
        if file is not None:
            require_replaceable(self._holder, self._store, file, f"file {file_id} is discarded")

    def label(self, file_id: int, key: ObjectKey) -> None:
        def write() -> None:
            self._file(file_id).key = key

        self._queue(file_id, write)

    def close(self, timeout_secs: float) -> None:
        """What is queued is carried out first."""
        while self._carry_out():
            pass


def require_replaceable(holder: Holder, store: SimStore, file: SpoolFile, what: str) -> None:
    """A file goes although nobody holds its offsets: somebody must be able to read its records again."""
    for value in file.values():
        if store.durable(value):
            continue
        if store.world.mode != "held":
            raise Violation(f"{what}, and {value!r} is committed or answered: nobody brings it again")
        if value in store.world.owed and value not in holder.values():
            raise Violation(f"{what}, and the log of {value!r} is gone: nobody brings it again")


@dataclass(slots=True)
class _Attempt:
    """One upload under way: when the store has it, when its answer is here, and what it is.

    The files of a group arrive one by one; what goes wrong with one of them is not told.
    """

    arrives_at: float
    ends_at: float
    sealed: SealedFile
    outcome: str
    grouped: bool = False
    arrived: bool = False
    answer: StoreError | None = None


class SimUploader:
    """The real schedule, with attempts that arrive and end when the seed says so."""

    def __init__(self, world: World, inbox: Inbox, store: SimStore, holder: Holder) -> None:
        self.world = world
        self._store = store
        self._holder = holder
        counter = iter(range(1 << 20))
        self.schedule = UploadSchedule(
            inbox,
            world.emit,
            self._remove,
            lambda: f"{world.lives:04x}{next(counter):08x}",
            world.rng,
            in_flight_max=world.rng.randint(1, 4),
            group_min=GROUP_MIN,
        )
        self._group_max = world.rng.choice((0, 3, 8))
        self._running: list[_Attempt] = []
        self._idle_until = 0.0
        """Before that there is nothing to begin or to end."""

    def submit(self, sealed: SealedFile) -> None:
        self.schedule.add(sealed, self.world.now)
        self._idle_until = 0.0

    def abandon(self, file_id: int) -> None:
        self.schedule.abandon(file_id)

    def state(self) -> UploadState:
        return self.schedule.state()

    def close(self, timeout_secs: float) -> None:
        """Running attempts are left to themselves."""

    def _remove(self, sealed: SealedFile) -> None:
        """A file leaves the spool: its records must be durable, or nobody may count on them."""
        file = self.world.spool.pop(sealed.file_id, None)
        if file is None:
            return
        self._require_nobody_needs(sealed, file)
        if self.world.chance("delete_fails"):
            file.undeletable = True
            self.world.spool[sealed.file_id] = file
            raise OSError("simulated: the file cannot be deleted")

    def _require_nobody_needs(self, sealed: SealedFile, file: SpoolFile) -> None:
        if self._holder.holds(sealed.file_id):
            for value in file.values():
                if not self._store.durable(value):
                    raise Violation(f"sealed file {sealed.file_id} removed before it is durable")
        require_replaceable(self._holder, self._store, file, f"sealed file {sealed.file_id} is removed")

    def turn(self) -> bool:
        """Begin an attempt, or let one arrive or end; False where nothing is due."""
        if self.world.now < self._idle_until or not self.schedule._files:
            return False
        try:
            if self._turn():
                return True
        except OSError as error:
            raise Violation(f"an upload thread dies: {error}") from error
        now = self.world.now
        ends = (a.ends_at if a.arrived else a.arrives_at for a in self._running)
        self._idle_until = min([now + self.schedule.wait_secs(now), *ends])
        return False

    def _turn(self) -> bool:
        now = self.world.now
        if group := self.schedule.begin_group(now, self._group_max):
            self._begin(group, now, grouped=True)
            return True
        if (sealed := self.schedule.begin(now)) is not None:
            self._begin([sealed], now, grouped=False)
            return True
        due = [a for a in self._running if (a.ends_at if a.arrived else a.arrives_at) <= now]
        if not due:
            return False
        attempt = due[self.world.below(len(due))]
        if not attempt.arrived:
            self._arrive(attempt)
            return True
        self._running.remove(attempt)
        if attempt.grouped and attempt.answer is not None:
            self.schedule.put_back(attempt.sealed, now)
        else:
            self.schedule.end(attempt.sealed, attempt.answer, now)
        return True

    def _begin(self, files: list[SealedFile], now: float, *, grouped: bool) -> None:
        slow = self.world.rng.uniform(5, 60) if self.world.chance("put_hangs") else 0.01
        for sealed in files:
            arrives = now + slow * self.world.rng.random()
            self._running.append(_Attempt(arrives, now + slow, sealed, self._outcome(), grouped))

    def _arrive(self, attempt: _Attempt) -> None:
        attempt.arrived = True
        file = self.world.spool.get(attempt.sealed.file_id)
        attempt.answer = self._store.put(attempt.sealed, file, attempt.outcome)

    def die(self) -> None:
        """Requests that had left the process may still arrive."""
        for attempt in self._running:
            if not attempt.arrived and self.world.rng.random() < 0.5:
                self._arrive(attempt)

    def _outcome(self) -> str:
        struck = self.world.struck(FAULTS_OF_A_PUT)
        return OUTCOMES[next(iter(struck))] if struck else "stored"


class SimDeadLetters:
    """Fails now and then, retries, and has the records when it says so; or is off and never has them."""

    def __init__(self, world: World, inbox: Inbox, store: SimStore, holder: Holder, *, off: bool) -> None:
        self.world = world
        self._holder = holder
        self.off = off
        self._inbox = inbox
        self._store = store
        self._waiting: list[RefusedFile] = []

    def submit(self, refused: RefusedFile) -> None:
        if self.off:
            self._inbox.put(DeadLettersFailed(refused.sealed.file_id, "the DLQ is off", will_retry=False))
        else:
            self._waiting.append(refused)

    def abandon(self, file_id: int) -> None:
        self._waiting = [refused for refused in self._waiting if refused.sealed.file_id != file_id]
        file = self.world.spool.pop(file_id, None)
        if file is not None:
            require_replaceable(self._holder, self._store, file, f"refused file {file_id} is abandoned")

    def turn(self) -> bool:
        """Try one file; False where there is none."""
        if not self._waiting:
            return False
        refused = self.world.rng.choice(self._waiting)
        if self.world.chance("dead_letters_fail"):
            self._inbox.put(DeadLettersFailed(refused.sealed.file_id, "simulated", will_retry=True))
            return True
        self._waiting.remove(refused)
        file = self.world.spool.pop(refused.sealed.file_id, None)
        if file is None:
            self._inbox.put(FileDamaged(refused.sealed.file_id, "the refused file is gone"))
        else:
            self.world.dead.update(file.values())
            self._inbox.put(DeadLettersWritten(refused.sealed.file_id))
        return True

    def close(self, timeout_secs: float) -> None:
        """Nothing to wait for."""
