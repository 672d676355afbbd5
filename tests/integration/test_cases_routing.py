"""Cases from the field: where odd routing values and odd records go, on a real broker (c31, c36 to c39)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.archive import segment
from tests.harness.daemon import merged
from tests.harness.kafka import KafkaServer
from tests.integration.cases import (
    S3Side,
    archive_files,
    assert_stored,
    caught_up,
    settings_for,
    spool_files,
    value,
)
from tests.integration.conftest import MakeDaemon

MIB = 1 << 20

ODD_ORGS = [f"a{sign}b" for sign in "=+ %#?:@&~"] + ["Zürich", "東京", "🙂", "e\u0301", "é"]
HOSTILE_ORGS = [
    "..", "../x", "/etc/x", "a/b", "a\\b", ".", " ", "%2e%2e", "a%2Fb", "a=2Fb", "nul\0byte",
    "x" * 2_000, "x" * 2_001, "é" * 1_000, "...", ".hidden", "a//b", "a/", "-", "con", "A", "a",
    "\n", "\u202e", "\ufeff", "x" * 200, "x" * 201, "=" * 70, "x" * 183 + "~" + "0" * 16,
]  # fmt: skip

PLACED: list[tuple[str, bytes | None]] = [
    ("default", b'{"n":1}'),
    ("default", b'{"_org_id":null}'),
    ("123", b'{"_org_id":123}'),
    ("123", b'{"_org_id":"123"}'),
    ("1.0", b'{"_org_id":1.0}'),
    ("1.00", b'{"_org_id":1.00}'),
    ("1e3", b'{"_org_id":1e3}'),
    ("-0", b'{"_org_id":-0}'),
    ("true", b'{"_org_id":true}'),
    ("false", b'{"_org_id":false}'),
    ("default", b'{"_org_id":{}}'),
    ("default", b'{"_org_id":[]}'),
    ("default", b'{"_org_id":["a"]}'),
    ("default", b'{"_org_id":""}'),
    ("a/b", b'{"_org_id":"a\\u002fb"}'),
    ("99999999999999999999999999", b'{"_org_id":99999999999999999999999999}'),
]
"""c37: values that are no plain strings, and the segment of each."""

DEEP = b"[" * 100_000 + b"]" * 100_000
ODD: list[tuple[str, bytes | None]] = [
    ("default", b""),
    ("default", b"{"),
    ("default", b"\xff\xfe"),
    ("default", b"null"),
    ("default", b"[]"),
    ("default", b'"x"'),
    ("default", b"NaN"),
    ("default", DEEP),
    ("default", b'{"_org_id":' + DEEP + b"}"),
    ("default", b'{"_org_id":"a"}garbage'),
    ("default", b'{"_org_id":"a"}{"_org_id":"b"}'),
    ("default", b'{"_org_id":"\xff"}'),
    ("default", b'{"_org_id":"a"'),
    ("default", b"{" * 5_000),
    ("default", b"\x00"),
]
"""c38: what is not one JSON object with a plain string, between good records."""

AMBIGUOUS: list[bytes | None] = [
    b'{"_org_id":"a","_org_id":"b"}',
    b'\xef\xbb\xbf{"_org_id":"a"}',
    b'{"_org_id":"\\ud800"}',
]
"""Where these go is not defined; that they are archived is."""


def org_value(org: object) -> bytes:
    """A record whose routing value is any JSON value."""
    return json.dumps({"_org_id": org, "n": 1}, ensure_ascii=False).encode()


def test_c31_odd_organisations_round_trip_through_the_stores_listing(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """[K5]: each is one segment, readable back byte for byte from the listing of an S3 store."""
    kafka.create_topic(topic)
    records = [(org, org_value(org)) for org in ODD_ORGS]
    kafka.produce(topic, [record for _, record in records])
    more = merged(s3_side.settings(), {"archive": {"roll_interval_secs": 1}})
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    listed = {key.split("/")[2] for key in s3_side.listing()}
    assert listed == {segment(org) for org in ODD_ORGS}
    assert {decoded(name) for name in listed} == set(ODD_ORGS)
    assert_stored(topic, records, s3_side.archive())


def decoded(name: str) -> str:
    """The routing value of a segment that was not cut."""
    from urllib.parse import unquote

    assert "%" not in name
    return unquote(name.replace("=", "%"))


def test_c36_no_organisation_leaves_its_prefix_or_shares_anothers(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[K5], [K6], [K7]: path tricks, NUL, and values of 2,000 characters."""
    kafka.create_topic(topic)
    records: list[tuple[str, bytes | None]] = [(org, org_value(org)) for org in HOSTILE_ORGS]
    records.append(("default", org_value("")))
    kafka.produce(topic, [record for _, record in records])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    archive = daemon.archive()
    assert_stored(topic, records, archive)
    assert len(archive) == len(HOSTILE_ORGS) + 1
    root = daemon.root / "archive"
    for path in archive_files(daemon):
        assert path.resolve().is_relative_to(root.resolve() / topic)
    outside = [path for path in Path(daemon.root).rglob("*.jsonl*") if not path.is_relative_to(root)]
    assert outside == []


def test_c37_values_that_are_no_strings_have_their_defined_places(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[K6]: missing, null, numbers and booleans by their own text, objects and arrays."""
    kafka.create_topic(topic)
    kafka.produce(topic, [record for _, record in PLACED])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, PLACED, daemon.archive())


def test_c38_no_value_stops_the_loop(kafka: KafkaServer, topic: str, make_daemon: MakeDaemon) -> None:
    """[F1], [K6]: everything that is not one JSON object is archived too, between good records."""
    kafka.create_topic(topic, 2)
    records: list[tuple[str, bytes | None]] = []
    for n, record in enumerate(ODD):
        records += [("a", value("a", n)), record, ("b", value("b", n))]
    kafka.produce(topic, [*(record for _, record in records), *AMBIGUOUS])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    archive = daemon.archive()
    lines = [line for files in archive.values() for file in files for line in file.lines]
    assert sorted(lines) == sorted(record or b"" for record in [*(r for _, r in records), *AMBIGUOUS])
    without = {
        route: [
            file.__class__(
                file.key,
                file.route,
                file.writer_id,
                file.size,
                file.raw_bytes,
                [line for line in file.lines if line not in AMBIGUOUS],
            )
            for file in files
        ]
        for route, files in archive.items()
    }
    assert_stored(topic, records, without)


def test_c39_a_record_of_20_mb_and_a_small_one_behind_it_are_archived(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """The broker's limit is 32 MB; the client's fetch sizes are far below."""
    kafka.create_topic(topic, config={"max.message.bytes": str(32 * MIB)})
    records = [
        ("a", value("a", 0)),
        ("a", value("a", 1, padding=20_000_000)),
        ("a", value("a", 2)),
        ("b", value("b", 3, padding=31_000_000)),
        ("b", value("b", 4)),
    ]
    kafka.produce(topic, [record for _, record in records])
    more = {"buffer": {"max_bytes": "32MiB"}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())
    assert spool_files(daemon) == []
