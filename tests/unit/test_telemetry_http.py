"""[O2]: the HTTP side, over real sockets."""

from __future__ import annotations

import http.client
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from archiver import events as e
from archiver.errors import StartError
from archiver.telemetry import HttpServer, Telemetry
from archiver.telemetry.connection import Connection
from archiver.telemetry.http import _is_loopback, bind
from tests.harness.process import SLACK_SECS
from tests.unit.telemetry_samples import PARTITIONS, a_status

TOKEN = "a-token-of-length"
HEALTHY_SECS = 30.0
LONG_BYTES = 2 << 20


class Served:
    """A running server whose clock the test holds."""

    def __init__(self, ops_token: str | None = TOKEN) -> None:
        self.now = 1000.0
        self.rolls = 0
        self.telemetry = Telemetry(stream=io.StringIO(), log_format="json", monotonic=lambda: self.now)
        self.server = HttpServer(
            "127.0.0.1:0", self.telemetry.status, self.telemetry.registry, self.roll, ops_token, HEALTHY_SECS
        )
        self.server.start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", trust_env=False)

    def roll(self) -> None:
        self.rolls += 1

    def get(self, path: str) -> tuple[int, str]:
        answer = self.client.get(path)
        return answer.status_code, answer.text

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.telemetry.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Served] = []

    def start(**settings: str | None) -> Served:
        made.append(Served(**settings))
        return made[-1]

    yield start
    for served in reversed(made):  # each gives logging back as it found it
        served.close()


def test_healthz_says_whether_the_loop_turns_within_its_deadline(serve: Serve) -> None:
    """[O2], c44: before the first turn, while it turns, while it only beats in a drain, and stuck."""
    served = serve()
    assert served.get("/healthz") == (200, "alive\n")
    served.now += HEALTHY_SECS + 1
    assert served.get("/healthz")[0] == 503
    served.telemetry.status.publish(replace(a_status(), turned_at_monotonic=served.now))
    assert served.get("/healthz")[0] == 200
    served.now += HEALTHY_SECS - 1
    served.telemetry.status.turned(served.now)
    served.now += HEALTHY_SECS - 1
    assert served.get("/healthz")[0] == 200
    served.now += 2
    assert served.get("/healthz") == (503, "the loop has not turned for 31 s (at most 30 s)\n")


def test_readyz_says_why_not_one_reason_a_line(serve: Serve) -> None:
    """[O2]"""
    served = serve()
    assert served.get("/readyz") == (503, "starting\n")
    status = replace(a_status(), turned_at_monotonic=served.now)
    served.telemetry.status.publish(status)
    assert served.get("/readyz") == (200, "ready\n")
    served.telemetry.status.publish(replace(status, not_ready=("store: denied", "dlq off")))
    assert served.get("/readyz") == (503, "store: denied\ndlq off\n")
    served.telemetry.status.publish(status)
    served.now += HEALTHY_SECS + 5
    assert served.get("/readyz") == (503, "the loop has not turned for 35 s (at most 30 s)\n")


def test_status_is_the_snapshot_with_the_troubles(serve: Serve) -> None:
    served = serve()
    before = json.loads(served.get("/status")[1])
    assert (before["state"], before["ready"], before["troubles"]) == ("starting", False, [])
    served.telemetry.status.publish(replace(a_status(), turned_at_monotonic=served.now))
    served.telemetry.emit(e.CommitFailed("timed out \udc80", 3))
    status = json.loads(served.get("/status")[1])
    assert (status["ready"], status["open_files"], status["state"]) == (True, 1, "running")
    assert status["partitions"][0] == {
        "topic": "events",
        "partition": 0,
        "position": 50,
        "low_water_mark": 40,
        "committed": 40,
        "log_start": 10,
        "stable_end": 140,
        "lag": 100,
        "retention_headroom_records": 30,
        "retention_headroom_secs": 7200.0,
        "retention_secs": 86400.0,
    }
    assert status["troubles"][0]["message"] == e.CommitFailed.message
    assert status["oldest"][0]["state"] == "open"


