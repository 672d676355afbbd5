"""Makes sealed files durable: who is tried when, and the threads that try.

One attempt a turn: a file that fails gives its worker back and waits in a heap with backoff and
jitter, so that eight failing routes never stop a ninth ([D1], [S6]). When attempts fail one after
the other for reasons of the whole store, a breaker opens and one attempt at a time goes through,
the file that would have been due first.

Where the store takes groups, many small files that wait go in one attempt. It is a short cut and nothing
more: a file that does not get through in it is tried alone, as if there had been no group.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from archiver.domain.sealed import SealedFile
from archiver.errors import KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.events import FileArchived, StoreDown, StoreRecovered, UploadRetried
from archiver.ports import (
    Clock,
    Emit,
    FileDamaged,
    FileDurable,
    FileRefused,
    GroupStore,
    Inbox,
    Store,
    UploadState,
    WorkerDied,
    WriterIdTaken,
)

BACKOFF_SECS_MIN = 0.5
BACKOFF_SECS_MAX = 60.0
"""[S6]: exponential with full upper half jitter between these."""

PROBE_SECS_MAX = 5.0
"""While the breaker is open, the longest wait between two attempts of any file, due or not: so long at most
does a store that is back stand idle."""

BREAKER_FAILURES = 8
"""Failures in a row, none of them about one file alone, that open the breaker."""

BREAKER_FAILURES_SPREAD = 3
BREAKER_SECS = 5.0
"""So many suffice when they are spread over so long: one waiting file makes eight only in a minute, and
readiness must not call a store that denies it ready all that time [O2]."""

GROUP_FILES_MIN = 16
"""Fewer are as soon durable one by one, on several threads at once."""

GROUP_BYTES_MAX = 32 << 20
"""What a group's files have together at most, so that none waits long for the others."""


@dataclass(slots=True)
class _Waiting:
    sealed: SealedFile
    attempts: int = 0
    started_at: float = 0.0
    running: bool = False
    abandoned: bool = False
    grouped: bool = False
    alone: bool = False
    """It did not get through in a group."""


_Due = tuple[float, int, int]
"""When it is due, after how many attempts, and which file."""


