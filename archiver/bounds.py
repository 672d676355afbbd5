"""Bounds of memory and disk, and the pauses that keep them ([B1], [B2])."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from archiver.events import Paused, PauseReason, Resumed
from archiver.ports import Clock, Emit, Source


@dataclass(frozen=True, slots=True)
class Bounds:
    """In bytes. `free_bytes_min` is of the spool's file system."""

    memory_bytes_max: int
    spool_bytes_max: int
    free_bytes_min: int

    def disk(self, spool: int, free: int) -> Iterator[tuple[PauseReason, int, int, bool, bool]]:
        """For each disk bound: reason, held, bound, whether it is reached, whether it is left behind.

        Between the two nothing changes, so that consumption does not flap: below 80 % of the spool
        bound, or with a quarter more free than the minimum.
        """
        yield (
            "spool",
            spool,
            self.spool_bytes_max,
            spool >= self.spool_bytes_max,
            spool < self.spool_bytes_max * 0.8,
        )
        low, enough = free < self.free_bytes_min, free >= self.free_bytes_min * 1.25
        yield ("disk", free, self.free_bytes_min, low, enough)


class Pauses:
    """Why consumption stands still, if it does: any number of reasons, one paused source."""

    def __init__(self, source: Source, emit: Emit, clock: Clock) -> None:
        self._source = source
        self._emit = emit
        self._clock = clock
        self._since: dict[PauseReason, float] = {}

    def begin(self, reason: PauseReason, held: int, bound: int) -> None:
        """Pause for a reason; again is nothing new."""
        if reason in self._since:
            return
        self._since[reason] = self._clock.monotonic()
        self._source.pause()
        self._emit(Paused(reason=reason, held=held, bound=bound))

    def end(self, reason: PauseReason) -> None:
        """The reason is gone; the last one to go resumes the source."""
        since = self._since.pop(reason, None)
        if since is None:
            return
        if not self._since:
            self._source.resume()
        self._emit(Resumed(reason=reason, secs=round(self._clock.monotonic() - since, 3)))

    def active(self, reason: PauseReason) -> bool:
        """Whether this reason holds now."""
        return reason in self._since

    def secs(self) -> dict[str, float]:
        """Seconds so far, by reason."""
        now = self._clock.monotonic()
        return {reason: now - since for reason, since in self._since.items()}
