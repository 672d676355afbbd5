"""Accepted pushes on their way to the pipeline: a queue that is bounded in bytes [G2].

A push waits as it came and is split only when the pipeline takes it: bytes that wait are counted
exactly, and a payload of very short lines does not grow in memory while it waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from archiver.sources.columns import Column, count_lines, new_column

PIECE_RECORDS = 2500
PIECE_BYTES = 1 << 20
"""What is handed out at once: so many records at most, and no further push once there are so many bytes.

A batch costs a turn of the loop and a run of lines per route, whatever its size."""

GATHER_SECS = 0.003
"""For so long the first push after a lull waits for others, unless enough bytes come together: its sender has
its answer, and a turn of the loop for each push would take the processor from those being received."""

_PUSH_COST_BYTES = 160
"""What a push costs beside its bytes: their header, its own object, its numbers and a place in the queue."""
_RECORD_COST_BYTES = 64
"""What a value of its own costs beside its bytes: the object's header and its place in a list."""

Verdict = Literal["queued", "full", "too_large", "stopping"]


class Push(Protocol):
    """One accepted push: all of it is queued or nothing."""

    @property
    def records(self) -> int: ...

    @property
    def cost(self) -> int:
        """Bytes that it holds in memory while it waits."""
        ...

    def hand_out(self, into: Column, most: int) -> bool:
        """Add its next values in order, at most so many; whether it has more."""
        ...


class JsonLines:
    r"""A payload whose records end with `\n`; the last one may leave it out. A `\r` is part of its record.

    The payload is a part of the `message` that brought it, so that it need not be copied out.
    """

    __slots__ = ("_message", "_next", "_stop", "cost", "records")

    def __init__(self, message: bytes, start: int = 0, stop: int | None = None) -> None:
        self._message = message
        self._next = start
        self._stop = len(message) if stop is None else stop
        self.records = count_lines(message, start, self._stop)
        self.cost = len(message) + _PUSH_COST_BYTES

    def hand_out(self, into: Column, most: int) -> bool:
        self._next = into.cut(self._message, self._next, self._stop, most)
        return self._next < self._stop


class Values:
    """Records that came with a payload each, taken as they are."""

    __slots__ = ("_next", "_values", "cost", "records")

    def __init__(self, values: list[bytes]) -> None:
        self._values = values
        self._next = 0
        self.records = len(values)
        self.cost = sum(map(len, values)) + _RECORD_COST_BYTES * len(values) + _PUSH_COST_BYTES

    def hand_out(self, into: Column, most: int) -> bool:
        first, self._next = self._next, self._next + most
        into.extend(self._values[first : self._next])
        return self._next < self.records


class PushQueue:
    """First in, first out, at most `bytes_max`; `offer` from any thread, the rest from the pipeline's.

    A push counts in full until its last record has been taken.
    """

    def __init__(self, bytes_max: int, *, compiled: bool = True) -> None:
        self._bytes_max = bytes_max
        self._low_bytes = bytes_max * 4 // 5
        self._enough_bytes = min(PIECE_BYTES, bytes_max // 8)
        self._bytes = 0
        self._waiting: deque[Push] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._refused = False
        self._open: Push | None = None
        """Handed out in part."""
        self._compiled = compiled

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def bound_bytes(self) -> int:
        return self._bytes_max

    def offer(self, push: Push) -> Verdict:
        """Queue it whole, or say why not. Never waits for room."""
        with self._changed:
            if self._stopping:
                return "stopping"
            if push.cost > self._bytes_max:
                return "too_large"
            if self._bytes + push.cost > self._bytes_max:
                self._refused = self._bytes > self._low_bytes
                return "full"
            self._bytes += push.cost
            self._waiting.append(push)
            if len(self._waiting) == 1 or self._bytes >= self._enough_bytes:
                self._changed.notify()
            return "queued"

    def refuses(self) -> Literal["full", "stopping"] | None:
        """Why no push is taken now, however small: so it need not even be read.

        From the first refusal on until a fifth of the room is free. At the very bound a push would
        be read whole, again and again, only to find that it does not fit.
        """
        if self._stopping:
            return "stopping"
        if self._bytes >= self._bytes_max:
            self._refused = True
        return "full" if self.at_bound() else None

    def at_bound(self) -> bool:
        """A push was refused for want of room and a fifth of the room is not free yet."""
        return self._refused and self._bytes > self._low_bytes

    def stop(self) -> None:
        """Take in nothing from now on; what has been accepted is still handed out."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def take(self, timeout_secs: float) -> Sequence[bytes]:
        """The next values in order of arrival, at most `PIECE_RECORDS`; none after `timeout_secs`."""
        values, size_bytes = new_column(compiled=self._compiled), 0
        while (room := PIECE_RECORDS - len(values)) > 0 and size_bytes < PIECE_BYTES:
            push = self._open or self._pop(0.0 if len(values) else timeout_secs)
            if push is None:
                break
            self._open = push if push.hand_out(values, room) else None
            if self._open is None:
                size_bytes += push.cost
                self._let_go(push)
        return cast(Sequence[bytes], values)

    def _pop(self, timeout_secs: float) -> Push | None:
        with self._changed:
            if not self._waiting and timeout_secs > 0:
                self._wait(timeout_secs)
            return self._waiting.popleft() if self._waiting else None

    def _wait(self, timeout_secs: float) -> None:
        """Until a push has come, and then a little for more of them."""
        if self._changed.wait_for(lambda: self._waiting, timeout_secs):
            self._changed.wait_for(lambda: self._stopping or self._bytes >= self._enough_bytes, GATHER_SECS)

    def _let_go(self, push: Push) -> None:
        with self._changed:
            self._bytes -= push.cost
            if self._bytes <= self._low_bytes:
                self._refused = False
