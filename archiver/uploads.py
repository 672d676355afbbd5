"""Makes sealed files durable: who is tried when, and the threads that try.

One attempt a turn: a file that fails gives its worker back and waits in a heap with backoff and
jitter, so that eight failing routes never stop a ninth ([D1], [S6]). When attempts fail one after
the other for reasons of the whole store, a breaker opens and one attempt at a time goes through,
the file that would have been due first.
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


@dataclass(slots=True)
class _Waiting:
    sealed: SealedFile
    attempts: int = 0
    started_at: float = 0.0
    running: bool = False
    abandoned: bool = False


class UploadSchedule:
    """Whose turn it is, and what an attempt's end means. Not thread-safe: the pool locks around it.

    `remove` deletes a file from the spool; `new_writer_id` gives a longer id after a collision.
    """

    def __init__(
        self,
        inbox: Inbox,
        emit: Emit,
        remove: Callable[[SealedFile], None],
        new_writer_id: Callable[[], str],
        rng: random.Random,
        in_flight_max: int,
    ) -> None:
        self._inbox = inbox
        self._emit = emit
        self._remove = remove
        self._new_writer_id = new_writer_id
        self._rng = rng
        self._in_flight_max = in_flight_max
        self._files: dict[int, _Waiting] = {}
        self._due: list[tuple[float, int, int]] = []  # due time, attempts, file id
        self._in_flight = 0
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
        if self._in_flight >= self._in_flight_max:
            return None
        if self._down is not None and (self._in_flight or now < self._probe_at):
            return None
        while self._due and (self._due[0][0] <= now or self._down is not None):
            _, _, file_id = heapq.heappop(self._due)
            waiting = self._files.get(file_id)
            if waiting is not None:
                waiting.running, waiting.started_at = True, now
                waiting.attempts += 1
                self._in_flight += 1
                return waiting.sealed
        return None

    def wait_secs(self, now: float) -> float:
        """How long until `begin` may have something, at most 60 s; finished attempts wake earlier."""
        if not self._due or self._in_flight >= self._in_flight_max:
            return BACKOFF_SECS_MAX
        due = self._due[0][0] if self._down is None else self._probe_at
        return min(max(due - now, 0.001), BACKOFF_SECS_MAX)

    def end(self, sealed: SealedFile, outcome: StoreError | None, now: float) -> None:
        """The attempt is over: None is success. Tells the pipeline or puts the file back."""
        waiting = self._files[sealed.file_id]
        waiting.running = False
        self._in_flight -= 1
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
        return UploadState(len(self._files) - self._in_flight, self._in_flight, failing, self._down)

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
            self._schedule.add(sealed, self._clock.monotonic())
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
            while (sealed := self._next()) is not None:
                outcome = self._attempt(sealed)
                with self._changed:
                    self._schedule.end(sealed, outcome, self._clock.monotonic())
                    self._changed.notify_all()
            ended = ""
        finally:
            if ended:
                self._inbox.put(WorkerDied(threading.current_thread().name, ended))

    def _next(self) -> SealedFile | None:
        """The next file to try, or None when closing."""
        with self._changed:
            while not self._closing:
                now = self._clock.monotonic()
                sealed = self._schedule.begin(now)
                if sealed is not None:
                    return sealed
                self._changed.wait(self._schedule.wait_secs(now))
        return None

    def _attempt(self, sealed: SealedFile) -> StoreError | None:
        try:
            self._store.put(sealed, str(sealed.key), self._describe(sealed))
        except StoreError as error:
            return error
        return None
