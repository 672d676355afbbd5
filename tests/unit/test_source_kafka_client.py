"""Settings as librdkafka takes them, columns, outages, commits: without a broker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st

from archiver.domain.batch import TopicPartition
from archiver.events import BrokerRecovered, BrokerTrouble, Event
from archiver.settings.models import Kafka
from archiver.sources.kafka_client import admin_properties, consumer_properties, is_eager
from archiver.sources.kafka_columns import batches, split_events
from archiver.sources.kafka_commits import UNANSWERED_SECS, Commits
from archiver.sources.kafka_trouble import QUIET_SECS, REPEAT_SECS, Trouble
from tests.unit.hand_clock import HandClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


# --- properties ---------------------------------------------------------------------------------------

SECURE: dict[str, Any] = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_user": "me",
    "sasl_password": "pw",
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group_protocol": "consumer"},
        {"group_instance_id": "one", "session_timeout_ms": 6_000},
        {"client": {"partition.assignment.strategy": "range,roundrobin", "fetch.min.bytes": "10"}},
        SECURE,
    ],
)
def test_librdkafka_takes_what_the_settings_become(settings: dict[str, Any]) -> None:
    kafka = Kafka(brokers=("127.0.0.1:9",), topics=("t",), **settings)
    properties = consumer_properties(kafka, 64 << 20)
    ck.Consumer(properties, logger=logging.getLogger("quiet")).close()
    AdminClient(admin_properties(kafka), logger=logging.getLogger("quiet"))
    assert properties["isolation.level"] == "read_committed"
    assert properties["auto.offset.reset"] == "error"
    assert properties["allow.auto.create.topics"] is False


def test_what_the_user_passes_wins_and_the_admin_client_gets_what_is_about_connections() -> None:
    kafka = Kafka(
        topics=("t",), client={"fetch.wait.max.ms": "7", "ssl.endpoint.identification.algorithm": "none"}
    )
    assert consumer_properties(kafka, 1 << 20)["fetch.wait.max.ms"] == "7"
    assert admin_properties(kafka)["ssl.endpoint.identification.algorithm"] == "none"
    assert "fetch.wait.max.ms" not in admin_properties(kafka)


def test_the_prefetch_queue_is_bounded_in_bytes() -> None:
    """[B1]"""
    properties = consumer_properties(Kafka(topics=("t",)), 8 << 20)
    assert properties["queued.max.messages.kbytes"] == 8 << 10
    assert properties["fetch.max.bytes"] == 4 << 20


def test_an_assignor_that_takes_everything_away_is_known_as_eager() -> None:
    assert not is_eager(consumer_properties(Kafka(topics=("t",)), 1))
    assert not is_eager(consumer_properties(Kafka(topics=("t",), group_protocol="consumer"), 1))
    assert is_eager({"partition.assignment.strategy": "range,roundrobin"})


# --- columns --------------------------------------------------------------------------------------------


def message(topic: str, partition: int, offset: int, value: bytes | None = b"v", error: Any = None) -> Any:
    return ck.Message(topic=topic, partition=partition, offset=offset, value=value, error=error)


def test_an_error_event_is_no_record_though_it_has_a_value() -> None:
    failure = ck.KafkaError(ck.KafkaError._AUTO_OFFSET_RESET)
    mixed = [message("t", 0, 1), message("t", 0, 2, b"text of the error", failure), message("t", 0, 3)]
    records, events = split_events(mixed)
    assert [m.offset() for m in records] == [1, 3]
    assert [m.offset() for m in events] == [2]


def test_tombstones_and_empty_values_stay_apart() -> None:
    (batch,) = batches([message("t", 0, 1, None), message("t", 0, 2, b"")], {P0})
    assert (batch.values, batch.offsets) == ([None, b""], [1, 2])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=40), st.booleans())
def test_batches_hold_every_record_of_wanted_partitions_in_order_once(
    places: list[tuple[str, int]], all_wanted: bool
) -> None:
    records = [message(topic, part, index, b"%d" % index) for index, (topic, part) in enumerate(places)]
    wanted = {TopicPartition(t, p) for t in "ab" for p in range(3) if all_wanted or p != 1}
    made = batches(records, wanted)
    assert len({batch.partition for batch in made}) == len(made)
    for partition in wanted:
        expected = [index for index, place in enumerate(places) if place == partition]
        got = [list(batch.offsets) for batch in made if batch.partition == partition]
        assert got == ([expected] if expected else [])
    assert {batch.partition for batch in made} <= wanted
    assert all(batch.values == [b"%d" % offset for offset in batch.offsets] for batch in made)


# --- outages ----------------------------------------------------------------------------------------------


def test_an_outage_is_said_at_once_every_30_s_and_when_it_is_over_with_the_count() -> None:
    """[O4]"""
    events: list[Event] = []
    clock = HandClock()
    trouble = Trouble(events.append, clock)
    down = ck.KafkaError(ck.KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
    for _ in range(100):
        trouble.failed(down)
    assert [type(event) for event in events] == [BrokerTrouble]
    assert trouble.away == "1/1 brokers are down"
    clock.now += REPEAT_SECS
    trouble.failed(down)
    assert len(events) == 2
    trouble.answered()
    assert (trouble.away or "") == ""
    assert len(events) == 2  # one answer right after a failure may be another broker's
    clock.now += QUIET_SECS
    trouble.answered()
    trouble.answered()
    assert events[2:] == [BrokerRecovered(failures=101, secs=REPEAT_SECS + QUIET_SECS)]


def test_the_cause_of_an_outage_is_kept_rather_than_the_number_of_brokers_that_are_down() -> None:
    events: list[Event] = []
    trouble = Trouble(events.append, HandClock())
    trouble.failed(ck.KafkaError(ck.KafkaError._AUTHENTICATION, "wrong user"))
    trouble.failed(ck.KafkaError(ck.KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    trouble.unanswered("a question")
    assert trouble.away == "wrong user"
    first = events[0]
    assert isinstance(first, BrokerTrouble)
    assert "kafka.sasl_password" in first.way_out


# --- commits ----------------------------------------------------------------------------------------------


class Broker:
    """Stands where the consumer stands: keeps what was sent until the test answers."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def commit(self, *, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous
        self.sent.append(offsets)


