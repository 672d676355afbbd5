"""What the pipeline needs from the outside, as narrow protocols, each with its contract in prose.

The pipeline's thread owns all state. It calls these; workers behind them answer with a `Result`
in the `Inbox`, never by calling back. Real implementations live in the adapters, fakes with
behaviour in the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.events import Event

Emit = Callable[[Event], None]
"""Where events go. Safe to call from any thread; never raises, never blocks for long."""


class Clock(Protocol):
    """Time, injected so that the simulation can own it."""

    def monotonic(self) -> float:
        """Seconds that never go back; for every interval and deadline."""
        ...

    def wall(self) -> float:
        """Unix seconds; for keys and nothing else. May jump."""
        ...


# --- the source -----------------------------------------------------------------------------


class PartitionListener(Protocol):
    """What a source tells the pipeline, always on the thread that called the source."""

    def assigned(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """These partitions are ours from now on, with what the group has committed (None: nothing)."""
        ...

    def revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """They are about to go. May block up to the drain timeout; nothing of them comes afterwards."""
        ...

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        """They are gone already and may belong to another member: commit nothing for them."""
        ...

    def restarted(self, partitions: frozenset[TopicPartition]) -> None:
        """They stay ours and are read anew from their beginning: topic recreated, or log truncated [D9].

        Nothing is known to be committed for them. Files with their earlier records stay and are
        uploaded (the broker has those no longer), but hold back no commit any more. A topic that is
        deleted is told the same way, and `lost` right after it.
        """
        ...

    def commit_confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker has stored these offsets."""
        ...

    def commit_failed(self, marks: Mapping[TopicPartition, int], reason: str) -> None:
        """The broker refused or did not answer; the same or a higher mark is tried again later."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """How long the broker keeps the records of one partition, by the topic's retention in seconds.

    `until` has pairs of an offset and a Unix time: from that offset on, every record is kept at least
    until then. Offsets and times rise together. From `end` on there was no record yet when the broker was
    asked: what came since counts as new until it is asked again.
    """

    retention_secs: float
    until: tuple[tuple[int, float], ...]
    end: int

    def secs_left(self, offset: int, now_unix: float) -> float:
        """For how long the record at `offset` is sure to be kept; 0 where it may go at any time."""
        if offset >= self.end:
            return self.retention_secs
        times = [time for place, time in self.until if place <= offset]
        return max(0.0, times[-1] - now_unix) if times else 0.0


@dataclass(frozen=True, slots=True)
class BrokerView:
    """What the broker says of one partition: first offset it still has, last stable offset (exclusive).

    `kept` is None where the topic keeps its records for ever, or where that is not known.
    """

    log_start: int
    stable_end: int
    kept: Kept | None = None


class Source(Protocol):
    """Where records come from."""

    def start(self, listener: PartitionListener) -> None:
        """Begin to join. Returns at once: a broker that is away is retried for ever, audibly."""
        ...

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        """Records in partition order, up to about `records_max`, or nothing after `timeout_secs`.

        Serves rebalances and commit answers through the listener before it returns. Nothing of a
        partition that is not assigned any more is returned. Raises `SourceFatalError`.
        """
        ...

    def positions(self) -> Mapping[TopicPartition, int]:
        """Next offset per assigned partition, gaps passed, for partitions that have delivered.

        Only meaningful right after everything `take` returned has been registered, and never called
        inside a listener callback. Local and cheap.
        """
        ...

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        """Start one asynchronous commit; False (and nothing done) while one is in flight."""
        ...

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        """Commit and ask the broker whether it holds them, within `timeout_secs`; True if it does."""
        ...

    def pause(self) -> None:
        """Hand out nothing; stay in the group; idempotent, and holds for later assignments too."""
        ...

    def resume(self) -> None:
        """Undo `pause`; idempotent."""
        ...

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        """What a background look at the broker last saw; never blocks."""
        ...

    def ready(self) -> str | None:
        """None when joined (or listening), else why not, in words for `/readyz`."""
        ...

    def queued_bytes(self) -> int:
        """Bytes that the source holds and has not handed out (prefetch or accepted pushes)."""
        ...

    def stop_taking(self) -> None:
        """First step of a shutdown: accept nothing new. What was accepted is still handed out."""
        ...

    def close(self, timeout_secs: float) -> None:
        """Leave the group or stop listening. Drain and commit come before; no callbacks drain here."""
        ...


class Ledger(Protocol):
    """Which offsets are safe to commit. One implementation per kind of promise ([D1], [D8], gRPC)."""

    @property
    def reads_again(self) -> bool:
        """Whether the next owner of a partition reads again what is not durable, so it may be dropped."""
        ...

    @property
    def holds(self) -> int:
        """How many pairs of a file and a partition it keeps, for the memory they take."""
        ...

    def assign(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """Start anew for these partitions."""
        ...

    def drop(self, partitions: frozenset[TopicPartition]) -> None:
        """Forget all state of revoked or lost partitions; later releases of their files do nothing."""
        ...

    def hold(self, file_id: int, partition: TopicPartition, first: int) -> None:
        """File `file_id` holds un-durable records of `partition` from offset `first` on."""
        ...

    def advance(self, partition: TopicPartition, position: int) -> None:
        """Everything below `position` has been registered with `hold` or needs no archiving."""
        ...

    def release(self, file_id: int) -> None:
        """The file's records are durable (or confirmed dead letters)."""
        ...

    def low_water(self, partition: TopicPartition) -> int | None:
        """Lowest offset that is not durable; None before anything was delivered."""
        ...

    def position(self, partition: TopicPartition) -> int | None:
        """Next offset that will be taken; None before anything was delivered."""
        ...

    def committed(self, partition: TopicPartition) -> int | None:
        """What the broker holds, as far as is known."""
        ...

    def partitions(self) -> list[TopicPartition]:
        """All that are assigned."""
        ...

    def committable(self) -> dict[TopicPartition, int]:
        """Marks above what is known to be committed, by partition."""
        ...

    def confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker holds these marks; nothing at or below is offered again."""
        ...


# --- results --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """The chunk is in the file as one complete frame; `file_size` is the file's size after it."""

    file_id: int
    chunk: int
    file_size: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The chunk is not in the file, which ends at its last whole frame and takes no more chunks.

    Later chunks of the file fail too, in order, until it is sealed or discarded. `no_space` tells a
    full disk (wait and go on) from any other error (gives up after a few).
    """

    file_id: int
    chunk: int
    file_size: int
    no_space: bool
    detail: str


@dataclass(frozen=True, slots=True)
class FileSealed:
    """The file waits under `uploads/`; its handle is closed.

    `nonce` is the one it would have after a crash, so the sealed file carries the same.
    """

    file_id: int
    size: int
    checksums: Checksums
    path: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class SealFailed:
    """The file could not be moved or fsynced; it is as it was and sealing can be asked again."""

    file_id: int
    no_space: bool
    detail: str


@dataclass(frozen=True, slots=True)
class FileDurable:
    """The store has confirmed the whole file; it has been removed from the spool."""

    file_id: int


@dataclass(frozen=True, slots=True)
class FileRefused:
    """The store will never take it ([Q1]); it stays in the spool."""

    file_id: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class FileDamaged:
    """The sealed file vanished or changed ([D10]): the process must end so that it is read again."""

    file_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class WriterIdTaken:
    """Another process writes with our writer id: later files need another one."""


@dataclass(frozen=True, slots=True)
class DeadLettersWritten:
    """Every record of the refused file is confirmed in the DLQ."""

    file_id: int


@dataclass(frozen=True, slots=True)
class DeadLettersFailed:
    """Not all of them; the offsets stay held. `will_retry` is false where the DLQ is off."""

    file_id: int
    detail: str
    will_retry: bool


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A thread ended with an error nobody foresaw: the process must end with status 1."""

    worker: str
    detail: str


