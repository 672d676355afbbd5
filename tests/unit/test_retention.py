"""The warning before the broker deletes records that are not archived."""

from __future__ import annotations

from dataclasses import replace

from archiver.events import Event, RetentionNear
from archiver.retention import AGAIN_SECS, PATIENCE_SECS_MAX, RetentionWatch
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


WEEK = 7 * 86_400.0


def timed(left: float, retention: float = WEEK, end: int = 1000) -> PartitionStatus:
    """Nothing has been deleted yet, and what is archived next is kept for `left` seconds."""
    return replace(partition(0, 500, end), retention_headroom_secs=left, retention_secs=retention)


def test_time_that_runs_out_is_told_before_anything_has_been_deleted() -> None:
    near = timed(86_400.0)
    assert told((near, 0.0), (near, PATIENCE_SECS_MAX - 1)) == []
    events = told((near, 0.0), (near, PATIENCE_SECS_MAX), (near, PATIENCE_SECS_MAX + 1))
    assert events == [RetentionNear("t", 0, 500, 0, 500, 86_400.0)]


def test_a_new_group_that_catches_up_is_not_told() -> None:
    """It begins with the oldest records there are."""
    near, far = timed(0.0), timed(3 * 86_400.0)
    assert told((near, 0.0), (far, 500.0), (near, 900.0), (far, 1400.0)) == []


def test_patience_is_short_where_the_retention_is() -> None:
    near = timed(60.0, retention=600.0)
    assert told((near, 0.0), (near, 29.0)) == []
    assert len(told((near, 0.0), (near, 30.0))) == 1


def test_time_is_no_danger_where_nothing_is_left_to_archive() -> None:
    done = replace(timed(0.0), lag=0)
    assert told((done, 0.0), (done, PATIENCE_SECS_MAX)) == []
