"""A clock in a test's hands."""

from __future__ import annotations


class HandClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now
