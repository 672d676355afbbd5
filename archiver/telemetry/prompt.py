"""The HTTP server's event loop, which ends when it is told to and not at its next look."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn

TICK_SECS = 1.0
"""How often the library's own looks are made: for the date in its answers."""
CLOSING_TURNS = 3
"""An idle connection is gone after that many turns of the event loop."""


class PromptServer(uvicorn.Server):
    """As the library's, but for its end: that looks ten times a second whether it is to end, and then waits
    0.1 s for connections even where there are none. A stop of the process would last as long."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Let running answers end, and then the thread; from any thread."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), TICK_SECS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listening in sockets or []:
            listening.close()
