"""Buffering by the compiled part beside `ArchiveFile.add`, with everything that happens to files between."""

from __future__ import annotations

import random
from typing import Any

import pytest

from archiver import pipeline
from archiver.domain.archive_file import ArchiveFile
from archiver.domain.batch import RecordBatch, Span
from archiver.native import native
from archiver.ports import FrameWritten, WriteFailed
from tests.unit.compiled import needs_native
from tests.unit.test_internals_claims import Bench, P, Q


@needs_native
def test_both_ways_buffer_alike() -> None:
    """Random batches of few routes with everything that may happen to their files between them."""
    for seed in range(300):
        compiled, python = Bench(flush_records=9), Bench(flush_records=9)
        python.archiver._add_slices = pipeline._add_none
        for bench in (compiled, python):
            _live(bench, random.Random(seed))
        assert _state(compiled) == _state(python), seed


def _live(bench: Bench, rng: random.Random) -> None:
    offsets = {P: 0, Q: 0}
    for _ in range(60):
        match rng.randrange(8):
            case 0 if bench.outside.appended:
                file_id, chunk, _ = bench.outside.appended.pop(rng.randrange(len(bench.outside.appended)))
                file = bench.archiver.files.get(file_id)
                if file is not None and file.chunks and file.chunks[0].number == chunk:
                    full = rng.random() < 0.3
                    failed, size = WriteFailed(file_id, chunk, file.size, True, "full"), file.size + 10
                    bench.inbox.put(failed if full else FrameWritten(file_id, chunk, size))
            case 1:
                bench.archiver.roll_all("request")
            case 2 if rng.random() < 0.2:
                lost = rng.choice([P, Q])
                bench.archiver.lost(frozenset([lost]))
                bench.archiver.assigned({lost: None})
            case 3 if rng.random() < 0.2:
                bench.archiver.restarted(frozenset([rng.choice([P, Q])]))
            case _:
                partition, count = rng.choice([P, Q]), rng.randint(1, 6)
                values: list[bytes | None] = [b'{"_org_id":%d}' % rng.randrange(4) for _ in range(count)]
                first, offsets[partition] = offsets[partition], offsets[partition] + count
                batch = RecordBatch(partition, values, range(first, first + count))
                bench.outside.batches.append(batch)
        bench.archiver.turn()


def _state(bench: Bench) -> Any:
    archiver = bench.archiver
    files = {
        file_id: (file.route, file.lines, file.buffered_records, file.buffered_bytes)
        + (file.buffered_spans, file.chunks, file.spans, file.held, file.state)
        for file_id, file in archiver.files.items()
    }
    ledger = archiver.parts.ledger
    marks = {p: (ledger.low_water(p), ledger.position(p)) for p in (P, Q)}
    order = list(archiver.dirty), list(archiver.opened)
    return files, order, marks, archiver.memory, archiver.spool_bytes, bench.outside.offered


@needs_native
@pytest.mark.parametrize(
    "change",
    [
        {"open": {"r": object()}, "slices": [("r", b"1", 0, 0, 1)]},
        {"open": []},
        {"slices": [("r", b"1", 0, 0)]},
        {"slices": [("r", "1", 0, 0, 1)]},
        {"slices": [("r", b"1", 0, 0, "1")]},
        {"slices": ()},
        {"bytes_max": None},
    ],
)
def test_what_are_no_slices_or_files_is_refused(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"open": {}, "partition": P, "slices": [], "span_type": Span, "bytes_max": 9}
    assert native is not None
    with pytest.raises((TypeError, AttributeError)):
        native.add_slices(*(given | change).values(), 9)


class _Shifted:
    """Slots of a file's names in other places, and one that is none."""

    __slots__ = ("before", "buffered_bytes", "buffered_records", "buffered_spans", "lines")
    held = None


_SLOTS = ("lines", "buffered_records", "buffered_bytes", "buffered_spans", "held")
_Borrowing = type("_Borrowing", (), {name: vars(ArchiveFile)[name] for name in _SLOTS})
"""Slots of another class: its own objects have no such places."""


@needs_native
@pytest.mark.parametrize("other", [_Shifted, _Borrowing])
def test_an_object_that_is_no_file_leaves_what_is_known_of_files_alone(other: type) -> None:
    """Slots are read where they lie: of a wrong place it could be any memory."""
    assert native is not None
    slices = [("r", b"1", 7, 7, 1)]
    for _ in range(2):
        bench = Bench(flush_records=9)
        file = bench.archiver.new_file("r", 0.0)
        file.held.add(P)
        file.add(P, b"0", 6, 6, 1)
        assert native.add_slices({"r": file}, P, slices, Span, 99, 9) == ([], 1)
        assert (file.lines, file.buffered_spans) == ([b"0", b"1"], {P: Span(6, 7, 2)})
        with pytest.raises(TypeError, match="must be a slot"):
            native.add_slices({"r": other()}, P, slices, Span, 99, 9)
