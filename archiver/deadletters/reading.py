"""Reading a refused file's records back: from Kafka, where they are whole, or else from the sealed file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from archiver.codecs import CODECS, read_all
from archiver.deadletters.letters import DeadLetter, Stopping, go_on
from archiver.domain.batch import Span, TopicPartition
from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, DeadLetterError
from archiver.ports import RefusedFile

REREAD_ATTEMPTS_MAX = 4
"""With a broker that does not answer the file is read instead only after so many attempts."""

_SPAN_CHARACTERS_MAX = 500
_READ_BYTES = 1024 * 1024


class Lines:
    """Reads the sealed file: one letter per line, with offsets where they follow from the span."""

    def open(
        self, refused: RefusedFile, attempt: int, stopping: Stopping
    ) -> Callable[[], Iterator[DeadLetter]]:
        sealed = refused.sealed
        lines = _count_lines(sealed, stopping)
        return lambda: _letters_of_lines(sealed, lines, stopping)


def _count_lines(sealed: SealedFile, stopping: Stopping) -> int:
    """Newlines in the whole file. Raises `DamagedFileError` where it is not what was sealed [D10]."""
    if _crc32(sealed, stopping) != sealed.checksums.crc32:
        raise DamagedFileError(f"{sealed.path}: the refused file is not what was sealed")
    return sum(piece.count(b"\n") for piece in _pieces(sealed, stopping))


def _crc32(sealed: SealedFile, stopping: Stopping) -> int:
    crc = 0
    try:
        with open(sealed.path, "rb") as file:
            while block := file.read(_READ_BYTES):
                go_on(stopping)
                crc = zlib.crc32(block, crc)
    except FileNotFoundError as error:
        raise DamagedFileError(f"{sealed.path}: the refused file has vanished") from error
    except OSError as error:
        raise DeadLetterError(f"{sealed.path}: cannot be read back: {error}") from error
    return crc


def _letters_of_lines(sealed: SealedFile, lines: int, stopping: Stopping) -> Iterator[DeadLetter]:
    only = next(iter(sealed.spans.items())) if len(sealed.spans) == 1 else None
    whole = lines == sealed.records
    if only is not None and whole and _is_dense(only[1]):
        (topic, number), span = only
        for index, line in enumerate(_lines(sealed, stopping)):
            yield DeadLetter(line, topic, number, span.first + index)
        return
    topics = {partition.topic for partition in sealed.spans}
    common = topics.pop() if len(topics) == 1 else None
    partition = None if only is None else only[0].partition
    spans = span_text(sealed.spans)
    for line in _lines(sealed, stopping):
        yield DeadLetter(line, common, partition, span=spans, is_line=not whole)


def _is_dense(span: Span) -> bool:
    """No offset between first and last belongs to another file or to nobody."""
    return span.last - span.first + 1 == span.count


def span_text(spans: Mapping[TopicPartition, Span]) -> str | None:
    """`topic/partition:first-last`, by commas; cut short for files of very many partitions."""
    if not spans:
        return None
    ordered = sorted(spans.items())
    text = ",".join(f"{part.topic}/{part.partition}:{span.first}-{span.last}" for part, span in ordered)
    return text if len(text) <= _SPAN_CHARACTERS_MAX else text[: _SPAN_CHARACTERS_MAX - 3] + "..."


def _lines(sealed: SealedFile, stopping: Stopping) -> Iterator[bytes]:
    parts: list[bytes] = []
    for piece in _pieces(sealed, stopping):
        lines = piece.split(b"\n")
        parts.append(lines[0])
        if len(lines) > 1:
            yield b"".join(parts)
            yield from lines[1:-1]
            parts = [lines[-1]]


def _pieces(sealed: SealedFile, stopping: Stopping) -> Iterator[bytes]:
    try:
        for piece in read_all(sealed.path, CODECS[sealed.codec]):
            go_on(stopping)
            yield piece
    except OSError as error:
        raise DeadLetterError(f"{sealed.path}: cannot be read back: {error}") from error


class Originals(Protocol):
    """Reads the records where they came from, with keys and headers."""

    def missing(self, refused: RefusedFile, stopping: Stopping) -> str | None:
        """Why exactly the file's records cannot be read there any more; None where they can.

        Raises `DeadLetterError` where this cannot be told now.
        """
        ...

    def letters(self, refused: RefusedFile, stopping: Stopping) -> Iterator[DeadLetter]: ...


class OriginalsThenLines:
    """From Kafka while the offsets are there and give exactly the file's records, else from the file."""

    def __init__(self, originals: Originals) -> None:
        self._originals = originals
        self._lines = Lines()

    def open(
        self, refused: RefusedFile, attempt: int, stopping: Stopping
    ) -> Callable[[], Iterator[DeadLetter]]:
        if refused.sealed.spans:
            try:
                if self._originals.missing(refused, stopping) is None:
                    return lambda: self._originals.letters(refused, stopping)
            except DeadLetterError:
                if attempt < REREAD_ATTEMPTS_MAX:
                    raise
        return self._lines.open(refused, attempt, stopping)
