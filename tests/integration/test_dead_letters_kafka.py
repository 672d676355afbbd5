"""Dead letters in a real topic, and records of a refused file read from a real broker again [Q1]."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from archiver.deadletters.delivery import RecordDelivery
from archiver.deadletters.file import FileSink
from archiver.deadletters.kafka import HEADER, KafkaOriginals, KafkaSink
from archiver.deadletters.letters import DeadLetter, GivenUpError, Sink
from archiver.deadletters.reading import Lines, OriginalsThenLines
from archiver.deadletters.worker import DeadLetterWorker
from archiver.domain.batch import Span, TopicPartition
from archiver.domain.routing import Router
from archiver.errors import DeadLetterError
from archiver.inbox import QueueInbox
from archiver.ports import DeadLettersFailed, DeadLettersWritten, RefusedFile
from tests.harness.kafka import KafkaServer
from tests.harness.process import PATIENCE, SLACK_SECS, free_port, wait_until
from tests.unit.refused_files import FOREVER, Heard, answers, lines_of, refuse, remove, spans_of


def to(server: KafkaServer) -> dict[str, Any]:
    return {"bootstrap.servers": server.bootstrap}


def make_route_of() -> Callable[[str, bytes], str]:
    return Router(["_org_id"], "default", with_topic=True).route_of


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    name = f"events-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, partitions=2)
    return name


@pytest.fixture
def dlq_topic(kafka: KafkaServer) -> str:
    name = f"dlq-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name)
    return name


def messages(server: KafkaServer, topic: str, secs: float = 20 * PATIENCE) -> list[Message]:
    """Everything in the topic's partition 0."""
    consumer = Consumer(to(server) | {"group.id": "reader", "enable.auto.commit": False})
    consumer.assign([KafkaPartition(topic, 0, 0)])
    end = server.end_offsets(topic)[0]
    found: list[Message] = []
    until = time.monotonic() + secs
    while len(found) < end:
        assert time.monotonic() < until
        found += [one for one in consumer.consume(500, 0.1) if one.error() is None]
    consumer.close()
    return found


def event(org: str, number: int) -> bytes:
    return json.dumps({"_org_id": org, "n": number}).encode()


def spans_by_route(written: Iterable[tuple[str, int, int, bytes]]) -> dict[str, dict[TopicPartition, Span]]:
    """What the pipeline would have registered, from `(topic, partition, offset, value)`s."""
    spans: dict[str, dict[TopicPartition, Span]] = {}
    route_of = make_route_of()
    for topic, number, offset, value in written:
        held = spans.setdefault(route_of(topic, value), {})
        partition, span = TopicPartition(topic, number), Span(offset, offset, 1)
        held[partition] = held[partition].then(span) if partition in held else span
    return spans


# --- the topic --------------------------------------------------------------------------------


def test_a_letter_has_value_key_and_headers_as_they_came_and_says_why_it_is_here(
    kafka: KafkaServer, dlq_topic: str, tmp_path: Path
) -> None:
    refused = refuse(tmp_path, [[b"x"]])
    letters = [
        DeadLetter(b"\xff\x00", "events", 3, 10, 1234, b"\xfe", (("h", b"v"), ("h", None))),
        DeadLetter(b"", span="events/3:10-20", is_line=True),
    ]
    assert KafkaSink(to(kafka), dlq_topic).write(refused, letters, FOREVER) == 2
    first, second = messages(kafka, dlq_topic)
    assert (first.value(), first.key()) == (b"\xff\x00", b"\xfe")
    assert first.headers() == [
        ("h", b"v"),
        ("h", None),
        (HEADER + "reason", b"key_invalid"),
        (HEADER + "topic", b"events"),
        (HEADER + "partition", b"3"),
        (HEADER + "offset", b"10"),
        (HEADER + "timestamp", b"1234"),
        (HEADER + "object_key", str(refused.sealed.key).encode()),
        (HEADER + "detail", b"the store said no"),
    ]
    assert (second.value(), second.key()) == (b"", None)
    assert second.headers() == [
        (HEADER + "reason", b"key_invalid"),
        (HEADER + "object_key", str(refused.sealed.key).encode()),
        (HEADER + "detail", b"the store said no"),
        (HEADER + "span", b"events/3:10-20"),
        (HEADER + "is_line", b"true"),
    ]


