"""Where the source's records come from: runs of messages, as columns, and the errors between them.

With the compiled part each partition's queue leads into one of our own, from which it takes runs without
an object a message; the client's own queue then brings only callbacks and errors. Both kinds of
queue drop messages that an assignment, a seek or a pause has made stale, by the same rules of librdkafka's;
both keep errors, which may tell of a position that is none any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import confluent_kafka as ck
from confluent_kafka import cimpl

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.native import native
from archiver.sources.kafka_columns import batches, split_events

TAKE_RECORDS = 1_000
"""What the client's `consume` is asked for: more objects leave the processor's cache, 5,000 and above cost
10–25 %."""
TAKE_SHARE = 16
"""A take does not go on beyond this part of the client's queue: what it returns is in no bound until it has
been buffered."""
QUEUE_KIB = "queued.max.messages.kbytes"
PLUGINS = "plugin.library.paths"


class Feed(Protocol):
    """What the source takes from. All calls come from the source's thread."""

    def properties(self) -> Mapping[str, Any]:
        """What the client has to be made with."""
        ...

    def open(self, consumer: ck.Consumer) -> None:
        """The client is there now."""
        ...

    def attach(self, partitions: Iterable[TopicPartition]) -> None:
        """All that is assigned, or about to be."""
        ...

    def take(
        self, wanted: Container[TopicPartition], timeout_secs: float, records_max: int
    ) -> tuple[Sequence[RecordBatch], Sequence[Any]]:
        """Batches of the partitions that are `wanted`, in offset order each, and error events.

        Up to `records_max` records, or fewer where more at a time do not pay.

        The client's callbacks run inside, and errors of the whole client are told there. Raises
        `KafkaException`.
        """
        ...

    def close(self) -> None:
        """Before the client is closed."""
        ...


def make_feed(client_properties: Mapping[str, Any], on_error: Callable[[ck.KafkaError], None]) -> Feed:
    """The compiled one where it has been built, fits the client, and the user loads no plugins."""
    if native is None or PLUGINS in client_properties:
        return ConsumedFeed(on_error)
    try:
        native.load_client(cimpl.__file__)
    except ImportError:  # a librdkafka that hides its functions
        return ConsumedFeed(on_error)
    return NativeFeed(native, int(client_properties[QUEUE_KIB]) * 1024 // TAKE_SHARE, on_error)


class ConsumedFeed:
    """By the client's `consume`: a Python object a message, then columns."""

    _consumer: ck.Consumer

    def __init__(self, on_error: Callable[[ck.KafkaError], None]) -> None:
        self._on_error = on_error

    def properties(self) -> Mapping[str, Any]:
        """See `Feed`."""
        return {"error_cb": self._on_error}

    def open(self, consumer: ck.Consumer) -> None:
        """See `Feed`."""
        self._consumer = consumer

    def attach(self, partitions: Iterable[TopicPartition]) -> None:
        """See `Feed`."""

    def take(
        self, wanted: Container[TopicPartition], timeout_secs: float, records_max: int
    ) -> tuple[Sequence[RecordBatch], Sequence[Any]]:
        """See `Feed`."""
        records, events = split_events(self._consumer.consume(min(records_max, TAKE_RECORDS), timeout_secs))
        return batches(records, wanted), events

    def close(self) -> None:
        """See `Feed`."""


class NativeFeed:
    """By the compiled part: columns at once. A take ends where it holds `take_bytes_max` or more."""

    def __init__(self, native: Any, take_bytes_max: int, on_error: Callable[[ck.KafkaError], None]) -> None:
        self._plugin = native.__file__
        self._feed = native.Feed()
        self._take_bytes_max = take_bytes_max
        self._served = ConsumedFeed(on_error)
        self._on_error = on_error
        self._attached: list[TopicPartition] = []

    def properties(self) -> Mapping[str, Any]:
        """See `Feed`. No `error_cb`: a partition's queue would call it where the client forbids it."""
        return {PLUGINS: self._plugin}

    def open(self, consumer: ck.Consumer) -> None:
        """See `Feed`."""
        self._served.open(consumer)
        self._feed.open(consumer)

    def attach(self, partitions: Iterable[TopicPartition]) -> None:
        """See `Feed`."""
        self._attached = list(partitions)
        self._attach_all()

    def _attach_all(self) -> None:
        for topic, partition in self._attached:
            self._feed.attach(topic, partition)

    def take(
        self, wanted: Container[TopicPartition], timeout_secs: float, records_max: int
    ) -> tuple[Sequence[RecordBatch], Sequence[Any]]:
        """See `Feed`. What the client's own queue still has of a partition is older than what ours has."""
        earlier, events = self._served.take(wanted, 0.0, TAKE_RECORDS)
        runs, troubles, errors = self._feed.take(records_max, self._take_bytes_max, int(timeout_secs * 1_000))
        for code, text, fatal in errors:
            self._on_error(ck.KafkaError(code, text, fatal=fatal))
        if not runs:  # nothing ought to have come loose meanwhile; if it has, it does not stay so
            self._attach_all()
        taken = [
            RecordBatch(place, values, offsets)
            for topic, partition, values, offsets in runs
            if (place := TopicPartition(topic, partition)) in wanted
        ]
        return [*earlier, *taken], [*events, *map(_event, troubles)]

    def close(self) -> None:
        """See `Feed`."""
        self._feed.close()


def _event(trouble: tuple[int, str, str | None, int, int]) -> Any:
    """As the client hands it out: a message with an error."""
    code, text, topic, partition, offset = trouble
    error = ck.KafkaError(code, text, fatal=code == ck.KafkaError._FATAL)
    return ck.Message(topic=topic, partition=partition, offset=offset, value=text.encode(), error=error)
