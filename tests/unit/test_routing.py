"""Routing ([K5]-[K8], [F5], [F6]): alignment is a tenant boundary."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from archiver.domain import routing
from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.keys import encode_segment
from archiver.domain.routing import CACHE_BYTES_MAX, REASONS, Router
from tests.unit.hostile_records import hostile_value

P0 = TopicPartition("events", 0)
BATCHES = int(os.environ.get("HOSTILE_BATCHES", "30000"))


def batch(*values: bytes | None, first: int = 0) -> RecordBatch:
    return RecordBatch(P0, list(values), list(range(first, first + len(values))))


@pytest.fixture(autouse=True, params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here holds for both ways to route."""
    if request.param == "python":
        monkeypatch.setattr(routing, "native", None)
    return str(request.param)


def router(*fields: str, default: str = "default") -> Router:
    return Router(fields or ["_org_id"], default, with_topic=True)


def routes_of(value: bytes, *fields: str) -> tuple[str, dict[str, int]]:
    routed = router(*fields).route_batch(batch(value))
    return routed.slices[0].route, {str(why): n for why, n in routed.defaulted.items()}


def one_by_one(values: list[bytes], made: Router) -> dict[str, bytes]:
    expected: dict[str, list[bytes]] = {}
    for value in values:
        expected.setdefault(made.route_of("events", value), []).append(value)
    return {route: b"\n".join(group) for route, group in expected.items()}


@pytest.mark.parametrize("fields", [("_org_id",), ("tags.category",), ("_org_id", "tags.category")])
@pytest.mark.timeout(240)
def test_a_batch_is_routed_as_its_records_are_one_by_one(fields: tuple[str, ...]) -> None:
    """c24, over hostile batches: a fixed seed and a fresh one, printed where it fails."""
    share = BATCHES // 2 if fields == ("_org_id",) else BATCHES // 20
    for seed in (20261130, time.time_ns()):
        rng = random.Random(seed)
        made, alone = router(*fields), router(*fields)
        for _ in range(share):
            values = [hostile_value(rng) for _ in range(rng.randint(1, 12))]
            routed = made.route_batch(batch(*values))
            found = {part.route: part.lines for part in routed.slices}
            assert found == one_by_one(values, alone), f"seed {seed}: {values}"


def test_a_record_alone_is_routed_as_the_standard_library_reads_it() -> None:
    """An independent reader, wherever both take the record for JSON."""
    rng = random.Random(7)
    made = router()
    for _ in range(5000):
        value = hostile_value(rng)
        try:
            document = json.loads(value.decode())
        except (ValueError, RecursionError):
            continue
        org = document.get("_org_id") if isinstance(document, dict) else None
        if isinstance(org, str) and org.isascii() and org:
            assert made.route_of("events", value) == f"events/{encode_segment(org)}"


@pytest.mark.parametrize(
    ("value", "segment", "reason"),
    [
        (b"{}", "default", "missing"),
        (b'{"_org_id":null}', "default", "null"),
        (b'{"_org_id":""}', "default", "empty"),
        (b'{"_org_id":{}}', "default", "not_scalar"),
        (b'{"_org_id":[]}', "default", "not_scalar"),
        (b'{"_org_id":123}', "123", None),
        (b'{"_org_id":1.0}', "1.0", None),
        (b'{"_org_id":1.00}', "1.00", None),
        (b'{"_org_id":1e400}', "1e400", None),
        (b'{"_org_id":-0}', "-0", None),
        (b'{"_org_id":true}', "true", None),
        (b'{"_org_id": "true" }', "true", None),
        (b'{"_org_id" :\n 12 \n}', "12", None),
        (b'{"_org_id":"\\u0061"}', "a", None),
        (b'{"\\u005forg_id":"a"}', "a", None),
        (b'{"_org_id":"default"}', "default", None),
        (b'{"_org_id":"missing"}', "missing", None),
    ],
)
def test_c37_each_kind_of_field_has_its_place(value: bytes, segment: str, reason: str | None) -> None:
    """[K6]"""
    assert routes_of(value) == (f"events/{segment}", {reason: 1} if reason else {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"null", "not_object"),
        (b"[]", "not_object"),
        (b'"x"', "not_object"),
        (b"NaN", "invalid_json"),
        (b"[" * 100_000, "not_object"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "invalid_json"),
        (b'\xef\xbb\xbf{"_org_id":"a"}', "invalid_json"),
        (b'{"_org_id":"a"}garbage', "invalid_json"),
        (b'{"_org_id":"\xff"}', "invalid_utf8"),
    ],
)
def test_c38_what_is_not_json_goes_to_the_default_and_stops_nothing(value: bytes, reason: str) -> None:
    good = b'{"_org_id":"good"}'
    routed = router().route_batch(batch(good, value, good))
    assert {part.route: part.lines for part in routed.slices} == {
        "events/good": good + b"\n" + good,
        "events/default": value,
    }
    assert dict(routed.defaulted) == {reason: 1}
    assert reason in REASONS


