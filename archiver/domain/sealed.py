"""A sealed archive file: the unit of upload, which any attempt can re-open from its first byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from archiver.domain.batch import Span, TopicPartition


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """A key in three parts, so that a taken one can be tried again under a longer writer id [K4].

    `stem` is `<route>/<expanded template>-<seq>`, `writer_id` lower-case hex, `extension` without a dot.
    The destination's prefix is not part of it: the store adds that.
    """

    stem: str
    writer_id: str
    extension: str

    def __str__(self) -> str:
        return f"{self.stem}-{self.writer_id}.{self.extension}"

    def under(self, writer_id: str) -> ObjectKey:
        """The same key for another writer id."""
        return replace(self, writer_id=writer_id)


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of all bytes of the sealed file, computed while its frames were appended.

    `crc32` always; `crc32c` (GCS) and `md5` (Azure) only where the store asks for it.
    """

    crc32: int
    crc32c: int | None = None
    md5: bytes | None = None


@dataclass(frozen=True, slots=True)
class SealedFile:
    """Closed for good: never appended to again, its size and checksums known.

    `file_id` is unique in this process; `nonce` is unique everywhere and tells our own object from
    another writer's with the same bytes. `spans` is empty for a source without offsets.
    """

    file_id: int
    path: Path
    key: ObjectKey
    size: int
    checksums: Checksums
    records: int
    raw_bytes: int
    codec: str
    nonce: str
    spans: Mapping[TopicPartition, Span] = field(default_factory=dict)
