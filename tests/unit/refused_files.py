"""Refused files as the pipeline hands them over, for the tests of the dead letters."""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from archiver.codecs import CODECS
from archiver.domain.batch import Span, TopicPartition
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.events import DeadLettered, Event
from archiver.inbox import QueueInbox
from archiver.ports import RefusedFile, Result
from tests.harness.process import PATIENCE

FOREVER: Callable[[], bool] = lambda: False  # noqa: E731


def refuse(
    folder: Path,
    frames: Sequence[Sequence[bytes]],
    spans: Mapping[TopicPartition, Span] | None = None,
    *,
    file_id: int = 1,
    codec: str = "zstd",
    route: str = "events/acme",
    reason: str = "key_invalid",
) -> RefusedFile:
    """A sealed file of these frames under `folder`, refused by the store."""
    folder.mkdir(parents=True, exist_ok=True)
    compressor = CODECS[codec].compressor()
    content = b"".join(compressor.frame(list(values)) for values in frames)
    nonce = secrets.token_hex(12)
    path = folder / f"{nonce}.{CODECS[codec].extension}"
    path.write_bytes(content)
    values = [value for frame in frames for value in frame]
    sealed = SealedFile(
        file_id=file_id,
        path=path,
        key=ObjectKey(f"{route}/2026/10/29/03-0001", "3f9a", CODECS[codec].extension),
        size=len(content),
        checksums=Checksums(zlib.crc32(content)),
        records=len(values),
        raw_bytes=sum(len(value) + 1 for value in values),
        codec=codec,
        nonce=nonce,
        spans=dict(spans or {}),
    )
    return RefusedFile(sealed, reason, "the store said no")


def remove(sealed: SealedFile) -> None:
    """What the spool does."""
    sealed.path.unlink(missing_ok=True)


def answers(inbox: QueueInbox, until: Callable[[list[Result]], bool], secs: float = 10) -> list[Result]:
    """Everything that arrives until the condition holds for it."""
    results: list[Result] = []
    deadline = time.monotonic() + PATIENCE * secs
    while not until(results):
        assert time.monotonic() < deadline, f"only {results}"
        results += inbox.wait(0.05)
    return results


class Heard:
    """Where events go in these tests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def outcomes(self) -> list[tuple[str, str, int]]:
        """Reason, outcome and records of every dead letter event."""
        return [(e.reason, e.outcome, e.records) for e in self.events if isinstance(e, DeadLettered)]


def spans_of(*spans: tuple[str, int, int, int, int]) -> dict[TopicPartition, Span]:
    """From `(topic, partition, first, last, count)`s."""
    return {TopicPartition(t, p): Span(first, last, count) for t, p, first, last, count in spans}


def lines_of(folder: Path) -> Iterable[bytes]:
    """Every line of every dead letter file, in the order of their names."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from path.read_bytes().splitlines()
