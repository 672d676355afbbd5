"""Looks at broker, topics and group for `dfe-archiver check`, without joining."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import confluent_kafka as ck

from archiver.domain.batch import TopicPartition
from archiver.settings.models import Kafka
from archiver.sources.kafka_client import connection_properties
from archiver.sources.kafka_topics import Selection


def look(
    kafka: Kafka, excluded_topics: Collection[str], timeout_secs: float
) -> Iterator[tuple[bool, str, str]]:
    """Findings as (fine, what, detail); stops at the first that makes the rest pointless."""
    quiet = logging.getLogger("librdkafka.check")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    reasons: list[str] = []
    properties: dict[str, Any] = connection_properties(kafka) | {
        "group.id": kafka.group_id,
        "error_cb": lambda error: reasons.append(error.str()),
    }
    brokers = ",".join(kafka.brokers)
    try:
        consumer = ck.Consumer(properties, logger=quiet)
    except ck.KafkaException as error:
        yield False, "broker", f"the client does not take the settings: {error.args[0].str()}"
        return
    try:
        try:
            listed = consumer.list_topics(timeout=timeout_secs)
        except ck.KafkaException as error:
            why = "; ".join(dict.fromkeys(reasons)) or error.args[0].str()
            yield False, "broker", f"{brokers} does not answer within {timeout_secs:g} s: {why}"
            return
        yield True, "broker", f"{brokers} answers: {len(listed.brokers)} brokers, {len(listed.topics)} topics"
        yield from _topics_and_group(kafka, consumer, listed, excluded_topics, timeout_secs)
    finally:
        consumer.close()


def _topics_and_group(
    kafka: Kafka, consumer: Any, listed: Any, excluded_topics: Collection[str], timeout_secs: float
) -> Iterator[tuple[bool, str, str]]:
    selection = Selection.of(kafka.topics, kafka.topic_include, kafka.topic_exclude, excluded_topics)
    there = {name for name, topic in listed.topics.items() if topic.error is None}
    chosen = selection.among(there)
    missing = sorted(set(kafka.topics) - there)
    if missing:
        yield False, "topics", f"missing: {', '.join(missing)} (the archiver waits for them, it creates none)"
    if not chosen:
        yield False, "topics", "there is none to archive: see kafka.topics and kafka.topic_include"
        return
    partitions = [TopicPartition(t, p) for t in sorted(chosen) for p in listed.topics[t].partitions]
    yield True, "topics", f"{len(chosen)} to archive, {len(partitions)} partitions: {_some(sorted(chosen))}"
    try:
        told = consumer.committed([ck.TopicPartition(*p) for p in partitions], timeout=timeout_secs)
    except ck.KafkaException as error:
        yield False, "group", f"{kafka.group_id}: {error.args[0].str()}"
        return
    begun = sum(1 for place in told if place.offset >= 0)
    yield True, "group", f"{kafka.group_id} has committed offsets for {begun} of {len(partitions)} partitions"


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
