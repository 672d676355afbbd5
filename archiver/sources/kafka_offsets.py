"""Questions to the broker about logs and topics, each answered within its timeout or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import confluent_kafka as ck
from confluent_kafka import admin as ck_admin
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import TopicPartition
from archiver.domain.offsets import LogRange

_spec: Any = ck_admin.OffsetSpec  # its types are not published

NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""All zeros: a broker that knows no topic ids."""


def client_partition(
    partition: TopicPartition, offset: int = ck.OFFSET_INVALID, metadata: str | None = None
) -> ck.TopicPartition:
    """Our partition as the client's."""
    if metadata is None:
        return ck.TopicPartition(partition.topic, partition.partition, offset)
    return ck.TopicPartition(partition.topic, partition.partition, offset, metadata)


def our_partitions(partitions: Iterable[Any]) -> list[TopicPartition]:
    """The client's partitions as ours."""
    return [TopicPartition(p.topic, p.partition) for p in partitions]


def log_ranges(
    admin: AdminClient, partitions: Collection[TopicPartition], timeout_secs: float, *, committed_only: bool
) -> dict[TopicPartition, LogRange]:
    """First and end offset of each partition that answered within the timeout.

    The end is the last stable offset with `committed_only`, otherwise the high watermark. Partitions
    whose leader does not answer, or that do not exist, are left out; so is everything when the
    cluster cannot be reached.
    """
    isolation = ck.IsolationLevel.READ_COMMITTED if committed_only else ck.IsolationLevel.READ_UNCOMMITTED
    first = ask_offsets(admin, dict.fromkeys(partitions, _spec.earliest()), isolation, timeout_secs)
    end = ask_offsets(admin, dict.fromkeys(partitions, latest()), isolation, timeout_secs)
    wait([*first.values(), *end.values()], timeout_secs + 1.0)
    found: dict[TopicPartition, LogRange] = {}
    for partition in partitions:
        low, high = answer_of(first.get(partition)), answer_of(end.get(partition))
        if low is None or high is None or min(low.offset, high.offset) < 0:
            continue  # a leader that kept silent gives a result without an error, but with an invalid offset
        found[partition] = LogRange(low.offset, high.offset)
    return found


def topic_ids(admin: AdminClient, topics: Collection[str], timeout_secs: float) -> dict[str, str | None]:
    """The id of each topic that exists and answered; a topic made anew under its old name has another.

    None for a broker that knows no ids.
    """
    if not topics:
        return {}
    answers = admin.describe_topics(ck.TopicCollection(sorted(topics)), request_timeout=timeout_secs)
    wait(answers.values(), timeout_secs + 1.0)
    described = {topic: answer_of(future) for topic, future in answers.items()}
    ids = {topic: str(answer.topic_id) for topic, answer in described.items() if answer is not None}
    return {topic: None if topic_id == NO_TOPIC_ID else topic_id for topic, topic_id in ids.items()}


def replaced(
    admin: AdminClient, ids: Mapping[TopicPartition, str | None], timeout_secs: float
) -> frozenset[TopicPartition]:
    """Partitions whose topic does not exist any more, or exists anew under another id than the one given.

    Only those of which the broker says so: a topic about which it said nothing has none among them.
    """
    if not ids:
        return frozenset()
    topics = ck.TopicCollection(sorted({partition.topic for partition in ids}))
    answers = admin.describe_topics(topics, request_timeout=timeout_secs)
    wait(answers.values(), timeout_secs)
    return frozenset(p for p, topic_id in ids.items() if _replaced(answers[p.topic], topic_id))


def _replaced(future: Future[Any], before: str | None) -> bool:
    error = future.exception() if future.done() else None
    if isinstance(error, ck.KafkaException):
        return bool(error.args[0].code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART)
    answer = answer_of(future)
    return answer is not None and before is not None and str(answer.topic_id) not in (before, NO_TOPIC_ID)


def latest() -> Any:
    """Asks for the end of the log."""
    return _spec.latest()


def since(unix_secs: float) -> Any:
    """Asks for the first record whose timestamp is not before that."""
    return _spec.for_timestamp(max(0, int(unix_secs * 1000)))


def ask_offsets(
    admin: AdminClient, specs: Mapping[TopicPartition, Any], isolation: Any, timeout_secs: float
) -> dict[TopicPartition, Future[Any]]:
    """One question about each partition, under way: the answers' `offset` is below 0 where there is none."""
    if not specs:
        return {}
    asked = {client_partition(partition): spec for partition, spec in specs.items()}
    answers = admin.list_offsets(asked, isolation_level=isolation, request_timeout=timeout_secs)
    return {TopicPartition(p.topic, p.partition): future for p, future in answers.items()}


def answer_of(future: Future[Any] | None) -> Any:
    """The future's result, or None where it failed or has not come."""
    if future is None or not future.done() or future.exception() is not None:
        return None
    return future.result()


def committed_offsets(
    consumer: ck.Consumer, partitions: Collection[TopicPartition], timeout_secs: float
) -> dict[TopicPartition, tuple[int | None, str | None]]:
    """Committed offset and topic id of each partition that answered: `(None, None)` has no commit."""
    if not partitions:
        return {}
    try:
        answers = consumer.committed([client_partition(p) for p in partitions], timeout=timeout_secs)
    except ck.KafkaException:
        return {}
    found: dict[TopicPartition, tuple[int | None, str | None]] = {}
    for answer in answers:
        if answer.error is None:
            some = answer.offset >= 0
            place = (answer.offset, topic_id_of(answer.metadata)) if some else (None, None)
            found[TopicPartition(answer.topic, answer.partition)] = place
    return found


def commit_metadata(topic_id: str | None) -> str | None:
    """What is stored beside a committed offset, so that a topic made anew is known after a restart."""
    return None if topic_id is None else json.dumps({"topic_id": topic_id}, separators=(",", ":"))


def topic_id_of(metadata: str | None) -> str | None:
    """The topic id in a commit's metadata; None for a commit made by another program."""
    try:
        stored = json.loads(metadata or "{}")
    except (ValueError, RecursionError):
        return None
    topic_id = stored.get("topic_id") if isinstance(stored, dict) else None
    return topic_id if isinstance(topic_id, str) else None


def wait_until_committed(
    consumer: ck.Consumer,
    marks: Mapping[TopicPartition, int],
    deadline: float,
    monotonic: Callable[[], float],
) -> bool:
    """Ask until the broker shows every mark or more, or the deadline has passed."""
    while (left := deadline - monotonic()) > 0:
        shown = committed_offsets(consumer, list(marks), left)
        if all(_reached(shown.get(partition), mark) for partition, mark in marks.items()):
            return True
        time.sleep(min(0.02, max(0.0, deadline - monotonic())))
    return False


def _reached(shown: tuple[int | None, str | None] | None, mark: int) -> bool:
    return shown is not None and shown[0] is not None and shown[0] >= mark
