"""What was measured on, and whether others used the machine meanwhile."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUSY_CORES_MAX = 0.15
"""More than this many cores used by others before a run, or while it lasts, and it does not count."""

ROUNDING_SECS = 0.05
"""The kernel counts CPU in ticks of 10 ms: over a run of milliseconds a tick or two look like a crowd."""

LOOK_SECS = 1.0
QUIET_TIMEOUT_SECS = 60.0

_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
_PACKAGES = ("confluent-kafka", "msgspec", "zstandard", "lz4", "isal", "cramjam", "boto3")


class BusyError(Exception):
    """Others used the machine: figures taken now would be theirs as much as ours."""


@dataclass(frozen=True)
class Machine:
    """Enough to judge whether figures can be compared."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    packages: Mapping[str, str]

    def as_dict(self) -> dict[str, object]:
        """For the result file."""
        return asdict(self)


def describe() -> Machine:
    """This machine."""
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
    )


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


# --- who uses the machine -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Usage:
    at: float
    everybody: float
    ours: float


class Others:
    """CPU that processes other than this one and its descendants use, in cores.

    `begin` and then `cores` bracket a run. Time in interrupts is nobody's: it comes with our own traffic.
    """

    def __init__(self, *, force: bool = False, max_cores: float = BUSY_CORES_MAX) -> None:
        self.force = force
        self.max_cores = max_cores
        self._began = _usage()

    def begin(self) -> None:
        """From here on."""
        self._began = _usage()

    def cores(self) -> float:
        """Cores that others used since `begin`, on average."""
        now = _usage()
        secs = max(now.at - self._began.at, 1e-9)
        used = (now.everybody - self._began.everybody) - (now.ours - self._began.ours)
        return max(0.0, used - ROUNDING_SECS) / secs

    def busy(self, cores: float) -> bool:
        """Whether that is more than a run may meet; never with `force`."""
        return cores > self.max_cores and not self.force

    def wait_until_quiet(self, timeout_secs: float = QUIET_TIMEOUT_SECS) -> None:
        """Look for a second, again until others are quiet. `BusyError` after `timeout_secs`."""
        deadline = time.monotonic() + timeout_secs
        while True:
            self.begin()
            time.sleep(LOOK_SECS if not self.force else 0.2)
            cores = self.cores()
            if not self.busy(cores):
                return
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"others use {cores:.2f} cores, more than {self.max_cores}, for {timeout_secs:.0f} s: "
                    "wait for a quiet machine, or FORCE=1 to measure all the same"
                )


def _usage() -> _Usage:
    fields = [int(word) for word in _read("/proc/stat").split("\n", 1)[0].split()[1:]]
    user, nice, system, steal = fields[0], fields[1], fields[2], fields[7]  # guest time is within user
    everybody = (user + nice + system + steal) / _TICKS_PER_SEC
    return _Usage(time.monotonic(), everybody, _tree_cpu_secs())


def _tree_cpu_secs() -> float:
    """CPU of this process and its descendants; the dead ones count through their parents."""
    children: dict[int, list[int]] = {}
    cpu: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        words = _read(f"/proc/{entry.name}/stat").rpartition(") ")[2].split()
        if len(words) < 15:
            continue  # it ended meanwhile
        pid = int(entry.name)
        children.setdefault(int(words[1]), []).append(pid)
        cpu[pid] = sum(map(int, words[11:15])) / _TICKS_PER_SEC
    total, due = 0.0, [os.getpid()]
    while due:
        pid = due.pop()
        total += cpu.get(pid, 0.0)
        due += children.get(pid, [])
    return total


# --- single processes ---------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        found += tree(int(child))
    return found


def cpu_secs(pid: int) -> float:
    """CPU that a process has used so far, its dead children's included."""
    words = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    return sum(map(int, words[11:15])) / _TICKS_PER_SEC if len(words) >= 15 else 0.0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it has ended."""
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ProcessLookupError):
        return ""


if sys.platform != "linux":  # pragma: no cover
    raise SystemExit("the benchmarks read /proc and so need Linux")
