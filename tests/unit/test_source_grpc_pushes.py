"""Splitting and queueing of pushes: whole or not at all, in order, bounded in bytes [G1] [G2]."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archiver.native import native
from archiver.sources import pushes
from archiver.sources.columns import count_lines_plain, new_column
from archiver.sources.pushes import PIECE_BYTES, PIECE_RECORDS, JsonLines, Push, PushQueue, Values
from tests.harness.process import SLACK_SECS

WAYS = [False] if native is None else [False, True]
both_ways = pytest.mark.parametrize("compiled", WAYS)


def pieces_of(push: Push, compiled: bool, most: int = PIECE_RECORDS) -> list[list[bytes]]:
    pieces, more = [], True
    while more:
        column = new_column(compiled=compiled)
        more = push.hand_out(column, most)
        pieces.append([column[n] for n in range(len(column))])
    return pieces


def taken(queue: PushQueue, timeout_secs: float = 0) -> list[bytes]:
    return list(queue.take(timeout_secs))


@pytest.mark.parametrize(
    ("payload", "records"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\n\nb\n", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a\r", b"b\r"]),
        (b"\xff\x00\n\x0b\x0c\x1c\n", [b"\xff\x00", b"\x0b\x0c\x1c"]),
    ],
)
@both_ways
def test_only_newlines_split_and_a_last_one_adds_no_record(
    payload: bytes, records: list[bytes], compiled: bool
) -> None:
    push = JsonLines(payload)
    assert pieces_of(push, compiled) == [records]
    assert push.records == len(records)


bits = st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bb", b"\0\xff"])).map(b"".join)


@given(bits, bits, bits, st.integers(1, 7))
def test_a_payload_split_in_pieces_is_as_split_at_once_whatever_its_message_has_around_it(
    before: bytes, payload: bytes, behind: bytes, piece: int
) -> None:
    whole = payload.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    start, stop = len(before), len(before) + len(payload)
    for compiled in WAYS:
        push = JsonLines(before + payload + behind, start, stop)
        pieces = pieces_of(push, compiled, piece)
        assert [value for part in pieces for value in part] == whole
        assert push.records == count_lines_plain(before + payload + behind, start, stop) == len(whole)
        assert all(0 < len(part) <= piece for part in pieces) or not whole


@both_ways
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_batch_of_values_is_taken_as_it_is(compiled: bool, most: int) -> None:
    values = [b"a\nb", b"", b"\xff"]
    push = Values(values)
    pieces = pieces_of(push, compiled, most)
    assert [value for piece in pieces for value in piece] == values
    assert all(0 < len(piece) <= most for piece in pieces)
    assert push.records == 3


@both_ways
def test_values_come_out_in_the_order_they_went_in(compiled: bool) -> None:
    """[G1]: also over pushes that are larger than one batch."""
    queue = PushQueue(1 << 22, compiled=compiled)
    expected = [b"%d" % number for number in range(5 * PIECE_RECORDS)]
    for first in range(0, 1000, 10):
        assert queue.offer(Values(expected[first : first + 10])) == "queued"
    assert queue.offer(JsonLines(b"\n".join(expected[1000:4000]))) == "queued"
    assert queue.offer(Values(expected[4000:])) == "queued"
    got: list[bytes] = []
    while values := taken(queue):
        assert len(values) == PIECE_RECORDS
        got += values
    assert got == expected
    assert queue.held_bytes == 0


@both_ways
def test_no_further_push_is_added_to_what_is_large_already(compiled: bool) -> None:
    """[B1]: what is handed out at once is one push's bytes, or little more than the smaller bound."""
    queue = PushQueue(1 << 24, compiled=compiled)
    for size in (100, PIECE_BYTES, 300, 200):
        assert queue.offer(JsonLines(b"a" * size)) == "queued"
    assert [len(value) for value in taken(queue)] == [100, PIECE_BYTES]
    assert [len(value) for value in taken(queue)] == [300, 200]


@both_ways
def test_a_push_is_queued_whole_or_not_at_all_and_counts_until_its_last_record_is_taken(
    compiled: bool,
) -> None:
    """[G2]"""
    first = JsonLines(b"a\n" * (PIECE_RECORDS + 500))
    queue = PushQueue(first.cost + 100, compiled=compiled)
    assert queue.offer(first) == "queued"
    assert queue.offer(JsonLines(b"b" * 100)) == "full"
    assert queue.held_bytes == first.cost
    assert queue.at_bound()
    assert len(queue.take(0)) == PIECE_RECORDS
    assert queue.held_bytes == first.cost
    assert len(queue.take(0)) == 500
    assert queue.held_bytes == 0
    assert not queue.at_bound()
    assert queue.offer(JsonLines(b"b" * 100)) == "queued"
    assert taken(queue) == [b"b" * 100]


