"""For how long the broker still keeps what: by the topic's own retention and its records' timestamps.

Kafka deletes a segment once its newest record is older than `retention.ms`, oldest segment first. So from the
first record on that is as new as T, everything stays until T + `retention.ms` at least. The broker is asked
where that record is, for a few T between now and one retention ago. What was asked stays true: it
holds as a time by the clock, and needs to be asked anew only so that it does not get too careful.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import wait
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from archiver.domain.batch import TopicPartition
from archiver.ports import Kept
from archiver.sources.kafka_offsets import answer_of, ask_offsets, latest, since

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Parts of a retention that are left; what lies between two of them counts as the lower one."""


def kept(
    admin: AdminClient, partitions: Collection[TopicPartition], now_unix: float, timeout_secs: float
) -> dict[TopicPartition, Kept]:
    """How long each partition keeps its records; without those that delete none by time or did not answer.

    It needs DescribeConfigs on the topics: one whose settings may not be read did not answer.
    """
    retentions = retention_secs(admin, {partition.topic for partition in partitions}, timeout_secs)
    ours = {p: secs for p in partitions if (secs := retentions.get(p.topic)) is not None}
    if not ours:
        return {}
    ends = ask_offsets(admin, dict.fromkeys(ours, latest()), ck.IsolationLevel.READ_UNCOMMITTED, timeout_secs)
    wait(ends.values(), timeout_secs + 1.0)  # before the rest: no record may lie between the two
    asked = {share: _ask(admin, ours, share, now_unix, timeout_secs) for share in SHARES}
    wait([future for futures in asked.values() for future in futures.values()], timeout_secs + 1.0)
    found = {p: _kept(p, secs, asked, answer_of(ends.get(p)), now_unix) for p, secs in ours.items()}
    return {p: known for p, known in found.items() if known is not None}


def retention_secs(
    admin: AdminClient, topics: Collection[str], timeout_secs: float
) -> dict[str, float | None]:
    """`retention.ms` of each topic that may be asked; None of one that deletes nothing by time."""
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in sorted(topics)]
    if not resources:
        return {}
    answers = admin.describe_configs(resources, request_timeout=timeout_secs)
    wait(answers.values(), timeout_secs + 1.0)
    told = {resource.name: answer_of(future) for resource, future in answers.items()}
    return {topic: _retention_secs(settings) for topic, settings in told.items() if settings is not None}


def _retention_secs(settings: Mapping[str, Any]) -> float | None:
    retention_ms = int(_value(settings, "retention.ms") or -1)
    by_time = "delete" in _value(settings, "cleanup.policy") and retention_ms > 0
    return retention_ms / 1000 if by_time else None


def _value(settings: Mapping[str, Any], name: str) -> str:
    entry = settings.get(name)
    return "" if entry is None or entry.value is None else str(entry.value)


def _ask(
    admin: AdminClient, ours: Mapping[TopicPartition, float], share: float, now: float, timeout_secs: float
) -> dict[TopicPartition, Any]:
    """Where records begin that stay for another `share` of the retention."""
    specs = {p: since(now - secs * (1 - share)) for p, secs in ours.items()}
    return ask_offsets(admin, specs, ck.IsolationLevel.READ_UNCOMMITTED, timeout_secs)


def _kept(
    partition: TopicPartition,
    secs: float,
    asked: Mapping[float, Mapping[TopicPartition, Any]],
    end: Any,
    now: float,
) -> Kept | None:
    if end is None or end.offset < 0:  # a leader that kept silent gives an invalid offset
        return None
    places: list[tuple[int, float]] = []
    for share in SHARES:
        answer = answer_of(asked[share].get(partition))
        if answer is None:
            return None
        if answer.offset >= 0:  # else there is no record as new as that
            places.append((answer.offset, now + secs * share))
    return Kept(retention_secs=secs, until=tuple(places), end=end.offset)
