"""An HTTP server whose every answer is a function of the request, body included.

For services that no server on this machine plays: a resumable session, a token endpoint. Faults in front of
a real server are `fault_proxy`'s.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """One request as it arrived; `target` is path and query as sent, header names are lower-case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        """Query parameters, the first value of each."""
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query, True).items()}


@dataclass(frozen=True)
class Answer:
    """What to send back."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


DROP = None
"""Close the connection without a word: the request may have been carried out or not."""

Handler = Callable[[Request], Answer | None]


class Answering:
    """Listens on 127.0.0.1 and asks `handler` for each answer; `requests` keeps what has arrived."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[Request] = []
        outer = self

        class _Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                outer.requests.append(request)
                answer = outer.handler(request)
                if answer is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
