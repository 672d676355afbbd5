"""The harness's broker does what the other suites rely on."""

from __future__ import annotations

import time
import uuid

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.harness.kafka import KafkaServer
from tests.harness.process import PATIENCE


def read_all(config: dict[str, str], topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            **config,
            "group.id": f"g-{uuid.uuid4()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    values: list[bytes | None] = []
    deadline = time.monotonic() + 20 * PATIENCE
    while len(values) < count and time.monotonic() < deadline:
        values += [message.value() for message in consumer.consume(100, 0.2)]
    consumer.close()
    return values


def test_records_deletions_and_offsets_are_what_was_asked(kafka: KafkaServer) -> None:
    kafka.create_topic("harness-offsets", 2)
    assert kafka.produce("harness-offsets", [b"%d" % n for n in range(10)]) == 10
    assert kafka.end_offsets("harness-offsets") == {0: 5, 1: 5}
    kafka.delete_records("harness-offsets", {0: 3})
    assert kafka.log_starts("harness-offsets") == {0: 3, 1: 0}
    read = read_all({"bootstrap.servers": kafka.bootstrap}, "harness-offsets", 7)
    assert {*read} == {b"%d" % n for n in (1, 3, 5, 6, 7, 8, 9)}


def test_committed_offsets_are_seen_and_go_with_the_group(kafka: KafkaServer) -> None:
    kafka.create_topic("harness-commits", 2)
    kafka.produce("harness-commits", [b"x"] * 4)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "harness-commits"})
    consumer.commit(offsets=[TopicPartition("harness-commits", 1, 2)], asynchronous=False)
    consumer.close()
    assert kafka.committed("harness-commits", "harness-commits") == {1: 2}
    assert kafka.lag("harness-commits", "harness-commits") == 2
    kafka.delete_group("harness-commits")
    assert kafka.committed("harness-commits", "harness-commits") == {}


def test_a_topic_made_anew_has_another_id(kafka: KafkaServer) -> None:
    kafka.create_topic("harness-again")
    first = kafka.topic_id("harness-again")
    kafka.delete_topic("harness-again")
    kafka.create_topic("harness-again")
    assert kafka.topic_id("harness-again") != first


def test_the_broker_keeps_its_records_over_kill_and_freeze(weak_kafka: KafkaServer) -> None:
    weak_kafka.create_topic("kept")
    weak_kafka.produce("kept", [b"1"])
    weak_kafka.kill()
    weak_kafka.start()
    weak_kafka.freeze()
    try:
        weak_kafka.admin.list_topics(timeout=1)
        raise AssertionError("a frozen broker answered")
    except KafkaException:
        pass
    weak_kafka.thaw()
    assert read_all({"bootstrap.servers": weak_kafka.bootstrap}, "kept", 1) == [b"1"]


def test_the_secure_listener_takes_the_right_password_alone(secure_kafka: KafkaServer) -> None:
    secure_kafka.create_topic("secret")
    secure_kafka.produce("secret", [b"1"])
    access = secure_kafka.secure_listener
    assert access is not None
    for mechanism in ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"):
        assert read_all(access.client_config(mechanism), "secret", 1) == [b"1"]
    wrong = Consumer({**access.client_config(), "sasl.password": "wrong", "group.id": "g", "log_level": 0})
    try:
        wrong.list_topics(timeout=2)
        raise AssertionError("a wrong password was taken")
    except KafkaException:
        pass
    finally:
        wrong.close()
