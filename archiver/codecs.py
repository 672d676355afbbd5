"""Compression: one complete standard frame per flush, and readers that read all frames [F2] to [F4].

A compressed archive file is a run of frames, each with its own checksum, so that any prefix which
ends at a frame's end is a whole file, and the codec's own command-line tool reads it.

    CODECS["zstd"].compressor(3).frame([b"{}", b"[]"])    one frame of b"{}\\n[]\\n"
    scan(path, CODECS["zstd"])                             where the last whole frame ends, what it holds
    read_all(path, CODECS["zstd"])                         every decoded byte of every frame

Several calls of the libraries below return the first frame of a file and no error. They appear here
only inside readers that go on to the next frame.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import cramjam
import deflate
import lz4.frame
import zstandard
from isal import isal_zlib

from archiver.errors import DamagedFileError

_GZIP_CONTAINER = 31  # zlib's wbits for a gzip member: mtime 0, CRC-32 and length behind the data
_READ_BYTES = 64 * 1024

_ZSTD_HEADER_BYTES_MAX = 18

_SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
_SNAPPY_COMPRESSED, _SNAPPY_UNCOMPRESSED = 0x00, 0x01
_SNAPPY_CHUNK_RAW_BYTES = 64 * 1024  # the framing format's maximum; every chunk but a frame's last is full
_SNAPPY_CHUNK_BYTES_MAX = 4 + 76_490  # checksum, and the most that 64 KiB can become


class Compressor(Protocol):
    """Belongs to one thread: a zstd context shared between threads crashes the process."""

    def frame(self, lines: list[bytes]) -> bytes:
        """One complete frame of the records in these runs (at least one), each followed by a newline [F1]."""
        ...

    def frames(self, buffers: Sequence[list[bytes]]) -> list[bytes]:
        """One such frame of each."""
        ...


_Compress = Callable[[list[bytes]], list[bytes]]
"""Each of some data as a frame of its own."""

_FrameReader = Callable[[BinaryIO, int], Generator[bytes, None, int]]
"""Decodes the frame at an offset in pieces; returns the offset of its end; raises `_NotWholeError`.

The pieces come before the frame's checksum has been verified.
"""


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec as users know it [F2]. The levels are None where there is nothing to choose.

    `extension` has no leading dot.
    """

    name: str
    extension: str
    level_min: int | None
    level_max: int | None
    level_default: int | None
    _compress: Callable[[int], _Compress]
    _read_frame: _FrameReader

    def compressor(self, level: int | None = None) -> Compressor:
        """A compressor for the calling thread; None is the codec's own level. ValueError out of range."""
        if level is None:
            level = self.level_default
        elif self.level_min is None or self.level_max is None:
            raise ValueError(f"{self.name} has no levels")
        elif not self.level_min <= level <= self.level_max:
            raise ValueError(f"{self.name} has levels {self.level_min} to {self.level_max}, not {level}")
        return _LineCompressor(self._compress(level or 0))


class _LineCompressor:
    __slots__ = ("_compress",)

    def __init__(self, compress: _Compress) -> None:
        self._compress = compress

    def frame(self, lines: list[bytes]) -> bytes:
        return self.frames([lines])[0]

    def frames(self, buffers: Sequence[list[bytes]]) -> list[bytes]:
        # The empty last element ends the last line without a second copy of the whole.
        return self._compress([b"\n".join((*lines, b"")) for lines in buffers])


# --- compressing ----------------------------------------------------------------------------


def _each(compress: Callable[[bytes], bytes]) -> _Compress:
    return lambda many: [compress(data) for data in many]


def _zstd(level: int) -> _Compress:
    context = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def compress(many: list[bytes]) -> list[bytes]:
        if len(many) == 1:
            return [context.compress(many[0])]
        # The interpreter's lock is let go of once for all of them, not for each.
        frames = context.multi_compress_to_buffer([*many])
        return [frames[n].tobytes() for n in range(len(many))]

    return compress


def _lz4(level: int) -> _Compress:
    def compress(data: bytes) -> bytes:
        frame: bytes = lz4.frame.compress(data, compression_level=level, content_checksum=True)
        return frame

    return _each(compress)


def _snappy(_level: int) -> _Compress:
    # Not through python-snappy: its StreamCompressor holds the GIL while it compresses.
    def compress(data: bytes) -> bytes:
        return bytes(cramjam.snappy.compress(data))

    return _each(compress)