def test_c38_the_last_of_duplicate_fields_counts() -> None:
    assert routes_of(b'{"_org_id":"a","_org_id":"b"}') == ("events/b", {})


def test_no_value_can_pose_as_the_reason_for_a_default() -> None:
    for reason in REASONS:
        routed = router().route_batch(batch(b"{}", json.dumps({"_org_id": f"\0{reason}"}).encode()))
        assert [part.route for part in routed.slices] == ["events/default", f"events/=00{reason}"]


def test_records_of_one_route_stay_in_order_however_their_field_is_spelt() -> None:
    values = [b'{"_org_id":"a","n":1}', b'{"_org_id":"\\u0061","n":2}', b'{"_org_id":"a","n":3}']
    (part,) = router().route_batch(batch(*values)).slices
    assert part.lines.split(b"\n") == values


@pytest.mark.parametrize("orgs", [1, 3, 41, 300])
def test_a_slice_knows_its_offsets_and_bytes(orgs: int) -> None:
    """[D2]; with few routes their ends are searched for, with many tabulated."""
    rng = random.Random(orgs)
    values = [f'{{"_org_id":"{rng.randrange(orgs)}"}}'.encode() for _ in range(400)]
    offsets = [100 + 3 * i for i in range(400)]
    routed = router().route_batch(RecordBatch(P0, values, offsets))
    for part in routed.slices:
        places = [
            o
            for v, o in zip(values, offsets, strict=True)
            if f"events/{json.loads(v)['_org_id']}" == part.route
        ]
        assert (part.first, part.last, part.records) == (places[0], places[-1], len(places))
        assert len(part.lines.split(b"\n")) == part.records


def test_a_tombstone_writes_no_line_and_an_empty_value_an_empty_one() -> None:
    """[F5]"""
    routed = router().route_batch(batch(None, b"", None, b'{"_org_id":"a"}'))
    assert (routed.records, routed.tombstones) == (4, 2)
    assert {part.route: part.lines for part in routed.slices} == {
        "events/default": b"",
        "events/a": b'{"_org_id":"a"}',
    }
    assert router().route_batch(batch(None, None)).slices == []


def test_values_that_hold_a_newline_are_counted() -> None:
    """[F6]"""
    assert router().route_batch(batch(b'{"_org_id":\n"a"}', b"x\n\ny", b"{}")).multiline == 2


def test_nested_and_several_fields_make_several_segments() -> None:
    """[K8]"""
    value = b'{"tags":{"category":"x/y"},"_org_id":7}'
    assert routes_of(value, "_org_id", "tags.category")[0] == "events/7/x=2Fy"
    assert routes_of(b'{"tags":"no","_org_id":7}', "_org_id", "tags.category") == (
        "events/7/default",
        {"missing": 1},
    )


def test_another_name_that_is_not_utf8_hides_no_field(way: str) -> None:
    """[K6]: neither at the top nor inside, alone or beside a record that has to be looked at alone."""
    odd = b'{"\xff":1,"tags":{"\xff":1,"category":"a"}}'
    made = router("tags.category")
    for values in ([odd], [odd, b'{"tags":{"category":1}}']):
        assert made.route_batch(batch(*values)).slices[0].route == "events/a"
    assert made.route_of("events", odd) == "events/a"


