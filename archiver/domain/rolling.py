"""When a buffer becomes a frame and when a file closes ([R1], [R3]). Pure: ages and sizes come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RollReason = Literal["size", "age", "space", "revoked", "shutdown", "request"]
"""Why a file closed: the closed list of [R2]."""


@dataclass(frozen=True, slots=True)
class RollPolicy:
    """`roll_size_bytes` counts compressed bytes; the interval counts from the file's first record."""

    roll_size_bytes: int
    roll_interval_secs: float

    def due(self, size: int, age_secs: float) -> RollReason | None:
        """The reason to close a file of this size and age now, if there is one."""
        if size >= self.roll_size_bytes:
            return "size"
        if age_secs >= self.roll_interval_secs:
            return "age"
        return None


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """When a route's buffered records become one frame: at the first bound reached. The age counts from the
    buffer's first record."""

    flush_bytes: int
    flush_records: int
    flush_age_secs: float
