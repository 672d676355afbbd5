"""`file://`: archive files as files, linked to their key so that none is ever replaced ([S2], [S3]).

Each upload is a row of small steps, and a crash between any two of them leaves the key absent or whole:

    same file system    verify, make_dirs, sync_original, link, sync_dir
    another one         the same up to link (refused), copy, sync_copy, compare, link_copy, sync_dir
    a group             verify and make_dirs for each, sync_group, link for each, sync_links

A group is many small files on the spool's file system, which is flushed twice instead of several times a
file. Whatever is unusual about one of them is left to a put of its own.

The caller removes the original afterwards. A file system keeps no metadata, so a taken key is ours only
where it is the same inode, or where this process has tried to link this very file there before.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from archiver.domain.sealed import SealedFile
from archiver.errors import (
    DamagedFileError,
    KeyTakenError,
    RefusedError,
    StoreError,
    TransientStoreError,
)
from archiver.events import CaseInsensitiveStore, Event, GroupFlushFailed
from archiver.ports import Emit, ProbeReport
from archiver.stores.answers import Answer, Heals, Refuses
from archiver.stores.sealed_file import open_sealed, read_range, verify_open
from archiver.stores.syncfs import SHORTAGES, FileSystemFlush

PROBE_NAME = ".dfe-archiver-probe"
PROBE_BYTES = b"dfe-archiver: shows that nothing here is ever replaced; not an archive file\n"
COMPARE_BYTES = 64 * 1024
ATTEMPTS_REMEMBERED_MAX = 10_000
DIRS_REMEMBERED_MAX = 10_000
LEFTOVER_AGE_SECS = 3600

STEPS = (
    "verify",
    "make_dirs",
    "sync_original",
    "link",
    "copy",
    "sync_copy",
    "compare",
    "link_copy",
    "sync_dir",
)
"""Every step of a put, announced to the `step` hook just before it is taken."""

GROUP_STEPS = ("verify", "make_dirs", "sync_group", "link", "sync_links")
"""The same of a group; the first two are taken for one file after the other, and so is the link."""

GROUP_FILES_MAX = 256
"""More make each file a little cheaper, and the first one wait longer."""

ERRORS: dict[int, Answer] = {
    errno.ENOSPC: Heals("no_space", way_out="free some space on the archive's file system"),
    errno.EDQUOT: Heals("quota", way_out="raise the quota on the archive's file system"),
    errno.EROFS: Heals("read_only", way_out="mount the archive's file system writable"),
    errno.EACCES: Heals("access_denied", way_out="give this user write access to the archive"),
    errno.EPERM: Heals("access_denied", way_out="the archive needs a file system with hard links"),
    errno.EOPNOTSUPP: Heals("no_hard_links", way_out="the archive needs a file system with hard links"),
    errno.EMLINK: Heals("no_hard_links", whole_store=False),
    errno.EIO: Heals("io"),
    errno.ENOENT: Heals("missing_directory", whole_store=False),
    errno.ENOTDIR: Heals("not_a_directory", whole_store=False, way_out="a file is where a folder belongs"),
    errno.EEXIST: Heals("not_a_directory", whole_store=False, way_out="a file is where a folder belongs"),
    errno.ELOOP: Heals("not_a_directory", whole_store=False),
    errno.EMFILE: Heals("local_limit", way_out="raise the limit of open files"),
    errno.ENFILE: Heals("local_limit", way_out="raise the limit of open files"),
    errno.ENOMEM: Heals("local_limit"),
    errno.ESTALE: Heals("network"),
    errno.ETIMEDOUT: Heals("network"),
    errno.EHOSTDOWN: Heals("network"),
    errno.ENOTCONN: Heals("network"),
    errno.ENAMETOOLONG: Refuses("key_invalid"),
    errno.EILSEQ: Refuses("key_invalid"),
    errno.EFBIG: Refuses("too_large"),
}
_OTHER: Answer = Heals("io")

_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""How a file system or kernel without O_TMPFILE answers."""

_NO_SEGMENT = frozenset({"", ".", ".."})

_LEFTOVER = re.compile(r"\.[0-9a-f]{4,}\.tmp\Z")


def _no_step(name: str) -> None:
    del name


def _no_emit(event: Event) -> None:
    del event


