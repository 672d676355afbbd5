"""The spool directory: one process at a time, its layout, its free space, and what a crash left in it.

<spool_dir>/.lock      held while a process uses the spool [B5]
<spool_dir>/open/      files that grow, and the labels of all files (see `labels`)
<spool_dir>/uploads/   sealed files that wait for the store
<spool_dir>/dlq/       dead letters, never touched here
<spool_dir>/refused/   files that the store refuses for good, never touched here
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from archiver.codecs import scan
from archiver.domain.sealed import SealedFile
from archiver.errors import SpoolError, StartError
from archiver.spool.file import FILE_MODE, RunningChecksums, fsync_directory
from archiver.spool.labels import SUFFIX, Label, label_path, read_label

_DIRECTORY_MODE = 0o700
_READ_BYTES = 1024 * 1024
_PROBE_BYTES = 64 * 1024

_WAYS_OUT = {
    errno.ENOSPC: "free some space on its file system or set buffer.spool_dir to another one",
    errno.EDQUOT: "raise the quota or set buffer.spool_dir to another file system",
    errno.EROFS: "its file system is read-only: set buffer.spool_dir to a writable one",
    errno.EACCES: "make it writable for uid {uid} or set buffer.spool_dir to a directory that is",
    errno.EPERM: "make it writable for uid {uid} or set buffer.spool_dir to a directory that is",
    errno.ENOTDIR: "buffer.spool_dir must be a directory",
    errno.EEXIST: "buffer.spool_dir must be a directory",
    errno.ENOLCK: "its file system has no locks: set buffer.spool_dir to a local one",
    errno.EOPNOTSUPP: "its file system has no locks: set buffer.spool_dir to a local one",
}


@dataclass(slots=True)
class Leftovers:
    """What an earlier run left behind.

    `sealed` is to be uploaded, with ids below zero that the pipeline gives to no file; `removed` counts
    deleted files, `set_aside` those moved to `refused/` because their label makes no sense.
    """

    sealed: list[SealedFile] = field(default_factory=list)
    removed: int = 0
    set_aside: int = 0
    cut_bytes: int = 0


class SpoolDirectory:
    """Paths of a spool that this process has to itself; made by `acquire`. Implements `ports.Disk`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open_dir = path / "open"
        self._open_dir = str(self.open_dir)
        self.uploads_dir = path / "uploads"
        self.dlq_dir = path / "dlq"
        self.refused_dir = path / "refused"
        self._lock_fd: int | None = None

    @classmethod
    def acquire(cls, path: Path) -> SpoolDirectory:
        """Create what is missing and take the lock. Raises StartError.

        Writing is not tried yet: on a full disk, removing `leftovers` may be what makes room. Call
        `require_writable` after that.
        """
        directory = cls(path)
        try:
            path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            directory._lock()
            directory._make_layout()
        except OSError as error:
            directory.release()
            raise _start_error(path, error) from error
        return directory

    def _make_layout(self) -> None:
        for inner in (self.open_dir, self.uploads_dir, self.dlq_dir, self.refused_dir):
            inner.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
            if inner.stat().st_mode & 0o077:
                # Records are nobody else's business; a directory of another user is theirs to close.
                with contextlib.suppress(PermissionError):
                    inner.chmod(_DIRECTORY_MODE)

    def _lock(self) -> None:
        lock = self.path / ".lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 300, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise StartError(
                f"{self.path}: the spool is in use by {holder}: stop that process, or give each process "
                "its own buffer.spool_dir"
            ) from error
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The lock holds without its text; whether the disk has room is asked later.

    def release(self) -> None:
        """Let another process have the spool. Idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def require_writable(self) -> None:
        """Write, fsync and remove a small file. Raises StartError: full, read-only, not ours."""
        probe = self.open_dir / f"probe-{os.getpid()}.tmp"
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            try:
                left = _PROBE_BYTES
                while left:
                    left -= os.write(fd, bytes(left))
                os.fsync(fd)
            finally:
                os.close(fd)
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise _start_error(self.path, error) from error

    def free_bytes(self) -> int:
        """Bytes an unprivileged writer may still use. Raises SpoolError: it has gone."""
        try:
            disk = os.statvfs(self.path)
        except OSError as error:
            raise SpoolError(f"{self.path}: the spool has gone: {error.strerror or error}") from error
        return disk.f_bavail * disk.f_frsize

    def remove(self, sealed: SealedFile) -> None:
        """Delete a sealed file and its label; fine where they are gone. Raises OSError."""
        path = os.fspath(sealed.path)
        nonce = os.path.basename(path).partition(".")[0]
        for gone in (path, f"{self._open_dir}/{nonce}{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(gone)

    # --- what a crash left ------------------------------------------------------------------

    def leftovers(self, checksums: frozenset[str] = frozenset()) -> Leftovers:
        """Clear up after an earlier run, before anything new is written [D7]. Raises StartError.

        Files without a label hold offsets that were never committed and are deleted. Labelled ones
        are cut to their last whole frame, fsynced, moved to `uploads/` and returned; where no frame is
        whole they are deleted. Reads every labelled file twice, with bounded memory.
        """
        found = Leftovers()
        try:
            for path in [*self._files(self.uploads_dir), *self._files(self.open_dir)]:
                self._recover(path, checksums, found)
            self._remove_stray_labels()
            for touched in (self.uploads_dir, self.open_dir):
                fsync_directory(touched)
        except OSError as error:
            raise _start_error(self.path, error) from error
        return found

    @staticmethod
    def _files(directory: Path) -> Iterator[Path]:
        """Data files; labels and unfinished writes are no data, and directories are not ours."""
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.suffix not in (SUFFIX, ".tmp"):
                yield path

    def _recover(self, path: Path, checksums: frozenset[str], found: Leftovers) -> None:
        nonce = _nonce(path)
        try:
            label = read_label(self.open_dir, nonce)
        except ValueError:
            path.rename(self.refused_dir / path.name)
            label_path(self.open_dir, nonce).rename(self.refused_dir / (nonce + SUFFIX))
            found.set_aside += 1
            return
        file_id = -1 - len(found.sealed)
        sealed = self._cut(path, label, file_id, checksums, found) if label else None
        if sealed is None:
            path.unlink()
            found.removed += 1
        else:
            found.sealed.append(sealed)

    def _cut(
        self, path: Path, label: Label, file_id: int, checksums: frozenset[str], found: Leftovers
    ) -> SealedFile | None:
        whole = scan(path, label.codec)
        found.cut_bytes += path.stat().st_size - whole.end
        if not whole.end:
            return None
        running = RunningChecksums(checksums)
        with open(path, "r+b") as file:
            file.truncate(whole.end)
            while piece := file.read(_READ_BYTES):
                running.update(piece)
            os.fsync(file.fileno())
        target = self.uploads_dir / path.name
        path.rename(target)
        return SealedFile(
            file_id=file_id,
            path=target,
            key=label.key,
            size=whole.end,
            checksums=running.result(),
            records=whole.lines,
            raw_bytes=whole.raw_bytes,
            codec=label.codec.name,
            nonce=label.nonce,
        )

    def _remove_stray_labels(self) -> None:
        """Labels without a file, and writes that never finished."""
        waiting = {_nonce(path) for path in self.uploads_dir.iterdir()}
        for path in self.open_dir.iterdir():
            if path.suffix == ".tmp" or path.stem not in waiting:
                path.unlink()
        for path in self.uploads_dir.glob("*.tmp"):
            path.unlink()


def _nonce(path: Path) -> str:
    return path.name.partition(".")[0]


def _start_error(path: Path, error: OSError) -> StartError:
    way_out = _WAYS_OUT.get(error.errno or 0, "buffer.spool_dir names the directory").format(uid=os.geteuid())
    where = f" at {error.filename}" if error.filename else ""
    return StartError(f"{path}: the spool cannot be used: {error.strerror or error}{where}: {way_out}")
