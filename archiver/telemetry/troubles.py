"""The last errors, one of each kind, with their way out: for `/status` and the page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace

from archiver.events import (
    CommitFailed,
    CreateOnlyMissing,
    DeadLettered,
    Event,
    Fatal,
    FileRefusedEvent,
    NoCommittedOffset,
    OffsetsSkipped,
    Paused,
    PushRefused,
    RetentionNear,
    SpoolWriteFailed,
    StoreDown,
    TopicMissing,
)
from archiver.status import Trouble
from archiver.telemetry.ratelimit import Scope

TROUBLES_MAX = 20

WAY_OUT: dict[type[Event], str] = {
    CommitFailed: "look at the brokers and the group's coordinator; it catches up by itself",
    CreateOnlyMissing: "keep replicas from sharing a writer id, or use a store that honours If-None-Match",
    DeadLettered: "read the dead letters: each carries the reason; fix it and produce the records again",
    Fatal: "the restart reads again from the committed offset; if it comes back, look at the reason",
    FileRefusedEvent: "fix the key or the object's size (path_template, roll_size_bytes), or turn on the DLQ",
    NoCommittedOffset: "expected for a new group; otherwise see whether the group's offsets were deleted",
    OffsetsSkipped: "raise the topic's retention, or give the archiver more to work with",
    RetentionNear: "raise the topic's retention until the archiver has caught up",
    SpoolWriteFailed: "look at the spool's disk: space, quota, mount, health",
    StoreDown: "look at the store, the network to it and its credentials; uploads start again by themselves",
    TopicMissing: "create the topic, or take it out of kafka.topics",
}

WAY_OUT_OF_PAUSE = {
    "memory": "records come in faster than they are compressed: raise buffer.max_bytes or add a replica",
    "spool": "uploads are slower than input: look at the store, or raise buffer.max_spool_bytes",
    "disk": "free space on the spool's disk; below buffer.min_free_disk_bytes nothing is taken",
    "no_space": "the spool's disk is full, or no file handle is left: free some; it goes on by itself",
}

WAY_OUT_OF_REFUSAL = {
    "full": "pushes come faster than they are archived: raise grpc.max_queue_bytes, add a replica or cores",
    "late": "very many pushes arrive at once, or their senders stall: look at the network, or add a replica",
    "stopping": "none is needed: senders send the push again, to the next process",
    "too_large": "have the sender send smaller pushes, or raise grpc.max_queue_bytes",
    "format": "have the sender send JSON lines: other formats cannot be archived as lines",
    "malformed": "see who sends it: these bytes are no message of the service",
    "incomplete": "have the sender send smaller pushes, or raise grpc.max_message_bytes",
}


class Troubles:
    """Bounded; not safe for several threads at once: the caller holds a lock."""

    def __init__(self, scrub: Callable[[str], str], troubles_max: int = TROUBLES_MAX) -> None:
        self._scrub = scrub
        self._troubles_max = troubles_max
        self._by_scope: OrderedDict[Scope, Trouble] = OrderedDict()

    def note(self, scope: Scope, event: Event, at_unix: float) -> None:
        """`event` has happened, the newest of its `scope`."""
        before = self._by_scope.get(scope)
        self._by_scope[scope] = Trouble(
            at_unix=at_unix,
            message=event.message,
            detail=self._scrub(_detail(event)),
            way_out=self._scrub(_way_out(event)),
            count=before.count + 1 if before is not None and not before.over else 1,
            level=event.level,
        )
        self._by_scope.move_to_end(scope)
        while len(self._by_scope) > self._troubles_max:
            ended = next((s for s, trouble in self._by_scope.items() if trouble.over), None)
            self._by_scope.pop(next(iter(self._by_scope)) if ended is None else ended)

    def over(self, name: str, values: Scope | None) -> None:
        """The failures of that name have ended: all, or the one with `values`."""
        for scope, trouble in self._by_scope.items():
            if scope[0] == name and (values is None or scope[1:] == values) and not trouble.over:
                self._by_scope[scope] = replace(trouble, over=True)

    def newest_first(self) -> tuple[Trouble, ...]:
        return tuple(reversed(self._by_scope.values()))


def _detail(event: Event) -> str:
    """The values in words, the detail in front."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    detail = str(values.pop("detail", "") or "")
    values.pop("way_out", None)
    rest = ", ".join(f"{name} {value}" for name, value in values.items())
    return f"{detail} ({rest})" if detail and rest else detail or rest


def _way_out(event: Event) -> str:
    if isinstance(event, Paused):
        return WAY_OUT_OF_PAUSE.get(event.reason, "")
    if isinstance(event, PushRefused):
        return WAY_OUT_OF_REFUSAL.get(event.reason, "")
    return str(getattr(event, "way_out", "") or WAY_OUT.get(type(event), ""))
