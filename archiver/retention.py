"""Warns before the broker deletes what is not archived yet: a slow archive must not lose silently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from archiver.events import RetentionNear
from archiver.ports import Emit
from archiver.status import PartitionStatus

NEAR_SHARE = 0.1
"""Near in records is: of what the broker holds, less than this part lies before our mark."""

PATIENCE_SECS_MAX = 600.0
PATIENCE_SHARE = 0.05
"""Near in time has to last for so long, or for this part of the retention if that is less: a new group
that begins with the oldest records catches up."""

AGAIN_SECS = 300.0
"""It is said again for a partition after this long."""


@dataclass(slots=True)
class _Seen:
    log_start: int
    near_since: float | None = None
    told_at: float | None = None


class RetentionWatch:
    """Looks at the partitions of each snapshot, in two ways, since a log is cut by time or by size.

    By time, the topic's retention and its records' timestamps say how long our next record is kept. In
    records, only a partition whose log start has moved since we look is in danger: a log that is kept
    whole, or a group that starts at its beginning, has no headroom either and loses nothing.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._seen: dict[tuple[str, int], _Seen] = {}

    def look(self, partitions: Iterable[PartitionStatus], now: float) -> None:
        """Tell of partitions that are near; `now` in monotonic seconds."""
        seen: dict[tuple[str, int], _Seen] = {}
        for partition in partitions:
            log_start = partition.log_start
            if log_start is None:
                continue
            name = (partition.topic, partition.partition)
            before = self._seen.get(name) or _Seen(log_start)
            seen[name] = before
            if not partition.retention_is_near:
                before.near_since = None
            elif before.near_since is None:
                before.near_since = now
            silent = before.told_at is None or now - before.told_at >= AGAIN_SECS
            cut = log_start > before.log_start and self._is_near_in_records(partition)
            if silent and (cut or self._has_been_near(partition, before, now)):
                before.told_at = now
                self._tell(partition)
        self._seen = seen

    def _has_been_near(self, partition: PartitionStatus, seen: _Seen, now: float) -> bool:
        if seen.near_since is None or partition.retention_secs is None:
            return False
        return now - seen.near_since >= min(PATIENCE_SECS_MAX, partition.retention_secs * PATIENCE_SHARE)

    def _is_near_in_records(self, partition: PartitionStatus) -> bool:
        headroom, start, end = (
            partition.retention_headroom_records,
            partition.log_start,
            partition.stable_end,
        )
        if headroom is None or start is None or end is None or not partition.lag:
            return False
        return headroom < (end - start) * NEAR_SHARE

    def _tell(self, partition: PartitionStatus) -> None:
        self._emit(
            RetentionNear(
                topic=partition.topic,
                partition=partition.partition,
                low_water_mark=(partition.log_start or 0) + (partition.retention_headroom_records or 0),
                log_start=partition.log_start or 0,
                headroom_records=partition.retention_headroom_records or 0,
                headroom_secs=partition.retention_headroom_secs,
            )
        )
