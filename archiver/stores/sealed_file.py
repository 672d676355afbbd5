"""Reading a sealed file for an upload: checked against what was sealed ([D10]), in bounded pieces."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from isal import isal_zlib

from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, StoreError, TransientStoreError

T = TypeVar("T")

READ_BYTES = 256 * 1024
"""One read while a checksum is computed: what one attempt holds of a file at a time."""

_BUSY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@contextmanager
def open_sealed(sealed: SealedFile) -> Iterator[int]:
    """A read-only descriptor of the sealed file, which has the size that was sealed.

    Raises `DamagedFileError` where it is gone, has another size or cannot be opened, and
    `TransientStoreError` where the process is out of descriptors or memory.
    """
    try:
        fd = os.open(sealed.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _reading_failed(sealed, error) from error
    try:
        size = os.fstat(fd).st_size
        if size != sealed.size:
            raise DamagedFileError(f"{sealed.path} has {size} bytes, {sealed.size} were sealed")
        yield fd
    finally:
        os.close(fd)


def verify_sealed(sealed: SealedFile) -> None:
    """Read the whole file; raises as `open_sealed`, and `DamagedFileError` where its CRC32 is another."""
    with open_sealed(sealed) as fd:
        verify_open(fd, sealed)


def verify_open(fd: int, sealed: SealedFile) -> None:
    """As `verify_sealed`, for a descriptor that is open already."""
    found = range_crc32(fd, 0, sealed.size, sealed)
    if found != sealed.checksums.crc32:
        raise DamagedFileError(
            f"{sealed.path} has CRC32 {found:08x}, {sealed.checksums.crc32:08x} was sealed"
        )


def read_range(fd: int, offset: int, length: int, sealed: SealedFile) -> Iterator[bytes]:
    """The bytes of a range in pieces of at most `READ_BYTES`; `DamagedFileError` where it ends early."""
    end = offset + length
    while offset < end:
        try:
            piece = os.pread(fd, min(READ_BYTES, end - offset), offset)
        except OSError as error:
            raise _reading_failed(sealed, error) from error
        if not piece:
            raise DamagedFileError(f"{sealed.path} ends at byte {offset}, {sealed.size} were sealed")
        offset += len(piece)
        yield piece


def range_crc32(fd: int, offset: int, length: int, sealed: SealedFile) -> int:
    """CRC32 of a range of the file."""
    crc = 0
    for piece in read_range(fd, offset, length, sealed):
        crc = isal_zlib.crc32(piece, crc)
    return crc


def _reading_failed(sealed: SealedFile, error: OSError) -> DamagedFileError | TransientStoreError:
    """A file of our own spool that cannot be read back is as good as gone: a restart reads it again."""
    detail = f"{sealed.path}: {error.strerror}"
    if error.errno in _BUSY:
        return TransientStoreError("local_limit", detail)
    return DamagedFileError(detail)


class SealedBody(io.RawIOBase):
    """A range of an open file as a seekable stream, for an SDK that reads in its own small pieces.

    Nothing of it is held in memory. It reads with `pread`, so that parts of one descriptor can be sent
    at once. It never closes the descriptor.
    """

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._at = 0

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        want = min(len(buffer), self._length - self._at)
        if want <= 0:
            return 0
        got = os.preadv(self._fd, [memoryview(buffer)[:want]], self._offset + self._at)
        self._at += got
        return got


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an upload in parts: `number` counts from 1, `offset` and `length` in bytes."""

    number: int
    offset: int
    length: int


def plan_parts(size: int, part_bytes: int, parts_max: int) -> list[Part]:
    """Cut `size` bytes into equal parts (the last may be shorter) of at least `part_bytes`.

    Parts grow in whole MiB where `parts_max` of them would not suffice.
    """
    least = -(-size // parts_max)
    if least > part_bytes:
        part_bytes = -(-least // (1 << 20)) * (1 << 20)
    starts = range(0, size, part_bytes)
    return [Part(n, at, min(part_bytes, size - at)) for n, at in enumerate(starts, 1)]


def in_parallel(parts: Sequence[Part], send: Callable[[Part], T], threads_max: int) -> list[T]:
    """`send` every part, up to `threads_max` at once; results in the parts' order.

    The first `StoreError` stops new parts, waits for those under way (so that an upload can be aborted
    with nothing still arriving) and is raised. Threads are daemons: they never hold up the process's end.
    """
    waiting = deque(enumerate(parts))
    results: dict[int, T] = {}
    failures: list[StoreError] = []

    def run() -> None:
        while waiting and not failures:
            try:
                index, part = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = send(part)
            except StoreError as error:
                failures.append(error)

    threads = [
        threading.Thread(target=run, name=f"upload-part-{n}", daemon=True)
        for n in range(min(threads_max, len(parts)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if len(results) != len(parts):
        raise RuntimeError("a thread that sends parts has died")
    return [results[index] for index in range(len(parts))]
