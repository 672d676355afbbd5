"""Segments, templates and keys ([K1]-[K5], [K7])."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archiver.domain import keys as keys_module
from archiver.domain.keys import (
    SEGMENT_BYTES_MAX,
    KeyMaker,
    KeyTemplate,
    decode_segment,
    encode_segment,
    longest_key_bytes,
)
from archiver.errors import ConfigError

HOUR = "{year}/{month}/{day}/{hour}"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
TRICKY = st.sampled_from(
    [
        "..",
        ".",
        "../x",
        "/etc/x",
        "a/b",
        "a\\b",
        " ",
        "%2e%2e",
        "a%2Fb",
        "a=2Fb",
        "\0",
        "=",
        "~",
        "a~b",
        "x" * 2000,
    ]
)


def maker(template: str = HOUR) -> KeyMaker:
    ids = itertools.count()
    return KeyMaker(KeyTemplate(template), "jsonl.zst", lambda digits: f"{next(ids):0{digits}x}")


@settings(max_examples=1000)
@given(TEXT | TRICKY)
def test_a_value_is_exactly_one_safe_segment(value: str) -> None:
    """[K5]: no value can leave its prefix."""
    segment = encode_segment(value)
    assert re.fullmatch(r"[A-Za-z0-9_=~-][A-Za-z0-9._=~-]*", segment)
    assert len(segment) <= SEGMENT_BYTES_MAX


@settings(max_examples=1000)
@given(TEXT | TRICKY)
def test_the_encoding_is_reversible_where_nothing_was_cut(value: str) -> None:
    segment = encode_segment(value)
    if "~" not in segment:
        assert decode_segment(segment) == value


@settings(max_examples=1000)
@given(TEXT | TRICKY, TEXT | TRICKY)
def test_distinct_values_never_share_a_segment(one: str, other: str) -> None:
    assert (encode_segment(one) == encode_segment(other)) == (one == other)


@pytest.mark.parametrize(
    ("value", "segment"),
    [("a/b", "a=2Fb"), ("..", "=2E."), (".x", "=2Ex"), ("a=2Fb", "a=3D2Fb"), ("é", "=C3=A9"), ("a.b", "a.b")],
)
def test_the_examples_of_the_contract(value: str, segment: str) -> None:
    assert encode_segment(value) == segment


def test_a_long_segment_is_cut_before_an_escape_and_ends_in_its_hash() -> None:
    """[K7]"""
    for start in range(4):
        segment = encode_segment("x" * start + "é" * 100)
        head, tail = segment.split("~")
        assert len(segment) <= 200 and 178 <= len(head) <= 183
        assert re.fullmatch(r"x*(=[0-9A-F]{2})+", head) and re.fullmatch(r"[0-9a-f]{16}", tail)
    assert encode_segment("x" * 200) == "x" * 200
    assert encode_segment("x" * 201).startswith("x" * 183 + "~")


def test_c36_hostile_organisations_stay_under_the_prefix_and_apart() -> None:
    values = ["..", "../x", "/etc/x", "a/b", "a\\b", ".", " ", "%2e%2e", "a%2Fb", "a=2Fb", "\0", "x" * 2000]
    segments = [encode_segment(value) for value in values]
    assert len(set(segments)) == len(values)
    assert all("/" not in segment and not segment.startswith(".") for segment in segments)


def test_a_template_expands_in_utc_and_zero_padded() -> None:
    """[K2]"""
    template = KeyTemplate("y={year}/{month}/{day}/{hour}{minute}-{timestamp}-{seq}")
    assert template.expand(1793300645.9, "0007") == "y=2026/10/29/1904-1793300645-0007"


@pytest.mark.parametrize(
    "template",
    [
        "{years}",
        "{year",
        "year}",
        "a//b",
        "/a",
        "a/",
        "../{year}",
        "{year}/.x",
        "{}",
        "{year!r}",
        "{year:>9}",
        "a b",
        "",
    ],
)
def test_any_other_template_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"archive.path_template={template!r}")):
        KeyTemplate(template)


def test_seq_counts_per_route_and_expansion_from_0001() -> None:
    """[K3]"""
    keys = maker()
    assert str(keys.next("e/acme", 3600)) == "e/acme/1970/01/01/01-0001-0000.jsonl.zst"
    assert str(keys.next("e/acme", 3601)) == "e/acme/1970/01/01/01-0002-0000.jsonl.zst"
    assert str(keys.next("e/other", 3602)) == "e/other/1970/01/01/01-0001-0000.jsonl.zst"
    assert str(keys.next("e/acme", 7200)) == "e/acme/1970/01/01/02-0001-0000.jsonl.zst"


def test_seq_has_at_least_four_digits_and_stands_where_the_template_wants_it_too() -> None:
    keys = maker("n{seq}")
    assert [str(keys.next("r", 1)) for _ in range(2)] == [
        "r/n0001-0001-0000.jsonl.zst",
        "r/n0002-0002-0000.jsonl.zst",
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        [HOUR, "{hour}", "{minute}", "{year}/{day}", "x", "{timestamp}", "{seq}", "{month}/{hour}"]
    ),
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(-90_000, 90_000)), max_size=60),
)
def test_no_key_is_handed_out_twice_whatever_the_clock_does(
    template: str, steps: list[tuple[str, int]]
) -> None:
    """[K4]: a used key with the same bytes would look like our own upload, and records would be lost."""
    keys, now = maker(template), 2_000_000
    made = []
    for route, step in steps:
        now = max(now + step, 0)
        made.append(str(keys.next(route, now)))
    assert len(set(made)) == len(made)


@settings(max_examples=300)
@given(st.lists(TEXT, min_size=1, max_size=3), st.text("ab/", max_size=20))
def test_no_key_is_longer_than_the_longest_key(values: list[str], prefix: str) -> None:
    """[K7]"""
    longest = longest_key_bytes(prefix, len(values), HOUR, "jsonl.zst", has_topic=True)
    keys = maker()
    keys.rename()
    route = "/".join(encode_segment(value) for value in ["topic", *values])
    prefix = prefix.strip("/")
    key = (prefix + "/" if prefix else "") + str(keys.next(route, 1e9))
    assert len(key.encode()) <= longest


def hostile_text(rng: random.Random) -> str:
    """A routing value out of the pieces that break paths, URLs and encodings."""
    pieces = (
        "..",
        "/",
        "\\",
        "=",
        "~",
        "%2F",
        "\0",
        " ",
        ".",
        "é",
        "\u202e",
        "a",
        "A",
        "=2F",
        "😀",
        "\n",
        "x" * 90,
    )
    return "".join(rng.choices(pieces, k=rng.randint(1, 8)))


def test_a_hundred_thousand_hostile_values_keep_apart_and_under_the_prefix() -> None:
    """[K5], c36: one segment each, none leaves its place, no two values share one."""
    seed = time.time_ns()
    rng = random.Random(seed)
    values = {hostile_text(rng) for _ in range(100_000)}
    segments = {encode_segment(value) for value in values}
    assert len(segments) == len(values), f"seed {seed}"
    safe = re.compile(r"[A-Za-z0-9_=~-][A-Za-z0-9._=~-]{0,199}")
    assert all(map(safe.fullmatch, segments)), f"seed {seed}"


def test_very_many_routes_change_the_writer_id_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """[K3], [B1]: what is counted is bounded, no key comes twice, and the reason told is the right one."""
    monkeypatch.setattr(keys_module, "SEQ_ENTRIES_MAX", 10)
    ids = iter(["0000", "111111111111", "222222222222", "333333333333", "444444444444"])
    maker = KeyMaker(KeyTemplate("{hour}"), "jsonl", lambda digits: next(ids))
    made = [maker.next(f"t/{n % 15}", 1_790_000_000) for n in range(25)]
    assert len(set(map(str, made))) == 25
    assert maker.renamed_because == "there are very many routes"
    assert len(maker._seqs) <= 10
    maker = KeyMaker(KeyTemplate(HOUR), "jsonl", lambda digits: next(ids))
    maker.next("t/0", 1_790_000_000)
    maker.next("t/0", 1_790_000_000 - 3_600)
    assert maker.renamed_because == "the clock went back"
