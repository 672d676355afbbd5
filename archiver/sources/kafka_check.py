"""Looks at broker, topics and group for `dfe-archiver check`, without joining."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import TopicPartition
from archiver.settings.models import Kafka
from archiver.sources.kafka_client import admin_properties, connection_properties
from archiver.sources.kafka_retention import retention_secs
from archiver.sources.kafka_topics import Selection
from archiver.sources.kafka_trouble import way_out

ASK_SECS = 0.5
"""The first attempt: as long as this, after a broker has refused the login, another one may still take it."""

_NO_USE_WAITING = frozenset(
    {
        ck.KafkaError._AUTHENTICATION,
        ck.KafkaError._SSL,
        ck.KafkaError.SASL_AUTHENTICATION_FAILED,
        ck.KafkaError.UNSUPPORTED_SASL_MECHANISM,
    }
)
"""What a broker says to a wrong login or certificate: it will say the same again."""

_COORDINATOR_SOON = frozenset(
    {
        ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        ck.KafkaError.COORDINATOR_NOT_AVAILABLE,
        ck.KafkaError.NOT_COORDINATOR,
    }
)
"""A group's coordinator moves, or is made with the first group there is."""

_NONE = "there is none to archive: see kafka.topics, and kafka.topic_include, which has to match whole names"


def look(
    kafka: Kafka, excluded_topics: Collection[str], timeout_secs: float, roll_interval_secs: float = 0.0
) -> Iterator[tuple[bool, str, str]]:
    """Findings as (fine, what, detail); stops at the first that makes the rest pointless.

    A topic that keeps its records for less than two of `roll_interval_secs` is none to archive from.
    """
    quiet = logging.getLogger("librdkafka.check")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    errors: list[ck.KafkaError] = []
    properties: dict[str, Any] = connection_properties(kafka) | {
        "group.id": kafka.group_id,
        "error_cb": errors.append,
    }
    brokers = ",".join(kafka.brokers)
    try:
        consumer = ck.Consumer(properties, logger=quiet)
    except ck.KafkaException as error:
        yield False, "broker", f"the client does not take the settings: {error.args[0].str()}"
        return
    try:
        listed = _listing(consumer, errors, timeout_secs)
        if listed is None:
            refused = any(error.code() in _NO_USE_WAITING for error in errors)
            kept = "refuses us" if refused else f"does not answer within {timeout_secs:g} s"
            yield False, "broker", f"{brokers} {kept}: {_why(errors)}"
            return
        yield True, "broker", f"{brokers} answers: {len(listed.brokers)} brokers, {len(listed.topics)} topics"
        selection = Selection.of(kafka.topics, kafka.topic_include, kafka.topic_exclude, excluded_topics)
        there = {name for name, topic in listed.topics.items() if topic.error is None}
        chosen = selection.among(there)
        yield from _topics_and_group(kafka, consumer, listed, there, chosen, timeout_secs)
        if chosen:
            admin = AdminClient(admin_properties(kafka), logger=quiet)
            yield _retention(retention_secs(admin, chosen, timeout_secs), chosen, roll_interval_secs)
    finally:
        consumer.close()


def _listing(consumer: Any, errors: list[ck.KafkaError], timeout_secs: float) -> Any:
    """The topics that the cluster has; None once a broker has refused us, or the time is over.

    A request waits out its whole timeout, whatever the brokers say meanwhile: it is made of several, each
    longer than the one before, for those who are slow to answer.
    """
    deadline, ask_secs = time.monotonic() + timeout_secs, ASK_SECS
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return consumer.list_topics(timeout=min(ask_secs, left))
        except ck.KafkaException as error:
            consumer.poll(0)  # only a poll serves the callback, and only the callback gets the cause
            if left <= ask_secs or any(told.code() in _NO_USE_WAITING for told in errors):
                errors.append(error.args[0])
                return None
            ask_secs *= 2


def _why(errors: Sequence[ck.KafkaError]) -> str:
    """The error that says most, with its way out: one of login, TLS or name before one of the connection."""
    vague = {ck.KafkaError._TRANSPORT: 1, ck.KafkaError._TIMED_OUT: 1, ck.KafkaError._ALL_BROKERS_DOWN: 2}
    told = min(errors, key=lambda error: vague.get(error.code(), 0))
    advice = way_out(told.code())
    return f"{told.str()} ({advice})" if advice else told.str()


def _topics_and_group(
    kafka: Kafka,
    consumer: Any,
    listed: Any,
    there: Collection[str],
    chosen: Collection[str],
    timeout_secs: float,
) -> Iterator[tuple[bool, str, str]]:
    missing = sorted(set(kafka.topics).difference(there))
    if missing:
        yield False, "topics", f"missing: {', '.join(missing)} (the archiver waits for them, it creates none)"
    if not chosen:
        yield False, "topics", _NONE
        return
    partitions = [TopicPartition(t, p) for t in sorted(chosen) for p in listed.topics[t].partitions]
    yield True, "topics", f"{len(chosen)} to archive, {len(partitions)} partitions: {_some(sorted(chosen))}"
    try:
        told = _committed(consumer, partitions, timeout_secs)
    except ck.KafkaException as error:
        yield False, "group", f"{kafka.group_id}: {error.args[0].str()}"
        return
    begun = sum(1 for place in told if place.offset >= 0)
    yield True, "group", f"{kafka.group_id} has committed offsets for {begun} of {len(partitions)} partitions"


def _committed(consumer: Any, partitions: Sequence[TopicPartition], timeout_secs: float) -> Any:
    """What the group has committed. Its coordinator may be about to be made, on a cluster that is new."""
    deadline = time.monotonic() + timeout_secs
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return consumer.committed([ck.TopicPartition(*p) for p in partitions], timeout=left)
        except ck.KafkaException as error:
            if error.args[0].code() not in _COORDINATOR_SOON or left <= ASK_SECS:
                raise
            time.sleep(ASK_SECS)


def _retention(
    told: Mapping[str, float | None], chosen: Collection[str], roll_interval_secs: float
) -> tuple[bool, str, str]:
    """Whether the broker keeps records for long enough to archive them."""
    secs = {topic: known for topic, known in told.items() if known is not None}
    short = sorted(topic for topic, known in secs.items() if known < 2 * roll_interval_secs)
    if short:
        return (
            False,
            "retention",
            (
                f"{_some(short)}: records are kept for less than two of archive.roll_interval_secs="
                f"{roll_interval_secs:g}, so Kafka may delete what is not archived: raise retention.ms"
            ),
        )
    parts = []
    if secs:
        least = min(secs, key=lambda topic: secs[topic])
        parts.append(f"records are kept for {_time(secs[least])} at least ({least})")
    elif told:
        parts.append("no topic deletes by time")
    if untold := len(set(chosen) - set(told)):
        parts.append(
            f"not told by {untold} of {len(chosen)} topics: allow DescribeConfigs, or no alert sees it end"
        )
    return True, "retention", "; ".join(parts)


def _time(secs: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if secs >= 2 * size:
            return f"{secs / size:.3g} {unit}"
    return f"{secs:g} s"


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
