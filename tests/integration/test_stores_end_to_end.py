"""Kafka to each real store: what was produced is there, byte for byte, read by the store's own listing."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from tests.harness.archive import segment
from tests.harness.daemon import Metrics, merged, wait_until
from tests.harness.fault_proxy import Delay
from tests.harness.kafka import KafkaServer
from tests.harness.process import SLACK_SECS
from tests.integration.cases import assert_stored, caught_up, settings_for, value
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import MIB, PREFIX, SCHEMES, MakeSide, uploads, with_store

BY_HAND = {"archive": {"roll_interval_secs": 3600}, "buffer": {"flush_age_secs": 3600}}
"""Files close only on request."""

CODECS = {"s3": "zstd", "minio": "lz4", "gs": "gzip", "az": "snappy"}
ODD_ORGS = (
    "a=b", "a+b", "a b", "100%", "a#b", "a?b", "a:b", "a@b", "a&b", "~a", "a~b", "a/b", "..", ".a", "a\\b",
    "Zürich", "東京", "naïve café", "%2e%2e", "a=2Fb", "a%20b", "&lt;a&gt;", "-", "'\"", "🚀", "x" * 300,
)  # fmt: skip


def odd_value(org: str, n: int) -> bytes:
    """A record of any organisation, with what JSON must escape escaped."""
    text = org.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{"_org_id":"{text}","n":{n}}}'.encode()


def exactly(org: str, size: int) -> bytes:
    """A record that makes `size` bytes with its newline."""
    head = f'{{"_org_id":"{org}","x":"'.encode()
    return head + b"x" * (size - len(head) - 3) + b'"}'


def consumed(metrics: Metrics) -> float:
    return metrics.total("records_consumed_total")


def incompressible(rng: random.Random, org: str, n: int) -> Iterator[tuple[str, bytes]]:
    for at in range(n):
        noise = rng.randbytes(200_000).hex()
        yield org, f'{{"_org_id":"{org}","n":{at},"x":"{noise}"}}'.encode()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_produced_is_in_the_store_byte_for_byte(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[F1], [K1], [S4]: small files and ones in parts, a codec for each store, nothing left behind."""
    kafka.create_topic(topic, 3)
    side = make_side(scheme)
    records = [(f"org-{n % 11}", value(f"org-{n % 11}", n, n % 300)) for n in range(20_000)]
    records += incompressible(random.Random(1), "large", 60)
    kafka.produce(topic, [record for _, record in records])
    more = {"compression": {"codec": CODECS[scheme]}, "archive": {"roll_interval_secs": 3}}
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()
    caught_up(kafka, topic)
    assert daemon.metrics().total("store_create_only") == (0 if scheme == "gs" else 1)
    assert daemon.metrics().total("upload_retries_total") == 0
    assert daemon.stop() == 0
    assert kafka.committed(topic, topic) == kafka.end_offsets(topic)
    assert_stored(topic, records, side.archive())
    assert side.leftovers() == []
    counted: Counter[str] = Counter()
    for key in side.archive_keys():
        metadata = side.metadata(f"{PREFIX}/{key}")
        assert metadata["codec"] == CODECS[scheme]
        counted["records"] += int(metadata["records"])
    assert counted["records"] == len(records)
    strangers = set(side.names()) - {f"{PREFIX}/{key}" for key in side.archive_keys()}
    assert strangers == {f"{PREFIX}/.dfe-archiver-probe"}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_c19_files_around_the_chunk_size_arrive_and_an_empty_one_never_exists(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S5], [F3], [F5]: 0, 1, 5 MiB - 1, 5 MiB, 5 MiB + 1, 16 MiB, and on s3:// 200 MiB."""
    kafka.create_topic(topic)
    side = make_side(scheme)
    sizes = {"below": 5 * MIB - 1, "at": 5 * MIB, "above": 5 * MIB + 1, "sixteen": 16 * MIB}
    records: list[tuple[str, bytes | None]] = [(org, exactly(org, size)) for org, size in sizes.items()]
    records += [("default", b""), ("nobody", None)]
    if scheme == "s3":
        records += [("huge", exactly("huge", 20 * MIB))] * 10
        sizes["huge"] = 200 * MIB
    settings = with_store(settings_for(kafka, topic, BY_HAND), side, endpoint=side.direct())
    daemon = make_daemon(merged(settings, {"compression": {"codec": "none"}})).start()
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: consumed(daemon.metrics()) == len(records), 60, "all taken")
    daemon.roll()
    caught_up(kafka, topic, 60)
    metrics = daemon.metrics()
    assert metrics.total("tombstones_total") == 1
    assert metrics.total("upload_retries_total") == 0
    assert daemon.stop() == 0
    found = {key.split("/")[1]: len(content) for key, content in side.objects().items()}
    assert found == {**sizes, "default": 1}
    assert_stored(topic, records, side.archive())
    assert side.leftovers() == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_c31_keys_of_any_organisation_come_back_from_the_listing_byte_for_byte(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[K5], [K7]: what the listing says is the key that was asked for, opens, and tells the organisation."""
    kafka.create_topic(topic)
    side = make_side(scheme)
    records = [(org, odd_value(org, n)) for n, org in enumerate(ODD_ORGS)]
    kafka.produce(topic, [record for _, record in records])
    daemon = make_daemon(with_store(settings_for(kafka, topic), side)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, side.archive())
    segments = {key.split("/")[1] for key in side.archive_keys()}
    assert segments == {segment(org) for org in ODD_ORGS}
    plain = {unquote_to_bytes(name.replace("=", "%")).decode() for name in segments if "~" not in name}
    assert plain == {org for org in ODD_ORGS if "~" not in segment(org)}


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_c22_two_instances_roll_a_hundred_files_each_in_a_second(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[K3], [K4]: the same hundred organisations on both, so that keys differ in the writer id alone."""
    kafka.create_topic(topic, 2)
    side = make_side(scheme)
    settings = with_store(settings_for(kafka, topic, BY_HAND), side, endpoint=side.direct())
    daemons = [make_daemon(settings, name=name) for name in "ab"]
    for daemon in daemons:
        daemon.launch()
    for daemon in daemons:
        daemon.wait_ready()
    wait_until(lambda: all(len(d.status()["partitions"]) == 1 for d in daemons), 40, "one partition each")
    records = [(f"org-{n // 2}", value(f"org-{n // 2}", n)) for n in range(200)]
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: all(consumed(d.metrics()) == 100 for d in daemons), 20, "a hundred records each")
    began = time.monotonic()
    for daemon in daemons:
        daemon.roll()
    assert time.monotonic() - began < SLACK_SECS
    caught_up(kafka, topic)
    for daemon in daemons:
        assert daemon.stop() == 0
    assert len(side.archive_keys()) == 200
    archive = side.archive()
    assert len({file.writer_id for files in archive.values() for file in files}) == 2
    assert_stored(topic, records, archive)