class FileStore:
    """`ports.Store` on a local or mounted file system, everything under `root`.

    `step` is called with the name of each step before it is taken; tests stop or fail there.
    `unnamed_copies` false forces the named `.tmp` of file systems without `O_TMPFILE`. `spool` is where
    sealed files lie: known before anything is written there, it lets files be put in groups.
    """

    def __init__(
        self,
        root: Path,
        *,
        emit: Emit = _no_emit,
        step: Callable[[str], None] = _no_step,
        unnamed_copies: bool = True,
        spool: Path | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._emit = emit
        self._step = step
        self._unnamed = unnamed_copies and os.path.isdir("/proc/self/fd")
        self._wall = wall
        self._lock = threading.Lock()
        self._attempted: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._durable_dirs: set[str] = set()
        self._flush = FileSystemFlush.of_folder(spool) if spool else None

    # --- Store --------------------------------------------------------------------------------

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """See `ports.Store.put`. `metadata` has no place on a file system and is not kept."""
        del metadata
        target = self._target(key)
        with self._translated(f"{target}"), open_sealed(sealed) as fd:
            self._step("verify")
            verify_open(fd, sealed)
            self._step("make_dirs")
            folder = os.path.dirname(target)
            self._make_dirs(folder)
            if not self._link_original(fd, sealed, key, target):
                self._copy(fd, sealed, key, Path(target))
            self._step("sync_dir")
            _sync_dir(folder)
            self._require_working(folder)

    @property
    def group_max(self) -> int:
        """See `ports.GroupStore`: 0 where the file system cannot be flushed as a whole."""
        return GROUP_FILES_MAX if self._flush is not None and self._flush.usable else 0

    def put_group(self, files: Sequence[tuple[SealedFile, str]]) -> list[bool]:
        """See `ports.GroupStore.put_group`."""
        durable = [False] * len(files)
        flush = self._flush
        if flush is None or not flush.usable:
            return durable
        made: set[str] = set()
        targets = [self._prepare(sealed, key, flush.device, made) for sealed, key in files]
        if not any(targets) or not self._flushed(flush, "sync_group"):
            return durable
        linked = [
            target is not None and self._link_of_group(flush, sealed, target)
            for (sealed, _), target in zip(files, targets, strict=True)
        ]
        if not any(linked) or not self._flushed(flush, "sync_links"):
            return durable
        if all(linked):  # otherwise one of the folders may be on another file system
            self._remember_dirs(made)
        return linked

    def probe(self) -> ProbeReport:
        """See `ports.Store.probe`; also looks whether the file system ignores case ([K5])."""
        target = self._root / PROBE_NAME
        with self._translated(f"{target}"):
            self._make_dirs(str(self._root))
            refused = [not self._put_probe(target) for _ in range(2)][-1]
            _sync_dir(str(self._root))
            ignores_case = _same_file(target, self._root / PROBE_NAME.upper())
        if ignores_case:
            self._emit(CaseInsensitiveStore(path=str(self._root)))
        return ProbeReport(create_only=refused, detail=f"files under {self._root} are linked, never replaced")

    def close(self) -> None:
        """Give back the one descriptor that is held between calls."""
        if self._flush is not None:
            self._flush.close()

    def remove_leftovers(self) -> int:
        """Remove copies that a crash left behind an hour ago or earlier ([S2]); returns how many.

        Only names that end like ours do, `.<hex>.tmp`. Walks the whole archive, so it belongs in the
        background; errors end it quietly, since it is tried again at the next start.
        """
        removed = 0
        oldest = self._wall() - LEFTOVER_AGE_SECS
        for folder, _, names in os.walk(self._root):
            for name in names:
                if _LEFTOVER.search(name) and _remove_older(os.path.join(folder, name), oldest):
                    removed += 1
        return removed

    def remove_leftovers_in_background(self) -> threading.Thread:
        """`remove_leftovers` on a thread that never holds up the process's end."""
        thread = threading.Thread(target=self.remove_leftovers, name="archive-leftovers", daemon=True)
        thread.start()
        return thread

    # --- paths --------------------------------------------------------------------------------

    def _target(self, key: str) -> str:
        """The file for a key; a key that could leave the archive is refused, whoever made it ([K5])."""
        segments = key.split("/")
        if "\0" in key or not _NO_SEGMENT.isdisjoint(segments):
            raise RefusedError("key_invalid", f"{key!r} is not a path below the archive")
        return os.path.join(self._root, key)

    def _make_dirs(self, folder: str) -> None:
        """Make `folder` and what is above it, each entry durable before it is relied on."""
        if folder in self._durable_dirs:
            return
        above = os.path.dirname(folder)
        if folder != above:
            if folder == str(self._root):
                os.makedirs(above, exist_ok=True)
            else:
                self._make_dirs(above)
        # Another thread may have made it and not synced it yet, so an existing one is synced too.
        _make_dir(folder)
        _sync_dir(above)
        self._remember_dirs([folder])

    def _remember_dirs(self, folders: Collection[str]) -> None:
        if len(self._durable_dirs) + len(folders) > DIRS_REMEMBERED_MAX:
            self._durable_dirs.clear()
        self._durable_dirs.update(folders)

    # --- steps of a group ---------------------------------------------------------------------

    def _prepare(self, sealed: SealedFile, key: str, device: int, made: set[str]) -> str | None:
        """Check one file of a group and make its folder; where to link it, None where it is put alone."""
        with suppress(OSError, StoreError):
            target = self._target(key)
            self._step("verify")
            with open_sealed(sealed) as fd:
                if os.fstat(fd).st_dev != device:
                    return None
                verify_open(fd, sealed)
            self._step("make_dirs")
            folder = os.path.dirname(target)
            if folder not in made and folder not in self._durable_dirs:
                _make_chain(folder)
                made.add(folder)
            return target
        return None

    def _link_of_group(self, flush: FileSystemFlush, sealed: SealedFile, target: str) -> bool:
        try:
            self._step("link")
            os.link(sealed.path, target, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EXDEV:
                flush.usable = False  # the archive is on another file system than the spool
            elif error.errno == errno.ENOENT:
                self._durable_dirs.clear()  # somebody removes folders
            return False
        return True

    def _flushed(self, flush: FileSystemFlush, step: str) -> bool:
        try:
            self._step(step)
            flush.flush()
        except OSError as error:
            if error.errno is not None:  # else nothing is flushed as a whole any more, which is no error
                self._emit(GroupFlushFailed(detail=error.strerror or str(error)))
            return False
        return True

    # --- steps of one file --------------------------------------------------------------------

    def _link_original(self, fd: int, sealed: SealedFile, key: str, target: str) -> bool:
        """Link the sealed file itself; False where the archive is on another file system."""
        self._step("sync_original")
        _sync_original(fd, sealed)
        self._step("link")
        try:
            os.link(sealed.path, target, follow_symlinks=False)
        except FileExistsError:  # the kernel looks at the key before it compares file systems
            self._check_ours(fd, sealed, key, target)
        except FileNotFoundError:
            if not sealed.path.exists():
                raise DamagedFileError(f"{sealed.path} vanished while it was linked") from None
            raise
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return False
        return True

    def _copy(self, fd: int, sealed: SealedFile, key: str, target: Path) -> None:
        """Copy, fsync, compare, link: for an archive on another file system than the spool."""
        self._step("copy")
        with self._staged(target, sealed.key.writer_id, os.fstat(fd).st_mode) as (copy, source):
            for piece in read_range(fd, 0, sealed.size, sealed):
                _write_all(copy, piece)
            self._step("sync_copy")
            os.fsync(copy)
            self._step("compare")
            if not _same_bytes(fd, copy, sealed.size):
                raise TransientStoreError(
                    "integrity", f"the copy for {target} differs from {sealed.path}", whole_store=False
                )
            self._step("link_copy")
            try:
                _link(source, target)
            except FileExistsError:
                # Over NFS a link whose answer was lost is sent again and then finds itself.
                if not os.path.samestat(os.fstat(copy), os.lstat(target)):
                    self._check_ours(fd, sealed, key, str(target))
            except OSError:
                self._remember_attempt(sealed.file_id, key)
                raise
            self._remember_attempt(sealed.file_id, key)

    def _require_working(self, folder: str) -> None:
        """Raise OSError where the journal has failed: what it lost is still seen, in a link of an earlier
        attempt too, and the kernel may say of it that it is flushed. But nothing new can be made there.
        """
        try:
            unnamed = self._open_unnamed(Path(folder), stat.S_IRUSR)
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            return
        if unnamed is not None:
            os.close(unnamed)

    def _check_ours(self, fd: int, sealed: SealedFile, key: str, target: str) -> None:
        """Return where the taken key holds this very file, else `KeyTakenError`.

        Equal bytes alone prove nothing, since two files may hold the same records and both must be
        archived: only a copy that this process has tried to link there before counts by its bytes.
        """
        if os.path.samestat(os.fstat(fd), os.lstat(target)):
            return
        with self._lock:
            attempted = (sealed.file_id, key) in self._attempted
        if not (attempted and _holds_bytes_of(target, fd, sealed.size)):
            raise KeyTakenError(f"{target} holds another writer's file")

    def _remember_attempt(self, file_id: int, key: str) -> None:
        with self._lock:
            self._attempted[file_id, key] = None
            self._attempted.move_to_end((file_id, key))
            if len(self._attempted) > ATTEMPTS_REMEMBERED_MAX:
                self._attempted.popitem(last=False)

    def _put_probe(self, target: Path) -> bool:
        """Put the reserved file; False where it was refused because it is there."""
        with self._staged(target, "0000", 0o644) as (copy, source):
            _write_all(copy, PROBE_BYTES)
            os.fsync(copy)
            try:
                _link(source, target)
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _staged(self, target: Path, writer_id: str, mode: int) -> Iterator[tuple[int, str | int]]:
        """A new file in the target's folder: its descriptor, and what to link (descriptor or `.tmp` path).

        Without a name where the file system can, so that a crash leaves nothing behind.
        """
        permissions = stat.S_IMODE(mode)
        copy = self._open_unnamed(target.parent, permissions)
        if copy is not None:
            try:
                yield copy, copy
            finally:
                os.close(copy)
            return
        path = target.parent / f"{target.name}.{writer_id}{secrets.token_hex(4)}.tmp"
        copy = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, permissions)
        try:
            yield copy, str(path)
        finally:
            os.close(copy)
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _open_unnamed(self, folder: Path, permissions: int) -> int | None:
        if not self._unnamed:
            return None
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, permissions)
        except OSError as error:
            if error.errno in _NO_UNNAMED and folder.is_dir():
                return None
            raise

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Foreign errors become ours here and nowhere else."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._durable_dirs.clear()  # somebody removes folders: make and sync them anew
            raise _translate(error, what) from error


