"""One flush for everything that has changed on a file system, where its answer can be relied on.

syncfs(2) writes back the data, names and folders of all files at once, which for many small ones costs
a small part of an fsync each. Three things about it are delicate. Not every kernel and file system
reports what it could not write. An error is reported once to each descriptor that was open before it:
so the descriptor here is open from the start on, and after an error nothing is flushed this way any more,
because files that were lost then may come to be flushed later. And a journal that has failed may have
nothing left to flush, and say that all is well: so something is made after each flush, which it refuses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

TRUSTED = frozenset({"ext4", "xfs", "btrfs", "tmpfs"})
"""Types that flush through to the disk and tell what failed. Not so overlayfs (which may flush less), FUSE
and network file systems, and ext2 (which leaves the disk's own cache alone)."""

KERNEL_MIN = (5, 17)
"""Since 5.8 syncfs tells of data that could not be written, since 5.17 of a journal that could not."""

SHORTAGES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Why nothing can be made on a file system that is as it should be."""


class FileSystemFlush:
    """Flushes the file system that a descriptor lies on; takes the descriptor over. Made by `of_folder`.

    `times` is how often in a row: twice where the first leaves something in the disk's own cache.
    """

    def __init__(self, fd: int, syncfs: Callable[[int], int], times: int = 1) -> None:
        self._fd = fd
        self._syncfs = syncfs
        self._times = times
        self._busy = threading.Lock()
        self._closed = False
        self.usable = True
        """False for good after an error."""
        self.device = os.fstat(fd).st_dev

    @classmethod
    def of_folder(cls, folder: Path) -> FileSystemFlush | None:
        """For the file system of `folder`; None where its flush cannot be relied on, or nothing is there.

        Only what is written after this call is sure to have its errors told.
        """
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None or _kernel() < KERNEL_MIN:
            return None
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        kind = file_system_type(fd)
        if kind not in TRUSTED:
            os.close(fd)
            return None
        return cls(fd, syncfs, flush_times(kind, os.fstat(fd).st_dev))

    def flush(self) -> None:
        """Everything that was written before the call survives a power cut after it. Raises OSError."""
        with self._busy:
            if self._closed or not self.usable:
                raise OSError(f"file system {self.device} is not flushed as a whole any more")
            for _ in range(self._times):
                if self._syncfs(self._fd) != 0:
                    self.usable = False
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
            self._require_working()

    def _require_working(self) -> None:
        """A journal that failed at any time until now takes nothing new, whatever the flush has said."""
        try:
            os.close(os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
        except OSError as error:
            self.usable = error.errno in SHORTAGES
            raise

    def close(self) -> None:
        """Give the descriptor back. A flush that hangs keeps it, so that its number is not used again."""
        if self._busy.acquire(blocking=False):
            if not self._closed:
                os.close(self._fd)
            self._closed = True
            self._busy.release()


def file_system_type(fd: int) -> str:
    """As the mount table calls it, such as `ext4`; empty where it does not tell."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
            mount = re.search(r"^mnt_id:\s*(\d+)$", file.read(), re.MULTILINE)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if mount and line.split(" ", 1)[0] == mount[1]:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except OSError:
        pass
    return ""


def flush_times(kind: str, device: int) -> int:
    """2 for an ext4 without a journal, or of which that is not known, else 1.

    Without one the kernel has the disk empty its cache first and writes folders and inodes last.
    """
    if kind != "ext4":
        return 1
    try:
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        with open(f"/sys/fs/ext4/{name}/journal_task", encoding="ascii") as file:
            return 1 if file.read().strip().isdigit() else 2
    except OSError:
        return 2


def _kernel() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
