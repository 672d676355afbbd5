"""One server of a test as a process group: started, waited for, frozen, killed, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_SECS = 0.05
TAIL_BYTES = 4_000

PATIENCE = 5
"""Tests say how long a wait takes at most on an idle machine; this is how many times as long it may take.

A machine may be slow or busy. Only a test that fails waits for so long.
"""

SLACK_SECS = 10
"""What may be added to a duration that a test bounds: more than scheduling takes away on a busy machine."""

PORTS = range(10_000, 32_000)
"""Below the range from which Linux takes the ports of outgoing connections: one of those could otherwise sit
on a server's port while that is down, and a client that tries again and again could even reach itself."""

_running: dict[int, Server] = {}
_claims: list[socket.socket] = []


class ServerError(Exception):
    """A server did not start, did not get ready or did not stop; the text ends with the tail of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on and that no running test process has been given."""
    for port in random.SystemRandom().sample(PORTS, 1_000):
        if _claim(port) and _bindable(port):
            return port
    raise ServerError("no free port found")


def _claim(port: int) -> bool:
    """Whether it is ours from now on: a name that only one process can hold, gone with that process."""
    if sys.platform != "linux":
        return True  # there are no such names
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dfe-archiver-tests-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _bindable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", port))
        return True
    return False


def port_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody accepts connections there; the usual `ready` of a server."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def wait_until(condition: Callable[[], object], timeout_secs: float, what: str = "the condition") -> None:
    """Poll until `condition()` is true; `TimeoutError` that names `what` after `PATIENCE * timeout_secs`."""
    asked = time.monotonic()
    deadline = asked + PATIENCE * timeout_secs
    while not condition():
        answered = time.monotonic()
        if answered > deadline:
            raise TimeoutError(f"{what} did not come true within {PATIENCE * timeout_secs} s")
        # a question that costs much is asked less often: who is asked needs the processor too
        time.sleep(max(POLL_SECS, 2 * (answered - asked)))
        asked = time.monotonic()


class Server:
    """A child process in a process group of its own, its output appended to `<log_dir>/<name>.log`.

    `env` is added to this process's environment. `ready` is polled after `start` until it is true; an
    exception of kind `OSError` from it means "not yet". Usable as a context manager, startable again
    after `stop` or `kill`. Signals go to the whole group, so that wrappers take their children along.
    However this process ends, its servers are killed: a `_Warden` sees to it where nobody else can.
    Waits for `ready` and for an end last up to `PATIENCE` times as long as said.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | os.PathLike[str]],
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready: Callable[[], bool] = lambda: True,
        ready_timeout_secs: float = 30,
    ) -> None:
        self.name = name
        self.argv = [os.fspath(argument) for argument in argv]
        self.env = dict(env or {})
        self.cwd = cwd
        self.ready = ready
        self.ready_timeout_secs = ready_timeout_secs
        self.log_path = log_dir / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start and wait until ready; `ServerError` with the log's tail where it does not get there."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start without waiting for `ready`."""
        if self.running:
            raise ServerError(f"{self.name} runs already, pid {self.pid}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                cwd=self.cwd,
                start_new_session=True,
            )
        _running[self._process.pid] = self
        _warden.watch(self._process.pid)

    def wait_ready(self, timeout_secs: float | None = None) -> None:
        """Wait until `ready()` is true; a server that does not get there is killed."""
        timeout_secs = self.ready_timeout_secs if timeout_secs is None else timeout_secs
        timeout_secs *= PATIENCE
        deadline = time.monotonic() + timeout_secs
        while not self._is_ready():
            if not self.running:
                raise self.error(f"ended with status {self.returncode} before it was ready")
            if time.monotonic() > deadline:
                self.kill()
                raise self.error(f"was not ready after {timeout_secs} s")
            time.sleep(POLL_SECS)

    def _is_ready(self) -> bool:
        try:
            return self.ready()
        except OSError:
            return False

    def stop(self, timeout: float = 10) -> int | None:
        """SIGTERM, then SIGKILL after `timeout` seconds. Returns the exit status; None if never started."""
        if self._process is None:
            return None
        self.thaw()
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return self.kill()
        return self._gone()

    def kill(self) -> int | None:
        """SIGKILL to the whole group, at once. Returns the exit status; None if never started."""
        if self._process is None:
            return None
        self.signal(signal.SIGKILL)
        self._process.wait()
        return self._gone()

    def freeze(self) -> None:
        """SIGSTOP: it keeps its sockets and does nothing until `thaw`. Returns once every thread stands."""
        self.signal(signal.SIGSTOP)
        wait_until(self._stands, 10, f"{self.name} stopping at SIGSTOP")

    def _stands(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(") ")[2].startswith(("T", "Z", "X")) for stat in threads)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the group; nothing happens where it is gone."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _gone(self) -> int | None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # children that outlived their leader
        if _running.pop(self._process.pid, None) is not None:
            _warden.forget(self._process.pid)
        return self._process.returncode

    def wait(self, timeout: float) -> int:
        """Wait for it to end by itself. Returns the exit status; `ServerError` if it does not."""
        if self._process is None:
            raise self.error("was never started")
        try:
            self._process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            raise self.error(f"still ran after {PATIENCE * timeout} s") from None
        status = self._gone()
        assert status is not None
        return status

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended (a frozen one runs)."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or before the first start."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        if self._process is None:
            raise self.error("was never started")
        return self._process.pid

    def output(self) -> str:
        """Everything written to stdout and stderr so far, over all starts."""
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def tail(self) -> str:
        """The end of `output()`."""
        return self.output()[-TAIL_BYTES:]

    def error(self, what: str) -> ServerError:
        """An error that shows what was run and how its log ends."""
        return ServerError(
            f"{self.name} {what}\n  argv: {self.argv}\n  log ({self.log_path}) ends:\n{self.tail()}"
        )

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Warden:
    """A process that kills the groups it was told of once this process is gone, however it went.

    Linux could send a signal at the parent's death by itself, but not to a server that changes its user, not
    to a server's children, and it would send it at the end of the thread that had started the server.
    """

    PROGRAM = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """Kill this process group, too."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It has ended."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        if self._process is None:
            # a session of its own: what is sent to the terminal's processes must not reach it
            argv = [sys.executable, "-I", "-S", "-c", self.PROGRAM]
            self._process = subprocess.Popen(
                argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


_warden = _Warden()


@atexit.register
def _stop_all() -> None:
    for server in list(_running.values()):
        server.kill()