@pytest.mark.parametrize(
    ("value", "route", "reasons"),
    [
        (b'{"tags":{"category":"a"},"tags":{}}', "default/default", {"not_scalar": 1}),
        (b'{"tags":{"category":"a"},"tags":"b"}', "b/default", {"missing": 1}),
        (b'{"tags":"b","tags":{"category":"a"}}', "default/a", {"not_scalar": 1}),
        (b'{"tags":[{"category":"a"}]}', "default/default", {"not_scalar": 1}),
        (b'{"tags.category":"a"}', "default/default", {"missing": 1}),
        (b'{"tags":null}', "default/default", {"null": 1}),
        (b'{"tags":{"category":"\xff"}}', "default/default", {"not_scalar": 1}),
        (b'{"tags":{"category":1.0}}', "default/1.0", {"not_scalar": 1}),
    ],
)
def test_the_last_of_a_name_counts_also_where_a_path_goes_through_it(
    value: bytes, route: str, reasons: dict[str, int]
) -> None:
    """[K6] [K8]: with a field inside another, and each beside itself."""
    assert routes_of(value, "tags", "tags.category") == (f"events/{route}", reasons)
    first, second = route.split("/")
    assert routes_of(value, "tags.category")[0] == f"events/{second}"
    assert routes_of(value, "tags", "tags")[0] == f"events/{first}/{first}"


@pytest.mark.parametrize(
    "fields", [["é"], ["a b"], ["a..b"], [""], ["a."], [".".join("abcdefghi")], [f"f{n}" for n in range(9)]]
)
def test_fields_that_the_compiled_part_does_not_know_are_routed_by_python(fields: list[str]) -> None:
    made = Router(fields, "default", with_topic=False)
    assert made._grouped is None
    document: dict[str, object] = {}
    for name in fields:
        first, *rest = name.split(".")
        inner: object = "v"
        for key in reversed(rest):
            inner = {key: inner}
        document[first] = inner
    (part,) = made.route_batch(batch(json.dumps(document).encode())).slices
    assert part.route == "/".join("v" for _ in fields)


def test_topic_mode_never_looks_into_a_record() -> None:
    class Untouchable(bytes):
        def __getitem__(self, _: object) -> int:  # type: ignore[override]
            raise AssertionError("a record was looked into")

    made = Router([], "default", with_topic=True)
    (part,) = made.route_batch(batch(Untouchable(b'{"_org_id":"a"}'), b"x")).slices
    assert part.route == "events"


def test_without_a_topic_a_route_starts_with_the_fields() -> None:
    made = Router(["_org_id"], "default", with_topic=False)
    assert made.route_of("", b'{"_org_id":"acme"}') == "acme"
    assert Router([], "default", with_topic=False).route_of("", b"x") == "default"


def test_the_table_of_routes_is_bounded(way: str) -> None:
    made = router()
    for start in range(0, 400_000, 1000):
        made.route_batch(batch(*(f'{{"_org_id":"{start + i}"}}'.encode() for i in range(1000))))
        if way == "python":
            assert max(map(len, made._routes.values()), default=0) <= 201_000
        else:
            assert made._grouped is not None
            assert sum(grouper.kept for grouper in made._grouped._groupers.values()) <= 202_000


def test_the_table_of_routes_is_bounded_in_bytes_too_with_several_fields() -> None:
    """[B1]: hostile values of two fields, each a megabyte long and never the same."""
    made = router("a", "b")
    for n in range(100):
        value = b'{"a":"%d%s","b":"%d%s"}' % (n, b"x" * (1 << 20), n, b"y" * (1 << 20))
        made.route_batch(batch(value))
        held = sum(len(part) for routes in made._routes.values() for key in routes for part in key)
        assert held <= CACHE_BYTES_MAX + (4 << 20)
