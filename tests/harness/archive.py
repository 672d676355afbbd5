"""Reads an archive as its users do, with the codecs' own tools, and compares it with what was produced.

Nothing here uses the archiver's code: what the archiver writes and what this reads can only agree if
both keep to the contract (`docs/archiving.md`).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.kafka import kafka_libs

TOOLS: Mapping[str, Sequence[str]] = {
    "jsonl.zst": ("zstd", "-dc", "-q"),
    "jsonl.lz4": ("lz4", "-dc", "-q"),
    "jsonl.gz": ("gzip", "-dc"),
    "jsonl": ("cat",),
}
SNAPPY = "jsonl.sz"
PROBE_NAME = ".dfe-archiver-probe"
"""The one object under a destination that is no archive file [S3]."""

KEY = r"(?P<route>.+)/(?:[^/]+/){DEPTH}[^/]*-\d{4,}-(?P<writer>[0-9a-f]{4,})\.jsonl(?:\.\w+)?"


class ArchiveError(AssertionError):
    """The archive holds something that the contract does not allow."""


@dataclass(frozen=True)
class ArchivedFile:
    """One object: its key below the destination, its size in the store, and its decoded lines in order."""

    key: str
    route: str
    writer_id: str
    size: int
    raw_bytes: int
    lines: list[bytes] = field(repr=False)


Archive = dict[str, list[ArchivedFile]]
"""Files by route, each route's in the order of their keys."""

Decode = Callable[[Sequence[Path]], Mapping[Path, bytes]]
"""All decoded bytes of each of some archive files."""


def read_archive(root: Path, *, template_segments: int = 4, decode: Decode | None = None) -> Archive:
    """Every archive file below `root`, by route, in the order of the keys.

    `template_segments` is how many path segments `archive.path_template` makes (the default one: 4);
    `decode` stands in for the tools where they are not to be had.
    `ArchiveError` for an empty file, a file that a tool does not take whole and silently, a last line
    without its newline, a foreign name, or a key that is not as [K1] says. `.tmp` files and the
    reserved key of the probe are passed over.
    """
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and not _passed_over(path)]
    decoded = (decode or decode_with_tools)(paths)
    routes: Archive = {}
    for path in paths:
        file = _archived(
            path.relative_to(root).as_posix(), path.stat().st_size, decoded[path], template_segments
        )
        routes.setdefault(file.route, []).append(file)
    return routes


