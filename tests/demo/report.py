"""What the demo shows of the archive: its files as a tree, some lines, and the offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import zstandard

from tests.harness.archive import Archive, ArchivedFile

LINE_CHARS = 100


def decode_zstd(paths: Sequence[Path]) -> dict[Path, bytes]:
    """With the zstandard package, since the demo needs no program beside Python. Reads every frame."""
    decoded = {}
    for path in paths:
        with path.open("rb") as handle:
            reader = zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True)
            decoded[path] = reader.readall()
    return decoded


def tree(archive: Archive) -> list[str]:
    """A line a folder with files and a line a file, with records, bytes and ratio; then the sums."""
    files = [file for route in sorted(archive) for file in archive[route]]
    lines: list[str] = []
    shown = ""
    for file in files:
        folder, _, name = file.key.rpartition("/")
        if folder != shown:
            lines.append(f"{folder}/")
            shown = folder
        lines.append(f"{'    ' + name:<36}{_sizes(file)}")
    raw, size = sum(file.raw_bytes for file in files), sum(file.size for file in files)
    records = sum(len(file.lines) for file in files)
    lines.append(f"{f'{len(files)} files':<36}{_columns(records, raw, size)}")
    return lines


def _sizes(file: ArchivedFile) -> str:
    return _columns(len(file.lines), file.raw_bytes, file.size)


def _columns(records: int, raw: int, size: int) -> str:
    return f"{records:>7,} records {raw:>10,} B -> {size:>9,} B   {raw / max(size, 1):.1f}x"


def first_lines(file: ArchivedFile, count: int = 3) -> list[str]:
    """The first records of a file, cut to the width of a terminal."""
    texts = [line.decode("utf-8", "replace") for line in file.lines[:count]]
    return [text if len(text) <= LINE_CHARS else text[: LINE_CHARS - 1] + "…" for text in texts]


def offsets(by_topic: Mapping[str, Mapping[int, tuple[int, int]]]) -> list[str]:
    """Committed against end offset, a line a partition."""
    return [
        f"{f'{topic}[{partition}]':<14} committed {committed:>6,}   end {end:>6,}   lag {end - committed}"
        for topic, partitions in by_topic.items()
        for partition, (committed, end) in partitions.items()
    ]
