"""The HTTP side ([O2]): metrics, health, status, the page, and the request to roll.

One thread, one event loop, no signal handlers. Every answer is made from a snapshot, so a request
never waits for the archiver and the archiver never for a request.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from archiver.errors import StartError
from archiver.telemetry import page
from archiver.telemetry.state import StatusSource

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from archiver.telemetry.prompt import PromptServer

HEADER_BYTES_MAX = 16_384
"""Of a request that is not complete yet; one that comes in a single read may be as large as that read."""

BODY_BYTES_MAX = 4_096
KEEP_ALIVE_SECS = 5
ACCEPTED_AT_ONCE_MAX = 8
"""The event loop accepts as many as its backlog before it looks at the first: each takes a file handle."""
WAITING_MAX = 512
"""Connections that the kernel keeps until they are accepted; they take no handle."""
START_SECS_MAX = 10.0

log = logging.getLogger("archiver")


class HttpServer:
    """Serves from `start` to `stop`. `listen` is `host:port`; port 0 takes a free one, see `port`.

    `roll` is called for `POST /ops/roll`, on the HTTP thread: from loopback, or with `ops_token`.
    `healthy_within_secs` is how old the loop's last turn may be; longer than a drain.
    `died`, if given, is called with the reason if the thread ends by itself.
    """

    def __init__(
        self,
        listen: str,
        state: StatusSource,
        registry: CollectorRegistry,
        roll: Callable[[], None],
        ops_token: str | None,
        healthy_within_secs: float,
        died: Callable[[str], None] | None = None,
    ) -> None:
        self._listen = listen
        self._answers = Answers(state, registry, roll, ops_token, healthy_within_secs)
        self._died = died
        self._socket: socket.socket | None = None
        self._server: PromptServer | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.port = 0

    def start(self) -> None:
        """Bind and serve. Raises StartError with the address where that is not possible."""
        self._socket = bind(self._listen)
        self.port = int(self._socket.getsockname()[1])
        self._server = _server(self._answers.app())
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECS_MAX
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise StartError(f"metrics.listen={self._listen}: the HTTP server did not start")
            time.sleep(0.005)
        # The event loop has cut the kernel's queue to what it accepts at once: in a crowd a probe would
        # wait for a second, until its client tries again.
        self._socket.listen(WAITING_MAX)

    def stop(self, timeout_secs: float = 2.0) -> None:
        """Close the port and let running answers end, within the time given; idempotent."""
        self._stopping = True
        if self._server is not None and self._thread is not None:
            self._server.end()
            self._thread.join(timeout_secs)
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        assert self._server is not None and self._socket is not None
        reason = "it ended by itself"
        try:
            self._server.run(sockets=[self._socket])
        except (OSError, RuntimeError, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
        if not self._stopping:
            log.error("http server ended: %s", reason)
            if self._died is not None:
                self._died(reason)


class Answers:
    """What each path answers; the routes of the application."""

    def __init__(
        self,
        state: StatusSource,
        registry: CollectorRegistry,
        roll: Callable[[], None],
        ops_token: str | None,
        healthy_within_secs: float,
    ) -> None:
        self._state = state
        self._registry = registry
        self._roll = roll
        self._ops_token = ops_token or None
        self._healthy_within_secs = healthy_within_secs

    def app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        application = Starlette(
            routes=[
                Route("/", self.page, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/healthz", self.healthz, methods=["GET"]),
                Route("/readyz", self.readyz, methods=["GET"]),
                Route("/status", self.status, methods=["GET"]),
                Route("/ops/roll", self.roll, methods=["POST"]),
            ]
        )
        application.router.redirect_slashes = False
        return application

    async def metrics(self, request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return _response(encoder(self._registry), content_type)

    async def healthz(self, request: Request) -> Response:
        stuck = self._stuck()
        return _text(503, stuck) if stuck else _text(200, "alive")

    async def readyz(self, request: Request) -> Response:
        reasons = self.not_ready()
        return _text(503, "\n".join(reasons)) if reasons else _text(200, "ready")

    async def status(self, request: Request) -> Response:
        body = status_json(self._state, self.not_ready())
        return _response(json.dumps(body).encode("ascii"), "application/json")

    async def page(self, request: Request) -> Response:
        html = page.render(
            self._state.latest(), self._state.troubles(), self.not_ready(), self._state.turn_age_secs()
        )
        return _response(
            html.encode("utf-8", "backslashreplace"),
            "text/html; charset=utf-8",
            headers={
                "Content-Security-Policy": page.CONTENT_SECURITY_POLICY,
                "Referrer-Policy": "no-referrer",
            },
        )

    async def roll(self, request: Request) -> Response:
        if int(request.headers.get("content-length", "0")) > BODY_BYTES_MAX:
            return _text(413, "the request needs no body", headers={"Connection": "close"})
        if not self._may_roll(request):
            return _text(
                401, "from loopback, or with metrics.ops_token", headers={"WWW-Authenticate": "Bearer"}
            )
        self._roll()
        return _text(202, "every open file is being sealed")

    def not_ready(self) -> tuple[str, ...]:
        """Why it is not ready; empty when it is. A loop that stands still is not, whatever it said last."""
        status = self._state.latest()
        stuck = self._stuck()
        if status is None:
            return ("starting", stuck) if stuck else ("starting",)
        return (stuck, *status.not_ready) if stuck else status.not_ready

    def _stuck(self) -> str | None:
        age_secs = self._state.turn_age_secs()
        if age_secs <= self._healthy_within_secs:
            return None
        return f"the loop has not turned for {age_secs:.0f} s (at most {self._healthy_within_secs:.0f} s)"

    def _may_roll(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self._ops_token is not None and scheme.lower() == "bearer":
            return hmac.compare_digest(token.strip().encode(), self._ops_token.encode())
        # a proxy on this machine speaks for others, and so does a browser that a web page sends here
        speaks_for_others = any(
            name in request.headers for name in ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")
        )
        return request.client is not None and _is_loopback(request.client.host) and not speaks_for_others


def status_json(state: StatusSource, not_ready: tuple[str, ...]) -> dict[str, Any]:
    """The status as plain data, with the troubles; what it is before the first one, too."""
    status = state.latest()
    body: dict[str, Any] = {"state": "starting"} if status is None else msgspec.to_builtins(status)
    body["ready"] = not not_ready
    body["not_ready"] = list(not_ready)
    body["turn_age_secs"] = round(state.turn_age_secs(), 3)
    body["troubles"] = msgspec.to_builtins(state.troubles())
    return body


def bind(listen: str, key: str = "metrics.listen") -> socket.socket:
    """A listening socket on `host:port`, `[v6]:port` or `:port`. Raises StartError, which names `key`."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "0.0.0.0"
    try:
        if not 0 <= int(port) <= 65_535:
            raise ValueError(f"port {port} is not between 0 and 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        raise StartError(f"{key}={listen}: not an address to listen on ({error})") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(WAITING_MAX)
    except OSError as error:
        listening.close()
        raise StartError(f"{key}={listen}: {error}: choose another port or stop what uses it") from error
    return listening


def _server(app: Starlette) -> PromptServer:
    import uvicorn

    from archiver.telemetry.connection import Connection
    from archiver.telemetry.prompt import PromptServer

    return PromptServer(
        uvicorn.Config(
            app,
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # an X-Forwarded-For must not make anyone look like loopback
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE_MAX,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_SECS,
            timeout_graceful_shutdown=1,
        )
    )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _response(
    body: bytes, content_type: str, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    from starlette.responses import Response

    always = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Content-Type": content_type}
    return Response(body, status, headers={**always, **(headers or {})})


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    body = f"{text}\n".encode("utf-8", "backslashreplace")
    return _response(body, "text/plain; charset=utf-8", status, headers)
