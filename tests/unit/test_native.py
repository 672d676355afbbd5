"""The compiled part of the hot path against the decoder in Python, which decides what a record is."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.keys import encode_segment
from archiver.domain.routing import Routed, Router, Slice
from archiver.native import native
from tests.unit.compiled import needs_native
from tests.unit.hostile_records import hostile_value

P0 = TopicPartition("events", 0)
BATCHES = 20_000


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
    assert native.scan(value, (b"_org_id",)) == (None if expected is None else (expected,))


PATHS = (b"_org_id", b"tags.region", b"tags", b"a.b.c")


@needs_native
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"tags":{"region":"eu"},"_org_id":1}', (b"1", b'"eu"', b"{", b"")),
        (b' { "a" : { "x":[{"b":{"c":1}}], "b" : { "c" : "y" } } } ', (b"", b"", b"", b'"y"')),
        (b'{"a":{"b":{"b":1},"c":2},"b":{"c":3},"c":4,"region":5}', (b"", b"", b"", b"")),
        (b'{"tags.region":"no","a.b.c":"no","a":{"b.c":"no"}}', (b"", b"", b"", b"")),
        (b'{"tags":{"_org_id":"no","tags":{"region":"no"}}}', (b"", b"", b"{", b"")),
        (b'{"a":{"b":{"_org_id":1,"c":2}},"_org_id":3}', (b"3", b"", b"", b"2")),
        # the last of a name counts, and only what is in that
        (b'{"tags":{"region":"a"},"tags":{}}', (b"", b"", b"{", b"")),
        (b'{"tags":{"region":"a"},"tags":null}', (b"", b"", b"null", b"")),
        (b'{"tags":{"region":"a"},"tags":[{"region":"b"}]}', (b"", b"", b"[", b"")),
        (b'{"tags":1,"tags":{"region":"a","region":"b"}}', (b"", b'"b"', b"{", b"")),
        (b'{"tags":{"region":"a"},"tags":{"region":{}}}', (b"", b"{", b"{", b"")),
        (b'{"a":{"b":{"c":1}},"a":{"b":{}}}', (b"", b"", b"", b"")),
        (b'{"a":{"b":{"c":1},"b":2}}', (b"", b"", b"", b"")),
        (b'{"a":{"b":{"c":1},"b":{"c":2}},"a":{"b":{"c":3}}}', (b"", b"", b"", b"3")),
        # what is no object leads nowhere
        (b'{"tags":"region","a":{"b":["c",{"c":1}]}}', (b"", b"", b'"region"', b"")),
        (b'{"tags":[{"region":1},[{"region":2}]],"_org_id":[]}', (b"[", b"", b"[", b"")),
        (b'{"":{"region":1},"tags":{"":1},"a":{"":{"c":1}}}', (b"", b"", b"{", b"")),
        (b'{"tags":{"\xff":1,"region":"\xff"}}', (b"", b'"\xff"', b"{", b"")),
        (b'{"a":{"b":{"c":' + b"[" * 50 + b"]" * 50 + b"}}}", (b"", b"", b"", b"[")),
        # not sure
        (b'{"tags":{"reg\\u0069on":"a"}}', None),
        (b'{"tags":{"region":"a","\\n":1}}', None),
        (b'{"tags":{"region":"a"}', None),
        (b'{"tags":{"region":"a"]}', None),
        (b'{"tags":{"region":"a",}}', None),
        (b'{"tags":{"region" "a"}}', None),
        (b'{"tags":{"region":"a"}}{"tags":{"region":"b"}}', None),
        (b'[{"tags":{"region":"a"}}]', None),
        (b'{"a":' * 61 + b"1" + b"}" * 61, None),
    ],
)
def test_the_scan_finds_fields_by_their_paths(value: bytes, expected: tuple[bytes, ...] | None) -> None:
    """Whatever is asked for beside it, in whatever order, as often as the scan takes fields."""
    assert native is not None
    assert native.scan(value, PATHS) == expected
    assert native.scan(value, PATHS[::-1] + PATHS) == (expected and expected[::-1] + expected)
    for at, path in enumerate(PATHS):
        assert native.scan(value, (path,)) == (expected and (expected[at],))


@needs_native
def test_what_are_no_paths_the_scan_is_not_made_for() -> None:
    assert native is not None
    longest = b".".join([b"a"] * native.NAMES_MAX)
    nested = b'{"a":' * native.NAMES_MAX + b"7" + b"}" * native.NAMES_MAX
    assert native.scan(nested, (longest,) * native.FIELDS_MAX) == (b"7",) * native.FIELDS_MAX
    for fields in ((b"",), (b".",), (b"a.",), (b".a",), (b"a..b",), (longest + b".a",), (b"a",) * 9):
        with pytest.raises(ValueError, match="path"):
            native.scan(b"{}", fields)
        with pytest.raises(ValueError, match="path"):
            grouper(lambda texts, value: ("r", None), fields)
    for wrong in (b"a", [b"a"], ("a",), None):
        with pytest.raises(TypeError):
            native.scan(b"{}", wrong)
        with pytest.raises(TypeError):
            grouper(lambda texts, value: ("r", None), wrong)


@needs_native
def test_an_end_anywhere_in_a_record_is_never_taken_for_its_end() -> None:
    """Every cut of a record that has everything in it, so that a read beyond the end would show too."""
    assert native is not None
    whole = json.dumps(
        {"a": [1.5e3, -0, {"b": "x" * 20}, [], {}, None, True, False], "_org_id": 'q"é', "e": "\\/"}
        | {"o": {"p": {"q": [{"q": 1}]}}}
    ).encode()
    for fields, found in {(b"_org_id",): (b'"q\\"\\u00e9"',), (b"o.p.q", b"e"): (b"[", b'"\\\\/"')}.items():
        assert native.scan(whole, fields) == found
        assert all(native.scan(whole[:cut], fields) is None for cut in range(len(whole)))


# --- the grouper ----------------------------------------------------------------------------------


def _members(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The text of an object in which a name may come twice."""
    names = st.sampled_from(["_org_id", "_org", "tags", "region", "tags.region", "a", ""])
    member = st.builds('"{}" :{}'.format, names, values)
    return st.lists(member, max_size=6).map(lambda members: "{ " + ",".join(members) + "}")


