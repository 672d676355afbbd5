"""One line at once, then at most one per interval: a failure that repeats must not fill the disk.

A scope is a failure of one kind (`("UploadRetried", "throttled")`). Its first occurrence is logged,
later ones are counted until the interval is over; the recovery tells the whole count. The interval
runs on through a recovery, so that something that flaps stays quiet too; what fell silent that way
and is still going on when the interval ends is logged late rather than never.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Scope = tuple[Any, ...]
"""The failure's name, then the values that tell one failure from another."""

INTERVAL_SECS = 30.0
SCOPES_MAX = 2000
"""Bounds the table: values in a scope come from brokers and stores."""


@dataclass(slots=True)
class _State:
    logged_at: float
    began_at: float
    failures: int = 0
    suppressed: int = 0
    open: bool = True
    announced: bool = True
    latest: object = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """How often it failed and for how long. `announced` is false where no line told of the failure."""

    failures: int
    secs: float
    announced: bool


class RateLimiter:
    """Not safe for several threads at once: the caller holds a lock. Times are monotonic seconds."""

    def __init__(self, interval_secs: float = INTERVAL_SECS, scopes_max: int = SCOPES_MAX) -> None:
        self._interval_secs = interval_secs
        self._scopes_max = scopes_max
        self._states: OrderedDict[Scope, _State] = OrderedDict()
        self._open: dict[str, set[Scope]] = {}

    def occurred(self, scope: Scope, now: float, latest: object = None) -> int | None:
        """How many were left out before this one, which is to be logged; None: leave it out too."""
        state = self._states.get(scope)
        if state is None:
            state = self._states[scope] = _State(logged_at=now - self._interval_secs, began_at=now)
            self._forget_oldest()
        self._states.move_to_end(scope)
        if not state.open:
            state.open, state.announced, state.began_at, state.failures = True, False, now, 0
        self._open.setdefault(scope[0], set()).add(scope)
        state.failures += 1
        state.latest = latest
        if now - state.logged_at < self._interval_secs:
            state.suppressed += 1
            return None
        return self._log(state, now)

    def recovered(self, name: str, values: Scope | None, now: float) -> Recovery | None:
        """End the open failures of that name (all, or the one with `values`); None: there are none."""
        open_scopes = self._open.get(name, set())
        ending = list(open_scopes) if values is None else [s for s in ((name, *values),) if s in open_scopes]
        if not ending:
            return None
        states = [self._states[scope] for scope in ending]
        open_scopes.difference_update(ending)
        for state in states:
            state.open = False
            if state.announced:
                state.suppressed = 0  # the recovery tells them
        return Recovery(
            failures=sum(state.failures for state in states),
            secs=now - min(state.began_at for state in states),
            announced=any(state.announced for state in states),
        )

    def overdue(self, now: float) -> list[tuple[object, int]]:
        """Failures that go on, of which no line has told: the latest of each, and the count left out."""
        return [
            (state.latest, self._log(state, now) - 1)
            for scopes in self._open.values()
            for state in map(self._states.__getitem__, scopes)
            if not state.announced and now - state.logged_at >= self._interval_secs
        ]

    def left_out(self) -> list[tuple[object, int]]:
        """The latest of every failure that has occurrences no line has told of; for the end."""
        told = [(state.latest, state.suppressed) for state in self._states.values() if state.suppressed]
        for state in self._states.values():
            state.suppressed = 0
        return told

    def _log(self, state: _State, now: float) -> int:
        suppressed, state.suppressed = state.suppressed, 0
        state.logged_at, state.announced = now, True
        return suppressed

    def _forget_oldest(self) -> None:
        while len(self._states) > self._scopes_max:
            scope, _ = self._states.popitem(last=False)
            self._open.get(scope[0], set()).discard(scope)