def _gzip(level: int) -> _Compress:
    """Levels 1 and 2 are ISA-L's 1 and 3, above are libdeflate's, each where it is the smaller for its time.

    Left out are the levels that give more than the one before them on some records: libdeflate's 2 (100 B),
    5 (2,000 B of the same words) and 10. So 9 is made as 8. Measured in docs/decisions/0006.
    """
    if level <= 2:
        theirs = (1, 3)[level - 1]
        return _each(lambda data: isal_zlib.compress(data, theirs, _GZIP_CONTAINER))
    theirs = (3, 4, 6, 7, 8, 9, 9)[level - 3]
    return _each(lambda data: bytes(deflate.gzip_compress(data, theirs)))


def _none(_level: int) -> _Compress:
    return lambda many: many


# --- reading one frame ----------------------------------------------------------------------


class _NotWholeError(Exception):
    """What starts here is not a whole frame: cut off, corrupt, or no frame at all."""


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise _NotWholeError("it is cut off")
    return data


class _Lz4Decoder(lz4.frame.LZ4FrameDecompressor):  # type: ignore[misc]
    def decode(self, data: bytes) -> bytes:
        """At most 64 KiB of what `data`, and what is left of earlier data, decodes to."""
        try:
            piece: bytes = self.decompress(data, max_length=_READ_BYTES)
        except RuntimeError as error:
            raise _NotWholeError(str(error)) from error
        return piece

    @property
    def hungry(self) -> bool:
        return bool(self.needs_input)


class _GzipDecoder:
    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP_CONTAINER)

    def decode(self, data: bytes) -> bytes:
        """At most 64 KiB of what `data`, and what is left of earlier data, decodes to."""
        try:
            return self._member.decompress(self._member.unconsumed_tail + data, _READ_BYTES)
        except zlib.error as error:
            raise _NotWholeError(str(error)) from error

    @property
    def hungry(self) -> bool:
        return not self._member.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data


def _read_streamed(
    file: BinaryIO, start: int, magic: bytes, decoder: _Lz4Decoder | _GzipDecoder
) -> Generator[bytes, None, int]:
    """Frames whose decoder itself says where they end."""
    file.seek(start)
    if _exactly(file, len(magic)) != magic:
        raise _NotWholeError("no frame starts here")
    fed = start + len(magic)
    piece = decoder.decode(magic)
    while not decoder.eof:
        data = b""
        if decoder.hungry and not (data := file.read(_READ_BYTES)) and not piece:
            raise _NotWholeError("it is cut off")
        fed += len(data)
        if piece := decoder.decode(data):
            yield piece
    return fed - len(decoder.unused_data or b"")


def _read_lz4(file: BinaryIO, start: int) -> Generator[bytes, None, int]:
    return (yield from _read_streamed(file, start, b"\x04\x22\x4d\x18", _Lz4Decoder()))


def _read_gzip(file: BinaryIO, start: int) -> Generator[bytes, None, int]:
    return (yield from _read_streamed(file, start, b"\x1f\x8b\x08", _GzipDecoder()))


def _read_zstd(file: BinaryIO, start: int) -> Generator[bytes, None, int]:
    """Block by block (RFC 8878, 3.1.1), so that no piece is larger than a block can be."""
    file.seek(start)
    head = file.read(_ZSTD_HEADER_BYTES_MAX)
    try:
        if head[:4] != zstandard.FRAME_HEADER:
            raise _NotWholeError("no frame starts here")
        header = head[: zstandard.frame_header_size(head)]
        checksummed = zstandard.get_frame_parameters(head).has_checksum
        frame = zstandard.ZstdDecompressor().decompressobj()
        frame.decompress(header)
        end = start + len(header)
        file.seek(end)
        last = False
        while not last:
            block_header = _exactly(file, 3)
            last, size = _zstd_block(block_header)
            end += 3 + size
            if piece := frame.decompress(block_header + _exactly(file, size)):
                yield piece
        if checksummed:
            end += 4
            frame.decompress(_exactly(file, 4))
    except zstandard.ZstdError as error:
        raise _NotWholeError(str(error)) from error
    if not frame.eof:
        raise _NotWholeError("its length and its blocks disagree")
    return end


def _zstd_block(header: bytes) -> tuple[bool, int]:
    """Whether a block is its frame's last, and how many bytes follow its header."""
    word = int.from_bytes(header, "little")
    last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
    if kind == 3:
        raise _NotWholeError("a block header is corrupt")
    return last, 1 if kind == 1 else size  # one byte stands for a run of itself


