"""Messages become columns without a Python step per record."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import groupby
from typing import Any

from confluent_kafka import Message

from archiver.domain.batch import RecordBatch, TopicPartition

# bound once: attribute look-ups on the class cost more than the calls
_client: Any = Message
_error: Callable[[Any], Any] = _client.error
_topic: Callable[[Any], str] = _client.topic
_partition: Callable[[Any], int] = _client.partition
_offset: Callable[[Any], int] = _client.offset
_value: Callable[[Any], bytes | None] = _client.value


def split_events(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Records and error events apart. An event carries its error's text as its value, so it must
    not be taken for a record."""
    if not any(map(_error, messages)):
        return messages, []
    return [m for m in messages if m.error() is None], [m for m in messages if m.error() is not None]


def batches(records: Sequence[Message], wanted: Container[TopicPartition]) -> list[RecordBatch]:
    """One batch per partition, each in offset order; partitions that are not `wanted` are left out.

    A fetch answer holds thousands of records of one partition in a row, so one consume is mostly of
    one partition, and never of more than a few.
    """
    if not records:
        return []
    values, offsets = list(map(_value, records)), list(map(_offset, records))
    if len(set(map(_partition, records))) == 1 and len(set(map(_topic, records))) == 1:
        only = TopicPartition(_topic(records[0]), _partition(records[0]))
        return [RecordBatch(only, values, offsets)] if only in wanted else []
    topics, partitions = map(_topic, records), map(_partition, records)
    columns: dict[tuple[str, int], tuple[list[bytes | None], list[int]]] = {}
    start = 0
    for where, run in groupby(zip(topics, partitions, strict=True)):
        stop = start + len(list(run))
        column = columns.get(where)
        if column is None:
            columns[where] = (values[start:stop], offsets[start:stop])
        else:
            column[0].extend(values[start:stop])
            column[1].extend(offsets[start:stop])
        start = stop
    return [
        RecordBatch(partition, *column)
        for partition, column in ((TopicPartition(*where), column) for where, column in columns.items())
        if partition in wanted
    ]