def test_many_letters_arrive_in_order_and_are_each_confirmed(
    kafka: KafkaServer, dlq_topic: str, tmp_path: Path
) -> None:
    values = [b"%d" % number * 100 for number in range(20_000)]
    sink = KafkaSink(to(kafka), dlq_topic)
    assert sink.write(refuse(tmp_path, [[b"x"]]), map(DeadLetter, values), FOREVER) == 20_000
    assert [one.value() for one in messages(kafka, dlq_topic)] == values


def test_a_missing_topic_is_an_error_that_says_what_to_do(kafka: KafkaServer, tmp_path: Path) -> None:
    with pytest.raises(DeadLetterError, match=r"not-there.*dlq\.topic"):
        KafkaSink(to(kafka), "not-there").write(refuse(tmp_path, [[b"x"]]), [DeadLetter(b"a")], FOREVER)


def test_one_letter_too_large_for_the_topic_fails_the_whole_file(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = f"dlq-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, config={"max.message.bytes": "5000"})
    large = b"".join(uuid.uuid4().bytes for _ in range(1000))  # does not compress
    letters = [DeadLetter(b"a"), DeadLetter(large), DeadLetter(b"b")]
    with pytest.raises(DeadLetterError, match=r"max\.message\.bytes"):
        KafkaSink(to(kafka), topic).write(refuse(tmp_path, [[b"x"]]), letters, FOREVER)


def test_a_large_record_that_the_topic_takes_is_taken(
    kafka: KafkaServer, dlq_topic: str, tmp_path: Path
) -> None:
    """c39: the client's own limit must not refuse what the broker accepts."""
    value = b"a" * (20 << 20)
    assert (
        KafkaSink(to(kafka), dlq_topic).write(refuse(tmp_path, [[b"x"]]), [DeadLetter(value)], FOREVER) == 1
    )
    (message,) = messages(kafka, dlq_topic)
    assert message.value() == value


def test_brokers_that_are_away_fail_the_attempt_within_its_time(tmp_path: Path) -> None:
    sink = KafkaSink({"bootstrap.servers": f"127.0.0.1:{free_port()}"}, "dlq", confirm_secs_max=1.5)
    began = time.monotonic()
    with pytest.raises(DeadLetterError, match=r"kafka\.brokers"):
        sink.write(refuse(tmp_path, [[b"x"]]), [DeadLetter(b"a")], FOREVER)
    assert time.monotonic() - began < 1.5 + SLACK_SECS


def test_an_attempt_ends_soon_after_it_is_asked_to(tmp_path: Path) -> None:
    sink = KafkaSink({"bootstrap.servers": f"127.0.0.1:{free_port()}"}, "dlq")
    began = time.monotonic()
    with pytest.raises(GivenUpError):
        sink.write(refuse(tmp_path, [[b"x"]]), [DeadLetter(b"a")], lambda: time.monotonic() - began > 0.5)
    assert time.monotonic() - began < 0.5 + SLACK_SECS


# --- reading again ----------------------------------------------------------------------------


def refused_of(
    folder: Path, spans: dict[str, dict[TopicPartition, Span]], route: str, values: list[bytes]
) -> RefusedFile:
    return refuse(folder, [values], spans[route], route=route)


def test_a_files_records_are_read_again_with_keys_headers_and_offsets_and_nobody_elses(
    kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    """Two organisations, two partitions, a tombstone, markers and aborted records in between."""
    number = count()
    written: list[tuple[str, int, int, bytes]] = []
    producer = Producer(to(kafka) | {"transactional.id": uuid.uuid4().hex})
    producer.init_transactions(20)

    def produce(value: bytes, partition: int, written: list[tuple[str, int, int, bytes]]) -> None:
        def delivered(_error: object, message: Message) -> None:
            written.append((topic, partition, message.offset() or 0, value))

        key = b"key of " + value
        headers: list[Any] = [("n", value[-3:])]
        producer.produce(
            topic,
            value,
            key=key,
            partition=partition,
            headers=headers,
            on_delivery=delivered,
        )

    def transaction(commit: bool) -> None:
        producer.begin_transaction()
        for org in ("acme", "other", "acme"):
            for partition in (0, 1):
                produce(event(org, next(number)), partition, written if commit else [])
        producer.produce(topic, None, key=b"acme", partition=0)
        producer.flush(20)
        if commit:
            producer.commit_transaction(20)
        else:
            producer.abort_transaction(20)

    for commit in (True, False, True, True):
        transaction(commit)
    acme = sorted((p, offset, value) for _, p, offset, value in written if b"acme" in value)
    refused = refused_of(tmp_path, spans_by_route(written), f"{topic}/acme", [value for _, _, value in acme])
    originals = KafkaOriginals(to(kafka), make_route_of)
    assert originals.missing(refused, FOREVER) is None
    letters = list(originals.letters(refused, FOREVER))
    assert [(one.partition, one.offset, one.value) for one in letters] == acme
    assert len(acme) == 12
    for one in letters:
        assert one.topic == topic
        assert one.key == b"key of " + one.value
        assert one.headers == (("n", one.value[-3:]),)
        assert one.timestamp_ms is not None
        assert abs(one.timestamp_ms / 1000 - time.time()) < 60


def five_of_acme(kafka: KafkaServer, topic: str, folder: Path) -> RefusedFile:
    values = [event("acme", number) for number in range(5)]
    kafka.produce(topic, values, partition=0, key=b"k")
    return refuse(folder, [values], spans_of((topic, 0, 0, 4, 5)), route=f"{topic}/acme")


def test_reading_again_joins_no_group_and_commits_nothing(
    kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    refused = five_of_acme(kafka, topic, tmp_path)
    originals = KafkaOriginals(to(kafka), make_route_of)
    assert originals.missing(refused, FOREVER) is None
    groups = kafka.admin.list_consumer_groups().result(20).valid
    assert not any("dead-letters" in group.group_id for group in groups)


@pytest.mark.parametrize("what", ["records deleted", "topic deleted", "topic recreated", "topic shorter"])
def test_records_that_are_not_there_any_more_are_told_and_read_from_the_file(
    kafka: KafkaServer, topic: str, tmp_path: Path, what: str
) -> None:
    """A topic of the same name with other records must not put them into the DLQ instead of ours."""
    refused = five_of_acme(kafka, topic, tmp_path)
    if what == "records deleted":
        kafka.delete_records(topic, {0: 3})
    else:
        kafka.delete_topic(topic)
    if what.startswith("topic r") or what == "topic shorter":
        kafka.create_topic(topic, partitions=2)
        amount = 5 if what == "topic recreated" else 2
        kafka.produce(topic, [event("acme", 10 + n) for n in range(amount)], partition=0)
    originals = KafkaOriginals(to(kafka), make_route_of)
    assert originals.missing(refused, FOREVER)
    letters = list(OriginalsThenLines(originals).open(refused, 1, FOREVER)())
    assert [(one.value, one.offset, one.key) for one in letters] == [
        (event("acme", n), n, None) for n in range(5)
    ]


def test_a_frozen_broker_is_an_error_to_try_again_and_not_a_reason_to_give_up_keys(
    weak_kafka: KafkaServer, tmp_path: Path
) -> None:
    weak_kafka.create_topic("events")
    refused = five_of_acme(weak_kafka, "events", tmp_path)
    originals = KafkaOriginals(to(weak_kafka), make_route_of, silence_secs_max=1.5)
    weak_kafka.freeze()
    with pytest.raises(DeadLetterError, match="Kafka again"):
        originals.missing(refused, FOREVER)
    weak_kafka.thaw()
    assert originals.missing(refused, FOREVER) is None


# --- all of it --------------------------------------------------------------------------------


@pytest.fixture
def inbox() -> QueueInbox:
    return QueueInbox()


def worker_for(
    kafka: KafkaServer, dlq_topic: str, folder: Path, mode: Any, inbox: QueueInbox, heard: Heard
) -> DeadLetterWorker:
    sinks: list[Sink] = [KafkaSink(to(kafka), dlq_topic), FileSink(folder, 1 << 30)]
    reader = OriginalsThenLines(KafkaOriginals(to(kafka), make_route_of))
    return DeadLetterWorker(
        RecordDelivery(reader, sinks, mode, heard), inbox, remove, backoff_secs=(0.1, 0.5)
    )


def test_with_fan_out_every_record_is_in_the_topic_and_in_the_folder(
    kafka: KafkaServer, topic: str, dlq_topic: str, tmp_path: Path, inbox: QueueInbox
) -> None:
    heard = Heard()
    worker = worker_for(kafka, dlq_topic, tmp_path / "dlq", "fan_out", inbox, heard)
    worker.submit(five_of_acme(kafka, topic, tmp_path / "uploads"))
    assert answers(inbox, lambda got: len(got) == 1, 30) == [DeadLettersWritten(1)]
    worker.close(60)
    values = [event("acme", n) for n in range(5)]
    assert [(one.value(), one.key()) for one in messages(kafka, dlq_topic)] == [(v, b"k") for v in values]
    entries = [json.loads(line) for line in lines_of(tmp_path / "dlq")]
    assert [(one["value"].encode(), one["key"], one["offset"]) for one in entries] == [
        (value, "k", offset) for offset, value in enumerate(values)
    ]
    assert heard.outcomes() == [("key_invalid", "kafka", 5), ("key_invalid", "file", 5)]


def test_with_cascade_a_missing_topic_sends_the_records_to_the_folder(
    kafka: KafkaServer, topic: str, tmp_path: Path, inbox: QueueInbox
) -> None:
    worker = worker_for(kafka, "not-there", tmp_path / "dlq", "cascade", inbox, Heard())
    worker.submit(five_of_acme(kafka, topic, tmp_path / "uploads"))
    assert answers(inbox, lambda got: len(got) == 1, 30) == [DeadLettersWritten(1)]
    worker.close(60)
    assert [json.loads(line)["key"] for line in lines_of(tmp_path / "dlq")] == ["k"] * 5


def test_a_topic_that_is_made_later_gets_what_was_held(
    kafka: KafkaServer, topic: str, tmp_path: Path, inbox: QueueInbox
) -> None:
    """The offsets stay held until then, and the error says which topic is missing."""
    dlq_topic = f"dlq-{uuid.uuid4().hex[:8]}"
    reader = OriginalsThenLines(KafkaOriginals(to(kafka), make_route_of))
    sinks = [KafkaSink(to(kafka), dlq_topic)]
    delivery = RecordDelivery(reader, sinks, "kafka_only", Heard())
    worker = DeadLetterWorker(delivery, inbox, remove, backoff_secs=(0.1, 0.5))
    refused = five_of_acme(kafka, topic, tmp_path)
    worker.submit(refused)
    failed = answers(inbox, lambda got: len(got) >= 1, 30)[0]
    assert isinstance(failed, DeadLettersFailed)
    assert dlq_topic in failed.detail
    assert refused.sealed.path.exists()
    kafka.create_topic(dlq_topic)
    answers(inbox, lambda got: DeadLettersWritten(1) in got, 30)
    worker.close(60)
    assert [one.key() for one in messages(kafka, dlq_topic)] == [b"k"] * 5


def test_a_stop_in_the_middle_loses_no_record_and_may_write_some_twice(
    kafka: KafkaServer, dlq_topic: str, tmp_path: Path, inbox: QueueInbox
) -> None:
    """After the restart the store refuses the file anew, and all of it is written again."""
    values = [b"%d" % number for number in range(50_000)]
    refused = refuse(tmp_path, [values])
    sink = KafkaSink(to(kafka), dlq_topic)

    class Slow(Lines):
        def open(self, *arguments: Any) -> Callable[[], Iterator[DeadLetter]]:
            letters = super().open(*arguments)

            def slowly() -> Iterator[DeadLetter]:
                for index, letter in enumerate(letters()):
                    if index > 10_000 and index % 50 == 0:
                        time.sleep(0.05)  # the end is far away, however late somebody looks
                    yield letter

            return slowly

    first = DeadLetterWorker(RecordDelivery(Slow(), [sink], "kafka_only", Heard()), inbox, remove)
    first.submit(refused)
    wait_until(lambda: kafka.end_offsets(dlq_topic)[0], 20, "letters")
    first.close(60)
    assert inbox.drain() == []
    assert 0 < kafka.end_offsets(dlq_topic)[0] < 50_000
    second = DeadLetterWorker(RecordDelivery(Lines(), [sink], "kafka_only", Heard()), inbox, remove)
    second.submit(refused)
    assert answers(inbox, lambda got: len(got) == 1, 30) == [DeadLettersWritten(1)]
    second.close(60)
    found = [one.value() for one in messages(kafka, dlq_topic)]
    assert found[-50_000:] == values
