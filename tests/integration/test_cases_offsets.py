"""Cases from the field: offsets and topics, on a real broker (c14 to c17)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from tests.harness.daemon import Daemon, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import (
    archive_files,
    assert_stored,
    caught_up,
    committed_nothing,
    consumed,
    settings_for,
    value,
)
from tests.integration.conftest import MakeDaemon


def warnings(daemon: Daemon, event: str) -> list[Mapping[str, Any]]:
    """Log lines of one event at WARN."""
    return [entry for entry in daemon.logs() if entry["event"] == event and entry["level"] == "warning"]


def test_c14_offsets_that_the_broker_deleted_are_told_and_counted(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D9]: committed 5, records up to 100 deleted while it is down; it goes on at 100."""
    kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(120)]
    kafka.produce(topic, [record for _, record in records[:5]])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    kafka.produce(topic, [record for _, record in records[5:]])
    kafka.delete_records(topic, {0: 100})
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.metrics().total("skipped_offsets_total") == 95
    (told,) = warnings(daemon, "offsets_skipped")
    assert (told["topic"], told["partition"]) == (topic, 0)
    assert (told["expected_offset"], told["next_offset"]) == (5, 100)
    assert daemon.stop() == 0
    assert_stored(topic, records[:5] + records[100:], daemon.archive())


def test_c14_offsets_that_the_broker_deletes_while_it_runs_are_told_and_counted(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D9]: the same with a frozen process, whose position falls below the log start."""
    kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(120)]
    kafka.produce(topic, [record for _, record in records[:5]])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    daemon.freeze()
    kafka.produce(topic, [record for _, record in records[5:]])
    kafka.delete_records(topic, {0: 100})
    daemon.thaw()
    caught_up(kafka, topic)
    skipped = daemon.metrics().total("skipped_offsets_total")
    assert daemon.stop() == 0
    archive = daemon.archive()
    lines = [line for files in archive.values() for file in files for line in file.lines]
    # a fetch that was under way when it froze may have brought some of them still
    assert set(lines) >= {record for _, record in records[:5] + records[100:]}
    assert len(lines) == len(set(lines)) == 120 - skipped


def test_c15_deleted_group_offsets_are_told_and_nothing_is_lost(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D9]: the group is deleted while the archiver is down: read again from the beginning, aloud."""
    kafka.create_topic(topic, 2)
    records = [("a", value("a", n)) for n in range(20)]
    kafka.produce(topic, [record for _, record in records[:10]])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    told_before = len(warnings(daemon, "no_committed_offset"))
    kafka.delete_group(topic)
    kafka.produce(topic, [record for _, record in records[10:]])
    daemon.start()
    caught_up(kafka, topic)
    assert len(warnings(daemon, "no_committed_offset")) == told_before + 2
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive(), exact=False)


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_c16_a_topic_that_appears_is_archived_from_its_first_record(
    reset: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[C6], [D9]: regular expression, a new topic, 100 records at once."""
    section = {
        "topics": [],
        "topic_include": [f"{topic}.*"],
        "topic_refresh_secs": 1,
        "auto_offset_reset": reset,
    }
    kafka.create_topic(f"{topic}-old")
    daemon = make_daemon(settings_for(kafka, topic, {"kafka": section})).start()
    late = f"{topic}-new"
    records = [("a", value("a", n)) for n in range(100)]
    kafka.create_topic(late, 3)
    kafka.produce(late, [record for _, record in records])
    caught_up(kafka, late, group=topic)
    assert daemon.stop() == 0
    assert_stored(late, records, daemon.archive())


def test_c17_compaction_and_aborted_transactions_leave_gaps_that_are_passed(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D3], [D11]: each committed record that survives once, committed equals the end, lag 0."""
    compaction = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.ms": "100",
        "max.compaction.lag.ms": "100",
    }
    kafka.create_topic(topic, config=compaction)
    plain = Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "log_level": 0})
    for n in range(300):
        plain.produce(topic, value("a", n), key=str(n % 10).encode())
        if n % 100 == 99:
            plain.flush(20)
            time.sleep(0.2)  # the next record begins another segment: only whole ones are compacted
    for n in range(300, 305):
        plain.produce(topic, value("a", n), key=b"last")
    plain.flush(20)

    def compacted() -> bool:
        reader = make_reader(kafka, topic)
        return len(reader) < 150

    wait_until(compacted, 40, "the log cleaner")
    transactions = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic, "log_level": 0})
    transactions.init_transactions(30)
    for start, commits in ((1000, True), (1010, False), (1020, True), (1030, False)):
        transactions.begin_transaction()
        for n in range(start, start + 10):
            transactions.produce(topic, value("a", n), key=f"t{n}".encode())
        transactions.flush(20)
        (transactions.commit_transaction if commits else transactions.abort_transaction)(30)
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert kafka.committed(topic, topic) == kafka.end_offsets(topic)
    wait_until(lambda: daemon.metrics().total("consumer_lag") == 0, 10)
    assert daemon.stop() == 0
    lines = [line for files in daemon.archive().values() for file in files for line in file.lines]
    numbers = [msgspec.json.decode(line)["n"] for line in lines]
    assert len(numbers) == len(set(numbers))
    assert set(range(1000, 1010)) | set(range(1020, 1030)) <= set(numbers)
    assert not set(numbers) & (set(range(1010, 1020)) | set(range(1030, 1040)))
    assert set(range(290, 300)) | {304} <= set(numbers)


