"""What an object says about itself, beside its bytes ([S4])."""

from __future__ import annotations

from collections.abc import Mapping

from archiver.domain.batch import Span, TopicPartition
from archiver.domain.sealed import SealedFile

METADATA_BYTES_MAX = 2048
"""S3's limit for names and values together, the lowest of the stores."""

_OMITTED_BYTES = len("offsets_omitted") + 10


def object_metadata(sealed: SealedFile, version: str) -> dict[str, str]:
    """Names of `[a-z0-9_]` and ASCII values, at most `METADATA_BYTES_MAX` together.

    `records`, `raw_bytes` (uncompressed), `codec`, `archiver_version`, `nonce` (tells our own upload from
    another writer's), and for a source with offsets `offsets`: `topic/partition:first-last:count` joined
    by commas, in the order of topic and partition, as many as fit; `offsets_omitted` counts the rest.
    """
    metadata = {
        "records": str(sealed.records),
        "raw_bytes": str(sealed.raw_bytes),
        "codec": sealed.codec,
        "archiver_version": version,
        "nonce": sealed.nonce,
    }
    room = METADATA_BYTES_MAX - metadata_bytes(metadata) - len("offsets") - _OMITTED_BYTES
    offsets, omitted = _offsets(sealed.spans, room)
    if offsets:
        metadata["offsets"] = offsets
    if omitted:
        metadata["offsets_omitted"] = str(omitted)
    return metadata


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """What a store counts: the bytes of all names and values."""
    return sum(len(name) + len(value) for name, value in metadata.items())


def _offsets(spans: Mapping[TopicPartition, Span], room: int) -> tuple[str, int]:
    """Entries that fit in `room` bytes, and how many did not."""
    entries: list[str] = []
    ordered = sorted(spans.items())
    for (topic, partition), span in ordered:
        entry = f"{topic}/{partition}:{span.first}-{span.last}:{span.count}"
        room -= len(entry) + bool(entries)
        if room < 0 or not entry.isascii():
            break
        entries.append(entry)
    return ",".join(entries), len(ordered) - len(entries)
