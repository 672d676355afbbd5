"""An HTTP proxy in front of any store that fails as told; without an upstream, a server that answers as told.

    with FaultProxy(seaweed.endpoint) as proxy:
        proxy.fail(s3_error(503, "SlowDown"), when=puts, times=3)
        proxy.fail(LoseAnswer(), when=puts)           # the request succeeds, its answer never arrives
        proxy.go_away()                               # connection refused, until come_back()

Signatures stay valid: method, path, query, headers and `Host` are passed on as they came.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from tests.harness.process import free_port

CHUNK_BYTES = 64 * 1024
UPSTREAM_TIMEOUT_SECS = 60
_NOT_PASSED_ON = frozenset({"expect", "connection", "transfer-encoding", "content-length", "keep-alive"})


@dataclass(frozen=True)
class Request:
    """What came in. `query` maps names to first values, empty for bare names; header names are lower-case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    at: float


@dataclass(frozen=True)
class Answer:
    """Take the whole request, pass nothing on, answer this. A HEAD gets the headers alone."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drop:
    """Take `after_bytes` of the request's body (None: all of it), pass nothing on, reset the connection."""

    after_bytes: int | None = 0


@dataclass(frozen=True)
class LoseAnswer:
    """Pass the request on, let it succeed, and reset the connection instead of answering."""


@dataclass(frozen=True)
class CutAnswer:
    """Pass the request on, and cut the answer's body after so many bytes."""

    after_bytes: int = 0


@dataclass(frozen=True)
class Delay:
    """Wait before a byte of the body is taken; then the request meets what else is told, or is passed on."""

    secs: float


@dataclass(frozen=True)
class Gate:
    """Wait, as with `Delay`, until it is opened."""

    _opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        """Let pass what waits, and everything from now on."""
        self._opened.set()

    def wait(self, closing: threading.Event) -> None:
        """Until it is open, or the proxy closes."""
        while not self._opened.wait(0.02) and not closing.is_set():
            pass


@dataclass(frozen=True)
class Hang:
    """Take the request and never answer: the connection stays open until the proxy closes."""


@dataclass(frozen=True)
class Respond:
    """Answer what a function makes of the request: for servers that check something about it."""

    make: Callable[[Request, bytes], Answer]


@dataclass(frozen=True)
class ChangeAnswer:
    """Pass the request on, and change the answer: for stores that lie."""

    change: Callable[[Answer], Answer]


Fault = Answer | Drop | LoseAnswer | CutAnswer | Delay | Gate | Hang | Respond | ChangeAnswer


def s3_error(status: int, code: str, message: str = "told so") -> Answer:
    """An error as S3 writes it."""
    body = (
        f"<?xml version='1.0'?><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
    )
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


def always(request: Request) -> bool:
    """Every request."""
    del request
    return True


def puts(request: Request) -> bool:
    """Requests that bring bytes."""
    return request.method == "PUT"


@dataclass
class _Rule:
    fault: Fault
    when: Callable[[Request], bool]
    times: int | None


