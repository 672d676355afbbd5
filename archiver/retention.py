"""Warns before the broker deletes what is not archived yet: a slow archive must not lose silently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from archiver.events import RetentionNear
from archiver.ports import Emit
from archiver.status import PartitionStatus

NEAR_SHARE = 0.1
"""Near is: of what the broker holds, less than this part lies before our mark ..."""

AGAIN_SECS = 300.0
"""... and it is said again for a partition after this long."""


@dataclass(slots=True)
class _Seen:
    log_start: int
    told_at: float | None = None


class RetentionWatch:
    """Looks at the partitions of each snapshot.

    Only a partition whose log start has moved since we look is in danger: a log that is kept whole,
    or a group that starts at its beginning, has no headroom either and loses nothing.
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
            silent = before.told_at is None or now - before.told_at >= AGAIN_SECS
            if silent and log_start > before.log_start and self._is_near(partition):
                before.told_at = now
                self._tell(partition)
        self._seen = seen

    def _is_near(self, partition: PartitionStatus) -> bool:
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
            )
        )
