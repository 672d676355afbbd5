"""Settings become the one `ports.DeadLetters` that fits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from archiver.deadletters.delivery import RecordDelivery
from archiver.deadletters.file import FileSink
from archiver.deadletters.kafka import KafkaOriginals, KafkaSink, RouteOf
from archiver.deadletters.letters import RecordReader, Sink
from archiver.deadletters.reading import Lines, OriginalsThenLines
from archiver.deadletters.refused import HoldRefused, KeepRefused, Remove
from archiver.deadletters.worker import DeadLetterWorker
from archiver.ports import DeadLetters, Emit, Inbox
from archiver.settings.models import Dlq


def dead_letters(
    dlq: Dlq,
    spool_dir: Path,
    kafka_properties: Mapping[str, Any],
    make_route_of: Callable[[], RouteOf] | None,
    inbox: Inbox,
    emit: Emit,
    remove: Remove,
) -> DeadLetters:
    """`make_route_of` is None for a source whose records cannot be read again and have no offsets (gRPC).

    `kafka_properties` are librdkafka's for the connection.
    """
    if not dlq.enabled:
        if make_route_of is not None:
            return HoldRefused(inbox, emit, remove)
        return DeadLetterWorker(KeepRefused(spool_dir / "refused", dlq.max_bytes, emit), inbox, remove)
    reader: RecordReader = Lines()
    if make_route_of is not None:
        reader = OriginalsThenLines(KafkaOriginals(kafka_properties, make_route_of))
    sinks: list[Sink] = []
    if dlq.mode != "file_only":
        sinks.append(KafkaSink(kafka_properties, dlq.topic))
    if dlq.mode != "kafka_only":
        sinks.append(FileSink(dlq.dir or spool_dir / "dlq", dlq.max_bytes))
    return DeadLetterWorker(RecordDelivery(reader, sinks, dlq.mode, emit), inbox, remove)
