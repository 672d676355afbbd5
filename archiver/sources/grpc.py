"""Records that are pushed over gRPC ([G1], [G2], [G3]): answered once queued, archived at most once.

    sender ──Push──▶ event loop (own thread) ──PushQueue──▶ take() on the pipeline's thread

The event loop never waits for room: at the bound it refuses, before it reads the push where it can.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.errors import SourceFatalError, StartError
from archiver.events import PushRefusal
from archiver.ports import BrokerView, Emit, PartitionListener
from archiver.sources.pushes import JsonLines, Push, PushQueue, Values
from archiver.sources.refusals import Refusals
from archiver.sources.tls import server_credentials
from archiver.sources.wire import transport_pb2 as wire
from archiver.sources.wire.plain import plain_push

if TYPE_CHECKING:
    from archiver.settings.models import Grpc

SERVICE = "scalo.transport.v1.Transport"
PUSHED = TopicPartition("", 0)
"""Where all pushed records come from: gRPC knows no partitions, only the order of arrival."""

_RETRY_AFTER_MS = 250
_RETRY_HINT = (("retry-after-ms", str(_RETRY_AFTER_MS)), ("grpc-retry-pushback-ms", str(_RETRY_AFTER_MS)))
_RECEIVING_MAX = 16
"""Pushes that are being read at once: with the message bound this bounds what is not queued yet."""
_RECEIVE_SLOT_SECS = 1.0
_RECEIVE_SECS = 30.0
_STREAMS_MAX = 256
_KEEPALIVE_SECS, _KEEPALIVE_ANSWER_SECS = 60.0, 20.0
_PING_SECS_MIN = 10.0
"""How often a sender may ping a connection on which nothing is under way."""

_ARCHIVABLE = frozenset({wire.AUTO, wire.JSON})
_CLOSED = "the gRPC listener is closed"
_NO_MESSAGE = "no whole message came: it is above grpc.max_message_bytes, or its sender gave up"

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Requests = AsyncIterator[bytes]


class GrpcSource:
    """The gRPC implementation of `ports.Source`: one partition, no commits, no rebalances.

    Offsets count the records handed out, from 0. Where TLS is configured its files are read again for
    each connection after they changed.
    """

    def __init__(self, settings: Grpc, emit: Emit) -> None:
        self._queue = PushQueue(settings.max_queue_bytes)
        self._listener = _Listener(settings, self._queue, Refusals(self._queue, emit))
        self._next_offset = 0
        self._paused = self._stopping = False
        self._turn = threading.Event()

    @property
    def port(self) -> int | None:
        """The port that is listened on; None before `start`."""
        return self._listener.port

    def start(self, listener: PartitionListener) -> None:
        """Listen. Raises `StartError` where the address is taken or a TLS file is of no use."""
        self._listener.start()

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        del records_max  # the queue's pieces are small enough
        if (reason := self._listener.died()) is not None:
            raise SourceFatalError(f"the gRPC listener has died: {reason}")
        if self._paused and not self._stopping:
            self._turn.wait(timeout_secs)
            return ()
        values = self._queue.take(timeout_secs)
        if not values:
            return ()
        first = self._next_offset
        self._next_offset = first + len(values)
        return (RecordBatch(PUSHED, values, range(first, self._next_offset)),)

    def positions(self) -> Mapping[TopicPartition, int]:
        return {}

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        return True

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        return True

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return self._listener.not_serving()

    def queued_bytes(self) -> int:
        return self._queue.held_bytes

    def stop_taking(self) -> None:
        """Refuse every push from now on with UNAVAILABLE; those already answered are still handed out.

        A pause ends with it: a stop that waits at a bound would lose what was answered [G1].
        """
        self._stopping = True
        self._queue.stop()
        self._listener.announce_the_end()

    def close(self, timeout_secs: float) -> None:
        self._queue.stop()
        self._listener.close(timeout_secs)


class _Listener:
    """The server and the thread its event loop runs on."""

    def __init__(self, settings: Grpc, queue: PushQueue, refusals: Refusals) -> None:
        self._settings = settings
        self._queue = queue
        self._refusals = refusals
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._bound: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._grace_secs = 1.0
        self._closing = False
        self._death = "its event loop ended"
        self._thread = threading.Thread(target=self._run, name="grpc-listener", daemon=True)
        self.port: int | None = None

    def start(self) -> None:
        self._thread.start()
        self.port = self._bound.result()

    def died(self) -> str | None:
        """Why it is gone although nobody closed it."""
        if self.port is None or self._closing or self._thread.is_alive():
            return None
        return self._death

    def not_serving(self) -> str | None:
        """Why pushes are refused at present, in words; None while they are taken."""
        if self.port is None:
            return "the gRPC listener has not started"
        if self._closing or self.died() or self._queue.refuses() == "stopping":
            return _CLOSED
        if self._queue.at_bound():
            return (
                f"pushes are refused: {self._queue.held_bytes} bytes wait, "
                f"the bound is grpc.max_queue_bytes={self._queue.bound_bytes}"
            )
        return None

    def announce_the_end(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._health.enter_graceful_shutdown(), self._loop)

    def close(self, timeout_secs: float) -> None:
        """Stop listening; answers on their way get half of the time. Harmless twice or before `start`."""
        self._closing = True
        if self._loop is None or self._end is None or not self._thread.is_alive():
            return
        self._grace_secs = timeout_secs / 2
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (OSError, RuntimeError, grpc.RpcError, StartError) as error:
            self._death = str(error)
            if not self._bound.done():
                self._bound.set_exception(error)
        finally:
            if not self._bound.done():
                self._bound.set_exception(StartError("the gRPC listener could not be started"))

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=_options(self._settings))
        transport = _Transport(self._queue, self._refusals, self.not_serving)
        server.add_generic_rpc_handlers((transport.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _bind(server, self._settings)
        await server.start()
        self._bound.set_result(port)
        await self._end.wait()
        await server.stop(self._grace_secs)


def _bind(server: grpc.aio.Server, settings: Grpc) -> int:
    credentials = server_credentials(settings)
    try:
        if credentials is None:
            return server.add_insecure_port(settings.listen)
        return server.add_secure_port(settings.listen, credentials)
    except RuntimeError as error:
        raise StartError(
            f"grpc.listen={settings.listen}: cannot listen there ({error}): "
            "is the port taken, or the address not one of this machine?"
        ) from error


def _options(settings: Grpc) -> tuple[tuple[str, int], ...]:
    """Without `so_reuseport` a second process on the port is an error, not a thief of half of the pushes."""
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
        ("grpc.keepalive_time_ms", int(_KEEPALIVE_SECS * 1000)),
        ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_ANSWER_SECS * 1000)),
        # else connections without a call are not pinged, and a sender may ping one every two hours only
        ("grpc.keepalive_permit_without_calls", 1),
        # the library waits for this one, 60 s unless told, where it is above the keepalive's own
        ("grpc.http2.ping_timeout_ms", int(_KEEPALIVE_ANSWER_SECS * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(_PING_SECS_MIN * 1000)),
        ("grpc.http2.max_ping_strikes", 5),
    )


class _Transport:
    """The three methods of the service.

    `Push` and `RouteBatch` are unary on the wire and registered as request streams: their handlers run
    before the message has been read, and so can refuse or put off the reading.
    """

    def __init__(self, queue: PushQueue, refusals: Refusals, not_serving: Callable[[], str | None]) -> None:
        self._queue = queue
        self._refusals = refusals
        self._not_serving = not_serving
        self._receiving = asyncio.Semaphore(_RECEIVING_MAX)

    def handlers(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Push": grpc.stream_unary_rpc_method_handler(self._push),
                "RouteBatch": grpc.stream_unary_rpc_method_handler(self._route_batch),
                "HealthCheck": grpc.unary_unary_rpc_method_handler(self._health_check),
            },
        )

    async def _push(self, _requests: _Requests, context: _Context) -> bytes:
        accepted = await self._accept(context, _lines_of)
        return wire.PushResponse(accepted=accepted).SerializeToString()

    async def _route_batch(self, _requests: _Requests, context: _Context) -> bytes:
        accepted = await self._accept(context, _values_of)
        return wire.BatchAck(accepted=accepted).SerializeToString()

    async def _health_check(self, _request: bytes, _context: _Context) -> bytes:
        status = wire.HealthCheckResponse.SERVING
        if self._not_serving() is not None:
            status = wire.HealthCheckResponse.NOT_SERVING
        return wire.HealthCheckResponse(status=status).SerializeToString()

    async def _accept(self, context: _Context, parse: Callable[[bytes], Push]) -> int:
        """Queue one push and return its number of records, or end the call with the reason.

        gRPC cancels this at the call's deadline or when the sender gives up; nothing is queued then.
        """
        if (reason := self._queue.refuses()) is not None:
            await self._refuse(context, reason, _LATER[reason])
        raw = await self._receive(context)
        try:
            push = parse(raw)
        except DecodeError:
            await self._refuse(context, "malformed", f"not a message of {SERVICE}")
        except _NotArchivable as error:
            await self._refuse(context, "format", str(error))
        if push.records > 0:
            await self._queue_or_refuse(context, push)
        return push.records

    async def _queue_or_refuse(self, context: _Context, push: Push) -> None:
        verdict = self._queue.offer(push)
        if verdict == "queued":
            self._refusals.taken()
        elif verdict == "too_large":
            await self._refuse(
                context,
                verdict,
                f"the push takes {push.cost} bytes, more than the whole queue "
                f"(grpc.max_queue_bytes={self._queue.bound_bytes}): it can never be taken, send smaller ones",
            )
        else:
            await self._refuse(context, verdict, _LATER[verdict])

    async def _receive(self, context: _Context) -> bytes:
        """The one message of the call. A sender that stops in the middle does not keep others waiting."""
        try:
            async with asyncio.timeout(_RECEIVE_SLOT_SECS) as waiting, self._receiving:
                waiting.reschedule(asyncio.get_running_loop().time() + _RECEIVE_SECS)
                raw: bytes | object = await context.read()
        except TimeoutError:
            await self._refuse(context, "late", _LATER["late"])
        if not isinstance(raw, bytes):
            # also where the library refuses it: the sender has been told RESOURCE_EXHAUSTED by then
            await self._refuse(context, "incomplete", _NO_MESSAGE)
        return raw

    async def _refuse(self, context: _Context, reason: PushRefusal, detail: str) -> NoReturn:
        """End the call. [G2]: with UNAVAILABLE nothing was taken, and the same push may be sent again."""
        self._refusals.refused(reason, detail)
        await context.abort(_STATUS[reason], detail, _RETRY_HINT if reason in _LATER else ())


_LATER: dict[PushRefusal, str] = {
    "full": "the archiver's queue is full: nothing of this push was taken, send it again later",
    "stopping": "the archiver is shutting down: nothing of this push was taken, send it again",
    "late": "the push did not arrive in time: nothing of it was taken, send it again later",
}

_STATUS: dict[PushRefusal, grpc.StatusCode] = {
    **dict.fromkeys(_LATER, grpc.StatusCode.UNAVAILABLE),
    "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "format": grpc.StatusCode.INVALID_ARGUMENT,
    "malformed": grpc.StatusCode.INVALID_ARGUMENT,
    "incomplete": grpc.StatusCode.INVALID_ARGUMENT,
}


class _NotArchivable(Exception):
    """The payload is in a format whose records cannot be told apart."""


def _lines_of(raw: bytes) -> Push:
    if (plain := plain_push(raw)) is not None:
        start, stop, number = plain
        _check_formats({number})
        return JsonLines(raw, start, stop)
    request = wire.PushRequest.FromString(raw)
    _check_formats({request.format})
    return JsonLines(request.payload)


def _values_of(raw: bytes) -> Push:
    records = list(wire.Batch.FromString(raw).records)  # each access makes an object anew
    _check_formats(set(map(attrgetter("format"), records)))
    return Values(list(map(attrgetter("payload"), records)))


def _check_formats(formats: Set[int]) -> None:
    for number in sorted(formats - _ARCHIVABLE):
        name = wire.Format.Name(number) if number in wire.Format.values() else f"format {number}"
        raise _NotArchivable(f"{name} cannot be archived as lines: send JSON or JSON lines (JSON or AUTO)")