@dataclass(frozen=True, slots=True)
class RollRequested:
    """`POST /ops/roll`: seal every open file."""


Result = (
    FrameWritten
    | WriteFailed
    | FileSealed
    | SealFailed
    | FileDurable
    | FileRefused
    | FileDamaged
    | WriterIdTaken
    | DeadLettersWritten
    | DeadLettersFailed
    | WorkerDied
    | RollRequested
)


class Inbox(Protocol):
    """Results on their way to the pipeline. `put` from any thread, the rest from the pipeline's."""

    def put(self, result: Result) -> None: ...

    def drain(self) -> list[Result]:
        """All that is there, at once."""
        ...

    def wait(self, timeout_secs: float) -> list[Result]:
        """All that is there, waiting for the first one up to `timeout_secs`."""
        ...


# --- spool, uploads, dead letters -----------------------------------------------------------


class Writers(Protocol):
    """Threads that compress and append. Commands for one file are carried out in order."""

    def append(self, file_id: int, chunk: int, lines: list[bytes]) -> None:
        """Append runs of lines as one frame, a newline behind each; creates the file.

        Answer: FrameWritten or WriteFailed.
        """
        ...

    def seal(self, file_id: int) -> None:
        """Close for good, move under `uploads/`. Answer: FileSealed or SealFailed."""
        ...

    def discard(self, file_id: int) -> None:
        """Delete the file, open or just sealed, and forget it. No answer."""
        ...

    def label(self, file_id: int, key: ObjectKey) -> None:
        """The key the file will have: kept beside it where leftovers are uploaded after a crash."""
        ...

    def close(self, timeout_secs: float) -> None: ...


