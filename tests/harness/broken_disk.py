"""A disk that breaks under a running process: a library that makes calls on its files fail as told."""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("disk_shim.c")


class BrokenDisk:
    """`env` for the process; `fail` and `mend` while it runs. Skips the test where there is no compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        library = folder / "disk_shim.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True
        )
        self._rules = folder / "disk_faults"
        self.mend()
        self.env = {"LD_PRELOAD": str(library), "DISK_FAULTS": str(self._rules)}

    def fail(self, *calls: str, number: int = errno.EIO, path: str = "/spool/", times: int = -1) -> None:
        """Calls (`open` for writing, `write`, `fsync`, `syncfs`, `ftruncate`, `rename`, `unlink`) on files
        whose path holds `path` fail from now on, each `times` times. Replaces what was told before."""
        text = "".join(f"{call} {number} {path} {times}\n" for call in calls)
        fresh = self._rules.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self._rules)

    def mend(self) -> None:
        """Nothing fails any more."""
        self.fail()
