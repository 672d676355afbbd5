"""One HTTP connection that cannot be held open by a slow peer, and does not keep others out."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """The server's own protocol, with a deadline for each answer and a bound on connections.

    The deadline starts with the connection and again with each completed answer. It covers a request
    that never ends and an answer that is never read; an idle connection is closed long before. Beyond
    `connections_max` the one that has been quiet the longest is cut, so that a probe gets through.
    """

    answer_secs_max: ClassVar[float] = 15.0
    connections_max: ClassVar[int] = 32

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        self._cut_quietest()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._set_deadline()
        super().on_response_complete()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.answer_secs_max, self.transport.abort)

    def _cut_quietest(self) -> None:
        # one that was cut stays in the set until the loop comes to it
        held = [other for other in self.connections if not other.transport.is_closing()]
        if len(held) > self.connections_max:
            quiet = [other for other in held if isinstance(other, Connection) and other is not self]
            min(quiet, key=lambda other: other._deadline.when() if other._deadline else 0.0).transport.abort()
