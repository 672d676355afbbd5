"""Dead letters as JSON lines in a folder: whole and fsynced before they count, never above a bound."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from archiver.deadletters.letters import DeadLetter, Stopping, go_on
from archiver.errors import DeadLetterError
from archiver.ports import RefusedFile

ROTATE_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


class FileSink:
    """Writes `<time>-<random>-<part>.jsonl` files, new ones for each refused file and every 64 MiB.

    They have their names only once all of them are on the disk; an attempt that failed leaves nothing.
    """

    name = "file"

    def __init__(self, directory: Path, bytes_max: int, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._rotate_bytes = rotate_bytes

    def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unfinished()
            room = self._bytes_max - folder_bytes(self._directory)
            stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(6)}"
            with _Parts(self._directory, stem, self._rotate_bytes) as parts:
                for letter in letters:
                    line = _line(letter, refused)
                    room -= len(line)
                    if room < 0:
                        raise DeadLetterError(self._full())
                    parts.write(line)
                    go_on(stopping)
                return parts.finish()
        except OSError as error:
            raise DeadLetterError(
                f"dead letters cannot be written to {self._directory}: {error.strerror or error}: "
                "dlq.dir names the folder"
            ) from error

    def _remove_unfinished(self) -> None:
        """What a killed process left; there is one process per spool [B5] and one writer in it."""
        for path in self._directory.glob("*.jsonl.tmp"):
            path.unlink()

    def _full(self) -> str:
        return (
            f"{self._directory} is full (dlq.max_bytes={self._bytes_max}): move dead letters away or raise "
            "dlq.max_bytes"
        )


class _Parts:
    """The files of one attempt: all of them get their names, or none is left."""

    def __init__(self, directory: Path, stem: str, rotate_bytes: int) -> None:
        self._directory = directory
        self._stem = stem
        self._rotate_bytes = rotate_bytes
        self._paths: list[Path] = []
        self._named: list[Path] = []
        self._file: BinaryIO | None = None
        self._file_bytes = 0
        self._lines = 0
        self._finished = False

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still buffered has no room: it goes anyway
                self._file.close()
        if not self._finished:
            for path in self._paths:
                path.with_suffix(".jsonl.tmp").unlink(missing_ok=True)
            for path in self._named:
                path.unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        if self._file is not None and self._file_bytes + len(line) > self._rotate_bytes:
            self._close_part()
        if self._file is None:
            self._file = self._open_part()
        self._file.write(line)
        self._file_bytes += len(line)
        self._lines += 1

    def finish(self) -> int:
        """fsync, name, fsync the folder; returns how many letters there are."""
        self._close_part()
        for path in self._paths:
            path.with_suffix(".jsonl.tmp").rename(path)
            self._named.append(path)
        fsync_directory(self._directory)
        self._finished = True
        return self._lines

    def _open_part(self) -> BinaryIO:
        path = self._directory / f"{self._stem}-{len(self._paths) + 1:04d}.jsonl"
        self._paths.append(path)
        fd = os.open(path.with_suffix(".jsonl.tmp"), _NEW_FILE, 0o600)
        self._file_bytes = 0
        return os.fdopen(fd, "wb", buffering=_BUFFER_BYTES)

    def _close_part(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def folder_bytes(directory: Path) -> int:
    """Bytes of all files directly in a folder."""
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))


def fsync_directory(directory: Path) -> None:
    """Make renames in it survive a crash."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(letter: DeadLetter, refused: RefusedFile) -> bytes:
    """One JSON object; what is not known is left out, bytes that are not UTF-8 are base64."""
    entry: dict[str, Any] = {
        "reason": refused.reason,
        "detail": refused.detail,
        "object_key": str(refused.sealed.key),
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "span": letter.span,
        "timestamp_ms": letter.timestamp_ms,
        "is_line": letter.is_line or None,
    }
    entry = {name: value for name, value in entry.items() if value is not None}
    if letter.key is not None:
        entry |= _text_or_base64("key", letter.key)
    if letter.headers:
        entry["headers"] = [_header(name, value) for name, value in letter.headers]
    entry |= _text_or_base64("value", letter.value)
    return msgspec.json.encode(entry) + b"\n"


def _header(name: str, value: bytes | None) -> dict[str, str | None]:
    return {"key": name, "value": None} if value is None else {"key": name, **_text_or_base64("value", value)}


def _text_or_base64(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
