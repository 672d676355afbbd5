"""The daemon with `transport: grpc`, from push to archived object [G1]."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from archiver.codecs import CODECS, read_all
from archiver.errors import DamagedFileError
from archiver.sources.grpc import SERVICE
from archiver.sources.wire import transport_pb2 as wire
from tests.harness.daemon import Metrics
from tests.harness.process import Server, free_port, port_open, wait_until


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost by itself, and its key."""
    paths = folder / "server.crt", folder / "server.key"
    options = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    where = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(["openssl", *options, *where], check=True, capture_output=True)
    return paths


class Daemon:
    """`dfe-archiver run` as a process of its own, on one spool and one archive."""

    def __init__(self, folder: Path, log: Path, **grpc_settings: Path) -> None:
        self.archive = folder / "archive"
        self.port = free_port()
        self._metrics = free_port()
        environment = {
            "DFE_ARCHIVER_TRANSPORT": "grpc",
            "DFE_ARCHIVER_GRPC_LISTEN": f"127.0.0.1:{self.port}",
            "DFE_ARCHIVER_DESTINATION": f"file://{self.archive}",
            "DFE_ARCHIVER_SPOOL_DIR": str(folder / "spool"),
            "DFE_ARCHIVER_BUFFER__FLUSH_AGE_SECS": "0.2",
            "METRICS_ADDR": f"127.0.0.1:{self._metrics}",
            "LOG_FORMAT": "json",
            **{f"DFE_ARCHIVER_GRPC__{name.upper()}": str(value) for name, value in grpc_settings.items()},
        }
        self._server = Server(
            log.stem,
            [sys.executable, "-m", "archiver", "run"],
            log.parent,
            env=environment,
            cwd=Path(__file__).parents[2],
            ready=lambda: port_open(self.port),
        )

    def start(self) -> None:
        self._server.start()

    def terminate(self) -> int | None:
        return self._server.stop(90)

    def kill(self) -> None:
        self._server.kill()

    def metrics(self) -> Metrics:
        with urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=20) as answer:
            return Metrics.parse(answer.read().decode())

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
                answer = push(wire.PushRequest(payload=b"\n".join(records) + b"\n"), timeout=60)
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
        thread.join(60)
    archived = daemon.archived()
    promised = Counter(value for mine in answered for value in mine)
    assert not promised - archived
    assert sum((archived - promised).values()) <= 3 * len(threads)
    assert set(archived.values()) == {1}
    routes = {path.relative_to(daemon.archive).parts[0] for path in daemon.archive.rglob("*.jsonl.zst")}
    assert routes == {"org-0", "org-1", "org-2", "org-3"}


def test_strangers_write_nothing_into_the_log(tmp_path: Path, log_dir: Path) -> None:
    """[O4]: every line is ours and JSON, also when somebody speaks something else on the port."""
    pair = make_pair(tmp_path)
    daemon = Daemon(tmp_path, tmp_path / "strangers.log", tls_certificate=pair[0], tls_key=pair[1])
    daemon.start()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", daemon.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(60)
            stranger.recv(100)
    assert daemon.terminate() == 0
    lines = (tmp_path / "strangers.log").read_text().splitlines()
    assert {json.loads(line)["level"] for line in lines} <= {"info", "warning"}


def lines_in_frames(spool: Path) -> int:
    """Records in whole frames of open files."""
    try:
        return sum(
            b"".join(read_all(path, CODECS["zstd"])).count(b"\n") for path in spool.rglob("*.jsonl.zst")
        )
    except DamagedFileError:
        return 0  # a frame is being written


def test_whole_frames_of_a_killed_process_are_archived_at_the_next_start(
    daemon: Daemon, tmp_path: Path
) -> None:
    """[D7] [G1]: a kill loses at most what queue and buffers held; what was flushed is there, once."""
    values = [record(0, number) for number in range(500)]
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        push = channel.unary_unary(
            f"/{SERVICE}/Push", wire.PushRequest.SerializeToString, wire.PushResponse.FromString
        )
        push(wire.PushRequest(payload=b"\n".join(values)), timeout=60)
    wait_until(lambda: daemon.metrics().total("records_consumed_total") == len(values), 20, "all taken")
    wait_until(lambda: lines_in_frames(tmp_path / "spool") == len(values), 20, "all of it in frames")
    daemon.kill()
    assert daemon.archived() == Counter()
    daemon.start()
    assert daemon.terminate() == 0
    assert daemon.archived() == Counter(values)
