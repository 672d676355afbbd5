"""What is told of pushes that are not taken: one event each, and when a full queue takes them again."""

from __future__ import annotations

import time

from archiver.events import PushesTaken, PushRefusal, PushRefused
from archiver.ports import Emit
from archiver.sources.pushes import PushQueue


class Refusals:
    """Called from the listener's event loop alone."""

    def __init__(self, queue: PushQueue, emit: Emit) -> None:
        self._queue = queue
        self._emit = emit
        self._refused = 0
        self._since = 0.0

    def refused(self, reason: PushRefusal, detail: str) -> None:
        """A sender was told so."""
        if reason == "full":
            self._since = self._since if self._refused else time.monotonic()
            self._refused += 1
        self._emit(PushRefused(reason, detail))

    def taken(self) -> None:
        """A push was queued, and so the queue is not full any more, unless it was a small one."""
        if self._refused and not self._queue.at_bound():
            refused, self._refused = self._refused, 0
            self._emit(PushesTaken("full", refused, round(time.monotonic() - self._since, 3)))
