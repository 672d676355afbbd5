"""The loop. One thread owns all state; the order of a turn is the correctness argument:

    take -> route -> flush what is full -> roll what is due -> collect results -> commit

Every record that `take` returned is held in the ledger before the turn can commit, and a hold ends
only with the store's confirmation (or a confirmed dead letter). `docs/internals.md` argues it.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archiver.bounds import Bounds, Pauses, Pressure
from archiver.domain.archive_file import RUN_BYTES, ArchiveFile
from archiver.domain.batch import RecordBatch, Span, TopicPartition
from archiver.domain.keys import KeyMaker
from archiver.domain.rolling import FlushPolicy, RollPolicy, RollReason
from archiver.domain.routing import Router, Slice
from archiver.domain.sealed import SealedFile
from archiver.domain.uncommitted import UncommittedBytes
from archiver.drain import Drain
from archiver.errors import FatalError, SpoolError
from archiver.events import (
    CommitDone,
    CommitFailed,
    Fatal,
    FileDamagedEvent,
    FileRefusedEvent,
    FileSealedEvent,
    Rebalanced,
    RecordsTaken,
    WriterIdChanged,
)
from archiver.local_failures import LocalFailures
from archiver.native import native
from archiver.ports import (
    Clock,
    DeadLetters,
    DeadLettersFailed,
    DeadLettersWritten,
    Disk,
    Emit,
    FileDamaged,
    FileDurable,
    FileRefused,
    FileSealed,
    FrameWritten,
    Inbox,
    Ledger,
    RefusedFile,
    Result,
    RollRequested,
    SealFailed,
    Source,
    Uploader,
    WorkerDied,
    WriteFailed,
    WriterIdTaken,
    Writers,
)

TAKE_SECS = 0.05
"""`consume` waits this long for a batch to fill: longer and the tail of a burst waits for it."""

TAKE_RECORDS_MIN = 1_000
TAKE_RECORDS_MAX = 64_000
TAKE_RECORDS_PER_ROUTE = 64
"""A record costs less the more of a batch share its route, and more where a batch leaves the processor's
cache: few routes take small batches, many take large ones."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the settings decide about the loop. Seconds and bytes."""

    roll: RollPolicy
    flush: FlushPolicy
    bounds: Bounds
    codec: str
    commit_interval_secs: float
    drain_timeout_secs: float
    shutdown_timeout_secs: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop talks to."""

    source: Source
    ledger: Ledger
    router: Router
    keys: KeyMaker
    writers: Writers
    uploader: Uploader
    dead_letters: DeadLetters
    inbox: Inbox
    clock: Clock
    disk: Disk
    emit: Emit
    publish: Callable[[Archiver], float]
    """Called with the loop's state, to make a snapshot of it; after how many seconds the next one is due."""
    beat: Callable[[float], None]
    """Called with the monotonic time whenever the loop turns, also while it waits in a drain."""


def _add_none(
    open_files: dict[str, ArchiveFile],
    partition: TopicPartition,
    slices: list[Slice],
    span_type: type[Span],
    bytes_max: int,
    records_max: int,
) -> tuple[list[Slice], int]:
    """What is done of `add_slices` where it has not been compiled: nothing."""
    return slices, 0


