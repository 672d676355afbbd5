"""The harness's archive reader sees what is wrong with an archive."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lz4.frame
import pytest
import snappy
import zstandard

from tests.harness.archive import ArchiveError, compare, read_archive, read_objects, segment

DAY = "2026/10/29"


def snappy_frame(data: bytes) -> bytes:
    return bytes(snappy.StreamCompressor().add_chunk(data))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "lz4": partial(lz4.frame.compress, content_checksum=True),
    "gz": gzip.compress,
    "sz": snappy_frame,
}


@pytest.mark.parametrize("extension", CODECS)
def test_every_frame_of_a_file_is_read(extension: str) -> None:
    """[F4]: several readers stop after the first frame."""
    frames = CODECS[extension](b"1\n2\n") + CODECS[extension](b"\n") + CODECS[extension](b"3\n")
    (files,) = read_objects({f"events/acme/{DAY}/03-0001-3f9a.jsonl.{extension}": frames}).values()
    assert files[0].lines == [b"1", b"2", b"", b"3"]
    assert (files[0].route, files[0].writer_id, files[0].size) == ("events/acme", "3f9a", len(frames))


@pytest.mark.parametrize("extension", CODECS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "followed"])
def test_a_damaged_file_is_an_error(extension: str, damage: str) -> None:
    """[F3]: whole frames with checksums and nothing after them."""
    content = CODECS[extension](bytes(range(10, 200)) * 50 + b"\n")
    middle = len(content) // 2
    damaged = {
        "cut": content[:-1],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "followed": content + b"\x01",
    }[damage]
    with pytest.raises(ArchiveError):
        read_objects({f"events/acme/{DAY}/03-0001-3f9a.jsonl.{extension}": damaged})


@pytest.mark.parametrize(
    ("key", "content"),
    [
        (f"events/acme/{DAY}/03-0001-3f9a.jsonl", b""),
        (f"events/acme/{DAY}/03-0001-3f9a.jsonl", b"no newline"),
        (f"events/acme/{DAY}/03-1-3f9a.jsonl", b"short seq\n"),
        (f"events/acme/{DAY}/03-0001-XYZ1.jsonl", b"no writer id\n"),
        (f"{DAY}/03-0001-3f9a.jsonl", b"no route\n"),
        (f"events/acme/{DAY}/03-0001-3f9a.jsonl.part", b"leftover\n"),
    ],
)
def test_what_the_contract_does_not_allow_is_an_error(key: str, content: bytes) -> None:
    with pytest.raises(ArchiveError):
        read_objects({key: content})


def test_unfinished_copies_and_the_probe_are_no_archive_files(tmp_path: Path) -> None:
    (tmp_path / ".dfe-archiver-probe").write_bytes(b"probe")
    (tmp_path / "03-0001-3f9a.jsonl.3f9a.tmp").write_bytes(b"half")
    assert read_archive(tmp_path) == {}


def test_missing_foreign_and_repeated_records_are_told_apart() -> None:
    archive = read_objects(
        {
            f"t/a/{DAY}/03-0001-3f9a.jsonl": b"1\n1\n2\nx\n",
            f"t/b/{DAY}/03-0001-3f9a.jsonl": b"4\n",
        }
    )
    result = compare({"t/a": [b"1", b"2", b"3", None], "t/c": [b"4"]}, archive)
    assert result.missing == {"t/a": {b"3": 1}, "t/c": {b"4": 1}}
    assert result.foreign == {"t/a": {b"x": 1}, "t/b": {b"4": 1}}
    assert result.duplicates == {"t/a": {b"1": 1}}
    assert not result.complete
    assert "2 missing in 2 routes" in str(result)


def test_equal_archives_are_exact() -> None:
    archive = read_objects({f"t/a/{DAY}/03-0001-3f9a.jsonl": b"1\n2\n\n3\n"})
    assert compare({"t/a": [b"1", b"2\n", b"3"]}, archive).exact


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/b", "a=2Fb"),
        ("..", "=2E."),
        ("a=b", "a=3Db"),
        ("é", "=C3=A9"),
        ("v1.2", "v1.2"),
        ("x" * 200, "x" * 200),
    ],
)
def test_segments_are_as_the_contract_says(value: str, expected: str) -> None:
    """[K5]."""
    assert segment(value) == expected


def test_a_long_segment_is_cut_at_a_whole_escape() -> None:
    """[K7]."""
    cut = segment("x" * 181 + "/" * 50)
    assert cut.startswith("x" * 181 + "~")
    assert len(cut) == 181 + 17
