"""The thread that takes refused files to where they may be forgotten, for as long as it takes [Q1]."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from dataclasses import dataclass

from archiver.deadletters.letters import Delivery, GivenUpError
from archiver.deadletters.refused import Remove
from archiver.errors import DamagedFileError, DeadLetterError
from archiver.ports import (
    DeadLettersFailed,
    DeadLettersWritten,
    FileDamaged,
    Inbox,
    RefusedFile,
    WorkerDied,
)

BACKOFF_SECS_MIN = 1.0
BACKOFF_SECS_MAX = 60.0


@dataclass(slots=True)
class _Pending:
    refused: RefusedFile
    attempts: int = 0
    abandoned: bool = False


class DeadLetterWorker:
    """`ports.DeadLetters` on one thread; a file that fails waits its turn while others are tried.

    The file is deleted after its records are confirmed and before that is told, so that it is never
    taken for one that still waits. A kill in between writes the same dead letters once more.
    """

    def __init__(
        self,
        delivery: Delivery,
        inbox: Inbox,
        remove: Remove,
        *,
        backoff_secs: tuple[float, float] = (BACKOFF_SECS_MIN, BACKOFF_SECS_MAX),
    ) -> None:
        self._delivery = delivery
        self._inbox = inbox
        self._remove = remove
        self._backoff_secs = backoff_secs
        self._pending: dict[int, _Pending] = {}
        self._due: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="dead-letters", daemon=True)
        self._thread.start()

    def submit(self, refused: RefusedFile) -> None:
        with self._changed:
            self._pending[refused.sealed.file_id] = _Pending(refused)
            heapq.heappush(self._due, (time.monotonic(), refused.sealed.file_id))
            self._changed.notify()

    def abandon(self, file_id: int) -> None:
        with self._changed:
            pending = self._pending.get(file_id)
            if pending is not None:
                pending.abandoned = True
                heapq.heappush(self._due, (time.monotonic(), file_id))
                self._changed.notify()

    def close(self, timeout_secs: float) -> None:
        """Give up the attempt under way; its file is read or held again after the restart."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_secs)

    def _work(self) -> None:
        ended = "an unexpected error"
        try:
            while (pending := self._next()) is not None:
                self._try(pending)
            ended = ""
        finally:
            if ended:
                self._inbox.put(WorkerDied(self._thread.name, ended))

    def _next(self) -> _Pending | None:
        """The file whose turn it is, or None when closing."""
        with self._changed:
            while not self._closing:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    pending = self._pending.get(heapq.heappop(self._due)[1])
                    if pending is not None:
                        return pending
                    continue
                self._changed.wait(wait)
        return None

    def _try(self, pending: _Pending) -> None:
        file_id = pending.refused.sealed.file_id
        pending.attempts += 1
        try:
            if not pending.abandoned:
                self._delivery.deliver(
                    pending.refused, pending.attempts, lambda: self._closing or pending.abandoned
                )
            self._finish(pending)
        except GivenUpError:
            if pending.abandoned:
                self._finish(pending)
        except DamagedFileError as error:
            self._forget(file_id)
            self._inbox.put(FileDamaged(file_id, str(error)))
        except DeadLetterError as error:
            self._inbox.put(DeadLettersFailed(file_id, str(error), will_retry=True))
            self._try_later(pending)

    def _finish(self, pending: _Pending) -> None:
        sealed = pending.refused.sealed
        with contextlib.suppress(OSError):  # its records are safe, and the next start clears what stays
            self._remove(sealed)
        self._forget(sealed.file_id)
        if not pending.abandoned:
            self._inbox.put(DeadLettersWritten(sealed.file_id))

    def _forget(self, file_id: int) -> None:
        with self._changed:
            self._pending.pop(file_id, None)

    def _try_later(self, pending: _Pending) -> None:
        least, most = self._backoff_secs
        wait = min(least * 2.0 ** min(pending.attempts - 1, 16), most)
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + wait, pending.refused.sealed.file_id))