class Archiver:
    """The running archiver; also what the source tells about its partitions (`PartitionListener`)."""

    def __init__(self, parts: Parts, policy: Policy) -> None:
        self.parts = parts
        self.policy = policy
        self.files: dict[int, ArchiveFile] = {}
        """Every file that is not durable, by id, oldest first."""
        self.open: dict[str, ArchiveFile] = {}
        """The one file per route that takes records."""
        self.state = "starting"
        self.uncommitted = UncommittedBytes()
        self.held_reasons: dict[int, str] = {}
        """Refused files whose records could not become dead letters, and why."""
        self.memory = 0
        """Bytes of records that are buffered or on their way to a writer."""
        self.writing = 0
        """Those of them that are on their way."""
        self.spool_bytes = 0
        self.free_bytes = parts.disk.free_bytes()
        self._nonce = secrets.token_hex(8)
        self.pauses = Pauses(parts.source, parts.emit, parts.clock)
        self.dirty: OrderedDict[int, ArchiveFile] = OrderedDict()
        """Files with a buffer, by id, the oldest buffer first."""
        self.opened: OrderedDict[int, ArchiveFile] = OrderedDict()
        """Files that still take records or wait to be closed, by id, the first to close first."""
        self.failures = LocalFailures(self)
        self.pressure = Pressure(self)
        self._add_slices = _add_none if native is None else native.add_slices
        self._next_id = 1
        self.stop_asked_at: float | None = None
        """Monotonic time of the request to stop: the time for it runs from there, whatever is going on."""
        self._stop_reason: str | None = None
        self._fatal: str | None = None
        self._next_commit = 0.0
        self._next_publish = 0.0

    # --- the loop --------------------------------------------------------------------------

    def run(self) -> int:
        """Archive until told to stop; the exit status."""
        try:
            self.start()
            while self._stop_reason is None and self._fatal is None:
                self.turn()
        except FatalError as error:
            self._fatal = str(error)
        return self.finish()

    def start(self) -> None:
        """Begin to join."""
        self.parts.source.start(self)
        self.state = "running"

    def stop(self, reason: str) -> None:
        """Ask the loop to end after the turn it is in; from any thread."""
        self.stop_asked_at = self.parts.clock.monotonic()
        self._stop_reason = reason

    def fail(self, reason: str) -> None:
        """The process must end with status 1; the first reason is the one that is told."""
        self._fatal = self._fatal or reason

    def finish(self) -> int:
        """Drain, commit, leave; 0 after a request to stop, 1 after a fatal error."""
        self.state = "stopping"
        if self._fatal is not None:
            self.parts.emit(Fatal(reason=self._fatal))
        try:
            Drain(self).shutdown(self._fatal or self._stop_reason or "stopped")
        except FatalError as error:
            self.fail(str(error))
        return 0 if self._fatal is None else 1

    def turn(self) -> None:
        """One turn. Raises `FatalError` when it cannot go on."""
        now = self.parts.clock.monotonic()
        self.pulse(now)
        batches = self.parts.source.take(TAKE_SECS, self.take_records)
        if batches:
            self.register(batches)
        self.pressure.hold_memory()
        now = self.parts.clock.monotonic()
        self.failures.retry()
        self._flush_due(now)
        self._roll_due(now)
        self.settle(self.parts.inbox.drain())
        if now >= self._next_commit:
            self._next_commit = now + self.policy.commit_interval_secs
            self.commit()
        self.pressure.hold_disk(now)
        if self._fatal is not None:
            raise SpoolError(self._fatal)

    def pulse(self, now: float) -> None:
        """Show that the loop is alive, and about once a second how it is. Also called in drains."""
        self.parts.beat(now)
        if now >= self._next_publish:
            self._next_publish = now + self.parts.publish(self)

    # --- records in --------------------------------------------------------------------------

    @property
    def take_records(self) -> int:
        """How many records to take at once."""
        return min(max(TAKE_RECORDS_MIN, TAKE_RECORDS_PER_ROUTE * len(self.open)), TAKE_RECORDS_MAX)

    def register(self, batches: Sequence[RecordBatch]) -> None:
        """Route batches into buffers, hold their offsets, and only then move the positions on."""
        records = tombstones = multiline = memory = 0
        defaulted: Counter[str] = Counter()
        now, open_files, flush = self.parts.clock.monotonic(), self.open, self.policy.flush
        bytes_max, records_max = flush.flush_bytes, flush.flush_records
        for batch in batches:
            partition, routed = batch.partition, self.parts.router.route_batch(batch)
            left, added = self._add_slices(open_files, partition, routed.slices, Span, bytes_max, records_max)
            memory += added
            # Where every record has a route of its own this is per record: no call that can be spared.
            for route, lines, first, last, count in left:
                file = open_files.get(route)
                if file is None:
                    file = open_files[route] = self.new_file(route, now)
                if not file.lines:
                    self.note_buffered(file, now)
                if file.add(partition, lines, first, last, count) and partition not in file.held:
                    file.held.add(partition)
                    self.parts.ledger.hold(file.file_id, partition, first)
                memory += len(lines)
                if file.buffered_bytes >= bytes_max or file.buffered_records >= records_max:
                    self.flush(file)
            self.parts.ledger.advance(partition, batch.offsets[-1] + 1)
            memory += (1 + RUN_BYTES) * len(routed.slices)
            records += routed.records
            tombstones += routed.tombstones
            multiline += routed.multiline
            if routed.defaulted:
                defaulted.update(routed.defaulted)
        self.memory += memory
        self.parts.emit(RecordsTaken(records, tombstones, multiline, tuple(defaulted.items())))

    def new_file(self, route: str, now: float) -> ArchiveFile:
        """A file for this route, under a key of its own; not yet the one that takes records."""
        keys = self.parts.keys
        writer_id = keys.writer_id
        key = keys.next(route, self.parts.clock.wall())
        if keys.writer_id != writer_id:
            self.parts.emit(WriterIdChanged(reason=keys.renamed_because, writer_id=keys.writer_id))
        nonce = f"{self._nonce}-{self._next_id}"
        file = ArchiveFile(self._next_id, route, key, nonce, opened_at=now, since=now)
        file.kept = not self.parts.ledger.reads_again
        self._next_id += 1
        self.files[file.file_id] = self.opened[file.file_id] = file
        return file

    # --- flush and roll ------------------------------------------------------------------------

    def flush(self, file: ArchiveFile) -> bool:
        """Hand the buffer to its writer; False while the spool is known not to take it."""
        if file.waits_for is not None or self.failures.waiting:
            return False
        self.dirty.pop(file.file_id, None)
        chunk = file.cut()
        if chunk.number == 1:
            self.parts.writers.label(file.file_id, file.key)
        self.spool_bytes += chunk.raw_bytes
        self.writing += chunk.memory
        self.parts.writers.append(file.file_id, chunk.number, chunk.lines)
        return True

    def _flush_due(self, now: float) -> None:
        """[R3]: buffers that have grown old, oldest first."""
        while self.dirty:
            file = next(iter(self.dirty.values()))
            if now - file.buffered_since < self.policy.flush.flush_age_secs or not self.flush(file):
                return

    def _roll_due(self, now: float) -> None:
        """[R1]: by age here, by size when the writer has told the size."""
        while self.opened:
            file = next(iter(self.opened.values()))
            reason = file.overdue or self.policy.roll.due(file.size, now - file.opened_at)
            if reason is None or not self.roll(file, reason):
                return

    def roll(self, file: ArchiveFile, reason: RollReason) -> bool:
        """Close an open file: its buffer becomes the last frame. False while the spool takes nothing."""
        if file.waits_for is not None or (file.lines and not self.flush(file)):
            return False
        self.close_file(file, reason)
        self.parts.writers.seal(file.file_id)
        return True

    def roll_all(self, reason: RollReason, holding: frozenset[TopicPartition] | None = None) -> None:
        """Close every open file, or those that have records of certain partitions, as soon as it can be."""
        for file in list(self.opened.values()):
            if holding is None or not holding.isdisjoint(file.held):
                self.close_soon(file, reason)

    def close_file(self, file: ArchiveFile, reason: RollReason) -> None:
        """It takes no more records and is not flushed any more."""
        file.state, file.reason = "closing", reason
        self.opened.pop(file.file_id, None)
        self.dirty.pop(file.file_id, None)
        if self.open.get(file.route) is file:
            del self.open[file.route]

    # --- results ---------------------------------------------------------------------------------

    def settle(self, results: Sequence[Result]) -> None:
        """Take in what writers, uploads and dead letters have answered."""
        for result in results:
            match result:
                case FrameWritten():
                    self._frame_written(result)
                case FileSealed():
                    self._file_sealed(result)
                case FileDurable():
                    self._file_durable(result.file_id)
                case DeadLettersWritten():
                    self.held_reasons.pop(result.file_id, None)
                    self._file_durable(result.file_id)
                case WriteFailed():
                    self.failures.write_failed(result)
                case SealFailed():
                    self.failures.seal_failed(result)
                case FileRefused():
                    self._file_refused(result)
                case DeadLettersFailed():
                    if result.file_id in self.files:
                        self.held_reasons[result.file_id] = result.detail
                case FileDamaged():
                    self._file_damaged(result)
                case WriterIdTaken():
                    fresh = self.parts.keys.rename()
                    self.parts.emit(WriterIdChanged(reason="another writer has it", writer_id=fresh))
                case RollRequested():
                    self.roll_all("request")
                case WorkerDied():
                    self._fatal = f"thread {result.worker} died: {result.detail}"

    def _frame_written(self, result: FrameWritten) -> None:
        file = self.files.get(result.file_id)
        if file is None:
            return
        grown = result.file_size - file.size
        chunk = file.written(result.file_size)
        self.memory -= chunk.memory
        self.writing -= chunk.memory
        self.spool_bytes += grown - chunk.raw_bytes
        file.failures = file.refusals = 0
        if not self.failures.waiting:
            self.pauses.end("no_space")
        if file.state == "open" and (reason := self.policy.roll.due(file.size, 0.0)):
            self.roll(file, reason)

    def _file_sealed(self, result: FileSealed) -> None:
        file = self.files.get(result.file_id)
        if file is None:
            return
        if result.size == 0:
            self._forget(file)
            return
        file.sealed = SealedFile(
            file_id=file.file_id,
            path=Path(result.path),
            key=file.key,
            size=result.size,
            checksums=result.checksums,
            records=file.records,
            raw_bytes=file.raw_bytes,
            codec=self.policy.codec,
            nonce=result.nonce or file.nonce,
            spans=dict(file.spans),
        )
        file.state = "uploading"
        self.parts.emit(
            FileSealedEvent(
                reason=file.reason or "request",
                key=str(file.key),
                records=file.records,
                raw_bytes=file.raw_bytes,
                size=result.size,
            )
        )
        self.parts.uploader.submit(file.sealed)

    def adopt(self, leftovers: Sequence[SealedFile]) -> None:
        """Files that an earlier run sealed, or could have: upload them under the keys they have [D7]."""
        now = self.parts.clock.monotonic()
        for sealed in leftovers:
            file = ArchiveFile(sealed.file_id, "", sealed.key, sealed.nonce, opened_at=now, since=now)
            file.state, file.sealed = "uploading", sealed
            file.size, file.records, file.raw_bytes = sealed.size, sealed.records, sealed.raw_bytes
            self.files[sealed.file_id] = file
            self.spool_bytes += sealed.size
            self.parts.uploader.submit(sealed)

    def _file_durable(self, file_id: int) -> None:
        file = self.files.get(file_id)
        if file is None:
            return
        live = {partition: span for partition, span in file.spans.items() if partition in file.held}
        if live:
            self.uncommitted.archived(live, file.size)
        self._forget(file)

    def _forget(self, file: ArchiveFile) -> None:
        """Its records are durable, moved to another file, or somebody else's: hold nothing any more."""
        self.parts.ledger.release(file.file_id)
        writing = sum(chunk.memory for chunk in file.chunks)
        self.memory -= file.memory + writing
        self.writing -= writing
        self.spool_bytes -= file.size + sum(chunk.raw_bytes for chunk in file.chunks)
        self.dirty.pop(file.file_id, None)
        self.opened.pop(file.file_id, None)
        if self.open.get(file.route) is file:
            del self.open[file.route]
        del self.files[file.file_id]

    # --- when things fail ------------------------------------------------------------------------

    def note_buffered(self, file: ArchiveFile, since: float) -> None:
        """The file's buffer holds records from now on, the oldest since then."""
        if not file.lines:
            file.buffered_since = since
            self.dirty[file.file_id] = file

    def _file_refused(self, result: FileRefused) -> None:
        file = self.files.get(result.file_id)
        if file is None or file.sealed is None:
            return
        file.state = "refused"
        self.parts.emit(
            FileRefusedEvent(
                reason=result.reason, key=str(file.key), records=file.records, detail=result.detail
            )
        )
        self.parts.dead_letters.submit(RefusedFile(file.sealed, result.reason, result.detail))

    def _file_damaged(self, result: FileDamaged) -> None:
        file = self.files.get(result.file_id)
        if file is not None:
            file.state = "damaged"
            self.parts.emit(FileDamagedEvent(key=str(file.key), detail=result.detail))
            self._fatal = f"sealed file of {file.key} is lost: {result.detail}"

    # --- commit ------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Offer the broker every mark that has moved. Positions pass gaps that no record showed [D3]."""
        self.advance_positions()
        marks = self.parts.ledger.committable()
        if marks:
            self.parts.source.commit(marks)

    def advance_positions(self) -> None:
        """Take over the source's positions. Right only when all that was taken has been registered."""
        for partition, position in self.parts.source.positions().items():
            self.parts.ledger.advance(partition, position)

    def commit_confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker has stored these offsets."""
        self.parts.ledger.confirmed(marks)
        self.uncommitted.committed(marks)
        self.parts.emit(CommitDone(partitions=len(marks)))

    def commit_failed(self, marks: Mapping[TopicPartition, int], reason: str) -> None:
        """Counted; the next interval tries again."""
        self.parts.emit(CommitFailed(reason=reason, partitions=len(marks)))

    # --- the group ---------------------------------------------------------------------------------

    def assigned(self, committed: Mapping[TopicPartition, int | None]) -> None:
        """New partitions are ours."""
        self.parts.ledger.assign(committed)
        self._tell("assigned", committed)

    def revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """They go: make durable and commit what time allows, abandon the rest [D5]."""
        if self.state != "stopping":
            previous, self.state = self.state, "draining"
            Drain(self).revoke(partitions)
            self.state = previous
        self.abandon(partitions)
        self._tell("revoked", partitions)

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        """They are gone: nothing of them is committed or waited for."""
        self.abandon(partitions)
        self._tell("lost", partitions)

    def restarted(self, partitions: frozenset[TopicPartition]) -> None:
        """They are read anew from their beginning: what files hold of them is nowhere else any more,
        so it is kept and uploaded, but holds back no commit [D9]."""
        self._let_go(partitions)
        self.parts.ledger.assign(dict.fromkeys(partitions))
        for file in list(self.files.values()):
            if not file.held.isdisjoint(partitions):
                file.held -= partitions
                file.kept = True
                self.close_soon(file, "revoked")

    def abandon(self, partitions: frozenset[TopicPartition]) -> None:
        """Let go of partitions: their files are deleted, unless they hold records of others too, or
        records that nobody reads again ([D8], [D9])."""
        self._let_go(partitions)
        for file in list(self.files.values()):
            if file.held.isdisjoint(partitions):
                continue
            file.held -= partitions
            if file.held or file.kept:
                self.close_soon(file, "revoked")
            else:
                self.discard(file)

    def _let_go(self, partitions: frozenset[TopicPartition]) -> None:
        self.parts.ledger.drop(partitions)
        self.uncommitted.drop(partitions)

    def close_soon(self, file: ArchiveFile, reason: RollReason) -> None:
        """Close an open file; one that cannot close yet takes no more records and is the first to.

        Whatever made it close came before the next record: a request is not forgotten while the disk
        is full, and a partition that comes back may be read again from further down, when in the same
        file records would change places.
        """
        heir = file.successor
        if heir is not None and heir.waits_for == file.file_id and heir.file_id in self.files:
            self.close_soon(heir, reason)
        if file.state != "open" or self.roll(file, reason):
            return
        if self.open.get(file.route) is file:
            del self.open[file.route]
        self.make_overdue(file, reason)

    def make_overdue(self, file: ArchiveFile, reason: RollReason) -> None:
        """It is the first to close."""
        file.overdue = reason
        self.opened.move_to_end(file.file_id, last=False)

    def discard(self, file: ArchiveFile) -> None:
        """Delete it, wherever it is; nobody needs it."""
        if file.state == "refused":
            self.parts.dead_letters.abandon(file.file_id)
        elif file.state in ("uploading", "damaged"):
            self.parts.uploader.abandon(file.file_id)
        else:
            self.parts.writers.discard(file.file_id)
        heir = file.successor
        if heir is not None and heir.waits_for == file.file_id:
            heir.waits_for = None
        self.held_reasons.pop(file.file_id, None)
        self._forget(file)

    def _tell(
        self, kind: str, partitions: Mapping[TopicPartition, object] | frozenset[TopicPartition]
    ) -> None:
        names = tuple(sorted(f"{p.topic}/{p.partition}" for p in partitions))
        total = len(self.parts.ledger.partitions())
        self.parts.emit(Rebalanced(kind=kind, partitions=names, total=total))  # type: ignore[arg-type]