JSON_TEXTS = _members(
    st.recursive(
        st.sampled_from(
            ['"acme"', '""', '"a/b"', '"\\u0041"', '"é"', "1", "1.0", "-0", "true", "false", "null"]
        ),
        lambda inner: (
            _members(inner) | st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)} ]")
        ),
        max_leaves=12,
    )
).map(str.encode)

SEVERAL = (
    ["tags.region"],
    ["_org_id", "tags.region"],
    ["tags", "_org_id", "tags.region", "_org_id"],
    ["tags.a._org_id", "tags.a", "a.tags.region", "a", "_org"],
)


@needs_native
@pytest.mark.parametrize("fields", [["_org_id"], [], *SEVERAL])
@pytest.mark.timeout(240)
def test_both_ways_route_hostile_batches_alike(fields: list[str]) -> None:
    """c24: routes, lines, offsets, reasons; a fixed seed and a fresh one, printed where it fails."""
    for seed in (20261201, time.time_ns()):
        rng = random.Random(seed)
        compiled = Router(fields, "default", with_topic=True)
        plain = Router(fields, "default", with_topic=True, compiled=False)
        assert compiled._grouped is not None
        for values in _hostile_batches(rng, BATCHES if len(fields) < 2 else BATCHES // 4):
            offsets = [7 + 3 * n for n in range(len(values))]
            batch = RecordBatch(P0, values, offsets)
            assert _told(compiled.route_batch(batch)) == _told(plain.route_batch(batch)), f"{seed}: {values}"


@needs_native
@pytest.mark.parametrize("fields", SEVERAL)
@given(values=st.lists(JSON_TEXTS, min_size=1, max_size=6))
@settings(max_examples=500, deadline=None)
def test_both_ways_and_the_standard_library_find_the_same_fields(
    fields: list[str], values: list[bytes]
) -> None:
    """[K6] [K8], in documents in which names come twice: in a batch, alone, and by an independent reader."""
    compiled = Router(fields, "default", with_topic=True)
    plain = Router(fields, "default", with_topic=True, compiled=False)
    assert compiled._grouped is not None
    batch = RecordBatch(P0, values, range(len(values)))
    told = _told(compiled.route_batch(batch))
    assert told == _told(plain.route_batch(batch))
    expected: dict[str, list[bytes]] = {}
    for value in values:
        route = "/".join(["events", *(_segment_by_json(value, field) for field in fields)])
        assert plain.route_of("events", value) == route
        expected.setdefault(route, []).append(value)
    assert {part.route: part.lines.split(b"\n") for part in told[0].values()} == expected


def _segment_by_json(value: bytes, field: str) -> str:
    inner = json.loads(value, parse_int=str, parse_float=str)
    for name in field.split("."):
        inner = inner.get(name) if isinstance(inner, dict) else None
    if isinstance(inner, bool):
        inner = json.dumps(inner)
    return encode_segment(inner) if isinstance(inner, str) and inner else "default"


@needs_native
@pytest.mark.parametrize("fields", [["_org_id"], [], *SEVERAL])
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


def _told(routed: Routed) -> tuple[Any, ...]:
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


NAMES = ("_org_id", "_org", "_org_idx", "tags", "region", "tags.region", "a", "é", 'k"q', "x\\y", "n\n", "")
SCALARS: tuple[object, ...] = (
    *("", "acme", "a/b", "é", "\0", "\ud83d", '"', "x" * 70, 0, -0.0, 1, -1, 1.5, 1e300, 1 << 70),
    *(True, False, None),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"_org_id", b'"_org_id":', b'"a"', b"1", b"-", b"0"),
    *(b".5", b"e3", b"true", b"null", b" ", b"\n", b"\0", b"\xff", b"\\u0041", b"\\ud800", b"x" * 9, b"{}"),
    *(b'"_org_id":{"_org_id":2},', b"E+07", b'\\"', b"\x1f", b"\x7f", b'"tags":{"region":"b",', b'"tags":'),
    *(b'"region":', b'{"region":"\xff"}', b'"\xff":1,', b'"a":{"tags":{"_org_id":"c",'),
)


