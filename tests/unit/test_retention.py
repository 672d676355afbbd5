"""The warning before the broker deletes records that are not archived."""

from __future__ import annotations

from archiver.events import Event, RetentionNear
from archiver.retention import AGAIN_SECS, RetentionWatch
from archiver.status import PartitionStatus


def partition(log_start: int, mark: int, end: int) -> PartitionStatus:
    return PartitionStatus("t", 0, end, mark, mark, log_start, end, end - mark, mark - log_start)


def told(*looks: tuple[PartitionStatus, float]) -> list[Event]:
    events: list[Event] = []
    watch = RetentionWatch(events.append)
    for seen, now in looks:
        watch.look([seen], now)
    return events


def test_a_mark_that_the_moving_log_start_comes_near_to_is_told() -> None:
    events = told((partition(0, 500, 1000), 0.0), (partition(480, 500, 1000), 1.0))
    assert events == [RetentionNear("t", 0, 500, 480, 20)]


def test_a_log_that_keeps_everything_is_not_in_danger_however_far_behind() -> None:
    assert told((partition(0, 0, 1000), 0.0), (partition(0, 0, 9000), 1.0)) == []


def test_a_mark_far_from_the_log_start_is_not_in_danger() -> None:
    assert told((partition(0, 900, 1000), 0.0), (partition(100, 900, 1000), 1.0)) == []


def test_a_partition_without_lag_is_not_in_danger() -> None:
    assert told((partition(0, 1000, 1000), 0.0), (partition(999, 1000, 1000), 1.0)) == []


def test_it_is_told_again_only_after_a_while() -> None:
    near = partition(480, 500, 1000)
    looks = [(partition(0, 500, 1000), 0.0), (near, 1.0), (near, 2.0), (near, 1.0 + AGAIN_SECS)]
    assert len(told(*looks)) == 2
