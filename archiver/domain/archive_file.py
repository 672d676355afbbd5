"""One archive file as the loop sees it, from its first buffered record until it is durable.

Buffer and file are one thing with one id: the ledger holds offsets by it, and a flush moves records
from the buffer into the file without touching the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from archiver.domain.batch import Span, Spans, TopicPartition, merge_spans
from archiver.domain.rolling import RollReason
from archiver.domain.sealed import ObjectKey, SealedFile

RUN_BYTES = 41
"""What a run of lines costs beside its bytes: CPython's header of a `bytes` (33) and a list slot (8)."""

FILE_BYTES = 1600
"""What a file costs in memory as long as it is not durable, so that very many small ones meet [B1] too."""

HOLD_BYTES = 170
"""What each partition costs that a file has records of: spans, the hold in the ledger, its sets and lists."""

State = Literal["open", "closing", "uploading", "refused", "damaged"]


@dataclass(slots=True)
class Chunk:
    """Records on their way to the writer, as one frame."""

    number: int
    lines: list[bytes]
    """Runs of records, as in `Slice.lines`."""
    records: int
    raw_bytes: int
    spans: Spans

    @property
    def memory(self) -> int:
        """Bytes of memory it holds."""
        return self.raw_bytes + RUN_BYTES * len(self.lines)


@dataclass(slots=True, eq=False)
class ArchiveFile:
    """`opened_at` and `since` are monotonic seconds: when it opened, and when its oldest record came.

    `held` are the partitions whose offsets it holds back in the ledger; `spans` what is in the file.
    """

    file_id: int
    route: str
    key: ObjectKey
    nonce: str
    opened_at: float
    since: float
    state: State = "open"
    lines: list[bytes] = field(default_factory=list)
    """The buffer: runs of records, as in `Slice.lines`."""
    buffered_records: int = 0
    buffered_bytes: int = 0
    buffered_since: float = 0.0
    buffered_spans: Spans = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    """Handed to the writer, oldest first. Few, and an empty deque would take 600 bytes of each file."""
    chunk_number: int = 0
    spans: Spans = field(default_factory=dict)
    held: set[TopicPartition] = field(default_factory=set)
    kept: bool = False
    """Nobody brings its records again: it is uploaded, whoever owns its partitions."""
    records: int = 0
    raw_bytes: int = 0
    size: int = 0
    reason: RollReason | None = None
    """Why it closed."""
    overdue: RollReason | None = None
    """Why it closes as soon as the spool takes its buffer; it takes no more records."""
    failures: int = 0
    """Local writes or seals that failed in a row, its predecessors' included."""
    refusals: int = 0
    """Writes in a row for which there was no space, its predecessors' included."""
    sealed: SealedFile | None = None
    successor: ArchiveFile | None = None
    waits_for: int | None = None
    """A successor takes the records that its predecessor could not write: until all of those are
    known it is not flushed, or records would change places."""
    requeued: int = 0
    """How many of the buffer's first runs came from the predecessor's failed chunks."""

    def add(self, partition: TopicPartition, lines: bytes, first: int, last: int, records: int) -> bool:
        """Buffer a `Slice` of this route's; True where the buffer had no record of the partition."""
        self.lines.append(lines)
        self.buffered_records += records
        self.buffered_bytes += len(lines) + 1
        span = self.buffered_spans.get(partition)
        if span is None:
            self.buffered_spans[partition] = Span(first, last, records)
            return True
        span.last = last
        span.count += records
        return False

    @property
    def memory(self) -> int:
        """Bytes of memory its buffer holds."""
        return self.buffered_bytes + RUN_BYTES * len(self.lines)

    def cut(self) -> Chunk:
        """Take the buffer as the next chunk."""
        self.chunk_number += 1
        chunk = Chunk(
            self.chunk_number, self.lines, self.buffered_records, self.buffered_bytes, self.buffered_spans
        )
        self.chunks.append(chunk)
        self.lines, self.buffered_records, self.buffered_bytes = [], 0, 0
        self.buffered_spans, self.requeued = {}, 0
        return chunk

    def written(self, size: int) -> Chunk:
        """The oldest chunk under way is in the file, which is now `size` bytes long."""
        chunk = self.chunks.pop(0)
        merge_spans(self.spans, chunk.spans)
        self.records += chunk.records
        self.raw_bytes += chunk.raw_bytes
        self.size = size
        return chunk

    def requeue(self, chunk: Chunk) -> None:
        """Put a predecessor's failed chunk in front of the buffer, behind earlier failed ones."""
        self.lines[self.requeued : self.requeued] = chunk.lines
        self.requeued += len(chunk.lines)
        self.buffered_records += chunk.records
        self.buffered_bytes += chunk.raw_bytes
        merge_spans(self.buffered_spans, {p: Span(s.first, s.last, s.count) for p, s in chunk.spans.items()})

    def inherit_buffer(self, predecessor: ArchiveFile) -> None:
        """Take over what the predecessor has buffered and will never flush."""
        self.lines, predecessor.lines = predecessor.lines, []
        self.buffered_records, predecessor.buffered_records = predecessor.buffered_records, 0
        self.buffered_bytes, predecessor.buffered_bytes = predecessor.buffered_bytes, 0
        self.buffered_spans, predecessor.buffered_spans = predecessor.buffered_spans, {}
        self.requeued, predecessor.requeued = predecessor.requeued, 0
