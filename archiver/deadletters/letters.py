"""A dead letter, and what readers and sinks of them promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from archiver.errors import ArchiverError
from archiver.ports import RefusedFile

Header = tuple[str, bytes | None]
Stopping = Callable[[], bool]
"""True once the attempt under way is of no use any more: the process ends, or nobody waits for the file."""


class GivenUpError(ArchiverError):
    """The attempt was given up because it was asked to stop."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of a refused file, as far as it is known.

    Read from Kafka again, all of it is. Read from the file there is no key, no header and no timestamp,
    and where the offset cannot be told `span` says what the file holds, as `topic/partition:first-last`.
    `is_line` marks a line that may be a part of a record whose value holds newlines.
    """

    value: bytes
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    timestamp_ms: int | None = None
    key: bytes | None = None
    headers: tuple[Header, ...] = ()
    span: str | None = None
    is_line: bool = False


class Sink(Protocol):
    """Where dead letters go."""

    @property
    def name(self) -> str:
        """The `outcome` of `dead_letters_total`: `kafka` or `file`."""
        ...

    def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
        """Write all letters and return their number once every one is confirmed.

        Raises `DeadLetterError`; what was written until then may stay and be written again.
        """
        ...


class RecordReader(Protocol):
    """Where the records of a refused file are read from."""

    def open(
        self, refused: RefusedFile, attempt: int, stopping: Stopping
    ) -> Callable[[], Iterator[DeadLetter]]:
        """Check that the file's records can be had, whole; the answer reads them, any number of times.

        `attempt` counts from 1. Raises `DeadLetterError` where a later attempt may see more, and
        `DamagedFileError` where the file is the last place and is not what was sealed. So does reading.
        """
        ...


class Delivery(Protocol):
    """One attempt to bring a refused file to where it may be forgotten."""

    def deliver(self, refused: RefusedFile, attempt: int, stopping: Stopping) -> None:
        """Returns once every record is confirmed. Raises `DeadLetterError` or `DamagedFileError`."""
        ...


def go_on(stopping: Stopping) -> None:
    """Raises `GivenUpError` once `stopping` says so."""
    if stopping():
        raise GivenUpError("asked to stop")