def test_a_secret_in_a_reason_is_hidden_from_every_path() -> None:
    """[S7]: what the loop says of why it is not ready comes from SDKs too."""
    telemetry = Telemetry(secrets=["hunter2-longer"], stream=io.StringIO(), log_format="json")
    server = HttpServer("127.0.0.1:0", telemetry.status, telemetry.registry, lambda: None, None, 60)
    server.start()
    try:
        telemetry.emit(e.StoreDown("credentials", "wrong key hunter2-longer"))
        telemetry.status.publish(replace(a_status(), not_ready=("store: wrong key hunter2-longer",)))
        for path in ("/", "/status", "/readyz", "/metrics"):
            answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", trust_env=False)
            assert "hunter2" not in answer.text
            if path != "/metrics":
                assert "wrong key" in answer.text
    finally:
        server.stop()
        telemetry.close()


def test_metrics_come_in_the_format_that_is_asked_for(serve: Serve) -> None:
    served = serve()
    plain = served.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert "dfe_archiver_build_info" in plain.text
    asked = served.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Authorization": f"Bearer {TOKEN}"}, 202),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"X-Forwarded-For": "203.0.113.7"}, 401),
        ({"X-Forwarded-For": "127.0.0.1"}, 401),
        ({"Origin": "http://evil.example"}, 401),
        ({"X-Forwarded-For": "203.0.113.7", "Authorization": f"Bearer {TOKEN}"}, 202),
    ],
)
def test_roll_is_for_loopback_or_the_token(serve: Serve, headers: dict[str, str], status: int) -> None:
    """[O2]: a proxy or a browser on loopback speaks for others and needs the token."""
    served = serve()
    assert served.client.post("/ops/roll", headers=headers).status_code == status
    assert served.rolls == (1 if status == 202 else 0)


def test_a_body_nobody_asked_for_is_refused_unread(serve: Serve) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(b"POST /ops/roll HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nabc")
        assert sock.recv(100).startswith(b"HTTP/1.1 413")
    assert served.rolls == 0


def test_without_a_token_none_is_accepted(serve: Serve) -> None:
    """An empty token must not turn into one that everybody knows."""
    for token in (None, ""):
        served = serve(ops_token=token)
        for said in ("Bearer None", "Bearer"):
            headers = {"Authorization": said, "X-Forwarded-For": "203.0.113.7"}
            assert served.client.post("/ops/roll", headers=headers).status_code == 401
        assert served.rolls == 0


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("localhost", False), ("", False)],
)  # fmt: skip
def test_loopback_is_an_address_not_a_name(host: str, loopback: bool) -> None:
    assert _is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/metrics", 405),
        ("DELETE", "/status", 405),
        ("GET", "/ops/roll", 405),
        ("PUT", "/", 405),
        ("GET", "/nothing", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("HEAD", "/healthz", 200),
    ],
)
def test_other_methods_and_paths_are_refused(serve: Serve, method: str, path: str, status: int) -> None:
    assert serve().client.request(method, path).status_code == status


def test_a_port_that_is_taken_is_a_start_error_with_the_address(serve: Serve) -> None:
    served = serve()
    address = f"127.0.0.1:{served.server.port}"
    again = HttpServer(address, served.telemetry.status, served.telemetry.registry, lambda: None, None, 1)
    with pytest.raises(StartError, match=address):
        again.start()
    again.stop()


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:notaport", "127.0.0.1:99999", "256.1.1.1:80", ""])
def test_an_address_that_is_none_is_a_start_error(listen: str) -> None:
    with pytest.raises(StartError, match=r"metrics\.listen"):
        bind(listen)


def test_the_port_is_free_again_after_stop_and_stop_may_come_twice(serve: Serve) -> None:
    served = serve()
    served.client.get("/healthz")
    served.server.stop()
    served.server.stop()
    bind(f"127.0.0.1:{served.server.port}").close()
    assert "http" not in [thread.name for thread in threading.enumerate()]


def test_stop_does_not_wait_for_a_client_that_holds_on(serve: Serve) -> None:
    served = serve()
    with served.connect() as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        served.server.stop(timeout_secs=60)
        assert time.monotonic() - began < 60 / 2


@pytest.mark.parametrize("requests", [0, 1])
def test_stop_waits_for_nobody_where_no_answer_is_under_way(serve: Serve, requests: int) -> None:
    """[D6]: a connection that is kept open has no answer under way. The quickest of ten counts."""
    took = []
    for _ in range(10):
        served = serve()
        for _ in range(requests):
            assert served.get("/healthz")[0] == 200
        began = time.monotonic()
        served.server.stop(timeout_secs=60)
        took.append(time.monotonic() - began)
    assert min(took) < 0.05


