"""Kinds of values: sizes, durations, lists, addresses, the destination."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archiver.settings.destination import Destination, parse_destination
from archiver.settings.values import (
    SIZE_BYTES_MAX,
    parse_bool,
    parse_list,
    parse_listen,
    parse_properties,
    parse_secs,
    parse_size,
    parse_whole,
    show_size,
    split_listen,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        (1048576, 1 << 20),
        ("64MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("10MB", 10_000_000),
        ("1.5 GiB", 3 << 29),
        ("2kb", 2000),
        (5.0, 5),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        -1,
        "nan",
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "5XB",
        "1.0000001MiB",
        "0.3",
        1.5,
        "1e3",
        [],
    ],
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


def test_a_huge_number_is_refused_in_words() -> None:
    for huge in ("9" * 5000, 10**5000, "9000000PiB", str(SIZE_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match="size"):
            parse_size(huge)
    for huge in ("9" * 5000, 10**5000):
        with pytest.raises(ValueError, match="whole number"):
            parse_whole(huge)


@given(st.integers(0, SIZE_BYTES_MAX))
def test_a_shown_size_reads_back_as_itself(size: int) -> None:
    assert parse_size(show_size(size)) == size


@pytest.mark.parametrize("text", ["0", "-5", "5m", True, "nan", float("inf"), "1e9", "99999999999", None])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"seconds|range"):
        parse_secs(text)


def test_a_duration_is_seconds_whole_or_not() -> None:
    assert [parse_secs(text) for text in ("60", 60, "0.5", 0.25)] == [60, 60, 0.5, 0.25]


def test_a_flag_is_true_or_false_in_their_usual_words() -> None:
    assert [parse_bool(text) for text in (True, "yes", "ON", "1", "True")] == [True] * 5
    assert [parse_bool(text) for text in (False, "no", "off", "0", 0)] == [False] * 5
    with pytest.raises(ValueError, match="neither"):
        parse_bool("maybe")


def test_a_list_is_split_at_commas_unless_it_is_json() -> None:
    assert parse_list("a, b,,c ") == ("a", "b", "c")
    assert parse_list('["a{1,2}", "b"]') == ("a{1,2}", "b")
    assert parse_list('["[ab]"]') == ("[ab]",)
    assert parse_list("[a-z][0-9]") == ("[a-z][0-9]",)
    for text in ("[_org_id, tags.region]", "[_org_id]", " ['a'] "):
        with pytest.raises(ValueError, match="in brackets but no JSON list"):
            parse_list(text)
    assert parse_list("[a-z]+") == ("[a-z]+",), "a regular expression is not a JSON list"
    assert parse_list("") == ()


def test_properties_become_text() -> None:
    assert parse_properties({"a": 1, "b": True, "c": "x"}) == {"a": "1", "b": "true", "c": "x"}
    assert parse_properties('{"a": 1}') == {"a": "1"}
    for wrong in ("[1]", "x", {"a": {"b": 1}}, {"a": None}):
        with pytest.raises(ValueError, match=r"is not a mapping|not text"):
            parse_properties(wrong)


def test_an_address_needs_a_port_and_gets_a_host() -> None:
    assert parse_listen(":9090") == "0.0.0.0:9090"
    assert split_listen(parse_listen("[::1]:0")) == ("::1", 0)
    for wrong in ("9090", "host", "host:", "host:x", "http://h:1", "h:70000", 9090, "h:\u0661"):
        with pytest.raises(ValueError, match=r"address|port"):
            parse_listen(wrong)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("file:///data/archive/", Destination("file", path=Path("/data/archive"))),
        ("s3://bucket/a/b/", Destination("s3", "bucket", "a/b")),
        ("S3://bucket", Destination("s3", "bucket")),
        ("minio://bucket/p", Destination("minio", "bucket", "p")),
        ("gs://bucket/p", Destination("gs", "bucket", "p")),
        ("az://container/p", Destination("az", "container", "p")),
        ("s3:///p", Destination("s3", "", "p")),
    ],
)
def test_a_destination_is_parsed_into_its_parts(url: str, parsed: Destination) -> None:
    """[S1]"""
    assert parse_destination(url) == parsed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/data", "perhaps file:///data"),
        ("ftp://x/y", "s3://bucket/prefix"),
        ("gcs://bucket", "did you mean gs://"),
        ("file://data/x", "three slashes"),
        ("file:///", "no folder"),
        ("file:///a/../b", "own path"),
        ("s3://bucket/../x", "prefix"),
        ("s3://bucket//x", "leading slash"),
        ("s3://bucket/a//b", "empty segment"),
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://bucket/x?region=y", "section s3"),
        ("az://con tainer/x", "bucket name"),
        ("s3://bucket/a\nb", "cannot be printed"),
    ],
)
def test_a_wrong_destination_says_what_would_be_right(url: str, words: str) -> None:
    """[S1]"""
    with pytest.raises(ValueError, match=words.replace("?", ".")) as error:
        parse_destination(url)
    assert "secret" not in str(error.value)
