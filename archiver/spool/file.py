"""One growing archive file: whole frames, their checksums, and a way back from a failed write.

Used by one thread. What is on disk beyond `size` is a torn frame, which is cut off before anything
else is written and before the file is sealed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
from isal import isal_zlib

from archiver.domain.sealed import Checksums
from archiver.errors import SpoolError
from archiver.native import native

FILE_MODE = 0o600
CHECKSUMS = frozenset({"crc32", "crc32c", "md5"})
"""The checksums that can be asked for; CRC-32 is computed in any case."""

_HEALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})


def is_no_space(error: Exception) -> bool:
    """Whether waiting for room can help: on the disk, in the quota, or in the table of file handles,
    which connections of others may have filled."""
    return isinstance(error, OSError) and error.errno in _HEALS


def fsync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RunningChecksums:
    """Checksums of bytes as they come. `wanted` is any of `CHECKSUMS`."""

    __slots__ = ("_crc32", "_crc32c", "_md5")

    def __init__(self, wanted: frozenset[str] = frozenset()) -> None:
        self._crc32 = 0
        self._crc32c = 0 if "crc32c" in wanted else None
        self._md5 = hashlib.md5(usedforsecurity=False) if "md5" in wanted else None

    def update(self, data: bytes) -> None:
        self._crc32 = isal_zlib.crc32(data, self._crc32)
        if self._crc32c is not None:
            self._crc32c = google_crc32c.extend(self._crc32c, data)
        if self._md5 is not None:
            self._md5.update(data)

    def result(self) -> Checksums:
        return Checksums(self._crc32, self._crc32c, self._md5.digest() if self._md5 else None)


class SpoolFile:
    """A file under `open/`, created by its first append; later moved to `uploads/` by `seal`.

    `size` counts the bytes of whole frames. `failure` is the first write that failed: after it the
    file takes no more frames, because a later one would overtake the records of the failed one.
    """

    __slots__ = ("_checksums", "_created", "_doubtful", "_fd", "_torn", "failure", "path", "size")

    def __init__(self, path: Path, checksums: frozenset[str] = frozenset()) -> None:
        self.path = path
        self.size = 0
        self.failure: OSError | SpoolError | None = None
        self._checksums = RunningChecksums(checksums)
        self._fd: int | None = None
        self._created = False
        self._torn = False
        self._doubtful = False

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    @property
    def is_idle(self) -> bool:
        """Closed, and nothing is wrong with it."""
        return self._fd is None and self.failure is None and not self._torn

    @property
    def is_torn(self) -> bool:
        """Whether something must be cut off before it is sealed."""
        return self._torn

    def append(self, frame: bytes) -> int:
        """Write one whole frame and return the size after it.

        Raises OSError (nothing of the frame counts, see `failure`) or SpoolError where the file on
        disk is not what was written.
        """
        if self.failure is not None:
            raise self.failure
        try:
            self._write(self.open(), frame)
        except (OSError, SpoolError) as error:
            self.failure = error
            raise
        self._count(frame)
        return self.size

    def _count(self, frame: bytes) -> None:
        self._checksums.update(frame)
        self.size += len(frame)

    def _write(self, fd: int, frame: bytes) -> None:
        try:
            written = os.write(fd, frame)
            while written < len(frame):
                # A full disk takes what fits and fails only on the next call.
                written += os.write(fd, memoryview(frame)[written:])
        except OSError:
            self._torn = True
            self._cut(fd)
            raise

    def _cut(self, fd: int) -> None:
        try:
            os.ftruncate(fd, self.size)
        except OSError:
            return  # still torn: cut when it is opened again or sealed
        self._torn = False

    def open(self) -> int:
        """The handle, opened again where it was closed. Raises OSError, SpoolError."""
        if self._fd is not None:
            return self._fd
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if not self._created:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(self.path, flags, FILE_MODE)
        except FileNotFoundError as error:
            if not self._created:
                raise
            raise self._vanished() from error
        self._created = True
        try:
            self._verify(fd)
        except (OSError, SpoolError):
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def _verify(self, fd: int) -> None:
        if self._torn:
            os.ftruncate(fd, self.size)
            self._torn = False
        self._require_size(os.fstat(fd).st_size)

    def _require_size(self, found: int) -> None:
        if found != self.size:
            raise SpoolError(
                f"{self.path}: the open archive file has {found} bytes where {self.size} were written: "
                "something else writes to the spool"
            )

    def close(self) -> None:
        """Give the handle back; appending opens it again. A disk that fails here fails the file."""
        try:
            self._close()
        except OSError as error:
            self.failure = self.failure or error

    def _close(self) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.close(fd)
        except OSError:  # some network disks report only here what they could not write
            self._doubtful = True
            raise

    def seal(self, uploads: Path, *, fsync: bool) -> Checksums:
        """Close for good and move to `uploads`; with `fsync`, in a way that survives a power cut.

        Raises OSError or SpoolError and leaves the file such that sealing can be asked again.
        """
        if self.size == 0:
            raise SpoolError(f"{self.path}: there is no frame in it to seal")
        if fsync or self._torn or self._fd is not None:
            self._verify(self.open())
        else:
            self._require_size(self._size_on_disk())
        if self._doubtful:
            # The kernel reports a lost write once and then calls its pages clean: an fsync that
            # succeeds after one that failed proves nothing.
            raise SpoolError(f"{self.path}: an earlier fsync or close failed: what is on disk is unknown")
        if fsync:
            self._fsync(self.open())
        self._close()
        target = uploads / self.path.name
        os.rename(self.path, target)  # does nothing where an earlier attempt got as far as this
        self.path = target
        if fsync:
            fsync_directory(uploads)
        return self._checksums.result()

    def _size_on_disk(self) -> int:
        try:
            return os.lstat(self.path).st_size
        except FileNotFoundError as error:
            raise self._vanished() from error

    def _vanished(self) -> SpoolError:
        return SpoolError(f"{self.path}: the open archive file has vanished from the spool")

    def _fsync(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError:
            self._doubtful = True
            raise

    def _appended_elsewhere(self, frame: bytes, outcome: int, number: int) -> bool:
        """Take in what `append_to_each` has done; whether the frame is in the file."""
        if outcome != _NOT_OPENED:
            self._created = True
        if outcome == _TORN:
            self._torn = True
        if outcome == _NOT_CLOSED:
            self._doubtful = True
            self.failure = OSError(number, os.strerror(number), os.fspath(self.path))
        if outcome in (_APPENDED, _NOT_CLOSED):
            self._count(frame)
            return True
        return False

    def remove(self) -> None:
        """Close and delete it. Raises OSError; a file that is not there is fine."""
        self.close()
        self.path.unlink(missing_ok=True)


_APPENDED, _NOT_OPENED, _SIZE_DIFFERS, _NOT_WRITTEN, _TORN, _NOT_CLOSED = range(6)
"""What `native.append_frames` tells of the last file that it tried."""


def append_to_each(appends: Sequence[tuple[SpoolFile, bytes]]) -> int:
    """Append a frame to each of some files that are closed and have no `failure`; they are closed again.

    Returns how many frames are in their files: all, or those before the first that has failed, and none where
    the compiled part is missing. What has failed is as it was, and `append` tells why when it fails, too.
    """
    if native is None or not appends:
        return 0
    orders = tuple((os.fsencode(file.path), not file._created, file.size, frame) for file, frame in appends)
    tried, last, number = native.append_frames(orders, FILE_MODE)
    done = 0
    for file, frame in appends[:tried]:
        done += file._appended_elsewhere(frame, last if done == tried - 1 else _APPENDED, number)
    return done
