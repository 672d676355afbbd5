"""How long the broker still keeps what is not archived: its own settings and timestamps, on a real one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import confluent_kafka as ck
import pytest

from archiver.domain.batch import TopicPartition
from archiver.events import RetentionNear
from archiver.ports import Kept
from archiver.settings.models import Kafka
from archiver.sources.kafka_check import look
from archiver.sources.kafka_retention import SHARES, kept
from tests.harness.daemon import wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import caught_up, settings_for
from tests.integration.conftest import MakeDaemon

HOUR = 3600.0
COARSE = max(after - before for before, after in zip((0.0, *SHARES), (*SHARES, 1.0), strict=True)) + 0.001
ANSWER_SECS = 60.0


def produce_at(kafka: KafkaServer, topic: str, times: Sequence[float]) -> None:
    """One record each, with these Unix times as timestamps."""
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True})
    for at in times:
        producer.produce(topic, b'{"_org_id":"acme"}', partition=0, timestamp=int(at * 1000))
    assert producer.flush(30) == 0


def test_what_is_promised_is_never_too_much_and_at_most_a_tenth_too_little(
    kafka: KafkaServer, topic: str
) -> None:
    """Ages from an eleventh hour to none, of ten hours of retention: the record's own time is the truth."""
    retention = 10 * HOUR
    kafka.create_topic(topic, config={"retention.ms": str(int(retention * 1000))})
    now = time.time()
    times = [now - retention * age / 40 for age in range(44, -1, -1)]
    produce_at(kafka, topic, times)
    partition = TopicPartition(topic, 0)
    known = kept(kafka.admin, {partition}, now, ANSWER_SECS)[partition]
    assert known.retention_secs == retention
    for offset, at in enumerate(times):
        left, truth = known.secs_left(offset, now), max(0.0, at + retention - now)
        assert left <= truth + 0.01, offset
        assert truth - left <= retention * COARSE, offset
    assert known.secs_left(len(times) // 2, now + 60) == pytest.approx(
        known.secs_left(len(times) // 2, now) - 60
    )


def test_a_late_record_with_an_old_timestamp_takes_nothing_from_the_promise(
    kafka: KafkaServer, topic: str
) -> None:
    """Kafka deletes from the oldest segment on and stops at one that holds a newer record."""
    kafka.create_topic(topic, config={"retention.ms": str(int(10 * HOUR * 1000))})
    now = time.time()
    produce_at(kafka, topic, [now - 9.5 * HOUR, now - HOUR, now - 9.9 * HOUR, now])
    known = kept(kafka.admin, {TopicPartition(topic, 0)}, now, ANSWER_SECS)[TopicPartition(topic, 0)]
    assert known.secs_left(0, now) <= 0.5 * HOUR
    assert known.secs_left(1, now) >= 8 * HOUR
    assert known.secs_left(2, now) >= 8 * HOUR, "it lies behind one that stays for so long"


def test_topics_that_keep_everything_or_are_not_there_have_no_time_left(
    kafka: KafkaServer, topic: str
) -> None:
    kafka.create_topic(f"{topic}-ever", config={"retention.ms": "-1"})
    kafka.create_topic(f"{topic}-compacted", config={"cleanup.policy": "compact"})
    kafka.create_topic(f"{topic}-empty", config={"retention.ms": "3600000"})
    names = ("ever", "compacted", "empty", "missing")
    partitions = {TopicPartition(f"{topic}-{name}", 0) for name in names}
    known = kept(kafka.admin, partitions, time.time(), ANSWER_SECS)
    empty = TopicPartition(f"{topic}-empty", 0)
    assert known == {empty: Kept(HOUR, (), 0)}
    assert known[empty].secs_left(0, time.time()) == HOUR, "the first record of a topic is no cause for alarm"


def test_check_says_for_how_long_records_are_kept_and_refuses_what_is_too_short(
    kafka: KafkaServer, topic: str
) -> None:
    """[O1]: before the first record is lost. Two roll intervals are the least that can work."""
    for name, retention_ms in (("week", 604_800_000), ("minutes", 599_000), ("ever", -1)):
        kafka.create_topic(f"{topic}-{name}", config={"retention.ms": str(retention_ms)})

    def said(*names: str) -> tuple[bool, str]:
        topics = tuple(f"{topic}-{name}" for name in names)
        found = list(look(Kafka(brokers=(kafka.bootstrap,), topics=topics), (), ANSWER_SECS, 300.0))
        ((fine, text),) = [(fine, text) for fine, what, text in found if what == "retention"]
        return fine, text

    assert said("week", "ever") == (True, f"records are kept for 7 d at least ({topic}-week)")
    assert said("ever") == (True, "no topic deletes by time")
    fine, text = said("week", "minutes")
    assert not fine
    assert text.startswith(f"{topic}-minutes: records are kept for less than two of archive.roll_interval")


def test_a_record_that_the_broker_may_soon_delete_is_told_in_seconds_until_it_is_archived(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """Nothing has been deleted yet, so records alone say nothing; the time does, as metric and in the log."""
    retention = 100.0
    kafka.create_topic(topic, config={"retention.ms": str(int(retention * 1000))})
    produced = time.time() - 0.85 * retention
    produce_at(kafka, topic, [produced, time.time()])
    daemon = make_daemon(settings_for(kafka, topic, {"archive": {"roll_interval_secs": 3600}})).start()
    wait_until(lambda: daemon.metrics().total("records_consumed_total") == 2, 30, "both taken")
    wait_until(lambda: daemon.metrics().total("retention_seconds") == retention, 30, "a look at it")
    asked = time.time()
    left = daemon.metrics().total("retention_headroom_seconds")
    assert left <= produced + retention - asked + 5  # what is told may be older than the question
    assert left < 0.2 * retention
    wait_until(lambda: RetentionNear.message in daemon.output(), 30, "the warning")
    (line,) = [line for line in daemon.output().splitlines() if RetentionNear.message in line]
    assert '"headroom_secs"' in line and topic in line
    daemon.roll()
    caught_up(kafka, topic)
    wait_until(
        lambda: daemon.metrics().total("retention_headroom_seconds") == retention, 30, "nothing to lose"
    )
    assert daemon.stop() == 0
