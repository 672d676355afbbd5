"""Everything notable that happens, one frozen dataclass each; telemetry makes log and metric of it.

`message` is a constant and `level` a fixed level (`debug info warning error`); the fields are the
values. `problem` events are rate-limited by their `scope` and end with the recovery event's count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from archiver.domain.rolling import RollReason

PauseReason = Literal["memory", "spool", "disk", "no_space"]
RebalanceKind = Literal["assigned", "revoked", "lost"]
PushRefusal = Literal["full", "late", "stopping", "too_large", "format", "malformed", "incomplete"]
"""Why a push was not taken; the first three say that the same push can be taken later ([G2])."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base: a constant message and a level, so that log lines can be searched for."""

    level: ClassVar[str] = "info"
    message: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Started(Event):
    message: ClassVar[str] = "archiver started"
    version: str
    transport: str
    destination: str
    writer_id: str
    spool_dir: str


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    message: ClassVar[str] = "stopping: no more records are taken, files are sealed and uploaded"
    reason: str
    open_files: int
    pending_uploads: int


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    message: ClassVar[str] = "archiver stopped"
    undurable_files: int
    secs: float


# --- records --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordsTaken(Event):
    """Once a turn of the loop, for metrics alone. `defaulted` counts by reason ([K6])."""

    level: ClassVar[str] = "debug"
    message: ClassVar[str] = ""
    records: int
    tombstones: int
    multiline: int
    defaulted: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class OffsetsSkipped(Event):
    """[D9]: Kafka no longer has them, or the topic is another one of the same name."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "offsets skipped: the broker no longer has them"
    topic: str
    partition: int
    expected_offset: int
    next_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoCommittedOffset(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "the group has no committed offset for a partition that holds records"
    topic: str
    partition: int
    start_offset: int
    log_start: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class RetentionNear(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "the broker is about to delete records that are not archived yet"
    topic: str
    partition: int
    low_water_mark: int
    log_start: int
    headroom_records: int
    headroom_secs: float | None = None  # where the topic deletes by time


@dataclass(frozen=True, slots=True)
class PushRefused(Event):
    """[G2], [G3]: rate-limited by reason; the end of a full queue is PushesTaken."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "push refused: nothing of it was taken, and its sender was told why"
    reason: PushRefusal
    detail: str


@dataclass(frozen=True, slots=True)
class PushesTaken(Event):
    message: ClassVar[str] = "pushes are taken again"
    reason: PushRefusal
    refused: int
    secs: float


