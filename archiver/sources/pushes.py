"""Accepted pushes on their way to the pipeline: a queue that is bounded in bytes [G2].

A push waits as it came and is split only when the pipeline takes it: bytes that wait are counted
exactly, and a payload of very short lines does not grow in memory while it waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from itertools import islice, repeat
from typing import Literal, Protocol

PIECE_RECORDS = 1000
"""Records of a push handed out at once; larger batches leave the processor's cache."""

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

    def pieces(self) -> Iterator[list[bytes]]:
        """Its values in order, at most `PIECE_RECORDS` at a time, never an empty list."""
        ...


class JsonLines:
    r"""A payload whose records end with `\n`; the last one may leave it out. A `\r` is part of its record."""

    __slots__ = ("_payload", "cost", "records")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self.records = _newlines(payload) + (1 if payload and not payload.endswith(b"\n") else 0)
        self.cost = len(payload) + _RECORD_COST_BYTES

    def pieces(self) -> Iterator[list[bytes]]:
        # a file's lines are found with memchr, which `split` does not use: half of its time
        lines = map(bytes.removesuffix, BytesIO(self._payload), repeat(b"\n"))
        while piece := list(islice(lines, PIECE_RECORDS)):
            yield piece


def _newlines(payload: bytes) -> int:
    """Leaving them out is done with memchr and counting them is not: a fifth of the time of `count`."""
    return len(payload) - len(payload.replace(b"\n", b""))


class Values:
    """Records that came with a payload each, taken as they are."""

    __slots__ = ("_values", "cost", "records")

    def __init__(self, values: list[bytes]) -> None:
        self._values = values
        self.records = len(values)
        self.cost = sum(map(len, values)) + _RECORD_COST_BYTES * (1 + len(values))

    def pieces(self) -> Iterator[list[bytes]]:
        for first in range(0, len(self._values), PIECE_RECORDS):
            yield self._values[first : first + PIECE_RECORDS]


class PushQueue:
    """First in, first out, at most `bytes_max`; `offer` from any thread, the rest from the pipeline's.

    A push counts in full until its last record has been taken.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._low_bytes = bytes_max * 4 // 5
        self._bytes = 0
        self._waiting: deque[Push] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._refused = False
        self._open: tuple[Push, Iterator[list[bytes]]] | None = None
        self._open_records_left = 0

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

    def take(self, timeout_secs: float) -> list[bytes]:
        """The next values in order of arrival, about `PIECE_RECORDS`; empty after `timeout_secs`."""
        values: list[bytes] = []
        while len(values) < PIECE_RECORDS:
            piece = self._next_piece(0.0 if values else timeout_secs)
            if piece is None:
                break
            if values:
                values += piece
            else:
                values = piece
        return values

    def _next_piece(self, timeout_secs: float) -> list[bytes] | None:
        if self._open is None:
            push = self._pop(timeout_secs)
            if push is None:
                return None
            self._open = (push, push.pieces())
            self._open_records_left = push.records
        push, pieces = self._open
        piece = next(pieces)
        self._open_records_left -= len(piece)
        if self._open_records_left == 0:
            self._open = None
            self._let_go(push)
        return piece

    def _pop(self, timeout_secs: float) -> Push | None:
        with self._changed:
            if not self._waiting and timeout_secs > 0:
                self._changed.wait_for(lambda: self._waiting, timeout_secs)
            return self._waiting.popleft() if self._waiting else None

    def _let_go(self, push: Push) -> None:
        with self._changed:
            self._bytes -= push.cost
            if self._bytes <= self._low_bytes:
                self._refused = False
