"""One event in, one log line and its metrics out ([O4])."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TextIO

from archiver import __version__
from archiver.events import (
    BrokerRecovered,
    BrokerTrouble,
    CommitDone,
    CommitFailed,
    CommitRecovered,
    DeadLettered,
    Event,
    FileArchived,
    FileRefusedEvent,
    Paused,
    PushesTaken,
    PushRefused,
    RecordsTaken,
    Resumed,
    RetentionNear,
    SpoolWriteFailed,
    StoreDown,
    StoreRecovered,
    TopicMissing,
    TopicsChanged,
    UploadRetried,
)
from archiver.status import Trouble
from archiver.telemetry.log import Format, LogOutput
from archiver.telemetry.metrics import Metrics
from archiver.telemetry.ratelimit import RateLimiter, Recovery, Scope
from archiver.telemetry.redact import Redactor
from archiver.telemetry.state import StatusHolder
from archiver.telemetry.troubles import Troubles

LIMITED: dict[type[Event], tuple[str, ...]] = {
    BrokerTrouble: ("code",),
    CommitFailed: (),
    DeadLettered: ("reason", "outcome"),
    FileRefusedEvent: ("reason",),
    Paused: ("reason",),
    PushRefused: ("reason",),
    RetentionNear: ("topic", "partition"),
    SpoolWriteFailed: (),
    StoreDown: (),
    TopicMissing: ("topic",),
    UploadRetried: ("kind",),
}
"""Failures that repeat: logged at once, then at most every 30 s for the same values of these fields.
What is not here is logged each time; offsets that were skipped above all ([D9])."""

RECOVERS: dict[type[Event], tuple[tuple[type[Event], tuple[str, ...] | None], ...]] = {
    BrokerRecovered: ((BrokerTrouble, None),),
    CommitDone: ((CommitFailed, None),),
    PushesTaken: ((PushRefused, ("reason",)),),
    Resumed: ((Paused, ("reason",)),),
    StoreRecovered: ((StoreDown, None), (UploadRetried, None)),
}
"""Which event ends which failures: all of them, or those with the same values of these fields."""

_PER_PARTITION = frozenset({"topic", "partition"})


@dataclass(frozen=True, slots=True)
class _Line:
    event: Event
    suppressed: int = 0


class Telemetry:
    """Logs, metrics and the last troubles of one process. `emit` is safe from any thread.

    `secrets` are the strings that must never be seen, as they were configured. `status` is where
    the loop publishes its snapshots and the HTTP server finds them; `registry` what it exposes.
    """

    def __init__(
        self,
        *,
        level: str = "info",
        log_format: Format = "auto",
        secrets: Iterable[str] = (),
        version: str = __version__,
        stream: TextIO | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        # one that the same thread may take again: a destructor or signal handler may emit in between
        self._lock = threading.RLock()
        self._limiter = RateLimiter()
        self.redactor = Redactor(secrets)
        self._troubles = Troubles(self.redactor.text)
        self._last_failed_key: dict[Scope, str] = {}
        self._log = LogOutput(
            self.redactor, level=level, log_format=log_format, stream=stream, monotonic=monotonic
        )
        self.status = StatusHolder(
            monotonic=monotonic,
            scrub=self.redactor.text,
            troubles=self.troubles,
            published=self._tell_overdue,
        )
        self._metrics = Metrics(self.status, version=version, log_lines_dropped=lambda: self._log.dropped)
        self.registry = self._metrics.registry

    def emit(self, event: Event) -> None:
        """Count it and log it. Cheap; never raises."""
        if isinstance(event, RecordsTaken):
            self._metrics.taken(event)
            return
        self._metrics.record(event)
        with self._lock:
            lines = self._lines(event)
        for line in lines:
            self._write(line)

    def troubles(self) -> tuple[Trouble, ...]:
        """The last errors, one of each kind, newest first."""
        with self._lock:
            return self._troubles.newest_first()

    def flush(self, timeout_secs: float = 2.0) -> bool:
        """Wait until every line so far has been written."""
        return self._log.flush(timeout_secs)

    def close(self, timeout_secs: float = 2.0) -> None:
        """Tell what was left out, write what is queued, give Python's logging back as it was."""
        with self._lock:
            left_out = self._limiter.left_out()
        for event, suppressed in left_out:
            if isinstance(event, Event):
                self._write(_Line(event, suppressed))
        self._log.close(timeout_secs)

    def _lines(self, event: Event) -> list[_Line]:
        now = self._monotonic()
        recovery = self._recover(event, now)
        if recovery is not None and isinstance(event, CommitDone):
            again = CommitRecovered(failures=recovery.failures, secs=round(recovery.secs, 3))
            return [_Line(event), *([_Line(again)] if recovery.announced else [])]
        if recovery is not None and not recovery.announced:
            return []
        if event.level in ("warning", "error"):
            scope = scope_of(event)
            self._troubles.note(scope_of(event, but=_PER_PARTITION), event, self._wall())
            if isinstance(event, UploadRetried):
                self._last_failed_key[scope] = event.key
            if type(event) in LIMITED:
                suppressed = self._limiter.occurred(scope, now, event)
                return [] if suppressed is None else [_Line(event, suppressed)]
        return [_Line(event)]

    def _recover(self, event: Event, now: float) -> Recovery | None:
        """Close what `event` ends; what was open of it, taken together."""
        ends: list[tuple[str, Scope | None]] = [
            (failed.__name__, None if names is None else tuple(getattr(event, name) for name in names))
            for failed, names in RECOVERS.get(type(event), ())
        ]
        if isinstance(event, TopicsChanged):
            ends = [(TopicMissing.__name__, (topic,)) for topic in event.added]
        if isinstance(event, FileArchived) and event.attempts > 1:
            # the one whose failure was the last to be seen has made it: that kind of failure has ended
            healed = [scope for scope, key in self._last_failed_key.items() if key == event.key]
            ends = [(scope[0], scope[1:]) for scope in healed]
        found = []
        for name, values in ends:
            self._troubles.over(name, None if name == TopicMissing.__name__ else values)
            found.append(self._limiter.recovered(name, values, now))
        recoveries = [recovery for recovery in found if recovery is not None]
        if not recoveries or isinstance(event, TopicsChanged | FileArchived):
            return None
        return Recovery(
            failures=sum(recovery.failures for recovery in recoveries),
            secs=max(recovery.secs for recovery in recoveries),
            announced=any(recovery.announced for recovery in recoveries),
        )

    def _tell_overdue(self) -> None:
        with self._lock:
            overdue = self._limiter.overdue(self._monotonic())
        for event, suppressed in overdue:
            if isinstance(event, Event):
                self._write(_Line(event, suppressed))

    def _write(self, line: _Line) -> None:
        event = line.event
        if not event.message or not self._log.wants(event.level):
            return
        values: dict[str, Any] = {field.name: getattr(event, field.name) for field in fields(event)}
        if not values.get("way_out", True):
            del values["way_out"]
        if line.suppressed:
            values["suppressed"] = line.suppressed
        self._log.write(
            event.level, event.message, {"event_name": event_name(type(event).__name__), **values}
        )


def scope_of(event: Event, but: frozenset[str] = frozenset()) -> Scope:
    """What makes two failures the same one."""
    kind = type(event)
    return (kind.__name__, *(getattr(event, name) for name in LIMITED.get(kind, ()) if name not in but))


@cache
def event_name(kind: str) -> str:
    """`UploadRetried` -> `upload_retried`: what log lines are searched by."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.removesuffix("Event")).lower()