# --- group ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rebalanced(Event):
    message: ClassVar[str] = "partitions changed"
    kind: RebalanceKind
    partitions: tuple[str, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Drained(Event):
    message: ClassVar[str] = "drained before partitions were let go"
    partitions: int
    files_durable: int
    files_abandoned: int
    secs: float


@dataclass(frozen=True, slots=True)
class CommitDone(Event):
    level: ClassVar[str] = "debug"
    message: ClassVar[str] = "offsets committed"
    partitions: int


@dataclass(frozen=True, slots=True)
class CommitFailed(Event):
    """Rate-limited; recovery is the next CommitDone."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "commit failed: it is tried again, nothing is lost"
    reason: str
    partitions: int


@dataclass(frozen=True, slots=True)
class CommitRecovered(Event):
    """Made by telemetry at the first CommitDone after a CommitFailed; nobody else emits it."""

    message: ClassVar[str] = "commits succeed again"
    failures: int
    secs: float


@dataclass(frozen=True, slots=True)
class BrokerTrouble(Event):
    """Rate-limited. `way_out` says what the operator can look at."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "trouble with the broker"
    code: str
    detail: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class BrokerRecovered(Event):
    message: ClassVar[str] = "broker reached again"
    failures: int
    secs: float


@dataclass(frozen=True, slots=True)
class TopicsChanged(Event):
    message: ClassVar[str] = "topics to archive changed"
    added: tuple[str, ...]
    removed: tuple[str, ...]
    total: int


@dataclass(frozen=True, slots=True)
class TopicMissing(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "topic does not exist: waiting for it, it is not created"
    topic: str


# --- files ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSealedEvent(Event):
    level: ClassVar[str] = "debug"
    message: ClassVar[str] = "file sealed"
    reason: RollReason
    key: str
    records: int
    raw_bytes: int
    size: int


@dataclass(frozen=True, slots=True)
class FileArchived(Event):
    """`key` is the object's key, `attempts` how many puts it took."""

    message: ClassVar[str] = "file archived"
    key: str
    records: int
    raw_bytes: int
    size: int
    attempts: int
    upload_secs: float


@dataclass(frozen=True, slots=True)
class UploadRetried(Event):
    """Rate-limited by kind; recovery is StoreRecovered."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "upload failed: it is tried again, nothing is lost"
    kind: str
    key: str
    attempt: int
    wait_secs: float
    detail: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class StoreDown(Event):
    level: ClassVar[str] = "error"
    message: ClassVar[str] = "the store is away: one upload at a time probes it"
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    message: ClassVar[str] = "the store answers again"
    failures: int
    secs: float


@dataclass(frozen=True, slots=True)
class StoreProbed(Event):
    message: ClassVar[str] = "store probed"
    create_only: bool
    detail: str


@dataclass(frozen=True, slots=True)
class StoreProbeFailed(Event):
    """At start; tried again until it succeeds. Files wait in the meantime."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "the store could not be probed: it is tried again, files wait"
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class CreateOnlyMissing(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = (
        "the store does not refuse to replace objects: a look-up before each upload stands in"
    )
    detail: str


@dataclass(frozen=True, slots=True)
class MultipartLeftBehind(Event):
    """The abort of a failed multipart upload failed itself; it is tried again after the next success."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "parts of a failed upload are still in the store: their removal failed"
    key: str
    detail: str


@dataclass(frozen=True, slots=True)
class WriterIdChanged(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "writer id changed: no key is used twice"
    reason: str
    writer_id: str


@dataclass(frozen=True, slots=True)
class FileRefusedEvent(Event):
    level: ClassVar[str] = "error"
    message: ClassVar[str] = "the store refuses a file for good"
    reason: str
    key: str
    records: int
    detail: str


@dataclass(frozen=True, slots=True)
class FileDamagedEvent(Event):
    level: ClassVar[str] = "error"
    message: ClassVar[str] = "a sealed file vanished or changed: ending so that its records are read again"
    key: str
    detail: str


@dataclass(frozen=True, slots=True)
class DeadLettered(Event):
    """`outcome` is `kafka`, `file`, `kept`, `held` or `failed`."""

    level: ClassVar[str] = "error"
    message: ClassVar[str] = "dead letters"
    reason: str
    outcome: str
    records: int
    key: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LeftoversFound(Event):
    message: ClassVar[str] = "leftovers of an earlier run in the spool"
    removed: int
    uploaded: int
    cut_bytes: int


@dataclass(frozen=True, slots=True)
class GroupFlushFailed(Event):
    """Nothing is lost by it: each file is flushed, and its own error told, when it is put alone."""

    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "the archive's file system reports an error: files are flushed one by one"
    detail: str


@dataclass(frozen=True, slots=True)
class CaseInsensitiveStore(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = (
        "the archive's file system ignores case: routes that differ in case alone share a folder"
    )
    path: str


# --- bounds and workers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paused(Event):
    level: ClassVar[str] = "warning"
    message: ClassVar[str] = "consumption paused at a bound"
    reason: PauseReason
    held: int
    bound: int


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    message: ClassVar[str] = "consumption resumed"
    reason: PauseReason
    secs: float


@dataclass(frozen=True, slots=True)
class SpoolWriteFailed(Event):
    level: ClassVar[str] = "error"
    message: ClassVar[str] = "a write to the spool failed: the file was cut back to its last whole frame"
    detail: str
    failures: int


@dataclass(frozen=True, slots=True)
class Fatal(Event):
    level: ClassVar[str] = "error"
    message: ClassVar[str] = "cannot go on: draining what can be drained, ending with status 1"
    reason: str