class UploadSchedule:
    """Whose turn it is, and what an attempt's end means. Not thread-safe: the pool locks around it.

    `remove` deletes a file from the spool; `new_writer_id` gives a longer id after a collision; `group_min`
    is how many small files are worth a group.
    """

    def __init__(
        self,
        inbox: Inbox,
        emit: Emit,
        remove: Callable[[SealedFile], None],
        new_writer_id: Callable[[], str],
        rng: random.Random,
        in_flight_max: int,
        group_min: int = GROUP_FILES_MIN,
    ) -> None:
        self._inbox = inbox
        self._emit = emit
        self._remove = remove
        self._new_writer_id = new_writer_id
        self._rng = rng
        self._in_flight_max = in_flight_max
        self._group_min = group_min
        self._files: dict[int, _Waiting] = {}
        self._due: list[_Due] = []
        self._in_flight = 0  # attempts
        self._running = 0  # files
        self._grouped = 0  # files of the group under way
        self._failures = 0
        self._first_failure_at = 0.0
        self._down: str | None = None
        self._probe_at = 0.0

    def add(self, sealed: SealedFile, now: float) -> None:
        """A newly sealed file: due at once."""
        self._files[sealed.file_id] = _Waiting(sealed)
        heapq.heappush(self._due, (now, 0, sealed.file_id))

    def begin(self, now: float) -> SealedFile | None:
        """The file to try now, marked as running; None where nothing is due or allowed."""
        if not self._allowed() or (self._down is not None and now < self._probe_at):
            return None
        due = self._next_due(now)
        if due is None:
            return None
        self._in_flight += 1
        return self._start(self._files[due[2]], now)

    def begin_group(self, now: float, files_max: int) -> list[SealedFile]:
        """Files to try in one attempt, marked as running; none where too few small ones are due.

        Each is told to `end` or to `put_back`. One group at a time: it is one attempt in flight.
        """
        if files_max < self._group_min or len(self._due) < self._group_min:
            return []
        if self._down is not None or not self._allowed():
            return []
        taken: list[_Due] = []
        size = 0
        while len(taken) < files_max and (due := self._next_due(now)) is not None:
            waiting = self._files[due[2]]
            size += waiting.sealed.size
            if waiting.alone or size > GROUP_BYTES_MAX:
                heapq.heappush(self._due, due)
                break
            taken.append(due)
        if len(taken) < self._group_min:
            for due in taken:
                heapq.heappush(self._due, due)
            return []
        self._in_flight += 1
        for _, _, file_id in taken:
            self._files[file_id].grouped = True
        self._grouped = len(taken)
        return [self._start(self._files[file_id], now) for _, _, file_id in taken]

    def _allowed(self) -> bool:
        """Whether one more attempt may begin. What will be a group waits for the one that is under way."""
        if self._grouped and len(self._due) >= self._group_min:
            return False
        return self._in_flight < (self._in_flight_max if self._down is None else 1)

    def _next_due(self, now: float) -> _Due | None:
        """Take the next file off the heap; what was abandoned meanwhile is passed over."""
        while self._due and (self._due[0][0] <= now or self._down is not None):
            due = heapq.heappop(self._due)
            if due[2] in self._files:
                return due
        return None

    def _start(self, waiting: _Waiting, now: float) -> SealedFile:
        waiting.running, waiting.started_at = True, now
        waiting.attempts += 1
        self._running += 1
        return waiting.sealed

    def wait_secs(self, now: float) -> float:
        """How long until `begin` may have something, at most 60 s; finished attempts wake earlier."""
        if not self._due or not self._allowed():
            return BACKOFF_SECS_MAX
        due = self._due[0][0] if self._down is None else self._probe_at
        return min(max(due - now, 0.001), BACKOFF_SECS_MAX)

    def end(self, sealed: SealedFile, outcome: StoreError | None, now: float) -> None:
        """The attempt is over: None is success. Tells the pipeline or puts the file back."""
        waiting = self._stopped(sealed)
        match outcome:
            case None:
                self._succeeded(waiting, now)
            case TransientStoreError():
                self._failed(waiting, outcome, now)
            case KeyTakenError():
                self._taken(waiting, now)
            case RefusedError():
                self._store_answers(now)
                self._finish(waiting, FileRefused(sealed.file_id, outcome.reason, str(outcome)), keep=True)
            case _:
                self._finish(waiting, FileDamaged(sealed.file_id, str(outcome)), keep=True)

    def put_back(self, sealed: SealedFile, now: float) -> None:
        """It did not get through in its group: that says nothing, and it is tried alone at once."""
        waiting = self._stopped(sealed)
        waiting.attempts -= 1
        waiting.alone = True
        if waiting.abandoned:
            self._finish(waiting, None, keep=False)
        else:
            heapq.heappush(self._due, (now, waiting.attempts, sealed.file_id))

    def _stopped(self, sealed: SealedFile) -> _Waiting:
        """The file whose attempt has ended; a group's is over with its last file."""
        waiting = self._files[sealed.file_id]
        waiting.running = False
        self._running -= 1
        if waiting.grouped:
            waiting.grouped = False
            self._grouped -= 1
            if self._grouped:
                return waiting
        self._in_flight -= 1
        return waiting

    def abandon(self, file_id: int) -> None:
        """Nobody waits for it: gone now, or when its running attempt ends."""
        waiting = self._files.get(file_id)
        if waiting is None:
            return
        waiting.abandoned = True
        if not waiting.running:
            del self._files[file_id]
            self._tidy(waiting.sealed)

    def state(self) -> UploadState:
        """Counts for `/status`."""
        failing = sum(1 for waiting in self._files.values() if waiting.attempts > 1)
        return UploadState(len(self._files) - self._running, self._in_flight, failing, self._down)

    def _succeeded(self, waiting: _Waiting, now: float) -> None:
        sealed = waiting.sealed
        self._store_answers(now)
        self._emit(
            FileArchived(
                key=str(sealed.key),
                records=sealed.records,
                raw_bytes=sealed.raw_bytes,
                size=sealed.size,
                attempts=waiting.attempts,
                upload_secs=now - waiting.started_at,
            )
        )
        self._finish(waiting, FileDurable(sealed.file_id), keep=False)

    def _failed(self, waiting: _Waiting, error: TransientStoreError, now: float) -> None:
        wait = _backoff(waiting.attempts, BACKOFF_SECS_MAX, self._rng)
        if error.whole_store:
            self._store_fails(error, now)
        elif self._down is not None:  # says nothing about the store: ask again soon, but not at once
            self._probe_at = now + BACKOFF_SECS_MIN
        if waiting.abandoned:
            self._finish(waiting, None, keep=False)
            return
        heapq.heappush(self._due, (now + wait, waiting.attempts, waiting.sealed.file_id))
        self._emit(
            UploadRetried(
                kind=error.kind,
                key=str(waiting.sealed.key),
                attempt=waiting.attempts,
                wait_secs=round(wait, 3),
                detail=str(error),
            )
        )

    def _taken(self, waiting: _Waiting, now: float) -> None:
        """[K4]: another writer has our id. Go on under a longer one, for this file and later ones."""
        self._store_answers(now)
        self._inbox.put(WriterIdTaken())
        key = waiting.sealed.key.under(self._new_writer_id())
        waiting.sealed = replace(waiting.sealed, key=key)
        heapq.heappush(self._due, (now, waiting.attempts, waiting.sealed.file_id))

    def _finish(
        self, waiting: _Waiting, result: FileDurable | FileRefused | FileDamaged | None, *, keep: bool
    ) -> None:
        del self._files[waiting.sealed.file_id]
        if not keep or waiting.abandoned:
            self._tidy(waiting.sealed)
        if result is not None:
            self._inbox.put(result)

    def _tidy(self, sealed: SealedFile) -> None:
        """Nobody needs the file any more; where it cannot be deleted the next start clears it away."""
        with contextlib.suppress(OSError):
            self._remove(sealed)

    def _store_fails(self, error: TransientStoreError, now: float) -> None:
        if not self._failures:
            self._first_failure_at = now
        self._failures += 1
        self._probe_at = now + _backoff(self._failures, PROBE_SECS_MAX, self._rng)
        lasting = self._failures >= BREAKER_FAILURES_SPREAD and now - self._first_failure_at >= BREAKER_SECS
        if lasting or self._failures >= BREAKER_FAILURES:
            if self._down is None:
                self._emit(StoreDown(kind=error.kind, detail=str(error)))
            self._down = str(error)

    def _store_answers(self, now: float) -> None:
        """The store is there: close the breaker and let all that wait for it go at once."""
        if self._failures:
            self._emit(StoreRecovered(failures=self._failures, secs=round(now - self._first_failure_at, 3)))
        if self._down is not None:
            self._due = [(min(due, now), attempts, file_id) for due, attempts, file_id in self._due]
            heapq.heapify(self._due)
        self._failures, self._down = 0, None


