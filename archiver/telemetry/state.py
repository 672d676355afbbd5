"""The latest snapshot of the loop, handed from its thread to the HTTP thread and the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from archiver.status import Status, Trouble


class StatusSource(Protocol):
    """What the HTTP side reads. Every call is cheap and safe from any thread."""

    def latest(self) -> Status | None:
        """The newest snapshot; None before the first."""
        ...

    def turn_age_secs(self) -> float:
        """Seconds since the loop last turned (or since the start, before its first turn)."""
        ...

    def troubles(self) -> tuple[Trouble, ...]:
        """The newest errors, one of each kind, newest first."""
        ...


class StatusHolder:
    """Plain attributes, written by the loop alone: an assignment is atomic, so nobody needs a lock."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        scrub: Callable[[str], str] = str,
        troubles: Callable[[], tuple[Trouble, ...]] = tuple,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        self._monotonic = monotonic
        self._scrub = scrub
        self._troubles = troubles
        self._published = published
        self._status: Status | None = None
        self._turned_at = monotonic()

    def publish(self, status: Status) -> None:
        """A new snapshot, about once a second; counts as a turn of the loop."""
        if status.not_ready:
            status = replace(status, not_ready=tuple(map(self._scrub, status.not_ready)))
        self._status = status
        self._turned_at = max(self._turned_at, status.turned_at_monotonic)
        self._published()

    def turned(self, now: float) -> None:
        """The loop is alive at monotonic `now`: called each turn, and while it waits in a drain."""
        self._turned_at = now

    def latest(self) -> Status | None:
        return self._status

    def turn_age_secs(self) -> float:
        return max(0.0, self._monotonic() - self._turned_at)

    def troubles(self) -> tuple[Trouble, ...]:
        return self._troubles()
