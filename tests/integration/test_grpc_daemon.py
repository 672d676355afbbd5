"""The daemon with `transport: grpc`, from push to archived object [G1]."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from archiver.codecs import CODECS, read_all
from archiver.sources.grpc import SERVICE
from archiver.sources.wire import transport_pb2 as wire
from tests.harness.process import free_port, wait_until

pytestmark = pytest.mark.timeout(120)


class Daemon:
    """`dfe-archiver run` as a process of its own, on one spool and one archive."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.archive = folder / "archive"
        self.port = free_port()
        self._log = log
        self._environment = os.environ | {
            "DFE_ARCHIVER_TRANSPORT": "grpc",
            "DFE_ARCHIVER_GRPC_LISTEN": f"127.0.0.1:{self.port}",
            "DFE_ARCHIVER_DESTINATION": f"file://{self.archive}",
            "DFE_ARCHIVER_SPOOL_DIR": str(folder / "spool"),
            "DFE_ARCHIVER_BUFFER__FLUSH_AGE_SECS": "0.2",
            "METRICS_ADDR": "127.0.0.1:0",
            "LOG_FORMAT": "json",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "archiver", "run"],
                cwd=Path(__file__).parents[2],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            grpc.channel_ready_future(channel).result(30)

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(30)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)

    def archived(self) -> Counter[bytes]:
        """Every archived record, by how often it is there."""
        found: Counter[bytes] = Counter()
        for path in self.archive.rglob("*.jsonl.zst"):
            content = b"".join(read_all(path, CODECS["zstd"]))
            assert content.endswith(b"\n")
            found.update(content[:-1].split(b"\n"))
        return found


@pytest.fixture
def daemon(tmp_path: Path, log_dir: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    started = Daemon(tmp_path, log_dir / f"{request.node.name[:60]}.log")
    started.start()
    yield started
    started.kill()


def record(sender: int, number: int) -> bytes:
    return b'{"_org_id":"org-%d","n":%d}' % (sender, number)


def send_until_refused(port: int, sender: int, answered: list[bytes]) -> None:
    """Pushes of three records, one after another; `answered` holds what the archiver has promised."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        push = channel.unary_unary(
            f"/{SERVICE}/Push", wire.PushRequest.SerializeToString, wire.PushResponse.FromString
        )
        for number in range(0, 3_000_000, 3):
            records = [record(sender, number + index) for index in range(3)]
            try:
                answer = push(wire.PushRequest(payload=b"\n".join(records) + b"\n"), timeout=10)
            except grpc.RpcError:
                return
            assert answer.accepted == 3
            answered += records


def test_a_graceful_stop_under_fire_archives_exactly_what_was_answered(daemon: Daemon) -> None:
    """[G1]: a push whose connection broke before its answer may be there too, whole, at most once."""
    answered: list[list[bytes]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=send_until_refused, args=(daemon.port, sender, answered[sender]))
        for sender in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(mine) > 100 for mine in answered), 30, "pushes of every sender")
    assert daemon.terminate() == 0
    for thread in threads:
        thread.join(20)
    archived = daemon.archived()
    promised = Counter(value for mine in answered for value in mine)
    assert not promised - archived
    assert sum((archived - promised).values()) <= 3 * len(threads)
    assert set(archived.values()) == {1}
    routes = {path.relative_to(daemon.archive).parts[0] for path in daemon.archive.rglob("*.jsonl.zst")}
    assert routes == {"org-0", "org-1", "org-2", "org-3"}


def test_whole_frames_of_a_killed_process_are_archived_at_the_next_start(daemon: Daemon) -> None:
    """[D7] [G1]: a kill loses at most what queue and buffers held; what was flushed is there, once."""
    values = [record(0, number) for number in range(500)]
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        push = channel.unary_unary(
            f"/{SERVICE}/Push", wire.PushRequest.SerializeToString, wire.PushResponse.FromString
        )
        push(wire.PushRequest(payload=b"\n".join(values)), timeout=10)
    time.sleep(2.5)  # several flush ages: all of it is in frames
    daemon.kill()
    assert daemon.archived() == Counter()
    daemon.start()
    assert daemon.terminate() == 0
    assert daemon.archived() == Counter(values)