def _translate(error: OSError, what: str) -> StoreError:
    return ERRORS.get(error.errno or 0, _OTHER).error(f"{what}: {error.strerror or error}")


def _make_dir(folder: str) -> None:
    try:
        os.mkdir(folder)
    except OSError:
        if not os.path.isdir(folder):
            raise


def _make_chain(folder: str) -> None:
    """As `os.makedirs`, in one call where only the last is missing; a file in its place is left to `link`."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        above = os.path.dirname(folder)
        if above == folder:
            raise
        _make_chain(above)
        _make_dir(folder)


def _sync_original(fd: int, sealed: SealedFile) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # After a failed fsync the kernel may call the lost pages clean: a second one proves nothing.
        raise DamagedFileError(f"{sealed.path} could not be flushed: {error.strerror}") from error


def _sync_dir(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _link(source: str | int, target: Path) -> None:
    if isinstance(source, int):
        # src_dir_fd makes Python call linkat with AT_SYMLINK_FOLLOW, which a file without a name needs.
        os.link(f"/proc/self/fd/{source}", target, src_dir_fd=source, follow_symlinks=True)
    else:
        os.link(source, target)


def _same_bytes(left: int, right: int, size: int) -> bool:
    """Whether two files are `size` long and equal, read in 64 KiB pieces."""
    if os.fstat(left).st_size != size or os.fstat(right).st_size != size:
        return False
    for at in range(0, size, COMPARE_BYTES):
        if os.pread(left, COMPARE_BYTES, at) != os.pread(right, COMPARE_BYTES, at):
            return False
    return True


def _holds_bytes_of(target: str, fd: int, size: int) -> bool:
    try:
        there = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _same_bytes(fd, there, size)
    finally:
        os.close(there)


def _same_file(left: Path, right: Path) -> bool:
    try:
        return os.path.samefile(left, right)
    except FileNotFoundError:
        return False


def _remove_older(path: str, oldest: float) -> bool:
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_mtime <= oldest:
            os.unlink(path)
            return True
    return False
