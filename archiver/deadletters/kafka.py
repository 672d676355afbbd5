"""Dead letters in a Kafka topic, and the records of a refused file read from Kafka again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from archiver.deadletters.letters import DeadLetter, Header, Stopping, go_on
from archiver.domain.batch import Span, TopicPartition
from archiver.errors import DeadLetterError
from archiver.ports import RefusedFile

HEADER = "dfe_archiver.error."
"""What the names of the headers we add begin with; headers of the record that do are left as they are."""

CONFIRM_SECS_MAX = 30.0
SILENCE_SECS_MAX = 15.0
_POLL_SECS = 0.2
_RECORD_BYTES_MAX = 1_000_000_000  # librdkafka's own limit: the topic's max.message.bytes is what decides

_WAYS_OUT: dict[int, str] = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create it, or set dlq.topic to one that exists",
    KafkaError._UNKNOWN_TOPIC: "create it, or set dlq.topic to one that exists",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow the user WRITE and DESCRIBE on it",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow the user WRITE on it and IDEMPOTENT_WRITE on the cluster",
    KafkaError.MSG_SIZE_TOO_LARGE: "raise its max.message.bytes, or let dlq.mode write files too",
    KafkaError.NOT_ENOUGH_REPLICAS: "too few of its replicas are in sync: look at the brokers",
    KafkaError._MSG_TIMED_OUT: "are the brokers of kafka.brokers reachable?",
    KafkaError._TRANSPORT: "are the brokers of kafka.brokers reachable?",
    KafkaError._AUTHENTICATION: "look at kafka.sasl_user, kafka.sasl_password and kafka.sasl_mechanism",
}

_GONE = frozenset(
    {
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)


class KafkaSink:
    """Produces each letter with its value, key and headers, idempotently and with acks=all."""

    name = "kafka"

    def __init__(
        self, properties: Mapping[str, Any], topic: str, *, confirm_secs_max: float = CONFIRM_SECS_MAX
    ) -> None:
        """`properties` are librdkafka's, for the connection; they hold secrets and are never shown.

        A record that is not acknowledged within `confirm_secs_max` fails the attempt.
        """
        self._topic = topic
        self._properties = dict(properties) | {
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": "lz4",
            "linger.ms": 20,
            "message.max.bytes": _RECORD_BYTES_MAX,
            "message.timeout.ms": int(confirm_secs_max * 1000),
            "queue.buffering.max.kbytes": 32 * 1024,
            "topic.metadata.propagation.max.ms": 5000,
            "log_level": 0,
        }

    def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
        """A producer of its own for every attempt: after a fatal error only a new one can go on."""
        attempt = _Attempt(self._topic, self._properties, stopping)
        try:
            for letter in letters:
                attempt.produce(letter, refused)
            return attempt.confirm()
        except KafkaException as error:
            raise DeadLetterError(_failure(self._topic, error.args[0])) from error
        finally:
            attempt.purge()


class _Attempt:
    def __init__(self, topic: str, properties: Mapping[str, Any], stopping: Stopping) -> None:
        self._topic = topic
        self._stopping = stopping
        self._produced = self._confirmed = 0
        self._error: KafkaError | None = None
        self._producer = Producer(dict(properties) | {"error_cb": self._fatal_only})

    def produce(self, letter: DeadLetter, refused: RefusedFile) -> None:
        headers: list[Any] = [*letter.headers, *_error_headers(letter, refused)]
        while True:
            self._serve(0)
            try:
                self._producer.produce(
                    self._topic, letter.value, letter.key, headers=headers, on_delivery=self._delivered
                )
                self._produced += 1
                return
            except BufferError:
                self._serve(_POLL_SECS)

    def confirm(self) -> int:
        """Wait until the last one is acknowledged; librdkafka itself gives up at its timeout."""
        while len(self._producer):
            self._producer.flush(_POLL_SECS)
            self._serve(0)
        self._serve(0)
        if self._confirmed != self._produced:
            raise DeadLetterError(
                f"DLQ topic {self._topic}: {self._confirmed} of {self._produced} records confirmed"
            )
        return self._confirmed

    def purge(self) -> None:
        """Nothing of a failed attempt may still be sent when the next one begins."""
        self._producer.purge()
        self._producer.flush(_POLL_SECS)

    def _serve(self, timeout_secs: float) -> None:
        self._producer.poll(timeout_secs)
        if self._error is not None:
            raise DeadLetterError(_failure(self._topic, self._error))
        go_on(self._stopping)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self._confirmed += 1
        elif self._error is None:
            self._error = error

    def _fatal_only(self, error: KafkaError) -> None:
        if error.fatal() or error.code() == KafkaError._AUTHENTICATION:
            self._error = self._error or error


def _failure(topic: str, error: KafkaError) -> str:
    way_out = _WAYS_OUT.get(error.code())
    return f"DLQ topic {topic}: {error.str()}" + (f": {way_out}" if way_out else "")


def _error_headers(letter: DeadLetter, refused: RefusedFile) -> list[Header]:
    """[Q1]: why, and where the record came from, as far as it is known."""
    known = {
        "reason": refused.reason,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "timestamp": letter.timestamp_ms,
        "object_key": str(refused.sealed.key),
        "detail": refused.detail,
        "span": letter.span,
        "is_line": "true" if letter.is_line else None,
    }
    return [(HEADER + name, str(value).encode()) for name, value in known.items() if value is not None]


class _GoneError(Exception):
    """The broker does not have these offsets any more, or does not give them to us."""


RouteOf = Callable[[str, bytes], str]


class KafkaOriginals:
    """Reads the spans of a refused file again, in no group, and keeps the records of the file's route.

    All records of one route of a partition between the first and the last offset of a file went to that
    file, so these are the file's records; number and bytes are compared before the first one is handed
    out. `make_route_of` makes a router for one reading, so that its memory ends with it.
    """

    def __init__(
        self,
        properties: Mapping[str, Any],
        make_route_of: Callable[[], RouteOf],
        *,
        silence_secs_max: float = SILENCE_SECS_MAX,
    ) -> None:
        self._make_route_of = make_route_of
        self._silence_secs_max = silence_secs_max
        self._properties = dict(properties) | {
            "group.id": "dfe-archiver-dead-letters",  # required, and never used: it neither joins nor commits
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
            "queued.max.messages.kbytes": 16 * 1024,
            "fetch.queue.backoff.ms": 5,
            "log_level": 0,
        }

    def missing(self, refused: RefusedFile, stopping: Stopping) -> str | None:
        sealed = refused.sealed
        counts = dict.fromkeys(sealed.spans, 0)
        raw_bytes = 0
        try:
            for letter in self._read(refused, stopping):
                counts[TopicPartition(letter.topic or "", letter.partition or 0)] += 1
                raw_bytes += len(letter.value) + 1
        except _GoneError as gone:
            return str(gone)
        if raw_bytes != sealed.raw_bytes or any(counts[p] != span.count for p, span in sealed.spans.items()):
            return "the broker holds other records at these offsets"
        return None

    def letters(self, refused: RefusedFile, stopping: Stopping) -> Iterator[DeadLetter]:
        try:
            yield from self._read(refused, stopping)
        except _GoneError as gone:
            raise DeadLetterError(f"records vanished from Kafka while they were read again: {gone}") from gone

    def _read(self, refused: RefusedFile, stopping: Stopping) -> Iterator[DeadLetter]:
        route_of, stem = self._make_route_of(), refused.sealed.key.stem
        consumer = Consumer(self._properties)
        try:
            _require(consumer, refused.sealed.spans, self._silence_secs_max)
            for partition, span in sorted(refused.sealed.spans.items()):
                for message in self._range(consumer, partition, span, stopping):
                    value = message.value()
                    if value is not None and stem.startswith(route_of(partition.topic, value) + "/"):
                        yield _letter(message, value)
        except KafkaException as error:
            raise DeadLetterError(f"reading from Kafka again: {error.args[0].str()}") from error
        finally:
            consumer.close()

    def _range(
        self, consumer: Consumer, partition: TopicPartition, span: Span, stopping: Stopping
    ) -> Iterator[Message]:
        """The partition's records from first to last offset; fewer where its end comes earlier."""
        consumer.assign([KafkaPartition(partition.topic, partition.partition, span.first)])
        heard_at = time.monotonic()
        while time.monotonic() - heard_at < self._silence_secs_max:
            go_on(stopping)
            for message in consumer.consume(500, _POLL_SECS):
                if (error := message.error()) is not None:
                    if _is_end(error, partition):
                        return
                    continue
                heard_at = time.monotonic()
                offset = message.offset() or 0
                if offset <= span.last:
                    yield message
                if offset >= span.last:
                    return
        raise DeadLetterError(
            f"reading {partition.topic}/{partition.partition} from Kafka again: no answer for "
            f"{self._silence_secs_max:g} s: are the brokers of kafka.brokers reachable?"
        )


def _require(consumer: Consumer, partitions: Iterable[TopicPartition], timeout_secs: float) -> None:
    """Raises `_GoneError` where a partition does not exist: a consumer of a deleted topic hears nothing."""
    for topic, numbers in groupby(sorted(partitions), lambda partition: partition.topic):
        found = consumer.list_topics(topic, timeout_secs).topics[topic]
        if found.error is not None:
            raise _GoneError(f"{topic}: {found.error.str()}")
        if not {number for _, number in numbers} <= found.partitions.keys():
            raise _GoneError(f"{topic}: has fewer partitions than it had")


def _is_end(error: KafkaError, partition: TopicPartition) -> bool:
    """The partition ends here. Raises `_GoneError` where its records are not to be had."""
    if error.code() in _GONE:
        raise _GoneError(f"{partition.topic}/{partition.partition}: {error.str()}")
    return error.code() == KafkaError._PARTITION_EOF


def _letter(message: Message, value: bytes) -> DeadLetter:
    kind, timestamp = message.timestamp()
    headers: Any = message.headers() or ()
    key: Any = message.key()
    return DeadLetter(
        value=value,
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        timestamp_ms=timestamp if kind else None,
        key=key,
        headers=tuple(headers),
    )
