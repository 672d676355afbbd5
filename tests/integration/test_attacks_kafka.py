"""What an adversary does to the broker, the disk and the archive of a running daemon."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from tests.harness.daemon import merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import assert_stored, caught_up, consumed, settings_for, spool_files, value
from tests.integration.conftest import MakeDaemon

QUICK: dict[str, Any] = {
    "kafka": {"topic_refresh_secs": 1},
    "buffer": {"flush_age_secs": 0.2},
    "archive": {"roll_interval_secs": 1},
}


LONG_SECS = 40
"""What a stop takes that waits for something that never comes."""


def records_of(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    """`(org, value)`s of three organisations, numbered from `start`."""
    return [(f"org-{n % 3}", value(f"org-{n % 3}", n)) for n in range(start, start + count)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_topic_made_anew_with_fewer_records_on_one_partition_and_more_on_another_is_archived_whole(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D9]: between two looks; the first partition is out of range at once, the second never is."""
    kafka.create_topic(topic, 2)
    slow = {"kafka": {"group_protocol": protocol, "topic_refresh_secs": 4}}
    daemon = make_daemon(settings_for(kafka, topic, merged(QUICK, slow))).start()
    first = records_of(100)
    kafka.produce(topic, [record for _, record in first])
    consumed(daemon, 100)
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    few, many = records_of(10, 1_000), records_of(200, 2_000)
    kafka.produce(topic, [record for _, record in few], partition=0)
    kafka.produce(topic, [record for _, record in many], partition=1)
    time.sleep(5)
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, first + few + many, daemon.archive(), exact=False)


def test_a_topic_made_anew_with_fewer_partitions_holds_nothing_up(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6], [D9]: nobody waits for commits of partitions that are gone; once they are back, all is read."""
    kafka.create_topic(topic, 4)
    by_hand = {"archive": {"roll_interval_secs": 3600}, "shutdown_timeout_secs": LONG_SECS}
    daemon = make_daemon(settings_for(kafka, topic, merged(QUICK, by_hand))).start()
    first = records_of(120)
    kafka.produce(topic, [record for _, record in first])
    consumed(daemon, 120)
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    again = records_of(30, 1_000)
    kafka.produce(topic, [record for _, record in again])
    consumed(daemon, 150)
    daemon.roll()
    caught_up(kafka, topic)
    time.sleep(2.5)
    failed = daemon.metrics().total("commits_total", outcome="failed")
    kafka.add_partitions(topic, 4)
    more = records_of(60, 2_000)
    kafka.produce(topic, [record for _, record in more])
    consumed(daemon, 210)
    daemon.roll()
    caught_up(kafka, topic)
    assert daemon.get("/readyz")[0] == 200
    assert daemon.metrics().total("commits_total", outcome="failed") <= failed + 1
    started = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started < LONG_SECS / 2
    assert_stored(topic, first + again + more, daemon.archive())


def test_a_stop_does_not_wait_for_the_commit_of_a_topic_that_is_deleted(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: the topic has gone and no look has noticed; every other commit is made, and that at once."""
    topics = [topic, f"{topic}-stays"]
    for name in topics:
        kafka.create_topic(name, 2)
    by_hand = {"archive": {"roll_interval_secs": 3600}, "shutdown_timeout_secs": LONG_SECS}
    daemon = make_daemon(settings_for(kafka, topic, merged(by_hand, {"kafka": {"topics": topics}}))).start()
    records = records_of(60)
    for name in topics:
        kafka.produce(name, [record for _, record in records])
    consumed(daemon, 120)
    kafka.delete_topic(topic)
    started = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started < LONG_SECS / 2
    assert kafka.lag(topic, topics[1]) == 0
    archive = daemon.archive()
    for name in topics:
        assert_stored(name, records, {r: files for r, files in archive.items() if r.startswith(f"{name}/")})


def test_a_spool_that_is_removed_ends_the_process_in_order_and_a_restart_reads_again(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D10]"""
    kafka.create_topic(topic, 2)
    ends_soon = {"shutdown_timeout_secs": 2}
    daemon = make_daemon(settings_for(kafka, topic, merged(QUICK, ends_soon))).start()
    records = records_of(50)
    kafka.produce(topic, [record for _, record in records])
    consumed(daemon, 50)
    shutil.rmtree(daemon.root / "spool")
    assert daemon.wait(20) == 1
    assert "the spool has gone" in daemon.output()
    assert "Traceback" not in daemon.output()
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert not spool_files(daemon)
    assert_stored(topic, records, daemon.archive(), exact=False)


def test_an_archive_that_is_removed_is_made_anew(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[S2], [S6]: folders that were known to be there are gone."""
    kafka.create_topic(topic, 2)
    daemon = make_daemon(settings_for(kafka, topic, QUICK)).start()
    kafka.produce(topic, [record for _, record in records_of(50)])
    caught_up(kafka, topic)
    wait_until(lambda: not spool_files(daemon), 10, "an empty spool")
    shutil.rmtree(daemon.root / "archive")
    more = records_of(50, 50)
    kafka.produce(topic, [record for _, record in more])
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, more, daemon.archive())
