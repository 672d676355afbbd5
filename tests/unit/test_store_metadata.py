"""What an object says about itself ([S4])."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from archiver.domain.batch import Span, TopicPartition
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.stores.metadata import METADATA_BYTES_MAX, metadata_bytes, object_metadata

SEALED = SealedFile(
    file_id=1,
    path=Path("/spool/1"),
    key=ObjectKey("events/acme/0001", "3f9a", "jsonl.zst"),
    size=10,
    checksums=Checksums(0),
    records=151,
    raw_bytes=50,
    codec="zstd",
    nonce="a" * 32,
)

topics = st.text("abcXYZ019._-", min_size=1, max_size=249)
offsets = st.integers(0, 2**63 - 1)
spans = st.dictionaries(
    st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1)),
    st.builds(Span, offsets, offsets, offsets),
    max_size=60,
)


@given(spans)
def test_metadata_always_fits_and_accounts_for_every_partition(held: dict[TopicPartition, Span]) -> None:
    """[S4]: 2 KB, names of [a-z0-9_], ASCII values; what is left out is counted."""
    metadata = object_metadata(replace(SEALED, spans=held), "1.2.3")
    assert metadata_bytes(metadata) <= METADATA_BYTES_MAX
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in metadata)
    assert all(value.isascii() and value.isprintable() for value in metadata.values())
    shown = [entry for entry in metadata.get("offsets", "").split(",") if entry]
    assert len(shown) + int(metadata.get("offsets_omitted", "0")) == len(held)
    for entry in shown:
        name, span, count = entry.rsplit(":", 2)
        topic, partition = name.rsplit("/", 1)
        first, last = span.split("-")
        assert held[TopicPartition(topic, int(partition))] == Span(int(first), int(last), int(count))


def test_a_source_without_offsets_has_none() -> None:
    """gRPC."""
    assert object_metadata(SEALED, "1.2.3") == {
        "records": "151",
        "raw_bytes": "50",
        "codec": "zstd",
        "archiver_version": "1.2.3",
        "nonce": "a" * 32,
    }


def test_dozens_of_partitions_fit() -> None:
    """A usual topic loses nothing."""
    held = {TopicPartition("events", n): Span(10_000_000, 10_000_999, 1000) for n in range(48)}
    assert "offsets_omitted" not in object_metadata(replace(SEALED, spans=held), "1.2.3")
