"""Refused files while the DLQ is off: held on Kafka, kept aside where no offsets can be held."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from archiver.deadletters.file import folder_bytes, fsync_directory
from archiver.deadletters.letters import Stopping
from archiver.deadletters.reading import span_text
from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, DeadLetterError
from archiver.events import DeadLettered
from archiver.ports import DeadLettersFailed, Emit, Inbox, RefusedFile

Remove = Callable[[SealedFile], None]
"""Deletes a sealed file and what belongs to it from the spool; raises OSError."""


class HoldRefused:
    """`ports.DeadLetters` with the DLQ off on Kafka: the file stays in the spool, its offsets stay held."""

    def __init__(self, inbox: Inbox, emit: Emit, remove: Remove) -> None:
        self._inbox = inbox
        self._emit = emit
        self._remove = remove
        self._held: dict[int, SealedFile] = {}
        self._lock = threading.Lock()

    def submit(self, refused: RefusedFile) -> None:
        """Answer: DeadLettersFailed, once and for good."""
        sealed = refused.sealed
        with self._lock:
            self._held[sealed.file_id] = sealed
        detail = (
            f"the store refuses {sealed.key} for good ({refused.reason}: {refused.detail}) and dlq.enabled "
            "is false: its records are held; set dlq.enabled or make the store take the file, and restart"
        )
        self._emit(DeadLettered(refused.reason, "held", sealed.records, str(sealed.key), detail))
        self._inbox.put(DeadLettersFailed(sealed.file_id, detail, will_retry=False))

    def abandon(self, file_id: int) -> None:
        with self._lock:
            sealed = self._held.pop(file_id, None)
        if sealed is not None:
            with contextlib.suppress(OSError):  # the next start clears what stays
                self._remove(sealed)

    def close(self, timeout_secs: float) -> None:
        """Nothing is under way."""


class KeepRefused:
    """A `Delivery` that moves the file to `refused/` with a JSON file beside it that says why.

    The folder holds at most `bytes_max`; above that the file stays in the spool until there is room.
    """

    def __init__(self, directory: Path, bytes_max: int, emit: Emit) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._emit = emit

    def deliver(self, refused: RefusedFile, attempt: int, stopping: Stopping) -> None:
        sealed = refused.sealed
        kept = self._directory / sealed.path.name
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # an attempt may have failed right after the move
            if not kept.exists() or sealed.path.exists():
                self._move(refused, kept)
            fsync_directory(self._directory)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{sealed.path}: the refused file has vanished") from error
        except OSError as error:
            raise DeadLetterError(
                f"a refused file cannot be kept in {self._directory}: {error.strerror or error}"
            ) from error
        self._emit(DeadLettered(refused.reason, "kept", sealed.records, str(sealed.key), str(kept)))

    def _move(self, refused: RefusedFile, kept: Path) -> None:
        if folder_bytes(self._directory) + refused.sealed.size > self._bytes_max:
            raise DeadLetterError(
                f"{self._directory} is full (dlq.max_bytes={self._bytes_max}): move refused files away or "
                "raise dlq.max_bytes"
            )
        _write_whole(kept.with_name(kept.name + ".json"), _description(refused))
        os.rename(refused.sealed.path, kept)


def _description(refused: RefusedFile) -> bytes:
    sealed = refused.sealed
    text = msgspec.json.encode(
        {
            "reason": refused.reason,
            "detail": refused.detail,
            "object_key": str(sealed.key),
            "records": sealed.records,
            "raw_bytes": sealed.raw_bytes,
            "bytes": sealed.size,
            "codec": sealed.codec,
            "crc32": f"{sealed.checksums.crc32:08x}",
            "span": span_text(sealed.spans),
        }
    )
    return msgspec.json.format(text, indent=2) + b"\n"


def _write_whole(path: Path, content: bytes) -> None:
    """Whole and on the disk under its name, or not there."""
    unfinished = path.with_name(path.name + ".tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    unfinished.rename(path)