def test_a_stop_with_500_open_files_ends_in_time_and_commits_what_it_uploaded(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[D6], beside c40: every request to the store takes 50 ms."""
    kafka.create_topic(topic, 4)
    side = make_side("s3")
    records = [(f"org-{n % 500}", value(f"org-{n % 500}", n)) for n in range(5_000)]
    daemon = make_daemon(with_store(settings_for(kafka, topic, BY_HAND), side)).start()
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: consumed(daemon.metrics()) == 5_000, 20, "all taken")
    wait_until(lambda: daemon.metrics().total("open_files") == 500, 5, "500 open files")
    assert side.archive_keys() == []
    side.proxy.fail(Delay(0.05), times=None)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 20
    assert len(side.archive_keys()) == 500
    assert sum(kafka.committed(topic, topic).values()) == 5_000
    assert_stored(topic, records, side.archive())


def test_a_stop_that_is_too_short_for_its_uploads_commits_no_more_than_it_uploaded(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[D6]: each organisation has a partition of its own, so what is committed tells what must be stored."""
    kafka.create_topic(topic, 40)
    side = make_side("s3")
    records = [(f"org-{n % 40}", value(f"org-{n % 40}", n)) for n in range(400)]
    more = merged(BY_HAND, {"shutdown_timeout_secs": 5, "buffer": {"writer_parallelism": 2}})
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: consumed(daemon.metrics()) == 400, 20, "all taken")
    side.proxy.fail(Delay(0.5), when=uploads(side), times=None)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 5 + SLACK_SECS
    side.proxy.heal()
    stored = {route.split("/")[1] for route in side.archive()}
    committed = {f"org-{partition}" for partition, mark in kafka.committed(topic, topic).items() if mark}
    assert 0 < len(committed) < 40
    assert committed <= stored, "committed, yet not stored"
    assert len(stored - committed) <= 2, "stored, yet not committed"
    daemon.settings["archive"]["roll_interval_secs"] = 1
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, side.archive(), exact=False)


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_c10_a_process_that_wakes_up_replaces_no_object(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[K4], [D4]: frozen with a file whose time has come when it wakes; the path is the same for both."""
    kafka.create_topic(topic)
    side = make_side(scheme)
    more: dict[str, Any] = {
        "kafka": {"session_timeout_ms": 3_000},
        "archive": {"roll_interval_secs": 3, "path_template": "x"},
    }
    sleeper, heir = (
        make_daemon(with_store(settings_for(kafka, topic, more), side), name=name) for name in "ab"
    )
    records = [("a", value("a", n)) for n in range(31)]
    sleeper.start()
    kafka.produce(topic, [record for _, record in records[:21]])
    wait_until(lambda: consumed(sleeper.metrics()) == 21, 10)
    sleeper.freeze()
    kafka.produce(topic, [record for _, record in records[21:]])
    heir.start()
    wait_until(lambda: kafka.committed(topic, topic) == {0: 31}, 40, "B's commit")
    before = side.objects()
    sleeper.thaw()
    wait_until(lambda: sleeper.metrics().total("rebalances_total", kind="lost") == 1, 20, "A's loss")
    wait_until(lambda: sleeper.get("/readyz")[0] == 200, 20, "A back in the group")
    assert sleeper.stop() == 0
    assert heir.stop() == 0
    assert kafka.committed(topic, topic) == {0: 31}
    after = side.objects()
    assert {key: after.get(key) for key in before} == before, "replaced or gone"
    assert_stored(topic, records, side.archive(template_segments=1), exact=False)