class Told:
    def __init__(self) -> None:
        self.confirmed: list[dict[TopicPartition, int]] = []
        self.failed: list[tuple[dict[TopicPartition, int], str]] = []

    def commit_confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        self.confirmed.append(dict(marks))

    def commit_failed(self, marks: Mapping[TopicPartition, int], reason: str) -> None:
        self.failed.append((dict(marks), reason))


def committing() -> tuple[Commits, Broker, Told, HandClock]:
    broker, told, clock = Broker(), Told(), HandClock()
    commits = Commits(cast(Any, broker), cast(Any, told), clock)
    commits.assigned(P0, 5, "id")
    commits.assigned(P1, None, "id")
    return commits, broker, told, clock


def test_a_commit_without_an_answer_keeps_its_slot_and_is_told_every_30_s() -> None:
    """[D4]: a second one beside it could be overtaken by it when the client tries it again."""
    commits, broker, told, clock = committing()
    assert commits.start({P0: 9})
    for _ in range(3):
        clock.now += UNANSWERED_SECS
        commits.complain()
        commits.complain()
    assert told.failed == [({P0: 9}, "no answer yet")] * 3
    assert not commits.start({P0: 10})
    commits.answer(None, broker.sent[0])
    assert told.confirmed == [{P0: 9}]
    assert commits.start({P0: 10})


def test_an_answer_to_another_commit_does_not_free_the_slot() -> None:
    commits, broker, told, _ = committing()
    commits.start({P0: 9})
    commits.send({P0: 12})
    commits.answer(None, broker.sent[1])
    assert told.confirmed == []
    assert not commits.start({P0: 13})
    commits.answer(None, broker.sent[0])
    assert told.confirmed == [{P0: 9}]


def test_a_partition_that_went_meanwhile_is_not_confirmed_even_if_it_came_back() -> None:
    commits, broker, told, _ = committing()
    commits.start({P0: 9, P1: 3})
    commits.dropped(frozenset({P0}))
    commits.assigned(P0, 7, "id")
    commits.answer(None, broker.sent[0])
    assert told.confirmed == [{P1: 3}]
    assert commits.ours({P0: 9}) == {P0: 9}


def test_refused_partitions_fail_beside_those_that_are_confirmed() -> None:
    commits, broker, told, _ = committing()
    commits.start({P0: 9, P1: 3})
    (sent,) = broker.sent
    answers = [ck.TopicPartition(p.topic, p.partition, p.offset) for p in sent]

    class Refused:
        topic, partition, offset = "t", 1, 3
        error = ck.KafkaError(ck.KafkaError.UNKNOWN_MEMBER_ID)

    commits.answer(None, [answers[0], Refused()])
    assert told.confirmed == [{P0: 9}]
    assert told.failed == [({P1: 3}, "UNKNOWN_MEMBER_ID")]
    assert commits.start({P1: 3})


def test_marks_at_or_below_what_is_known_are_confirmed_without_a_commit() -> None:
    commits, broker, told, _ = committing()
    assert commits.start({P0: 4})
    assert (broker.sent, told.confirmed) == ([], [{P0: 5}])
    assert commits.start({TopicPartition("gone", 0): 4})
    assert broker.sent == []


def test_the_topic_id_travels_with_every_commit() -> None:
    commits, broker, _, _ = committing()
    commits.start({P1: 0})
    assert [p.metadata for p in broker.sent[0]] == ['{"topic_id":"id"}']
