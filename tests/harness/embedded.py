"""librdkafka's mock cluster: a broker inside this process, for the demo and for tests without servers.

It lacks much of a real one: it keeps 5 MB a partition and drops what is older in silence, a topic that
was not created appears with four partitions when it is asked for, a classic group admits one member, and
there are no transactions. What must hold on a real broker is tested on a real broker.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

TIMEOUT_SECS = 10
PRODUCER_TYPE = 0  # rd_kafka_type_t


def _librdkafka() -> ctypes.CDLL:
    """The shared library inside confluent-kafka's wheel, which is loaded already."""
    package = Path(confluent_kafka.__file__).parent
    candidates = [
        *package.parent.glob("confluent_kafka.libs/librdkafka-*.so*"),
        *package.glob(".dylibs/librdkafka*.dylib"),
    ]
    if not candidates:
        raise OSError(f"no librdkafka beside {package}: the embedded broker needs confluent-kafka's wheel")
    library = ctypes.CDLL(str(candidates[0]))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


class EmbeddedBroker:
    """One broker on a port of 127.0.0.1 that other processes reach too; gone with `close`."""

    def __init__(self) -> None:
        self._library = _librdkafka()
        error = ctypes.create_string_buffer(512)
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._library.rd_kafka_conf_set(conf, b"log_level", b"0", error, len(error))
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(PRODUCER_TYPE, conf, error, len(error)))
        if not self._client.value:
            raise OSError(f"embedded broker: {error.value.decode()}")
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, 1))
        self.bootstrap = self._call("rd_kafka_mock_cluster_bootstraps").decode()
        # without a controller it answers no question of an admin client
        self._call("rd_kafka_mock_set_controller_id", ctypes.c_int32(1))
        self._call("rd_kafka_mock_group_initial_rebalance_delay_ms", ctypes.c_int32(0))
        self._producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, "log_level": 0})
        self._partitions: dict[str, int] = {}

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(self._library, function)(self._cluster, *arguments)

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Create a topic."""
        if code := self._call("rd_kafka_mock_topic_create", topic.encode(), partitions, 1):
            raise OSError(f"embedded broker: topic {topic} was not created, error {code}")
        self._partitions[topic] = partitions

    def produce_all(self, records: Iterable[tuple[str, int, bytes | None]]) -> int:
        """Produce `(topic, partition, value)`s and wait for every acknowledgement. Returns their number."""
        failures: list[str] = []

        def answered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(f"{message.topic()}[{message.partition()}]: {error}")

        count = 0
        for topic, partition, value in records:
            self._producer.produce(topic, value, partition=partition, on_delivery=answered)
            count += 1
        if unsent := self._producer.flush(TIMEOUT_SECS):
            failures.append(f"{unsent} records without an answer")
        if failures:
            raise OSError(f"{len(failures)} of {count} records were not produced: {failures[:3]}")
        return count

    def offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """Per partition, what the group has committed (0 where nothing) and the end offset."""
        config = {"bootstrap.servers": self.bootstrap, "group.id": group, "log_level": 0}
        consumer = Consumer({**config, "enable.auto.commit": False})
        try:
            partitions = [KafkaPartition(topic, number) for number in range(self._partitions[topic])]
            committed = consumer.committed(partitions, timeout=TIMEOUT_SECS)
            ends = {p.partition: consumer.get_watermark_offsets(p, timeout=TIMEOUT_SECS) for p in partitions}
            return {p.partition: (max(p.offset, 0), ends[p.partition][1]) for p in committed}
        finally:
            consumer.close()

    def lag(self, group: str, topic: str) -> int:
        """Records of all partitions that the group has not committed."""
        return sum(end - committed for committed, end in self.offsets(group, topic).values())

    def close(self) -> None:
        """Take the broker and everything in it away."""
        if self._cluster.value:
            self._call("rd_kafka_mock_cluster_destroy")
            self._library.rd_kafka_destroy(self._client)
            self._cluster = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
