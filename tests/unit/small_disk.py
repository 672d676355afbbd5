"""A real file system of a few megabytes, so that a full disk is a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size_bytes: int, options: str = "") -> Iterator[Path]:
    """A tmpfs mounted at `path`; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},{options}".rstrip(","), "tmpfs", str(path)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, leave_bytes: int = 0) -> Path:
    """Fill the file system with one file, but for about `leave_bytes`; returns the file."""
    ballast = path / "ballast"
    disk = os.statvfs(path)
    with open(ballast, "wb", buffering=0) as file:
        left = disk.f_bavail * disk.f_frsize - leave_bytes
        while left > 0:
            try:
                left -= file.write(bytes(min(left, 65536)))
            except OSError:
                break
    return ballast
