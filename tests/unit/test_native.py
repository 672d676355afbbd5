"""The compiled part of the hot path against the decoder in Python, which decides what a record is."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.routing import Routed, Router, Slice
from archiver.native import native
from tests.unit.hostile_records import hostile_value

P0 = TopicPartition("events", 0)
BATCHES = 20_000

needs_native = pytest.mark.skipif(native is None, reason="there is no compiler here")


def test_it_has_been_built_where_there_is_a_compiler() -> None:
    """The rest of this file would not run, and nobody would see that the archiver has become slow."""
    assert native is not None or shutil.which("cc") is None


# --- the scan -------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"_org_id":"a"}', b'"a"'),
        (b' {"x":[{"_org_id":1},[]], "_org_id" : "a" }\n', b'"a"'),
        (b'{"_org_id":"a","_org_id":-1.5e+3}', b"-1.5e+3"),
        (b'{"_org_id":"a\\u0041\\n\\""}', b'"a\\u0041\\n\\""'),
        (b'{"_org_id":{"_org_id":"a"}}', b"{"),
        (b'{"_org_id":[]}', b"["),
        (b'{"_org_id":"\xff"}', b'"\xff"'),
        (b'{"x":"' + b"y" * 100 + b'","_org_id":true}', b"true"),
        (b"{}", b""),
        (b'{"_org":1,"_org_idx":2,"x":{"_org_id":3}}', b""),
        (b'{"_org_id":"a"', None),
        (b'{"_org_id":"a"}}', None),
        (b'{"_org_id":"a"}{"_org_id":"b"}', None),
        (b'{"_org_id":"a",}', None),
        (b'{"_org_id":"a" "x":1}', None),
        (b'{"_org_id":01}', None),
        (b'{"_org_id":1.}', None),
        (b'{"_org_id":-}', None),
        (b'{"_org_id":tru}', None),
        (b'{"_org_id":"a\nb"}', None),
        (b'{"_org_id":"\\ud800"}', None),
        (b'{"_org_id":"\\x41"}', None),
        (b'{"\\u005forg_id":"a"}', None),
        (b'{"x":' + b"[" * 100 + b"]" * 100 + b"}", None),
        (b'["_org_id"]', None),
        (b'"_org_id"', None),
        (b"{", None),
        (b"", None),
    ],
)
def test_the_scan_finds_a_top_level_field_or_says_that_it_is_not_sure(
    value: bytes, expected: bytes | None
) -> None:
    assert native is not None
    assert native.scan(value, b"_org_id") == expected


@needs_native
def test_an_end_anywhere_in_a_record_is_never_taken_for_its_end() -> None:
    """Every cut of a record that has everything in it, so that a read beyond the end would show too."""
    assert native is not None
    whole = json.dumps(
        {"a": [1.5e3, -0, {"b": "x" * 20}, [], {}, None, True, False], "_org_id": 'q"é', "e": "\\/"}
    ).encode()
    assert native.scan(whole, b"_org_id") == b'"q\\"\\u00e9"'
    assert all(native.scan(whole[:cut], b"_org_id") is None for cut in range(len(whole)))


# --- the grouper ----------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("fields", [["_org_id"], []])
@pytest.mark.timeout(240)
def test_both_ways_route_hostile_batches_alike(fields: list[str]) -> None:
    """c24: routes, lines, offsets, reasons; a fixed seed and a fresh one, printed where it fails."""
    for seed in (20261201, time.time_ns()):
        rng = random.Random(seed)
        compiled = Router(fields, "default", with_topic=True)
        plain = Router(fields, "default", with_topic=True, compiled=False)
        assert compiled._grouped is not None
        for values in _hostile_batches(rng, BATCHES):
            offsets = [7 + 3 * n for n in range(len(values))]
            batch = RecordBatch(P0, values, offsets)
            assert _told(compiled.route_batch(batch)) == _told(plain.route_batch(batch)), f"{seed}: {values}"


@needs_native
@pytest.mark.parametrize("fields", [["_org_id"], []])
def test_records_of_pushes_are_routed_as_a_list_of_them_is(fields: list[str]) -> None:
    """[F6] [K5]: cut out of payloads, given one by one, and both in one batch."""
    assert native is not None
    for seed in (20261201, time.time_ns()):
        rng = random.Random(seed)
        compiled = Router(fields, "default", with_topic=False)
        plain = Router(fields, "default", with_topic=False, compiled=False)
        for hostile in _hostile_batches(rng, BATCHES // 10):
            column, values = native.Lines(), []
            for value in hostile:
                if value is None or rng.random() < 0.3:
                    column.extend([value or b""])
                    values.append(value or b"")
                    continue
                payload = value + rng.choice([b"", b"\n", b"\r\n", b"\n\n"])
                column.cut(b"\n" + payload + b"\n}", 1, 1 + len(payload), 1 << 20)
                values += payload.removesuffix(b"\n").split(b"\n") if payload else []
            assert list(column) == values, f"{seed}: {hostile}"
            offsets = range(7, 7 + len(values))
            assert _told(compiled.route_batch(RecordBatch(P0, column, offsets))) == _told(
                plain.route_batch(RecordBatch(P0, values, offsets))
            ), f"{seed}: {hostile}"


def _told(routed: Routed) -> tuple[object, ...]:
    slices = {part.route: part for part in routed.slices}
    assert len(slices) == len(routed.slices)
    return slices, routed.records, routed.tombstones, routed.multiline, +routed.defaulted


def _hostile_batches(rng: random.Random, count: int) -> Iterator[list[bytes | None]]:
    kinds: tuple[Callable[[random.Random], bytes | None], ...] = (
        hostile_value,
        _document,
        _soup,
        lambda rng: _damaged(rng, _document(rng)),
        lambda rng: _damaged(rng, hostile_value(rng)),
        lambda rng: None if rng.random() < 0.2 else _document(rng),
    )
    for _ in range(count):
        yield [rng.choice(kinds)(rng) for _ in range(rng.randint(1, 10))]


NAMES = ("_org_id", "_org", "_org_idx", "a", "é", 'k"q', "x\\y", "n\n")
SCALARS: tuple[object, ...] = (
    *("", "acme", "a/b", "é", "\0", "\ud83d", '"', "x" * 70, 0, -0.0, 1, -1, 1.5, 1e300, 1 << 70),
    *(True, False, None),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"_org_id", b'"_org_id":', b'"a"', b"1", b"-", b"0"),
    *(b".5", b"e3", b"true", b"null", b" ", b"\n", b"\0", b"\xff", b"\\u0041", b"\\ud800", b"x" * 9, b"{}"),
    *(b'"_org_id":{"_org_id":2},', b"E+07", b'\\"', b"\x1f", b"\x7f"),
)


def _document(rng: random.Random) -> bytes:
    def inner(depth: int) -> object:
        kind = rng.random()
        if depth < 3 and kind < 0.15:
            return {rng.choice(NAMES): inner(depth + 1) for _ in range(rng.randint(0, 3))}
        if depth < 3 and kind < 0.3:
            return [inner(depth + 1) for _ in range(rng.randint(0, 3))]
        return rng.choice(SCALARS)

    document = {rng.choice(NAMES): inner(1) for _ in range(rng.randint(0, 6))}
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    return text.encode("utf-8", "surrogatepass")


def _soup(rng: random.Random) -> bytes:
    return b"{" + b"".join(rng.choice(TOKENS) for _ in range(rng.randint(0, 12))) + b"}"


def _damaged(rng: random.Random, value: bytes) -> bytes:
    damaged = bytearray(value)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(damaged) + 1)
        match rng.randrange(3):
            case 0:
                damaged[at:at] = rng.choice(TOKENS)
            case 1:
                del damaged[at : at + rng.randint(1, 4)]
            case _ if damaged:
                damaged[at % len(damaged)] = rng.randrange(256)
    return bytes(damaged)


def grouper(resolve: Any, field: bytes | None = b"f") -> Any:
    assert native is not None
    return native.Grouper(field, resolve, Slice, 1)


@needs_native
def test_a_field_value_is_asked_for_once_and_an_unsure_record_each_time() -> None:
    asked: list[bytes | None] = []

    def resolve(text: bytes | None, value: bytes) -> tuple[str, str | None]:
        asked.append(text)
        return "r", None

    made = grouper(resolve)
    for _ in range(2):
        (part,), *_ = made.group([b'{"f":1}', b"{", b'{"f":1}', b'{"f":"1"}'], range(4))
        assert part == Slice("r", b'{"f":1}\n{\n{"f":1}\n{"f":"1"}', 0, 3, 4)
    assert asked == [b"1", None, b'"1"', None]


@needs_native
def test_very_many_field_values_are_kept_apart() -> None:
    made = grouper(lambda text, value: (text.decode(), None))
    values = [b'{"f":%d}' % n for n in range(100_000)]
    for _ in range(2):
        slices, *_ = made.group(values, range(len(values)))
        assert [(part.route, part.lines) for part in slices] == [(v[5:-1].decode(), v) for v in values]
    assert made.kept == 200_000  # texts and routes


@needs_native
@pytest.mark.parametrize(
    ("values", "offsets", "error"),
    [
        ((b"{}",), [0], TypeError),
        ([b"{}"], [0, 1], ValueError),
        ([b"{}"], 7, TypeError),
        (["{}"], [0], TypeError),
        ([bytearray(b"{}")], [0], TypeError),
    ],
)
def test_what_is_no_batch_is_refused(values: Any, offsets: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        grouper(lambda text, value: ("r", None)).group(values, offsets)


@needs_native
@pytest.mark.parametrize("answer", [None, "r", ("r",), (b"r", None), LookupError("no")])
def test_an_answer_that_is_none_ends_the_batch_with_an_error_and_loses_no_memory(answer: Any) -> None:
    def resolve(text: bytes | None, value: bytes) -> Any:
        if b"bad" in value and isinstance(answer, Exception):
            raise answer
        return answer if b"bad" in value else ("r", None)

    made = grouper(resolve)
    values = [b'{"f":"good"}', b'{"f":"bad"}']
    before = [sys.getrefcount(value) for value in values]
    for _ in range(100):
        with pytest.raises((TypeError, LookupError)):
            made.group(values, [0, 1])
    assert [sys.getrefcount(value) for value in values] == before
    (part,), *_ = made.group(values[:1], [5])
    assert part == Slice("r", values[0], 5, 5, 1)


@needs_native
def test_nothing_is_left_behind_by_batches() -> None:
    made = grouper(lambda text, value: ("r", "null" if text == b"null" else None))
    values: list[bytes | None] = [b'{"f":null}', None, b"x\ny", b'{"f":1}'] * 50
    made.group(values, range(200))
    blocks = sys.getallocatedblocks()
    for _ in range(200):
        _slices, tombstones, multiline, reasons = made.group(values, range(200))
        assert (tombstones, multiline, reasons) == (50, 50, {"null": 50})
    del _slices, reasons
    assert sys.getallocatedblocks() - blocks < 50


# --- records of pushes ----------------------------------------------------------------------------


@needs_native
def test_lines_outlive_the_buffers_they_were_cut_from() -> None:
    assert native is not None
    column = native.Lines()
    given = [b"%d" % n * 30 for n in range(100)]
    for n in range(100):
        assert column.cut(b"%d\nnot this" % n, 0, len(b"%d" % n) + 1, 5) == len(b"%d" % n) + 1
    column.extend(given)
    given.clear()
    assert list(column) == [b"%d" % n for n in range(100)] + [b"%d" % n * 30 for n in range(100)]


@needs_native
def test_lines_leave_nothing_behind() -> None:
    assert native is not None
    payload, values = b"a\nb\n" * 50, [b"x" * 600] * 10

    def use() -> None:
        column = native.Lines()
        at = column.cut(payload, 0, len(payload), 60)
        assert column.cut(payload, at, len(payload), 1000) == len(payload)
        column.extend(values)
        assert (len(column), column[-1]) == (110, values[0])

    use()
    held = sys.getrefcount(payload), sys.getrefcount(values[0]), sys.getallocatedblocks()
    for _ in range(200):
        use()
    assert (sys.getrefcount(payload), sys.getrefcount(values[0])) == held[:2]
    assert sys.getallocatedblocks() - held[2] < 50


@needs_native
@pytest.mark.parametrize(
    ("part", "error"),
    [
        ((b"ab", -1, 2, 1), ValueError),
        ((b"ab", 0, 3, 1), ValueError),
        ((b"ab", 2, 1, 1), ValueError),
        ((bytearray(b"ab"), 0, 2, 1), TypeError),
        (("ab", 0, 2, 1), TypeError),
    ],
)
def test_what_is_no_part_of_a_buffer_is_refused(part: tuple[Any, ...], error: type[Exception]) -> None:
    assert native is not None
    column = native.Lines()
    with pytest.raises(error):
        column.cut(*part)
    with pytest.raises(error):
        native.count_lines(*part[:3])
    with pytest.raises(TypeError):
        column.extend([part[0], "a"])
    with pytest.raises(TypeError):
        column.extend((b"a",))
    assert (len(column), column.cut(b"ab", 1, 1, 5), column.cut(b"ab", 0, 2, 0)) == (0, 1, 0)
    with pytest.raises(IndexError):
        column[0]


# --- the feed -------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", ["Lines", "Feed"])
def test_what_takes_no_arguments_says_so(name: str) -> None:
    with pytest.raises(TypeError):
        getattr(native, name)(unknown=1)


@needs_native
def test_a_feed_without_a_client_of_its_own_is_refused() -> None:
    import confluent_kafka.cimpl as cimpl

    assert native is not None
    with pytest.raises(ImportError):
        native.load_client("/nowhere/librdkafka.so")
    native.load_client(cimpl.__file__)
    feed = native.Feed()
    uses: list[Callable[[], object]] = [
        lambda: feed.open(object()),
        lambda: feed.take(1, 1, 0),
        lambda: feed.attach("t", 0),
    ]
    for use in uses:
        with pytest.raises(RuntimeError):
            use()
    feed.close()
