"""One flush for everything that has changed on a file system, where its answer can be relied on.

syncfs(2) writes back the data, names and folders of all files at once, which for many small ones costs
a small part of an fsync each. Two things about it are delicate. Not every kernel and file system
reports what it could not write. And an error is reported once to each descriptor that was open before it:
so the descriptor here is open from the start on, and after an error nothing is flushed this way any more,
because files that were lost then may come to be flushed later.
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


class FileSystemFlush:
    """Flushes the file system that a descriptor lies on; takes the descriptor over. Made by `of_folder`."""

    def __init__(self, fd: int, syncfs: Callable[[int], int]) -> None:
        self._fd = fd
        self._syncfs = syncfs
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
        if file_system_type(fd) not in TRUSTED:
            os.close(fd)
            return None
        return cls(fd, syncfs)

    def flush(self) -> None:
        """Everything that was written before the call survives a power cut after it. Raises OSError."""
        with self._busy:
            if self._closed or not self.usable:
                raise OSError(f"file system {self.device} is not flushed as a whole any more")
            number = ctypes.get_errno() if self._syncfs(self._fd) != 0 else 0
            if not number and os.fstatvfs(self._fd).f_flag & os.ST_RDONLY:
                number = errno.EROFS  # where an error has made it read-only, nothing is flushed or told
            if number:
                self.usable = False
                raise OSError(number, os.strerror(number))

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


def _kernel() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
