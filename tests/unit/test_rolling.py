"""When files close and buffers become frames ([R1], [R3])."""

from __future__ import annotations

from archiver.domain.rolling import FlushPolicy, RollPolicy


def test_a_file_closes_at_its_compressed_size_or_its_age() -> None:
    policy = RollPolicy(roll_size_bytes=100, roll_interval_secs=60)
    assert policy.due(99, 59.9) is None
    assert policy.due(100, 0) == "size"
    assert policy.due(1, 60) == "age"


def test_a_buffer_is_full_at_its_bytes_or_its_records() -> None:
    policy = FlushPolicy(flush_bytes=100, flush_records=10, flush_age_secs=1)
    assert not policy.full(99, 9)
    assert policy.full(100, 1)
    assert policy.full(1, 10)
