"""Codecs, checked by readers we did not write [F2] to [F4]."""

from __future__ import annotations

import random
import subprocess
import threading
import tracemalloc
import zlib
from pathlib import Path

import lz4.frame
import pytest
import snappy
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archiver.codecs import CODECS, Codec, end_of_last_whole_frame, read_all, scan
from archiver.errors import DamagedFileError
from bench.workload import Workload, make_values
from tests.unit.json_lines import json_lines

COMPRESSED = ["zstd", "lz4", "snappy", "gzip"]
CHUNKS = [
    [b'{"_org_id":"acme"}', b"", b"not json", b"two\nlines"],
    json_lines(700, seed=1),
    [random.Random(2).randbytes(200_000)],  # does not compress
    [b""],
]
RAW = b"".join(value + b"\n" for chunk in CHUNKS for value in chunk)


def write_frames(path: Path, codec: Codec, level: int | None = None) -> list[int]:
    """The chunks as a file; where each frame ends."""
    compressor = codec.compressor(level)
    ends, data = [0], b""
    for chunk in CHUNKS:
        data += compressor.frame(chunk)
        ends.append(len(data))
    path.write_bytes(data)
    return ends


def outside(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout


def snappy_all(data: bytes) -> bytes:
    """Every frame with python-snappy, which wants a new decoder behind each stream identifier."""
    identifier = b"\xff\x06\x00\x00sNaPpY"
    frames = data.split(identifier)
    assert frames[0] == b""
    return b"".join(snappy.StreamDecompressor().decompress(identifier + frame) for frame in frames[1:])


@pytest.mark.parametrize("level", [None, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("name", ["zstd", "lz4", "gzip"])
def test_the_codecs_own_tool_reads_every_frame(name: str, level: int | None, tmp_path: Path) -> None:
    """[F3]"""
    codec = CODECS[name]
    path = tmp_path / f"file.{codec.extension}"
    write_frames(path, codec, level)
    tool = {"zstd": "zstd", "lz4": "lz4", "gzip": "gzip"}[name]
    outside(tool, "-t", str(path))
    assert outside(tool, "-dc", str(path)) == RAW


def test_python_snappy_reads_every_frame(tmp_path: Path) -> None:
    """[F3]; SnappyFramedInputStream reads it in the integration tests."""
    path = tmp_path / "file.jsonl.sz"
    write_frames(path, CODECS["snappy"])
    assert snappy_all(path.read_bytes()) == RAW


def test_without_a_codec_the_file_is_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    write_frames(path, CODECS["none"])
    assert path.read_bytes() == RAW


@pytest.mark.parametrize("name", CODECS)
def test_our_reader_reads_every_frame(name: str, tmp_path: Path) -> None:
    """[F4]: byte and record counts match."""
    path = tmp_path / "file"
    ends = write_frames(path, CODECS[name])
    assert b"".join(read_all(path, CODECS[name])) == RAW
    found = scan(path, CODECS[name])
    assert (found.end, found.raw_bytes, found.lines) == (ends[-1], len(RAW), RAW.count(b"\n"))


def test_readers_of_one_frame_miss_the_others_without_an_error(tmp_path: Path) -> None:
    """[F4]: why `read_all` exists. Where this fails, the libraries have changed and the docs may too."""
    first = b"".join(value + b"\n" for value in CHUNKS[0])
    path = tmp_path / "file"
    write_frames(path, CODECS["zstd"])
    assert zstandard.ZstdDecompressor().decompress(path.read_bytes()) == first
    assert zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()) == first
    write_frames(path, CODECS["lz4"])
    assert lz4.frame.decompress(path.read_bytes()) == first
    write_frames(path, CODECS["gzip"])
    assert zlib.decompressobj(31).decompress(path.read_bytes()) == first


def test_a_zstd_frame_carries_its_checksum_and_content_size() -> None:
    frame = CODECS["zstd"].compressor().frame([b"{}"] * 1000)
    header = zstandard.get_frame_parameters(frame)
    assert header.has_checksum
    assert header.content_size == 3000


def test_an_lz4_frame_carries_its_content_checksum_and_size() -> None:
    header = lz4.frame.get_frame_info(CODECS["lz4"].compressor().frame([b"{}"] * 1000))
    assert header["content_checksum"]
    assert header["content_size"] == 3000


@pytest.mark.parametrize("level", [None, *range(1, 10)])
def test_a_gzip_member_has_no_time_in_it(level: int | None) -> None:
    """The same records give the same bytes, whenever they are compressed."""
    frame = CODECS["gzip"].compressor(level).frame([b"{}"])
    assert frame[:4] == b"\x1f\x8b\x08\x00"
    assert frame[4:8] == b"\0\0\0\0"


def logs(size: int) -> list[bytes]:
    return make_values(Workload(size=size, orgs=1), random.Random(6), (1 << 20) // size)


def measurements() -> list[bytes]:
    rng = random.Random(7)
    return [
        b'{"at":%d,"sensor":%d,"values":[%s],"ok":true}'
        % (1_790_000_000_000 + n, rng.randrange(500), b",".join(b"%.4f" % rng.gauss(0, 9) for _ in range(6)))
        for n in range(8000)
    ]


@pytest.mark.parametrize(
    "lines",
    [json_lines(2500, seed=4), logs(100), logs(400), logs(2000), measurements()],
    ids=["json lines", "logs 100 B", "logs 400 B", "logs 2,000 B", "numbers"],
)
def test_a_higher_gzip_level_is_never_larger(lines: list[bytes]) -> None:
    """[F2]: levels mean what users of gzip expect. Not every level of every library keeps to it."""
    sizes = [len(CODECS["gzip"].compressor(level).frame(lines)) for level in range(1, 10)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("lines", [json_lines(2500, seed=4), measurements()], ids=["json lines", "numbers"])
def test_gzip_by_default_is_nearly_as_small_as_gzip_and_at_level_6_as_small(lines: list[bytes]) -> None:
    """Not on logs as above: where a few words repeat, a fast search misses the longest runs."""
    gzip, theirs = CODECS["gzip"], len(zlib.compress(b"\n".join(lines), 6))
    assert 0.93 * len(gzip.compressor().frame(lines)) <= theirs
    assert len(gzip.compressor(6).frame(lines)) <= theirs


@pytest.mark.parametrize(("name", "least", "most"), [("zstd", 1, 22), ("lz4", 1, 12), ("gzip", 1, 9)])
def test_a_level_out_of_range_is_refused(name: str, least: int, most: int) -> None:
    """[C5]"""
    codec = CODECS[name]
    assert (codec.level_min, codec.level_max) == (least, most)
    for level in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} has levels {least} to {most}, not {level}"):
            codec.compressor(level)


@pytest.mark.parametrize("name", ["snappy", "none"])
def test_a_codec_without_levels_refuses_one(name: str) -> None:
    with pytest.raises(ValueError, match="has no levels"):
        CODECS[name].compressor(3)


@pytest.mark.parametrize("name", CODECS)
@given(chunks=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=8), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_come_back_as_they_went(name: str, chunks: list[list[bytes]], tmp_path: Path) -> None:
    """[F1]"""
    codec, path = CODECS[name], tmp_path / "file"
    compressor = codec.compressor()
    path.write_bytes(b"".join(compressor.frame(chunk) for chunk in chunks))
    wanted = b"".join(value + b"\n" for chunk in chunks for value in chunk)
    assert b"".join(read_all(path, codec)) == wanted


@pytest.mark.parametrize("name", CODECS)
def test_threads_with_a_compressor_each_do_not_disturb_one_another(name: str) -> None:
    codec, lines = CODECS[name], json_lines(300, seed=5)
    wanted = codec.compressor().frame(lines)
    wrong: list[int] = []

    def work() -> None:
        compressor = codec.compressor()
        wrong.extend(n for n in range(100) if compressor.frame(lines) != wanted)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- where the last whole frame ends [D7] ---------------------------------------------------

SMALL_CHUNKS = [[b"a", b"", b'{"a":1}'], [b"q" * 500], [random.Random(3).randbytes(150)]]
TAILS = [b"", b"\0" * 64, b"garbage\xff\x00" * 9, b"\n"]


def small_file(codec: Codec) -> tuple[bytes, list[int]]:
    data, ends = b"", [0]
    compressor = codec.compressor()
    for chunk in SMALL_CHUNKS:
        data += compressor.frame(chunk)
        ends.append(len(data))
    return data, ends


@pytest.mark.parametrize("tail", [*TAILS, "start of a frame"], ids=repr)
@pytest.mark.parametrize("name", COMPRESSED)
def test_the_last_whole_frame_is_found_at_any_cut(name: str, tail: bytes | str, tmp_path: Path) -> None:
    """[D7]: cut at every byte, and followed by what a power cut can leave there."""
    codec, path = CODECS[name], tmp_path / "file"
    data, ends = small_file(codec)
    behind = data[:7] if isinstance(tail, str) else tail
    for cut in range(len(data) + 1):
        left = data[:cut] + behind
        path.write_bytes(left)
        # Zeros behind a cut can happen to complete the frame, so what counts is what is there.
        wanted = max(end for end in ends if left[:end] == data[:end])
        assert end_of_last_whole_frame(path, codec) == wanted, cut


def test_without_a_codec_the_last_newline_is_the_end(tmp_path: Path) -> None:
    codec, path = CODECS["none"], tmp_path / "file"
    data, _ = small_file(codec)
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        assert end_of_last_whole_frame(path, codec) == data.rfind(b"\n", 0, cut) + 1
    path.write_bytes(b"line\n" + b"x" * 200_000)
    assert end_of_last_whole_frame(path, codec) == 5


@pytest.mark.parametrize("name", COMPRESSED)
def test_no_flipped_bit_changes_a_record_unseen(name: str, tmp_path: Path) -> None:
    """Checksums are verified: in every byte of the second frame a bit is flipped once.

    A few bits matter to nobody (the time in a gzip header, one of two equal back references).
    """
    codec, path = CODECS[name], tmp_path / "file"
    data, ends = small_file(codec)
    wanted = b"".join(value + b"\n" for chunk in SMALL_CHUNKS for value in chunk)
    seen = 0
    for at in range(ends[1], ends[2]):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        if end_of_last_whole_frame(path, codec) == ends[1]:
            seen += 1
            with pytest.raises(DamagedFileError):
                list(read_all(path, codec))
        else:
            assert b"".join(read_all(path, codec)) == wanted, at - ends[1]
    assert seen > (ends[2] - ends[1]) / 2


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 16])
def test_a_snappy_frame_of_full_chunks_has_an_end(chunks: int, extra: int, tmp_path: Path) -> None:
    """The framing format has no end mark: a frame whose last chunk is full still counts as whole."""
    codec, path = CODECS["snappy"], tmp_path / "file"
    value = random.Random(6).randbytes(chunks * 65536 - 1 + extra).replace(b"\n", b" ")
    frame = codec.compressor().frame([value])
    path.write_bytes(frame + frame)
    assert scan(path, codec).raw_bytes == 2 * (len(value) + 1)
    assert end_of_last_whole_frame(path, codec) == 2 * len(frame)
    for garbage in (b"\0\0", b"\xff" * 30, b"\x00\x04\x00\x00abcd"):
        path.write_bytes(frame + garbage)
        assert end_of_last_whole_frame(path, codec) == len(frame)


def test_a_snappy_frame_that_lacks_chunks_is_not_whole(tmp_path: Path) -> None:
    """Each chunk has its own checksum, so a cut between two looks like a whole stream to any reader."""
    codec, path = CODECS["snappy"], tmp_path / "file"
    frame = codec.compressor().frame([b"x" * 300_000])
    second_chunk = 10 + 4 + int.from_bytes(frame[11:14], "little")
    path.write_bytes(frame + frame[:second_chunk])
    assert end_of_last_whole_frame(path, codec) == len(frame)


@pytest.mark.parametrize("name", CODECS)
def test_a_frame_that_decodes_to_far_more_than_itself_is_scanned_in_little_memory(
    name: str, tmp_path: Path
) -> None:
    codec, path = CODECS[name], tmp_path / "file"
    value = b"\0" * (48 * 1024 * 1024)
    path.write_bytes(codec.compressor().frame([value]))
    tracemalloc.start()
    found = scan(path, codec)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.raw_bytes == len(value) + 1
    assert peak < 4 * 1024 * 1024


@pytest.mark.parametrize("name", CODECS)
def test_an_empty_file_holds_no_frame(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert end_of_last_whole_frame(path, CODECS[name]) == 0
    assert list(read_all(path, CODECS[name])) == []


@pytest.mark.parametrize("name", CODECS)
def test_reading_a_damaged_file_says_which_frame(name: str, tmp_path: Path) -> None:
    codec, path = CODECS[name], tmp_path / "file"
    data, ends = small_file(codec)
    path.write_bytes(data[:-1])
    at = ends[2] if name != "none" else data.rfind(b"\n", 0, -1) + 1
    with pytest.raises(DamagedFileError, match=f"the {name} frame at byte {at} is not whole"):
        list(read_all(path, codec))


def test_reading_a_file_that_is_gone_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="vanished"):
        list(read_all(tmp_path / "gone", CODECS["zstd"]))
