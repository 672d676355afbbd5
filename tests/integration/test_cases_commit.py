"""Cases from the field: commit against upload, on a real broker (c01 to c09)."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness.daemon import merged, wait_until
from tests.harness.embedded import EmbeddedBroker
from tests.harness.fault_proxy import Gate, Request, puts, s3_error
from tests.harness.kafka import KafkaServer
from tests.integration.cases import (
    CommitWatch,
    S3Side,
    archive_files,
    assert_stored,
    blocked_route,
    caught_up,
    committed_nothing,
    consumed,
    files_archived,
    settings_for,
    value,
)
from tests.integration.conftest import MakeDaemon

BY_HAND = {"archive": {"roll_interval_secs": 3600}}
"""Files close only on request."""

QUICK_RETURN = {"kafka": {"group_instance_id": "one"}}
"""After a kill the group needs not wait for the session to end."""

OFFSET_COMMIT = ctypes.c_int16(8)
"""Kafka's number of the request."""
GROUP_AUTHORIZATION_FAILED = 30


def test_c01_a_failing_route_holds_the_commit_while_others_go_on(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D1]: uploads of a fail, b rolls five times: nothing is committed; after healing, all ten once."""
    kafka.create_topic(topic)
    daemon = make_daemon(settings_for(kafka, topic, BY_HAND))
    records = [("ab"[n % 2], value("ab"[n % 2], n)) for n in range(10)]
    with blocked_route(daemon, topic, "a") as heal, CommitWatch(kafka, topic, 1) as watch:
        daemon.start()
        for pair in range(5):
            kafka.produce(topic, [record for _, record in records[2 * pair : 2 * pair + 2]])
            taken = 2 * pair + 2
            consumed(daemon, taken, 10)
            daemon.roll()
            files_archived(daemon, pair + 1, 10)
        wait_until(lambda: daemon.metrics().total("uncommitted_archived_bytes") > 0, 5)
        assert daemon.metrics().total("upload_retries_total") >= 1
        assert daemon.metrics().total("upload_retries_total", kind="not_a_directory") >= 1
        assert watch.steps[0] in ([], [0])
        assert committed_nothing(kafka, topic)
        heal()
        caught_up(kafka, topic, 70)
        watch.assert_never_back()
    assert daemon.stop() == 0
    assert kafka.committed(topic, topic) == {0: 10}
    assert_stored(topic, records, daemon.archive())


def stored(side: S3Side, org: str) -> bool:
    """Whether an object of the organisation is there."""
    return any(f"/{org}/" in key for key in side.listing())


def test_c02_a_refused_object_is_not_passed_by_a_later_one(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """[D1], [S6]: 403 for the second object only, a kill in the middle of it: nothing is missing."""
    kafka.create_topic(topic)
    more = merged(s3_side.settings(), merged(BY_HAND, QUICK_RETURN))
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    refused: list[str] = []

    def is_second(request: Request) -> bool:
        if request.method != "PUT" or "/b/" not in request.path:
            return False
        refused.append(request.path)
        return refused[0] == request.path

    s3_side.proxy.fail(s3_error(403, "AccessDenied"), when=is_second, times=None)
    records = []
    for n, org in enumerate("abc"):
        records.append((org, value(org, n)))
        kafka.produce(topic, [records[-1][1]])
        consumed(daemon, n + 1, 10)
        daemon.roll()
        if org != "b":
            wait_until(partial(stored, s3_side, org), 10)
    wait_until(lambda: refused and kafka.committed(topic, topic) == {0: 1}, 10, "a commit of the first")
    daemon.kill()
    s3_side.proxy.heal()
    daemon.start()
    consumed(daemon, 2, 10)
    daemon.roll()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, s3_side.archive(), exact=False)


def test_c03_a_throttled_completion_brings_the_file_later_and_the_commit_then(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """[S5], [S6]: CompleteMultipartUpload answers 503 SlowDown on a file closed by age."""
    kafka.create_topic(topic, config={"max.message.bytes": str(32 << 20)})
    more = merged(s3_side.settings(), {"compression": {"codec": "none"}})
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    slow = s3_error(503, "SlowDown")

    def completes(request: Request) -> bool:
        return request.method == "POST" and "uploadId" in request.query

    s3_side.proxy.fail(slow, when=completes, times=None)
    records = [("a", value("a", 0, padding=7_000_000))]  # one record is one file, whenever the interval ends
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: sum(map(completes, s3_side.proxy.requests)) >= 3, 20, "three completions")
    assert committed_nothing(kafka, topic)
    s3_side.proxy.heal()
    caught_up(kafka, topic)
    assert sum(map(completes, s3_side.proxy.requests)) >= 4
    assert len(s3_side.listing()) == 1
    assert daemon.metrics().total("files_sealed_total", reason="age") == 1
    assert daemon.metrics().total("upload_retries_total") >= 1
    assert daemon.stop() == 0
    assert s3_side.server.uploads(s3_side.bucket) == []
    assert_stored(topic, records, s3_side.archive())


def test_c04_a_new_group_whose_first_upload_fails_starts_again_from_the_first_offset(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D3]: nothing has ever been committed, the first upload fails, restart."""
    kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(20)]
    kafka.produce(topic, [record for _, record in records])
    daemon = make_daemon(settings_for(kafka, topic, {"shutdown_timeout_secs": 2, **QUICK_RETURN}))
    with blocked_route(daemon, topic, "a") as heal:
        daemon.start()
        wait_until(lambda: daemon.metrics().total("upload_retries_total") >= 1, 15, "a failed upload")
        assert daemon.stop() == 0
        assert committed_nothing(kafka, topic)
        daemon.start()
        wait_until(lambda: daemon.metrics().total("upload_retries_total") >= 1, 15, "a failed upload")
        daemon.kill()
        heal()
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c05_refused_commits_are_counted_and_catch_up_without_new_records(
    topic: str, make_daemon: MakeDaemon
) -> None:
    """[D4]: the coordinator refuses every commit for a while; uploads go on meanwhile."""
    with EmbeddedBroker() as broker:
        broker.create_topic(topic, 1)
        daemon = make_daemon(
            {
                "kafka": {
                    "brokers": broker.bootstrap,
                    "topics": [topic],
                    "group_id": topic,
                    "commit_interval_secs": 0.2,
                },
                "archive": {"roll_interval_secs": 1},
                "buffer": {"flush_age_secs": 1},
            }
        ).start()
        errors = (ctypes.c_int * 10_000)(*[GROUP_AUTHORIZATION_FAILED] * 10_000)
        broker._call("rd_kafka_mock_push_request_errors_array", OFFSET_COMMIT, len(errors), errors)
        records = []
        for n in range(5):
            records.append(("a", value("a", n)))
            broker.produce_all([(topic, 0, records[-1][1])])
            files_archived(daemon, n + 1, 10)
        wait_until(lambda: daemon.metrics().total("commits_total", outcome="failed") >= 5, 10)
        assert broker.lag(topic, topic) == 5
        assert daemon.metrics().total("uncommitted_archived_bytes") > 0
        broker._call("rd_kafka_mock_clear_request_errors", OFFSET_COMMIT)
        wait_until(lambda: broker.lag(topic, topic) == 0, 10, "the commit catching up by itself")
        wait_until(lambda: daemon.metrics().total("uncommitted_archived_bytes") == 0, 5)
        failures = [entry for entry in daemon.logs() if "commit failed" in str(entry)]
        assert 1 <= len(failures) <= 5, "told, and not again and again"
        assert daemon.stop() == 0
        assert_stored(topic, records, daemon.archive())