def ended_within(sock: socket.socket, secs: float) -> bool:
    """Whether the peer closes within `secs`, whatever it sends before."""
    sock.settimeout(secs)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_request_that_never_ends_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then must not hold a connection open."""
    monkeypatch.setattr(Connection, "answer_secs_max", 0.4)
    served = serve()
    with served.connect() as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        with suppress(ConnectionError):  # cut already
            for _ in range(3):
                time.sleep(0.1)
                slow.sendall(b"X-A: b\r\n")
        assert ended_within(slow, 30)
    assert served.get("/healthz")[0] == 200


def test_a_connection_that_keeps_asking_stays(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for one answer: a scraper's connection outlives many of them."""
    monkeypatch.setattr(Connection, "answer_secs_max", 2)
    served = serve()
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port, timeout=60)
    connection.connect()
    connection.auto_open = 0  # a second connection would hide that the first was cut
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"alive\n"
        time.sleep(0.1)
    connection.close()


def test_an_answer_that_is_never_read_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "answer_secs_max", 0.4)
    served = serve()
    partitions = tuple(replace(PARTITIONS[0], partition=number) for number in range(20_000))
    served.telemetry.status.publish(replace(a_status(), partitions=partitions))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", served.server.port))
    with slow:
        slow.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 60
        assert served.server._server is not None
        while served.server._server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not served.server._server.server_state.connections
    assert served.get("/healthz")[0] == 200


def test_a_crowd_of_quiet_connections_does_not_keep_a_probe_out(serve: Serve) -> None:
    """A probe that fails for that would have the process killed."""
    served = serve()
    crowd = [served.connect() for _ in range(Connection.connections_max * 3)]
    try:
        for sock in crowd[-10:]:
            sock.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(5):
            with httpx.Client(trust_env=False) as probe:
                assert probe.get(f"http://127.0.0.1:{served.server.port}/healthz").status_code == 200
        assert served.server._server is not None
        assert len(served.server._server.server_state.connections) <= Connection.connections_max
        assert ended_within(crowd[0], 30)
    finally:
        for sock in crowd:
            sock.close()


CROWD = """
import socket, sys
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(600)]
sys.stdin.read()
"""


def test_a_crowd_that_comes_at_once_takes_few_file_handles(serve: Serve) -> None:
    """[B3]: handles that connections take are missing where records are written."""
    port, fds = serve().server.port, Path("/proc/self/fd")
    most = before = len(list(fds.iterdir()))
    command = [sys.executable, "-S", "-c", CROWD, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as crowd:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            most = max(most, len(list(fds.iterdir())))
        crowd.communicate()
    assert most - before <= 2 * Connection.connections_max + 8


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * LONG_BYTES + b"\r\n\r\n",
        b"GET /" + b"a" * LONG_BYTES + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"POST /ops/roll HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ],
    ids=["long header", "long path", "not http", "negative length"],
)
def test_nonsense_is_refused_and_the_next_request_answered(serve: Serve, request_bytes: bytes) -> None:
    served = serve()
    with served.connect() as sock:
        try:
            sock.sendall(request_bytes)
            assert sock.recv(100).startswith(b"HTTP/1.1 400")
        except ConnectionError:
            pass  # closed while we were still sending
    assert served.get("/healthz")[0] == 200
    assert served.rolls == 0


def test_a_thousand_partitions_are_answered_quickly(serve: Serve) -> None:
    served = serve()
    partitions = tuple(replace(PARTITIONS[0], partition=number) for number in range(1_000))
    served.telemetry.status.publish(replace(a_status(), partitions=partitions))
    for path in ("/status", "/", "/metrics"):
        began = time.monotonic()
        assert served.get(path)[0] == 200
        assert time.monotonic() - began < SLACK_SECS


def test_the_thread_s_death_is_told() -> None:
    """A worker that has died must not go unnoticed."""
    deaths: list[str] = []
    telemetry = Telemetry(stream=io.StringIO(), log_format="json")
    server = HttpServer(
        "127.0.0.1:0", telemetry.status, telemetry.registry, lambda: None, None, 60, died=deaths.append
    )
    server.start()
    try:
        assert server._server is not None
        server._server.should_exit = True
        assert server._thread is not None
        server._thread.join(60)
        assert deaths == ["it ended by itself"]
    finally:
        server.stop()
        telemetry.close()