def _read_snappy(file: BinaryIO, start: int) -> Generator[bytes, None, int]:
    """The stream identifier and the chunks behind it. The format has no end mark.

    Every chunk but a frame's last is full, so a shorter one ends the frame. A full one is the last
    where no good chunk follows and it ends with a newline, as every frame does.
    """
    file.seek(start)
    if _exactly(file, len(_SNAPPY_IDENTIFIER)) != _SNAPPY_IDENTIFIER:
        raise _NotWholeError("no frame starts here")
    end = start + len(_SNAPPY_IDENTIFIER)
    piece = b""
    while True:
        try:
            size, piece = _snappy_chunk(file)
        except _NotWholeError:
            if piece.endswith(b"\n"):
                return end
            raise
        end += size
        yield piece
        if len(piece) < _SNAPPY_CHUNK_RAW_BYTES:
            return end


def _snappy_chunk(file: BinaryIO) -> tuple[int, bytes]:
    """The size of the chunk of data that comes next, and what it decodes to, checksum verified."""
    header = _exactly(file, 4)
    size = int.from_bytes(header[1:], "little")
    if header[0] not in (_SNAPPY_COMPRESSED, _SNAPPY_UNCOMPRESSED) or size > _SNAPPY_CHUNK_BYTES_MAX:
        raise _NotWholeError("no chunk of data starts here")
    try:
        piece = bytes(cramjam.snappy.decompress(_SNAPPY_IDENTIFIER + header + _exactly(file, size)))
    except (OSError, cramjam.DecompressionError) as error:
        raise _NotWholeError(str(error)) from error
    return 4 + size, piece


def _read_none(file: BinaryIO, start: int) -> Generator[bytes, None, int]:
    """Without a codec there are no frames, so all that is there up to the last newline."""
    end = _end_of_last_line(file, start)
    if end == start:
        raise _NotWholeError("no line ends here")
    file.seek(start)
    for at in range(start, end, _READ_BYTES):
        yield _exactly(file, min(_READ_BYTES, end - at))
    return end


def _end_of_last_line(file: BinaryIO, start: int) -> int:
    at = file.seek(0, os.SEEK_END)
    while at > start:
        size = min(_READ_BYTES, at - start)
        at -= size
        file.seek(at)
        if (newline := _exactly(file, size).rfind(b"\n")) >= 0:
            return at + newline + 1
    return start


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("zstd", "jsonl.zst", 1, 22, 3, _zstd, _read_zstd),
        Codec("lz4", "jsonl.lz4", 1, 12, 1, _lz4, _read_lz4),
        Codec("snappy", "jsonl.sz", None, None, None, _snappy, _read_snappy),
        Codec("gzip", "jsonl.gz", 1, 9, 4, _gzip, _read_gzip),
        Codec("none", "jsonl", None, None, None, _none, _read_none),
    )
}
"""Every codec by the name it has in `compression.codec`."""


# --- reading all frames ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scan:
    """What the whole frames of a file hold: where the last one ends, and decoded bytes and lines.

    `lines` counts newlines, so a value that itself contains some counts for several.
    """

    end: int
    raw_bytes: int
    lines: int


def scan(path: Path, codec: Codec) -> Scan:
    """Decode frame after frame, checksums verified, up to the first that is not whole.

    For files that a crash left behind: any cut and any garbage behind the last whole frame is allowed.
    Memory is bounded by a zstd window or a few hundred KiB. Raises OSError if the file cannot be read.
    """
    found = Scan(0, 0, 0)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while found.end < size:
            try:
                found = _scan_frame(codec._read_frame(file, found.end), found)
            except _NotWholeError:
                break
    return found


def _scan_frame(frame: Generator[bytes, None, int], before: Scan) -> Scan:
    raw_bytes, lines = before.raw_bytes, before.lines
    while True:
        try:
            piece = next(frame)
        except StopIteration as ended:
            return Scan(ended.value, raw_bytes, lines)
        raw_bytes += len(piece)
        lines += piece.count(b"\n")


def end_of_last_whole_frame(path: Path, codec: Codec) -> int:
    """How many bytes of the file are whole frames; for `none`, whole lines [D7]. See `scan`."""
    return scan(path, codec).end


def read_all(path: Path, codec: Codec) -> Iterator[bytes]:
    """The decoded bytes of all frames [F4], in pieces that neither lines nor frames align with.

    Raises DamagedFileError where a frame is not whole; pieces of that frame may have come before.
    """
    end = 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while end < size:
                end = yield from codec._read_frame(file, end)
    except _NotWholeError as error:
        what = f"the {codec.name} frame at byte {end} is not whole"
        raise DamagedFileError(f"{path}: {what}: {error}") from error
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: the file has vanished") from error
