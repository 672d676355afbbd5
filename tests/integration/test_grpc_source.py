"""The push listener against real senders: gRPC channels on localhost."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from archiver.domain.batch import TopicPartition
from archiver.errors import StartError
from archiver.events import Event, PushesTaken, PushRefused
from archiver.ports import Emit
from archiver.settings.models import Grpc
from archiver.sources import grpc as grpc_source
from archiver.sources.grpc import SERVICE, GrpcSource
from archiver.sources.wire import transport_pb2 as wire
from tests.harness.process import SLACK_SECS


class NoListener:
    """gRPC has no partitions to be told about: any call is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the gRPC source called {name}")


def unheard(event: Event) -> None:
    del event


@contextmanager
def listening(emit: Emit = unheard, **settings: Any) -> Iterator[GrpcSource]:
    source = GrpcSource(Grpc(listen="127.0.0.1:0", **settings), emit)
    source.start(NoListener())
    try:
        yield source
    finally:
        source.close(5)


@pytest.fixture
def source() -> Iterator[GrpcSource]:
    with listening() as started:
        yield started


class Sender:
    """A sender as others write them: unary calls on a channel of its own."""

    def __init__(self, source: GrpcSource, credentials: grpc.ChannelCredentials | None = None) -> None:
        address = f"localhost:{source.port}"
        pairs = [("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=pairs)
        else:
            self.channel = grpc.secure_channel(address, credentials, options=pairs)

    def push(self, payload: bytes, format: int = wire.JSON, **call: Any) -> int:
        method = self.channel.unary_unary(
            f"/{SERVICE}/Push", wire.PushRequest.SerializeToString, wire.PushResponse.FromString
        )
        request = wire.PushRequest(payload=payload, format=format, metadata={"k": "v"})  # type: ignore[arg-type]
        return int(method(request, timeout=60, **call).accepted)

    def route_batch(self, records: list[wire.Record]) -> int:
        method = self.channel.unary_unary(
            f"/{SERVICE}/RouteBatch", wire.Batch.SerializeToString, wire.BatchAck.FromString
        )
        return int(method(wire.Batch(records=records), timeout=60).accepted)

    def raw(self, name: str, message: bytes, timeout: float = 60) -> bytes:
        return bytes(self.channel.unary_unary(f"/{SERVICE}/{name}", None, None)(message, timeout=timeout))

    def serving(self) -> bool:
        answer = wire.HealthCheckResponse.FromString(self.raw("HealthCheck", b""))
        return answer.status == wire.HealthCheckResponse.SERVING


@pytest.fixture
def sender(source: GrpcSource) -> Iterator[Sender]:
    sender = Sender(source)
    yield sender
    sender.channel.close()


def refusal(call: Callable[[], object]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def taken(source: GrpcSource, records: int, secs: float = 60) -> list[bytes]:
    values: list[bytes] = []
    until = time.monotonic() + secs
    while len(values) < records and time.monotonic() < until:
        for batch in source.take(0.05, 1_000):
            values += [value for value in batch.values if value is not None]
    return values


def wait_for(condition: Callable[[], bool], secs: float = 60) -> None:
    until = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < until, "not within its time"
        time.sleep(0.01)


# --- what is taken ----------------------------------------------------------------------------


def test_an_answered_push_comes_out_of_take_in_order_with_rising_offsets(
    source: GrpcSource, sender: Sender
) -> None:
    """[G1] [G3]"""
    assert sender.push(b'{"n":1}\n{"n":2}\r\n') == 2
    assert sender.push(b'{"n":3}', wire.AUTO) == 1
    assert source.queued_bytes() > 0
    first = source.take(1, 1_000)
    assert sender.route_batch([wire.Record(payload=b"a\nb", key="k"), wire.Record(payload=b"")]) == 2
    second = source.take(1, 1_000)
    assert [list(batch.values) for batch in first] == [[b'{"n":1}', b'{"n":2}\r', b'{"n":3}']]
    assert [list(batch.values) for batch in second] == [[b"a\nb", b""]]
    assert [list(batch.offsets) for batch in (*first, *second)] == [[0, 1, 2], [3, 4]]
    assert first[0].partition == TopicPartition("", 0)
    assert source.queued_bytes() == 0


def test_nothing_to_take_is_an_empty_answer_after_the_timeout(source: GrpcSource) -> None:
    began = time.monotonic()
    assert source.take(0.05, 1_000) == ()
    assert 0.04 < time.monotonic() - began < SLACK_SECS


def test_a_push_without_records_is_answered_with_zero(source: GrpcSource, sender: Sender) -> None:
    assert sender.push(b"") == 0
    assert sender.route_batch([]) == 0
    assert source.take(0, 1_000) == ()


def test_there_are_no_positions_and_nothing_to_commit(source: GrpcSource, sender: Sender) -> None:
    sender.push(b"a")
    taken(source, 1)
    assert source.positions() == {}
    assert source.view() == {}
    assert source.commit({TopicPartition("", 0): 1}) is True
    assert source.commit_and_confirm({TopicPartition("", 0): 1}, 1) is True


@pytest.mark.parametrize("kind", ["MSGPACK", "ARROW_IPC", "7"])
def test_formats_that_are_not_lines_are_refused_with_the_reason(
    source: GrpcSource, sender: Sender, kind: str
) -> None:
    """[G3]: also where one record of a batch has it, and then none of the batch is taken."""
    number = int(kind) if kind.isdigit() else wire.Format.Value(kind)
    for call in (
        lambda: sender.push(b"x", number),
        lambda: sender.route_batch([wire.Record(payload=b"x"), wire.Record(payload=b"y", format=number)]),  # type: ignore[arg-type]
    ):
        error = refusal(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert kind in error.details()
        assert "JSON" in error.details()
    assert source.take(0, 1_000) == ()


def test_bytes_that_are_no_message_are_refused(source: GrpcSource, sender: Sender) -> None:
    error = refusal(lambda: sender.raw("Push", b"\xff\xff\xff"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sender.push(b"still here") == 1


def test_fields_we_do_not_know_do_not_hurt(source: GrpcSource, sender: Sender) -> None:
    sender.raw("Push", wire.PushRequest(payload=b"a").SerializeToString() + b"\xa2\x06\x03new")
    assert taken(source, 1) == [b"a"]


def test_records_of_many_senders_are_each_taken_once_and_each_senders_in_order(source: GrpcSource) -> None:
    """[G1]"""

    def send(name: int) -> None:
        sender = Sender(source)
        for number in range(50):
            assert sender.push(b"%d:%d\n%d:%d" % (name, 2 * number, name, 2 * number + 1)) == 2
        sender.channel.close()

    threads = [threading.Thread(target=send, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    values = taken(source, 800)
    for thread in threads:
        thread.join()
    assert source.take(0.05, 1_000) == ()
    for name in range(8):
        mine = [value for value in values if value.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, number) for number in range(100)]


# --- bounds -----------------------------------------------------------------------------------


def test_at_the_bound_pushes_are_refused_at_once_with_a_hint_and_nothing_accepted_is_lost() -> None:
    """[G2] [O2]"""
    with listening(max_queue_bytes=100_000) as source:
        sender = Sender(source)
        accepted = 0
        while True:
            try:
                accepted += sender.push(b"x" * 999)
            except grpc.RpcError as error:
                refused: Any = error
                break
            assert accepted < 1000
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        hints = {key: value for key, value in refused.trailing_metadata() if "retry" in key}
        assert 0 < int(hints["retry-after-ms"]) < 5000
        assert hints["grpc-retry-pushback-ms"] == hints["retry-after-ms"]
        assert accepted > 80
        assert source.queued_bytes() <= 100_000
        assert "max_queue_bytes" in str(source.ready())
        assert not sender.serving()

        times = []
        for _ in range(20):
            began = time.monotonic()
            assert refusal(lambda: sender.push(b"x" * 999)).code() == grpc.StatusCode.UNAVAILABLE
            times.append(time.monotonic() - began)
        assert sorted(times)[10] < 0.5  # there is no waiting for room

        assert taken(source, accepted) == [b"x" * 999] * accepted
        assert source.take(0, 1_000) == ()
        assert source.ready() is None
        assert sender.serving()
        assert sender.push(b"again") == 1
        sender.channel.close()


def test_a_full_queue_refuses_before_it_reads_until_a_fifth_of_it_is_free() -> None:
    """[G2]: at the bound a push would be read whole only to be refused, over and over."""
    with listening(max_queue_bytes=100_000) as source:
        sender, small = Sender(source), b"y"
        while _accepted(sender, b"x" * 9_000):
            pass
        assert refusal(lambda: sender.push(small)).code() == grpc.StatusCode.UNAVAILABLE
        stuck = _half_a_push(source.port or 0)
        _wait_for_the_calls_end(stuck)  # answered although its message has not come
        stuck.close()
        while source.queued_bytes() > 80_000:
            assert source.take(0, 1_000)
        assert sender.push(small) == 1
        sender.channel.close()


def test_every_refused_push_is_told_with_its_reason_and_so_is_the_end_of_a_full_queue() -> None:
    """[O4]: what `pushes_refused_total` counts; a sender alone would know of it otherwise."""
    heard: list[Event] = []
    with listening(heard.append, max_queue_bytes=20_000, max_message_bytes=30_000) as source:
        sender = Sender(source)
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("format", lambda: sender.push(b"x", wire.MSGPACK)),
            ("malformed", lambda: sender.raw("Push", b"\xff\xff\xff")),
            ("too_large", lambda: sender.push(b"x" * 25_000)),
            ("incomplete", lambda: sender.push(b"x" * 40_000)),
        ]
        for _, call in wrong:
            refusal(call)
        assert sender.push(b"x" * 19_000) == 1
        for _ in range(3):
            refusal(lambda: sender.push(b"y" * 2_000))
        taken(source, 1)
        assert sender.push(b"z") == sender.push(b"z") == 1
        source.stop_taking()
        refusal(lambda: sender.push(b"z"))
        sender.channel.close()
        expected = [reason for reason, _ in wrong] + ["full"] * 3 + ["taken again"] + ["stopping"]
        wait_for(lambda: len(heard) == len(expected))
    reasons = [event.reason if isinstance(event, PushRefused) else "taken again" for event in heard]
    assert reasons == expected
    (again,) = (event for event in heard if isinstance(event, PushesTaken))
    assert (again.reason, again.refused) == ("full", 3)
    assert 0 < again.secs < 30


def test_a_push_larger_than_the_whole_queue_is_told_so() -> None:
    with listening(max_queue_bytes=10_000) as source:
        sender = Sender(source)
        error = refusal(lambda: sender.push(b"x" * 20_000))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_queue_bytes=10000" in error.details()
        assert sender.push(b"x") == 1
        sender.channel.close()


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_message_above_the_bound_is_refused_also_when_it_travels_compressed(
    compression: grpc.Compression,
) -> None:
    with listening(max_message_bytes=1 << 20) as source:
        sender = Sender(source)
        error = refusal(lambda: sender.push(b"x" * (2 << 20), compression=compression))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert source.take(0.05, 1_000) == ()
        assert sender.push(b"x" * (1 << 19), compression=compression) == 1
        assert taken(source, 1) == [b"x" * (1 << 19)]
        sender.channel.close()


def test_while_paused_nothing_is_handed_out_the_queue_fills_and_then_pushes_are_refused() -> None:
    """[B2] [G2]"""
    with listening(max_queue_bytes=10_000) as source:
        sender = Sender(source)
        source.pause()
        source.pause()
        assert sender.push(b"x" * 6000) == 1
        assert source.take(0.05, 1_000) == ()
        assert source.ready() is None
        assert refusal(lambda: sender.push(b"y" * 6000)).code() == grpc.StatusCode.UNAVAILABLE
        assert source.take(0.05, 1_000) == ()
        source.resume()
        source.resume()
        assert taken(source, 1) == [b"x" * 6000]
        assert sender.push(b"y" * 6000) == 1
        sender.channel.close()


def test_senders_that_stop_in_the_middle_of_a_push_do_not_keep_others_waiting(source: GrpcSource) -> None:
    """Raw HTTP/2: a preface, settings and headers of a Push, and then never its message."""
    stuck = [_half_a_push(source.port or 0) for _ in range(10)]
    sender = Sender(source)
    began = time.monotonic()
    assert sender.push(b"a") == 1
    assert time.monotonic() - began < SLACK_SECS
    sender.channel.close()
    for connection in stuck:
        connection.close()


def test_with_very_many_stuck_senders_others_are_refused_and_not_left_waiting() -> None:
    """[G2]: what is being received is bounded too, and a bound is answered with UNAVAILABLE."""
    heard: list[Event] = []
    with listening(heard.append) as source:
        _refused_beside_stuck_senders(source)
    assert {event.reason for event in heard if isinstance(event, PushRefused)} >= {"late"}


def _refused_beside_stuck_senders(source: GrpcSource) -> None:
    stuck = [_half_a_push(source.port or 0) for _ in range(20)]
    sender = Sender(source)
    early = 0
    while True:  # until all of them have been noticed
        began = time.monotonic()
        try:
            early += sender.push(b"a")
        except grpc.RpcError as error:
            refused: Any = error
            break
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    assert "retry-after-ms" in dict(refused.trailing_metadata())
    assert time.monotonic() - began < SLACK_SECS
    for connection in stuck:
        connection.close()
    wait_for(lambda: _accepted(sender, b"b"))
    assert taken(source, early + 1) == [b"a"] * early + [b"b"]
    sender.channel.close()


def _accepted(sender: Sender, payload: bytes) -> bool:
    try:
        return sender.push(payload) == 1
    except grpc.RpcError:
        return False


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """One HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _half_a_push(port: int, **more: str) -> socket.socket:
    """A Push of `aaaaaaaaaaaaaa` of which 12 of 16 bytes have not been sent yet."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/Push",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    block = b"".join(literal(name.encode(), value.encode()) for name, value in headers.items())
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"") + _frame(1, 4, 1, block))
    connection.sendall(_frame(0, 0, 1, b"\x00\x00\x00\x00\x10\x0a\x0eaa"))
    return connection


def _other_half(connection: socket.socket) -> None:
    connection.sendall(_frame(0, 1, 1, b"a" * 12))


def _wait_for_the_calls_end(connection: socket.socket) -> None:
    """Read until the server has ended the call: with RST_STREAM, or with headers that end the stream."""
    connection.settimeout(60)
    with connection.makefile("rb") as frames:
        while True:
            head = frames.read(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
            frames.read(int.from_bytes(head[:3], "big"))
            if stream == 1 and (kind == 3 or (kind == 1 and flags & 1)):
                return


def test_a_push_whose_deadline_has_passed_is_not_archived(source: GrpcSource) -> None:
    """Deadlines: its sender sends it again, and it would be there twice."""
    patient, hasty = _half_a_push(source.port or 0), _half_a_push(source.port or 0, grpc_timeout="50m")
    _wait_for_the_calls_end(hasty)
    _other_half(hasty)
    _other_half(patient)
    assert taken(source, 1) == [b"a" * 14]
    assert source.take(0.5, 1_000) == ()
    patient.close()
    hasty.close()


# --- connections ------------------------------------------------------------------------------


class Peer:
    """A sender's end of one HTTP/2 connection, which answers nothing by itself."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.settimeout(60)
        self._frames = self._connection.makefile("rb")
        self._connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))

    def ping(self, times: int = 1) -> None:
        """All at once: the listener may close the connection after any of them."""
        self._connection.sendall(_frame(6, 0, 0, bytes(8)) * times)

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Kind, flags and body of each frame, until the other side closes."""
        while len(head := self._frames.read(9)) == 9:
            yield head[3], head[4], self._frames.read(int.from_bytes(head[:3], "big"))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def test_a_sender_that_pings_without_end_is_sent_away(source: GrpcSource) -> None:
    """Keepalive limits: GOAWAY with ENHANCE_YOUR_CALM; a few pings are answered."""
    with Peer(source.port or 0) as peer:
        peer.ping(20)
        kinds = [(kind, body) for kind, _, body in peer.frames()]
    (goaway,) = (body for kind, body in kinds if kind == 7 and int.from_bytes(body[4:8], "big") == 11)
    assert b"too_many_pings" in goaway
    assert any(kind == 6 for kind, _ in kinds)


def test_a_sender_may_ping_a_connection_without_calls_as_often_as_the_docs_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keepalive limits: here every 10 ms, and it pings every 50."""
    monkeypatch.setattr(grpc_source, "_PING_SECS_MIN", 0.01)
    with listening() as source, Peer(source.port or 0) as peer:
        frames = peer.frames()
        for _ in range(20):
            peer.ping()
            for kind, flags, _ in frames:
                assert kind != 7
                if kind == 6 and flags == 1:
                    break  # the next ping is not sent before this one has arrived
            else:
                raise AssertionError("the connection was closed")
            time.sleep(0.05)


def test_a_connection_whose_other_end_is_gone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepalive: a ping that nobody answers, as after a cut cable. Here after half a second, not 80."""
    monkeypatch.setattr(grpc_source, "_KEEPALIVE_SECS", 0.3)
    monkeypatch.setattr(grpc_source, "_KEEPALIVE_ANSWER_SECS", 0.2)
    with listening() as source, Peer(source.port or 0) as gone:
        frames = list(gone.frames())  # ends when the listener closes the connection
        assert any(kind == 6 and not flags for kind, flags, _ in frames)
        lively = Sender(source)
        # it may be too busy to answer a ping in so short a time, and then connects again
        wait_for(lambda: _accepted(lively, b"a"))
        lively.channel.close()


def test_a_connection_carries_a_bounded_number_of_calls_at_once(source: GrpcSource) -> None:
    with Peer(source.port or 0) as peer:
        settings = next(body for kind, flags, body in peer.frames() if kind == 4 and not flags)
    pairs = [settings[at : at + 6] for at in range(0, len(settings), 6)]
    told = {int.from_bytes(pair[:2], "big"): int.from_bytes(pair[2:], "big") for pair in pairs}
    assert told[3] == 256


# --- start and stop ---------------------------------------------------------------------------


def test_a_taken_port_is_a_start_error_with_the_address(source: GrpcSource) -> None:
    address = f"127.0.0.1:{source.port}"
    second = GrpcSource(Grpc(listen=address), unheard)
    with pytest.raises(StartError, match=address):
        second.start(NoListener())
    second.close(1)


def test_after_stop_taking_pushes_are_refused_and_answered_ones_are_handed_out(
    source: GrpcSource, sender: Sender
) -> None:
    """[G1]: a graceful stop loses nothing that was answered."""
    sender.push(b"a\nb")
    source.stop_taking()
    error = refusal(lambda: sender.push(b"c"))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.details()
    assert not sender.serving()
    assert source.ready() is not None
    assert taken(source, 2) == [b"a", b"b"]
    assert source.take(0, 1_000) == ()


def test_a_stop_while_paused_still_hands_out_what_was_answered(source: GrpcSource, sender: Sender) -> None:
    """[G1]: the bound that paused it may never be free again before the process ends."""
    source.pause()
    sender.push(b"a")
    assert source.take(0, 1_000) == ()
    source.stop_taking()
    assert taken(source, 1) == [b"a"]


def test_a_stop_under_fire_hands_out_exactly_what_was_answered() -> None:
    """[G1]: every answered record comes out; a refused one does not."""
    with listening() as source:
        answered: list[bytes] = []
        lock = threading.Lock()

        def send(name: int) -> None:
            sender = Sender(source)
            for number in range(10_000):
                value = b"%d:%d" % (name, number)
                try:
                    sender.push(value)
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    break
                with lock:
                    answered.append(value)
            sender.channel.close()

        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        values = taken(source, 200)
        source.stop_taking()
        for thread in threads:
            thread.join()
        while batches := source.take(0.05, 1_000):
            values += [value for batch in batches for value in batch.values if value is not None]
        assert sorted(values) == sorted(answered)


def test_close_lets_the_port_go_and_can_be_called_twice() -> None:
    source = GrpcSource(Grpc(listen="127.0.0.1:0"), unheard)
    assert source.ready() is not None
    source.start(NoListener())
    assert source.ready() is None
    port = source.port
    began = time.monotonic()
    source.close(5)
    source.close(5)
    assert time.monotonic() - began < SLACK_SECS
    assert source.ready() is not None
    assert source.take(0, 1_000) == ()
    again = GrpcSource(Grpc(listen=f"127.0.0.1:{port}"), unheard)
    again.start(NoListener())
    again.close(5)


# --- standard services ------------------------------------------------------------------------


def test_the_standard_health_service_follows_the_listener(source: GrpcSource, sender: Sender) -> None:
    stub = health_pb2_grpc.HealthStub(sender.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", SERVICE):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
    source.stop_taking()
    for name in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=name)
        wait_for(lambda request=request: stub.Check(request).status != serving)  # type: ignore[misc]


def test_reflection_lists_the_service_with_its_methods(sender: Sender) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(sender.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(stub.ServerReflectionInfo(iter([request])))
    assert SERVICE in {service.name for service in answer.list_services_response.service}
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    answer = next(stub.ServerReflectionInfo(iter([request])))
    assert b"RouteBatch" in answer.file_descriptor_response.file_descriptor_proto[0]


# --- TLS --------------------------------------------------------------------------------------


class Authority:
    """A certificate authority of its own, and certificates for localhost by it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        certificate = self._sign(self._subject, self._key, is_authority=True)
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Paths of a certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, is_authority=False)
        paths = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def trusting(authority: Authority, pair: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    key = None if pair is None else pair[1].read_bytes()
    chain = None if pair is None else pair[0].read_bytes()
    return grpc.ssl_channel_credentials(authority.path.read_bytes(), key, chain)


def test_with_a_certificate_pushes_are_taken_over_tls_alone(tmp_path: Path) -> None:
    """[G1] grpc.tls_certificate, grpc.tls_key"""
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("server")
    with listening(tls_certificate=certificate, tls_key=key) as source:
        sender = Sender(source, trusting(authority))
        assert sender.push(b"a") == 1
        assert refusal(lambda: Sender(source).push(b"b")).code() == grpc.StatusCode.UNAVAILABLE
        stranger = Sender(source, trusting(Authority(tmp_path, "other")))
        assert refusal(lambda: stranger.push(b"c")).code() == grpc.StatusCode.UNAVAILABLE
        assert taken(source, 1) == [b"a"]
        assert source.take(0.05, 1_000) == ()


def test_with_a_client_authority_only_its_senders_are_served(tmp_path: Path) -> None:
    """grpc.tls_client_ca"""
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    certificate, key = authority.issue("server")
    with listening(tls_certificate=certificate, tls_key=key, tls_client_ca=authority.path) as source:
        assert Sender(source, trusting(authority, authority.issue("sender"))).push(b"a") == 1
        for credentials in (trusting(authority), trusting(authority, other.issue("stranger"))):
            error = refusal(lambda credentials=credentials: Sender(source, credentials).push(b"b"))  # type: ignore[misc]
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert taken(source, 1) == [b"a"]
        assert source.take(0.05, 1_000) == ()


def test_a_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, key = old.issue("server")
    with listening(tls_certificate=certificate, tls_key=key) as source:
        assert Sender(source, trusting(old)).push(b"a") == 1
        good = certificate.read_bytes()
        certificate.write_bytes(good[: len(good) // 2])
        assert Sender(source, trusting(old)).push(b"b") == 1
        new.issue("server")
        assert Sender(source, trusting(new)).push(b"c") == 1


def test_tls_files_of_no_use_are_start_errors_that_name_the_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("server")
    _, foreign_key = authority.issue("other")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for settings in (
        {"tls_certificate": tmp_path / "missing.pem", "tls_key": key},
        {"tls_certificate": certificate, "tls_key": foreign_key},
        {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": empty},
    ):
        source = GrpcSource(Grpc(listen="127.0.0.1:0", **settings), unheard)  # type: ignore[arg-type]
        with pytest.raises(StartError, match=r"grpc\.tls_certificate|TLS file"):
            source.start(NoListener())