def read_objects(
    objects: Mapping[str, bytes], *, template_segments: int = 4
) -> dict[str, list[ArchivedFile]]:
    """The same for objects fetched from a store, by key below the destination's prefix."""
    with tempfile.TemporaryDirectory(prefix="archive-") as folder:
        for key, content in objects.items():
            path = Path(folder, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return read_archive(Path(folder), template_segments=template_segments)


def _passed_over(path: Path) -> bool:
    return path.suffix == ".tmp" or path.name == PROBE_NAME


def _archived(key: str, size: int, raw: bytes, template_segments: int) -> ArchivedFile:
    match = re.fullmatch(KEY.replace("DEPTH", str(template_segments - 1)), key)
    if match is None:
        raise ArchiveError(f"{key}: not a key of the archive")
    if not size or not raw:
        raise ArchiveError(f"{key}: an empty file")
    if not raw.endswith(b"\n"):
        raise ArchiveError(f"{key}: the last line has no newline: {raw[-80:]!r}")
    return ArchivedFile(key, match["route"], match["writer"], size, len(raw), raw[:-1].split(b"\n"))


def decode_with_tools(paths: Sequence[Path]) -> dict[Path, bytes]:
    """With the codecs' own command-line tools, and snappy-java for the framing format of snappy."""
    snappy = [path for path in paths if path.name.endswith(SNAPPY)]
    others = [path for path in paths if not path.name.endswith(SNAPPY)]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        decoded = dict(zip(others, pool.map(_decode_with_tool, others), strict=True))
    return decoded | dict(_decode_snappy(snappy))


def _decode_with_tool(path: Path) -> bytes:
    tool = TOOLS.get(path.name[path.name.find(".jsonl") + 1 :])
    if tool is None:
        raise ArchiveError(f"{path}: no archive file has such a name")
    done = subprocess.run([*tool, str(path)], stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0 or done.stderr:
        raise ArchiveError(f"{path}: {tool[0]} ends with {done.returncode}: {done.stderr.decode()}")
    return done.stdout


def _decode_snappy(paths: Sequence[Path]) -> Iterator[tuple[Path, bytes]]:
    """All of them in one Java process, since each start of one takes a second."""
    if not paths:
        return
    with tempfile.TemporaryDirectory(prefix="snappy-") as folder:
        targets = {path: Path(folder, str(number)) for number, path in enumerate(paths)}
        program = Path(__file__).with_name("SnappyRead.java")
        done = subprocess.run(
            ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{kafka_libs()}/*", str(program)],
            input="".join(f"{path}\t{target}\n" for path, target in targets.items()),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise ArchiveError(f"snappy's framed reader ends with {done.returncode}: {done.stderr}")
        for path, target in targets.items():
            yield path, target.read_bytes()


@dataclass(frozen=True)
class Comparison:
    """What differs between what was produced and what is archived, by route and line, with counts.

    `missing` was produced and is not archived; `foreign` is archived where it was never produced;
    `duplicates` is archived more often than it was produced.
    """

    missing: dict[str, Counter[bytes]]
    foreign: dict[str, Counter[bytes]]
    duplicates: dict[str, Counter[bytes]]

    @property
    def complete(self) -> bool:
        """Nothing missing and nothing foreign; duplicates allowed, as at-least-once allows them."""
        return not self.missing and not self.foreign

    @property
    def exact(self) -> bool:
        """Every record once."""
        return self.complete and not self.duplicates

    def __str__(self) -> str:
        kinds = {"missing": self.missing, "foreign": self.foreign, "duplicates": self.duplicates}
        return "; ".join(_described(name, lines) for name, lines in kinds.items() if lines) or "equal"


def _described(name: str, by_route: Mapping[str, Counter[bytes]]) -> str:
    total = sum(lines.total() for lines in by_route.values())
    route, lines = next(iter(by_route.items()))
    first = next(iter(lines))
    return f"{total} {name} in {len(by_route)} routes, for example in {route}: {first[:120]!r}"


def compare(
    produced: Mapping[str, Iterable[bytes | None]], archive: Mapping[str, Sequence[ArchivedFile]]
) -> Comparison:
    """Compare as multisets of lines per route. Tombstones (None) write no line [F5].

    A value that holds newlines is several lines, in the archive as in the comparison [F6].
    """
    comparison = Comparison({}, {}, {})
    for route in sorted({*produced, *archive}):
        expected = _lines(produced.get(route, ()))
        found: Counter[bytes] = Counter()
        for file in archive.get(route, ()):
            found.update(file.lines)
        more = found - expected
        parts = (
            (comparison.missing, expected - found),
            (comparison.foreign, Counter({line: n for line, n in more.items() if line not in expected})),
            (comparison.duplicates, Counter({line: n for line, n in more.items() if line in expected})),
        )
        for kind, lines in parts:
            if lines:
                kind[route] = lines
    return comparison


def _lines(values: Iterable[bytes | None]) -> Counter[bytes]:
    lines: Counter[bytes] = Counter()
    for value in values:
        if value is not None:
            lines.update(value.split(b"\n"))
    return lines


def segment(value: str) -> str:
    """The path segment of a routing value, from the contract's text alone ([K5], [K7])."""
    raw = value.encode()
    plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
    units = [
        chr(byte) if byte in plain or (byte == 0x2E and index) else f"={byte:02X}"
        for index, byte in enumerate(raw)
    ]
    if sum(map(len, units)) <= 200:
        return "".join(units)
    cut = ""
    for unit in units:
        if len(cut) + len(unit) > 183:
            break
        cut += unit
    return f"{cut}~{hashlib.sha256(raw).hexdigest()[:16]}"