def test_after_a_refusal_none_is_taken_until_a_fifth_of_the_room_is_free() -> None:
    """[G2]: what cannot be taken need not be read. A large push alone does not keep small ones out."""
    queue = PushQueue(1000)
    for _ in range(5):
        assert queue.offer(JsonLines(b"a" * 24)) == "queued"
    assert queue.held_bytes == 920
    assert queue.refuses() is None
    assert queue.offer(JsonLines(b"a" * 24)) == "full"
    assert queue.refuses() == "full"
    assert len(queue.take(0)) == 5
    assert queue.refuses() is None
    assert queue.offer(JsonLines(b"a" * 604)) == "queued"
    assert queue.offer(JsonLines(b"a" * 604)) == "full"
    assert queue.refuses() is None
    assert queue.offer(JsonLines(b"a" * 30)) == "queued"


def test_a_push_larger_than_the_whole_bound_is_told_apart_from_a_full_queue() -> None:
    queue = PushQueue(1000)
    assert queue.offer(JsonLines(b"a" * 1000)) == "too_large"
    assert not queue.at_bound()


def test_many_tiny_values_count_more_than_their_bytes() -> None:
    """[B1]: a list of empty values is memory too."""
    assert PushQueue(10_000).offer(Values([b""] * 1000)) == "too_large"


def test_after_stop_nothing_is_accepted_and_what_was_accepted_is_handed_out() -> None:
    """[G1]: a graceful stop loses nothing that was answered."""
    queue = PushQueue(1 << 20)
    queue.offer(JsonLines(b"a\nb"))
    queue.stop()
    assert queue.offer(JsonLines(b"c")) == "stopping"
    assert queue.refuses() == "stopping"
    assert taken(queue) == [b"a", b"b"]
    assert taken(queue) == []


def test_take_wakes_up_for_a_push_and_gives_up_after_its_timeout() -> None:
    queue = PushQueue(1 << 20)
    began = time.monotonic()
    assert taken(queue, 0.05) == []
    assert 0.04 < time.monotonic() - began < SLACK_SECS
    threading.Timer(0.05, lambda: queue.offer(JsonLines(b"late"))).start()
    began = time.monotonic()
    assert taken(queue, 60) == [b"late"]
    assert time.monotonic() - began < 60 / 2


@pytest.mark.parametrize("end", ["enough", "stop"])
def test_what_comes_after_a_lull_is_gathered_until_it_is_enough_or_taking_stops(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """[G2]: nothing is refused because records are waited for."""
    monkeypatch.setattr(pushes, "GATHER_SECS", 60)
    queue = PushQueue(8000)
    sizes = [10, 20, 1000] if end == "enough" else [10, 20]

    def send() -> None:
        for size in sizes:
            time.sleep(0.05)
            assert queue.offer(JsonLines(b"a" * size)) == "queued"
        if end == "stop":
            queue.stop()

    sender = threading.Thread(target=send)
    sender.start()
    began = time.monotonic()
    assert [len(value) for value in taken(queue, 60)] == sizes
    assert time.monotonic() - began < 60 / 2
    sender.join()


@pytest.mark.parametrize("size", [1, 20, 200, 1000])
@pytest.mark.parametrize("kind", [JsonLines, lambda value: Values([value])])
def test_what_waits_takes_no_more_memory_than_is_counted_also_in_the_smallest_pushes(
    kind: Callable[[bytes], Push], size: int
) -> None:
    """[B1]: the bound is one of memory."""
    queue = PushQueue(1 << 20)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        while queue.offer(kind(b"[" + b"a" * size)) == "queued":
            pass
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < queue.bound_bytes * 1.05


@given(st.lists(st.one_of(st.integers(1, 400), st.none()), max_size=60))
def test_what_waits_is_never_above_the_bound_and_nothing_queued_is_lost(steps: list[int | None]) -> None:
    """[G2]: sizes are offers, None is a take."""
    queue, accepted, got = PushQueue(1000), [], []
    for number, size in enumerate(steps):
        if size is None:
            got += taken(queue)
        else:
            value = b"%d:" % number + b"x" * size
            if queue.offer(JsonLines(value)) == "queued":
                accepted.append(value)
        assert 0 <= queue.held_bytes <= 1000
    while values := taken(queue):
        got += values
    assert got == accepted
    assert queue.held_bytes == 0