def _document(rng: random.Random) -> bytes:
    def inner(depth: int) -> object:
        kind = rng.random()
        if depth < 4 and kind < 0.2:
            return {rng.choice(NAMES): inner(depth + 1) for _ in range(rng.randint(0, 3))}
        if depth < 4 and kind < 0.3:
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


def grouper(resolve: Any, fields: Any = (b"f",)) -> Any:
    assert native is not None
    return native.Grouper(fields, resolve, Slice, 1)


@needs_native
def test_a_field_value_is_asked_for_once_and_an_unsure_record_each_time() -> None:
    asked: list[tuple[bytes, ...] | None] = []

    def resolve(texts: tuple[bytes, ...] | None, value: bytes) -> tuple[str, str | None]:
        asked.append(texts)
        return "r", None

    made = grouper(resolve)
    for _ in range(2):
        (part,), *_ = made.group([b'{"f":1}', b"{", b'{"f":1}', b'{"f":"1"}'], range(4))
        assert part == Slice("r", b'{"f":1}\n{\n{"f":1}\n{"f":"1"}', 0, 3, 4)
    assert asked == [(b"1",), None, (b'"1"',), None]


@needs_native
def test_the_texts_of_several_fields_are_one_key_only_where_each_is_the_same() -> None:
    """A tenant boundary: neither what stands between two texts nor one that is missing makes them alike."""
    ones = [f'"{"1" * length}"' for length in (0, 1, 10, 253, 254, 255, 256)]
    texts = ["", "0", "1", "11", "110", '"1,"', '",1"', '"\\u0000"', *ones]
    made = grouper(lambda texts, value: (repr(texts), None), (b"a", b"t.b", b"c"))
    keys = list(product(texts, repeat=3))
    values = [_with_members(a=a, t=b and f'{{"b":{b}}}', c=c) for a, b, c in keys]
    for _ in range(2):
        slices, *_ = made.group(values, range(len(values)))
        assert [(part.route, part.lines) for part in slices] == [
            (repr(tuple(text.encode() for text in key)), value)
            for key, value in zip(keys, values, strict=True)
        ]


def _with_members(**members: str) -> bytes:
    """An object of the members whose JSON text is not empty."""
    return ("{" + ",".join(f'"{name}":{text}' for name, text in members.items() if text) + "}").encode()


@needs_native
def test_texts_of_several_fields_that_are_long_are_asked_for_each_time_and_not_kept() -> None:
    """[B1]"""
    asked: list[tuple[bytes, ...] | None] = []

    def resolve(texts: tuple[bytes, ...] | None, value: bytes) -> tuple[str, str | None]:
        asked.append(texts)
        return "r", "empty"

    made = grouper(resolve, (b"a", b"b"))
    for length in (1024 - 2 * 2 - 2 - 1, 1024 - 2 * 2 - 2, 65_536 - 3, 65_536 - 2, 1 << 20):
        value = _with_members(a='"' + "x" * length + '"', b="1")
        for _ in range(2):
            (part,), _, _, reasons = made.group([value], [0])
            assert (part.lines, reasons) == (value, {"empty": 1})
    assert asked == [(b'"' + b"x" * 1017 + b'"', b"1")] + [None] * 8
    assert (made.kept, made.kept_bytes) == (2, 1024 + 1)


@needs_native
def test_very_many_field_values_are_kept_apart() -> None:
    made = grouper(lambda texts, value: (texts[0].decode(), None))
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
        grouper(lambda texts, value: ("r", None)).group(values, offsets)


@needs_native
@pytest.mark.parametrize("answer", [None, "r", ("r",), (b"r", None), LookupError("no")])
def test_an_answer_that_is_none_ends_the_batch_with_an_error_and_loses_no_memory(answer: Any) -> None:
    def resolve(texts: tuple[bytes, ...] | None, value: bytes) -> Any:
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
    made = grouper(lambda texts, value: ("r", "null" if texts == (b"null",) else None))
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