def _backoff(attempts: int, secs_max: float, rng: random.Random) -> float:
    """Doubling from `BACKOFF_SECS_MIN`, the upper half drawn at random."""
    full = min(BACKOFF_SECS_MIN * 2.0 ** min(attempts - 1, 16), secs_max)
    return max(full * (0.5 + rng.random() / 2), BACKOFF_SECS_MIN)


class UploadPool:
    """Threads around the schedule: `ports.Uploader` for real stores."""

    def __init__(
        self,
        schedule: UploadSchedule,
        store: Store,
        describe: Callable[[SealedFile], Mapping[str, str]],
        clock: Clock,
        inbox: Inbox,
        parallelism: int,
    ) -> None:
        self._schedule = schedule
        self._store = store
        self._groups = store if isinstance(store, GroupStore) else None
        self._describe = describe
        self._clock = clock
        self._inbox = inbox
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"upload-{n}", daemon=True) for n in range(parallelism)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sealed: SealedFile) -> None:
        """Answer, once: FileDurable, FileRefused or FileDamaged."""
        with self._changed:
            now = self._clock.monotonic()
            self._schedule.add(sealed, now)
            if self._schedule.wait_secs(now) < BACKOFF_SECS_MAX:
                self._changed.notify()

    def abandon(self, file_id: int) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._schedule.abandon(file_id)

    def state(self) -> UploadState:
        """Counts for `/status`."""
        with self._changed:
            return self._schedule.state()

    def close(self, timeout_secs: float) -> None:
        """Start no more attempts; wait for running ones up to the timeout."""
        deadline = self._clock.monotonic() + timeout_secs
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _work(self) -> None:
        ended = "an unexpected error"
        try:
            while files := self._next():
                if len(files) == 1:
                    outcome = self._attempt(files[0])
                    with self._changed:
                        self._schedule.end(files[0], outcome, self._clock.monotonic())
                        self._changed.notify_all()
                else:
                    self._attempt_group(files)
            ended = ""
        finally:
            if ended:
                self._inbox.put(WorkerDied(threading.current_thread().name, ended))

    def _next(self) -> list[SealedFile]:
        """The next file to try, or the next group of them; none when closing."""
        with self._changed:
            while not self._closing:
                now = self._clock.monotonic()
                if self._groups and (group := self._schedule.begin_group(now, self._groups.group_max)):
                    return group
                if (sealed := self._schedule.begin(now)) is not None:
                    return [sealed]
                self._changed.wait(self._schedule.wait_secs(now))
        return []

    def _attempt(self, sealed: SealedFile) -> StoreError | None:
        try:
            self._store.put(sealed, str(sealed.key), self._describe(sealed))
        except StoreError as error:
            return error
        return None

    def _attempt_group(self, files: list[SealedFile]) -> None:
        assert self._groups is not None
        durable: list[bool] = []
        try:
            durable = self._groups.put_group([(sealed, str(sealed.key)) for sealed in files])
        finally:
            if not durable:  # an error nobody foresaw ends this thread: the others put one by one
                self._groups = None
                durable = [False] * len(files)
            self._end_group(files, durable)

    def _end_group(self, files: list[SealedFile], durable: list[bool]) -> None:
        for sealed, is_durable in zip(files, durable, strict=True):
            with self._changed:  # let go of in between: the loop must not wait for a whole group
                now = self._clock.monotonic()
                if is_durable:
                    self._schedule.end(sealed, None, now)
                else:
                    self._schedule.put_back(sealed, now)
        with self._changed:
            self._changed.notify_all()
