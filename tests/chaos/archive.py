"""Where an archive lies, and what is in it, record by record: counted, compared, and held to a bound."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.chaos.load import Load
from tests.chaos.periods import Period, reads
from tests.harness.archive import ArchivedFile, read_archive, read_objects
from tests.harness.seaweed import SeaweedFS

OBJECTS_AT_ONCE = 2_000


class Place(Protocol):
    """An archive that can be listed and read without the archiver."""

    def keys(self) -> list[str]:
        """All keys below the destination."""
        ...

    def files(self) -> list[ArchivedFile]:
        """Every archive file, decoded whole by the codec's own tool; `ArchiveError` where that fails."""
        ...


class Folder:
    """A `file://` destination."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def keys(self) -> list[str]:
        return [path.relative_to(self.root).as_posix() for path in self.root.rglob("*.jsonl*")]

    def files(self) -> list[ArchivedFile]:
        return [file for files in read_archive(self.root).values() for file in files]


class Bucket:
    """An `s3://` destination: a bucket and a prefix."""

    def __init__(self, server: SeaweedFS, bucket: str, prefix: str) -> None:
        self.server = server
        self.bucket = bucket
        self.prefix = prefix

    def keys(self) -> list[str]:
        head = f"{self.prefix}/"
        found = (key.removeprefix(head) for key in self.server.keys(self.bucket, head))
        return [key for key in found if ".jsonl" in key]

    def files(self) -> list[ArchivedFile]:
        files: list[ArchivedFile] = []
        keys = self.keys()
        for first in range(0, len(keys), OBJECTS_AT_ONCE):
            part = keys[first : first + OBJECTS_AT_ONCE]
            objects = {key: self.server.read(self.bucket, f"{self.prefix}/{key}") or b"" for key in part}
            files += [file for found in read_objects(objects).values() for file in found]
        return files


@dataclass
class Interruption:
    """What the archive held and what was committed when a process had just been killed [D7]."""

    keys: frozenset[str]
    committed: Mapping[int, int]


@dataclass
class Verdict:
    """What a check found. `beyond` counts copies that the interruptions do not explain."""

    records: int = 0
    objects: int = 0
    bytes: int = 0
    missing: int = 0
    foreign: int = 0
    disordered: int = 0
    duplicates: int = 0
    allowed: int = 0
    beyond: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep the first few."""
        if len(self.examples) < 5:
            self.examples.append(text)

    def __str__(self) -> str:
        parts = [f"{name} {value:,}" for name, value in vars(self).items() if name != "examples"]
        return ", ".join(parts) + "".join(f"\n    {text}" for text in self.examples)


def check(
    load: Load,
    produced: int,
    place: Place,
    interruptions: Sequence[Interruption] = (),
    having: Sequence[Period] = (),
) -> Verdict:
    """Compare an archive with what was produced: byte for byte, each record in its own route, in order.

    Copies are explained by interruptions, or by the periods in which members of a group had partitions.
    """
    verdict = Verdict(records=produced)
    copies = array("H", bytes(2 * produced))
    allowed = array("H", (max(count - 1, 0) for count in reads(load, produced, having)))
    for file in place.files():
        verdict.objects += 1
        verdict.bytes += file.size
        numbers = _numbers(load, produced, file, verdict)
        for n in numbers:
            copies[n] += 1
        for interruption in interruptions:
            if file.key in interruption.keys:
                for n in numbers:
                    if load.offsets[n] >= interruption.committed.get(n % load.partitions, 0):
                        allowed[n] += 1
    for n, count in enumerate(copies):
        if not count:
            verdict.missing += 1
            verdict.note(f"missing: record {n}, partition {n % load.partitions} at {load.offsets[n]}")
        verdict.duplicates += max(count - 1, 0)
        verdict.allowed += allowed[n]
        if count > 1 + allowed[n]:
            verdict.beyond += count - 1 - allowed[n]
            verdict.note(f"record {n} is there {count} times, {1 + allowed[n]} are explained")
    return verdict


def _numbers(load: Load, produced: int, file: ArchivedFile, verdict: Verdict) -> list[int]:
    """The records of a file; what is not one of ours, not here, or out of order is counted."""
    numbers: list[int] = []
    last = dict.fromkeys(range(load.partitions), -1)
    for line in file.lines:
        n = load.number(line)
        if n is None or n >= produced or load.value(n) != line or load.route(n) != file.route:
            verdict.foreign += 1
            verdict.note(f"foreign in {file.key}: {line[:100]!r}")
            continue
        if n <= last[n % load.partitions]:
            verdict.disordered += 1
            verdict.note(f"order in {file.key}: record {n} behind {last[n % load.partitions]}")
        last[n % load.partitions] = n
        numbers.append(n)
    return numbers


def temporary_root() -> Path:
    """A folder for one run."""
    return Path(tempfile.mkdtemp(prefix="chaos-"))
