"""What an adversary does to the process's file handles: they are shared by connections and the spool."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import grpc

from archiver.local_failures import LOCAL_FAILURES_MAX, WRITE_RETRY_SECS
from archiver.sources.grpc import SERVICE
from archiver.sources.wire import transport_pb2 as wire
from tests.harness.daemon import wait_until
from tests.harness.process import free_port
from tests.integration.conftest import MakeDaemon

HANDLES = 160


def test_connections_that_take_every_handle_lose_no_push_that_was_answered(make_daemon: MakeDaemon) -> None:
    """[G1], [G2], [B3]: the spool cannot be written until some are closed; then all is there."""
    port = free_port()
    settings = {
        "transport": "grpc",
        "grpc": {"listen": f"127.0.0.1:{port}"},
        "archive": {"roll_interval_secs": 1},
        "buffer": {"flush_age_secs": 0.2},
    }
    daemon = make_daemon(settings, prefix=["prlimit", f"--nofile={HANDLES}"]).start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        push = channel.unary_unary(
            f"/{SERVICE}/Push",
            request_serializer=wire.PushRequest.SerializeToString,
            response_deserializer=wire.PushResponse.FromString,
        )
        push(wire.PushRequest(payload=b'{"_org_id":"a"}', format=wire.JSON), timeout=60)
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(HANDLES + 40)]
        for n in range(5):
            push(wire.PushRequest(payload=b'{"_org_id":"crowd-%d"}' % n, format=wire.JSON), timeout=60)
        wait_until(lambda: "Too many open files" in daemon.output(), 10, "a shortage of handles")
        time.sleep(1.2 * LOCAL_FAILURES_MAX * WRITE_RETRY_SECS)  # any other error would have ended it by now
        for connection in crowd:
            connection.close()
    wait_until(lambda: len(daemon.archive()) == 6, 20, "all six organisations")
    assert daemon.stop() == 0
    assert sorted(daemon.archive()) == ["a", *(f"crowd-{n}" for n in range(5))]


def test_the_process_takes_as_many_handles_as_it_may(make_daemon: MakeDaemon) -> None:
    """[B3]: a soft limit of 1,024 is no limit of the machine."""
    settings = {"transport": "grpc", "grpc": {"listen": "127.0.0.1:0"}}
    daemon = make_daemon(settings, prefix=["prlimit", "--nofile=256:2048"]).start()
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["2048", "2048"]
    assert daemon.stop() == 0
