"""One server of a test as a process group: started, waited for, frozen, killed, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_SECS = 0.05
TAIL_BYTES = 4_000

_running: dict[int, Server] = {}
_given_out: set[int] = set()


class ServerError(Exception):
    """A server did not start, did not get ready or did not stop; the text ends with the tail of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on and that this process has not given out before."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given_out:
            _given_out.add(port)
            return port


def port_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody accepts connections there; the usual `ready` of a server."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def wait_until(condition: Callable[[], object], timeout_secs: float, what: str = "the condition") -> None:
    """Poll until `condition()` is true; `TimeoutError` that names `what` after `timeout_secs`."""
    deadline = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {timeout_secs} s")
        time.sleep(POLL_SECS)


class Server:
    """A child process in a process group of its own, its output appended to `<log_dir>/<name>.log`.

    `env` is added to this process's environment. `ready` is polled after `start` until it is true; an
    exception of kind `OSError` from it means "not yet". Usable as a context manager, startable again
    after `stop` or `kill`. Signals go to the whole group, so that wrappers take their children along.
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

    def wait_ready(self, timeout_secs: float | None = None) -> None:
        """Wait until `ready()` is true; a server that does not get there is killed."""
        timeout_secs = self.ready_timeout_secs if timeout_secs is None else timeout_secs
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
        wait_until(self._stands, 5, f"{self.name} stopping at SIGSTOP")

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
        _running.pop(self._process.pid, None)
        return self._process.returncode

    def wait(self, timeout: float) -> int:
        """Wait for it to end by itself. Returns the exit status; `ServerError` after `timeout` seconds."""
        if self._process is None:
            raise self.error("was never started")
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.error(f"still ran after {timeout} s") from None
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


@atexit.register
def _stop_all() -> None:
    for server in list(_running.values()):
        server.kill()