class FaultProxy:
    """See the module. `requests` holds what came in, in order; rules are tried in the order of telling.

    `tls` makes it speak https to its clients.
    """

    def __init__(self, upstream: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream or "")
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.forwards = upstream is not None
        self.requests: list[Request] = []
        self.connections = 0
        self.closing = threading.Event()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.tls = tls
        # not one that an outgoing connection could take while the proxy is away
        self._server: _Server | None = _Server(("127.0.0.1", free_port()), self)
        self.port: int = self._server.server_address[1]
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def fail(self, fault: Fault, when: Callable[[Request], bool] = always, times: int | None = 1) -> None:
        """Let the next `times` requests for which `when` holds meet `fault`; None: all from now on."""
        with self._lock:
            self._rules.append(_Rule(fault, when, times))

    def heal(self) -> None:
        """Forget every fault that was told."""
        with self._lock:
            self._rules.clear()

    def go_away(self) -> None:
        """Refuse connections and reset those that are open."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            reset(one)

    def come_back(self) -> None:
        """Listen again, on the same port."""
        if self._server is None:
            self._server = _Server(("127.0.0.1", self.port), self)
            self._server.start()

    def seen(self, method: str = "", query: str = "") -> list[Request]:
        """Requests of a method that carry a query name."""
        with self._lock:
            return [
                r
                for r in self.requests
                if (not method or r.method == method) and (not query or query in r.query)
            ]

    def note(self, request: Request) -> None:
        """Remember what came in."""
        with self._lock:
            self.requests.append(request)

    def faults_for(self, request: Request) -> Iterator[Fault]:
        """The faults that the request meets; taking one uses it up."""
        with self._lock:
            rules = list(self._rules)
        for rule in rules:
            with self._lock:
                if rule.times == 0 or not rule.when(request):
                    continue
                if rule.times is not None:
                    rule.times -= 1
            yield rule.fault

    def fault_for(self, request: Request) -> Fault | None:
        """The fault that the request meets, after the delays that are told before it."""
        for fault in self.faults_for(request):
            match fault:
                case Delay():
                    self.closing.wait(fault.secs)
                case Gate():
                    fault.wait(self.closing)
                case _:
                    return fault
        return None

    @contextlib.contextmanager
    def open_connection(self, connection: socket.socket) -> Iterator[None]:
        """Count a client's connection and remember it while it is open."""
        with self._lock:
            self.connections += 1
            self._sockets.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)

    def __enter__(self) -> Self:
        if self._server is not None:
            self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self.go_away()


def reset(connection: socket.socket) -> None:
    """Close so that the other side sees a reset, not an orderly end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        super().__init__(address, _Handler)
        if proxy.tls is not None:
            self.socket = proxy.tls.wrap_socket(self.socket, server_side=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are what this server is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle(self) -> None:
        with self.server.proxy.open_connection(self.connection):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """The tests look at `requests` instead."""

    def _serve(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, split.path, query, headers, time.monotonic())
        proxy = self.server.proxy
        proxy.note(request)
        fault = proxy.fault_for(request)
        match fault:
            case Answer():
                self._take_body()
                self._answer(fault)
            case Respond():
                self._answer(fault.make(request, self._take_body()))
            case Drop():
                self._take_body(fault.after_bytes)
                self._reset()
            case Hang():
                self._take_body()
                self.server.proxy.closing.wait()
                self._reset()
            case _ if not self.server.proxy.forwards:
                self._take_body()
                self._answer(Answer(404))
            case _:
                self._pass_on(fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _serve

    def _pass_on(self, fault: Fault | None) -> None:
        answer = self._forward(self._take_body())
        match fault:
            case LoseAnswer():
                self._reset()
            case CutAnswer():
                self._answer(answer, cut_after=fault.after_bytes)
                self._reset()
            case ChangeAnswer():
                self._answer(fault.change(answer))
            case _:
                self._answer(answer)

    def _forward(self, body: bytes) -> Answer:
        """The upstream's answer; 502 where there is none."""
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=UPSTREAM_TIMEOUT_SECS)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _NOT_PASSED_ON:
                    upstream.putheader(name, value)
            if body or "content-length" in self.headers or "transfer-encoding" in self.headers:
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return Answer(answer.status, answer.read(), dict(answer.getheaders()))
        except (OSError, http.client.HTTPException):
            return Answer(502)
        finally:
            upstream.close()

    def _take_body(self, bytes_max: int | None = None) -> bytes:
        """The request's body, or the first `bytes_max` bytes of it."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            return b"".join(self._chunks())
        length = int(self.headers.get("content-length", 0))
        return self.rfile.read(length if bytes_max is None else min(length, bytes_max))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, answer: Answer, cut_after: int | None = None) -> None:
        names = {name.lower() for name in answer.headers}
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _NOT_PASSED_ON or (
                self.command == "HEAD" and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if not (self.command == "HEAD" and "content-length" in names):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body if cut_after is None else answer.body[:cut_after])
        self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        reset(self.connection)