class Uploader(Protocol):
    """Makes sealed files durable, in any order, several at once, for as long as it takes."""

    def submit(self, sealed: SealedFile) -> None:
        """Answer, once: FileDurable, FileRefused or FileDamaged."""
        ...

    def abandon(self, file_id: int) -> None:
        """Nobody waits for it any more: delete it unless an attempt is running; then let that end."""
        ...

    def state(self) -> UploadState: ...

    def close(self, timeout_secs: float) -> None: ...


@dataclass(frozen=True, slots=True)
class UploadState:
    """For `/status` and `/readyz`. `store_down` says since when and why no upload has succeeded."""

    waiting: int
    in_flight: int
    failing: int
    store_down: str | None


@dataclass(frozen=True, slots=True)
class RefusedFile:
    """A sealed file that the store will never take, on its way to the dead letters."""

    sealed: SealedFile
    reason: str
    detail: str


class DeadLetters(Protocol):
    """Takes the records of refused files. Retries by itself where that can help."""

    def submit(self, refused: RefusedFile) -> None:
        """Answer: DeadLettersWritten once, after any number of DeadLettersFailed.

        FileDamaged where the file has vanished or changed and its records are nowhere else.
        """
        ...

    def abandon(self, file_id: int) -> None:
        """Its partitions are gone: write no more of it and delete the file. No answer, or a late one."""
        ...

    def close(self, timeout_secs: float) -> None: ...


class Store(Protocol):
    """A place for whole objects. Called from several threads at once."""

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """Make the sealed file durable under `<prefix>/<key>`, never replacing anything.

        Returns once the store has confirmed size and checksum; the caller then removes the original.
        An object under the key that carries the file's nonce (or, where the store keeps no metadata,
        is provably the same upload) is our own upload whose answer was lost: returns. Every call
        starts afresh from the first byte. Raises a `StoreError`, nothing else.
        """
        ...

    def probe(self) -> ProbeReport:
        """Put the reserved key create-only, twice ([S3]). Raises a `StoreError`, nothing else."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class GroupStore(Protocol):
    """What a store has beside `Store` where many small files together are cheaper than one by one."""

    @property
    def group_max(self) -> int:
        """How many files `put_group` takes at once; 0 where it cannot, now or ever."""
        ...

    def put_group(self, files: Sequence[tuple[SealedFile, str]]) -> list[bool]:
        """Put the sealed files under their keys as far as all is well; raises nothing.

        True means what a `put` that returns means. False means nothing: the file may be there or not, and
        whatever is wrong is told by the `put` that must follow.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What `probe` found. `create_only` false: a look-up before each upload stands in."""

    create_only: bool
    detail: str


class Disk(Protocol):
    """The spool's file system."""

    def free_bytes(self) -> int:
        """Bytes an unprivileged writer may still use. Raises SpoolError."""
        ...
