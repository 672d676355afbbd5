"""Bounds of memory and disk, the pauses that keep them, and what makes room again ([B1], [B2])."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from archiver.domain.archive_file import FILE_BYTES, HOLD_BYTES
from archiver.events import Paused, PauseReason, Resumed
from archiver.ports import Clock, Emit, Source

if TYPE_CHECKING:
    from archiver.pipeline import Archiver

WAIT_SECS = 0.05
"""Longest wait for the writers before memory is looked at again."""

_FLUSHED_FROM, _FLUSHED_TO = 0.85, 0.75
"""Shares of the memory's bound: where the largest buffers are flushed, and down to what."""

_BUFFERS_MIN = 0.1
"""What the buffers may take in any case: with less, very many files would get very small frames."""

_BUFFERS_KEPT = 0.05
"""What is left in them even so: the small ones, which would make the smallest frames of all."""

_RESUMED_BELOW = 0.9
"""A pause ends below this share: above what may stay in the buffers, or it would never end."""


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


class Pressure:
    """Keeps the loop below its bounds: flushes and closes what helps, waits a little, and pauses."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver
        self._parts = archiver.parts
        self._next_disk_check = 0.0

    def hold_memory(self) -> None:
        """[B1]: near the bound flush the largest buffers; at it let the writers catch up before taking more.

        A little at a time: the largest buffers make the largest frames, and the writers are never idle nor
        waited for as long as they keep up.
        """
        archiver = self._archiver
        bound = archiver.policy.bounds.memory_bytes_max
        files = self._files_memory()
        # What the files themselves take cannot be flushed: the buffers get the rest, or a little at least.
        if archiver.memory - archiver.writing >= max(bound * _FLUSHED_FROM - files, bound * _BUFFERS_MIN):
            self._flush_largest(int(max(bound * _FLUSHED_TO - files, bound * _BUFFERS_KEPT)))
        if archiver.memory + files < bound:
            if archiver.pauses.active("memory") and archiver.memory + files < bound * _RESUMED_BELOW:
                archiver.pauses.end("memory")
            return
        self._roll_oldest(bound * 3 // 4)
        deadline = self._parts.clock.monotonic() + 1.0
        while self._held_memory() >= bound:
            archiver.settle(self._parts.inbox.wait(WAIT_SECS))
            archiver.failures.retry()
            if self._parts.clock.monotonic() >= deadline:
                archiver.pauses.begin("memory", self._held_memory(), bound)
                return

    def hold_disk(self, now: float) -> None:
        """[B2]: at a disk bound seal the largest open files, so that uploads can free space, and pause."""
        archiver = self._archiver
        bounds = archiver.policy.bounds
        if now < self._next_disk_check and archiver.spool_bytes < bounds.spool_bytes_max:
            return
        self._next_disk_check = now + 1.0
        archiver.free_bytes = self._parts.disk.free_bytes()
        for reason, held, bound, over, under in bounds.disk(archiver.spool_bytes, archiver.free_bytes):
            if over:
                archiver.pauses.begin(reason, held, bound)
            elif under:
                archiver.pauses.end(reason)
            if archiver.pauses.active(reason):
                self._roll_largest(0 if reason == "disk" else bounds.spool_bytes_max // 2)

    def _held_memory(self) -> int:
        return self._archiver.memory + self._files_memory()

    def _files_memory(self) -> int:
        """What the files take beside the records: it grows with the partitions that a route's come from."""
        return FILE_BYTES * len(self._archiver.files) + HOLD_BYTES * self._parts.ledger.holds

    def _flush_largest(self, target: int) -> None:
        """Hand buffers to the writers, largest first, until `target` bytes are left unflushed."""
        archiver = self._archiver
        if archiver.failures.waiting:  # nothing would be flushed, turn after turn
            return
        unflushed = archiver.memory - archiver.writing
        for file in sorted(archiver.dirty.values(), key=attrgetter("buffered_bytes"), reverse=True):
            if unflushed <= target:
                return
            unflushed -= file.memory
            archiver.flush(file)

    def _roll_oldest(self, target: int) -> None:
        """Where open files themselves are what fills the memory, close the oldest until they fit.

        Those that are closed already count no more: they go as soon as the store takes them.
        """
        archiver = self._archiver
        costs = [(file, FILE_BYTES + HOLD_BYTES * len(file.held)) for file in archiver.opened.values()]
        excess = sum(cost for _, cost in costs) - target
        for file, cost in costs:
            if excess <= 0:
                return
            excess -= cost
            archiver.roll(file, "space")

    def _roll_largest(self, target: int) -> None:
        """Seal open files, largest and then oldest first, until `target` bytes are left in open ones.

        Asked again as long as the pause lasts: what is left open frees no space.
        """
        archiver = self._archiver
        still_open = sum(file.size for file in archiver.opened.values())
        if still_open <= target:
            return
        for file in sorted(archiver.opened.values(), key=lambda f: (-f.size, f.opened_at)):
            if file.size == 0 or still_open <= target:
                return
            still_open -= file.size
            archiver.roll(file, "space")