def make_reader(kafka: KafkaServer, topic: str) -> list[int]:
    """Offsets that a plain consumer still gets from the topic."""
    from confluent_kafka import Consumer
    from confluent_kafka import TopicPartition as KafkaPartition

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": f"{topic}-reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([KafkaPartition(topic, 0, 0)])
        offsets: list[int] = []
        while True:
            message = consumer.poll(5)
            if message is None:
                continue
            if message.error() is not None:
                return offsets
            offsets.append(message.offset() or 0)
    finally:
        consumer.close()


def test_a_topic_made_anew_while_it_runs_is_read_from_its_beginning(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D9]: deleted and created again, with fewer and then more records than before."""
    kafka.create_topic(topic)
    old = [("a", value("a", n)) for n in range(50)]
    kafka.produce(topic, [record for _, record in old])
    more = {"kafka": {"topic_refresh_secs": 1}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    caught_up(kafka, topic)
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    assert committed_nothing(kafka, topic)
    new = [("a", value("a", n)) for n in range(1000, 1080)]
    kafka.produce(topic, [record for _, record in new])
    wait_until(lambda: kafka.committed(topic, topic) == {0: 80}, 40, "the new topic's end")
    assert daemon.stop() == 0
    assert_stored(topic, old + new, daemon.archive(), exact=False)
    assert warnings(daemon, "offsets_skipped")


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_topic_that_is_deleted_with_open_files_is_archived_and_holds_up_no_other(
    made_anew: bool, protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D5], [D9]: what was taken of it is in files alone and is archived; no commit of it is waited for."""
    gone, stays = f"{topic}-gone", f"{topic}-stays"
    for name in (gone, stays):
        kafka.create_topic(name)
    section = {"topics": [gone, stays], "topic_refresh_secs": 1, "group_protocol": protocol}
    more = {"kafka": {**section, "drain_timeout_secs": 60}, "archive": {"roll_interval_secs": 3600}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    records = [("a", value("a", n)) for n in range(20)]
    kafka.produce(gone, [record for _, record in records])
    kafka.produce(stays, [record for _, record in records])
    consumed(daemon, 40)
    kafka.delete_topic(gone)
    if made_anew:
        kafka.create_topic(gone)
    wait_until(lambda: len(archive_files(daemon)) == 1, 20, "the file of the deleted topic")
    daemon.roll()
    caught_up(kafka, stays, group=topic)
    drains = [entry["secs"] for entry in daemon.logs() if entry["event"] == "drained"]
    assert max(drains, default=0) < 60 / 2, "one waited for a commit that cannot come"
    assert daemon.stop() == 0
    archive = daemon.archive()
    assert_stored(stays, records, {route: f for route, f in archive.items() if route.startswith(stays)})
    assert_stored(gone, records, {route: f for route, f in archive.items() if route.startswith(gone)})