def test_c06_committed_transactions_and_then_nothing_end_with_lag_zero(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D3]: ten records in committed transactions; the marker at the end is passed too."""
    from confluent_kafka import Producer

    kafka.create_topic(topic)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    records = [("a", value("a", n)) for n in range(10)]
    for at in (0, 5):
        producer.begin_transaction()
        for _, record in records[at : at + 5]:
            producer.produce(topic, record)
        producer.commit_transaction(30)
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert kafka.committed(topic, topic) == kafka.end_offsets(topic) == {0: 12}
    wait_until(lambda: daemon.metrics().total("consumer_lag") == 0, 10)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c07_a_late_success_commits_nothing_for_a_revoked_partition(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """[D4], [D5]: an upload is running when its partition goes; it succeeds later."""
    kafka.create_topic(topic, 2)
    more = {"kafka": {"drain_timeout_secs": 1}, "archive": {"roll_interval_secs": 1}}
    slow, other = (
        make_daemon(settings_for(kafka, topic, merged(s3_side.settings(), more)), name=name) for name in "ab"
    )
    slow.start()
    records = [(f"org-{n % 2}", value(f"org-{n % 2}", n)) for n in range(40)]
    slowly = Gate()
    s3_side.proxy.fail(slowly, when=lambda r: puts(r) and ".jsonl" in r.path, times=None)
    kafka.produce(topic, [record for _, record in records])  # org-0 in partition 0, org-1 in partition 1
    wait_until(lambda: slow.metrics().total("uploads_in_flight") == 2, 10, "uploads on their way")
    other.settings["archive"]["roll_interval_secs"] = 3600
    other.start()  # no drain waits for the slow upload: it has not ended yet
    wait_until(lambda: len(other.status()["partitions"]) == 1, 15, "a partition for the newcomer")
    moved = other.status()["partitions"][0]["partition"]
    kept = 1 - moved
    assert s3_side.listing() == []
    slowly.open()
    wait_until(lambda: len(s3_side.listing()) == 2, 20, "the late successes")
    wait_until(lambda: kafka.committed(topic, topic).get(kept) == 20, 10, "the commit of what was kept")
    time.sleep(1)
    assert not kafka.committed(topic, topic).get(moved)
    s3_side.proxy.heal()
    other.roll()
    caught_up(kafka, topic)
    assert slow.stop() == 0
    assert other.stop() == 0
    assert_stored(topic, records, s3_side.archive(), exact=False)


def test_c08_a_kill_with_open_files_and_a_lost_spool_loses_nothing(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D7]: 5,000 records in buffers and open files, the spool gone with the machine."""
    kafka.create_topic(topic, 3)
    records = [(f"org-{n % 7}", value(f"org-{n % 7}", n)) for n in range(5_000)]
    more = merged(BY_HAND, {"buffer": {"flush_records": 500}, **QUICK_RETURN})
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    kafka.produce(topic, [record for _, record in records])
    consumed(daemon, 5_000, 20)
    daemon.kill()
    assert committed_nothing(kafka, topic)
    shutil.rmtree(daemon.root / "spool")
    daemon.settings["archive"]["roll_interval_secs"] = 1
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c09_a_record_that_is_no_json_is_archived_under_default(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[F1], [K6]: good, `not json`, good."""
    kafka.create_topic(topic)
    records = [("a", value("a", 0)), ("default", b"not json"), ("a", value("a", 1))]
    kafka.produce(topic, [record for _, record in records])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.metrics().total("default_routed_total") == 1
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


SESSION_MS = 60_000
"""Longer than a broker stands still: what was archived meanwhile is not read again."""


@pytest.fixture(scope="module")
def lenient_kafka(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[KafkaServer]:
    """A broker to freeze, whose sessions last."""
    properties = {"group.consumer.session.timeout.ms": str(SESSION_MS)}
    root = tmp_path_factory.mktemp("kafka")
    with KafkaServer(root, log_dir, name="kafka-lenient", properties=properties, short_lived=True) as server:
        yield server


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_frozen_broker_stops_no_upload_and_the_commit_comes_when_it_is_back(
    protocol: str, lenient_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D4], beside c05: the commit has no answer at all while the broker stands still."""
    lenient_kafka.create_topic(topic)
    section = {"group_protocol": protocol, "session_timeout_ms": SESSION_MS}
    more = merged(BY_HAND, {"kafka": section})
    daemon = make_daemon(settings_for(lenient_kafka, topic, more)).start()
    records = [("a", value("a", n)) for n in range(100)]
    lenient_kafka.produce(topic, [record for _, record in records])
    consumed(daemon, 100, 10)
    lenient_kafka.freeze()
    try:
        daemon.roll()
        wait_until(lambda: len(archive_files(daemon)) == 1, 15, "an upload without a broker")
        time.sleep(1.5)
    finally:
        lenient_kafka.thaw()
    caught_up(lenient_kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_a_destination_that_is_read_only_is_waited_for(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[S6]: a `file://` destination remounted read-only and back: readiness says why, nothing is lost."""
    import subprocess

    from tests.unit.small_disk import small_disk

    kafka.create_topic(topic)
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        more = {"archive": {"destination": f"file://{disk}/archive", "roll_interval_secs": 0.3}}
        daemon = make_daemon(settings_for(kafka, topic, more)).start()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        records = [(f"org-{n % 10}", value(f"org-{n % 10}", n)) for n in range(100)]
        kafka.produce(topic, [record for _, record in records])
        wait_until(lambda: daemon.get("/readyz")[0] == 503, 20, "not ready")
        assert "read-only" in daemon.get("/readyz")[1].lower()
        assert committed_nothing(kafka, topic)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        caught_up(kafka, topic)
        wait_until(lambda: daemon.get("/readyz")[0] == 200, 10, "ready again")
        assert daemon.stop() == 0
        assert_stored(topic, records, daemon.archive())
