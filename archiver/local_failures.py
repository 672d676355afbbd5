"""What the loop does when the spool does not take a write: nothing is dropped, nothing changes places.

A file ends at its last whole frame and is uploaded as it is; what it could not take goes to a successor,
its heir, which holds the offsets before the file lets go of them (`docs/decisions/0002-heirs.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from archiver.domain.archive_file import ArchiveFile
from archiver.domain.batch import Spans
from archiver.events import SpoolWriteFailed
from archiver.ports import SealFailed, WriteFailed

if TYPE_CHECKING:
    from archiver.pipeline import Archiver

WRITE_RETRY_SECS = 1.0
"""Pause before a failed local write is tried again."""

REFUSALS_MAX = 5
"""Writes of the same records for which there was no space, a second apart, before the other open files are
closed to make some."""

LOCAL_FAILURES_MAX = 5
"""Writes or seals of one file (or its heirs) that fail in a row, for another reason than a full disk,
before the process ends [D10]."""


class LocalFailures:
    """Writes and seals that failed: who takes over, and when they are tried again."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver
        self._parts = archiver.parts
        self._retry_at = 0.0
        self._seals: list[ArchiveFile] = []

    @property
    def waiting(self) -> bool:
        """Whether the spool is known not to take anything for the moment."""
        return self._retry_at > 0

    def retry(self) -> None:
        """Some time after a failed write: seal and flush again what failed."""
        archiver = self._archiver
        if not self._retry_at:
            if archiver.pauses.active("no_space") and not self._writing():
                archiver.pauses.end("no_space")  # what was tried again is done, or has been abandoned
            return
        if self._parts.clock.monotonic() < self._retry_at:
            return
        self._retry_at = 0.0
        seals, self._seals = self._seals, []
        for file in seals:
            if file.file_id in archiver.files:
                self._parts.writers.seal(file.file_id)
        for file in [file for file in archiver.dirty.values() if file.requeued]:
            archiver.flush(file)

    def _writing(self) -> bool:
        """Whether a writer still owes an answer that will tell if the disk takes bytes again."""
        return any(file.chunks or file.state == "closing" for file in self._archiver.files.values())

    def write_failed(self, result: WriteFailed) -> None:
        """The file ends at its last whole frame; what it could not take goes to a successor, in order."""
        archiver = self._archiver
        now = self._parts.clock.monotonic()
        file = archiver.files.get(result.file_id)
        if file is None:
            return
        if file.successor is None:  # later chunks fail because the first one did
            self._note(file, result.no_space, result.detail)
        heir = file.successor
        if heir is None or heir.file_id not in archiver.files:  # it may have been abandoned meanwhile
            heir = self._succeed(file, now)
        chunk = file.chunks.pop(0)
        archiver.spool_bytes -= chunk.raw_bytes
        archiver.writing -= chunk.memory
        self._hand_over(file, heir, chunk.spans)
        archiver.note_buffered(heir, file.since)
        heir.requeue(chunk)
        if not file.chunks:
            heir.waits_for = None

    def seal_failed(self, result: SealFailed) -> None:
        """The file stays as it is, and is sealed again later."""
        archiver = self._archiver
        file = archiver.files.get(result.file_id)
        if file is None:
            return
        if file.size == 0:  # every chunk of it has moved to the heir
            archiver.discard(file)
            return
        self._note(file, result.no_space, result.detail)
        self._parts.emit(SpoolWriteFailed(detail=result.detail, failures=file.failures))
        self._seals.append(file)

    def _succeed(self, file: ArchiveFile, now: float) -> ArchiveFile:
        """Close a file that failed a write; a new one takes what it could not, and its place."""
        archiver = self._archiver
        was_open, takes_records = file.state == "open", archiver.open.get(file.route) is file
        archiver.close_file(file, file.reason or "space")
        heir = archiver.new_file(file.route, now)
        heir.waits_for = file.file_id
        if takes_records:
            archiver.open[file.route] = heir
        else:
            archiver.make_overdue(heir, file.overdue or file.reason or "space")
        heir.since = file.since
        heir.failures, heir.refusals = file.failures, file.refusals
        file.successor = heir
        if was_open:
            if file.lines:
                archiver.note_buffered(heir, file.buffered_since)
                self._hand_over(file, heir, file.buffered_spans)
                heir.inherit_buffer(file)
            self._parts.writers.seal(file.file_id)
        return heir

    def _hand_over(self, file: ArchiveFile, heir: ArchiveFile, spans: Spans) -> None:
        """The heir holds the offsets of these records from now on; before the old file lets go of them."""
        heir.kept = heir.kept or file.kept
        for partition, span in spans.items():
            if partition in file.held:
                heir.held.add(partition)
                self._parts.ledger.hold(heir.file_id, partition, span.first)

    def _note(self, file: ArchiveFile, no_space: bool, detail: str) -> None:
        """Wait before the spool is written again; a full disk heals, anything else not for long [D10]."""
        archiver = self._archiver
        self._retry_at = self._parts.clock.monotonic() + WRITE_RETRY_SECS
        if no_space:
            archiver.pauses.begin("no_space", 0, 0)
            file.refusals += 1
            if file.refusals >= REFUSALS_MAX:
                self._make_space(file)
            return
        file.failures += 1
        if file.failures >= LOCAL_FAILURES_MAX:
            archiver.fail(f"the spool cannot be written: {detail}")

    def _make_space(self, file: ArchiveFile) -> None:
        """[B2]: what stays open frees nothing, and where inodes are short no bound of bytes is reached."""
        for other in list(self._archiver.opened.values()):
            if other.size and other is not file:
                self._archiver.close_soon(other, "space")
