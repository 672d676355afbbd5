"""When files close and buffers become frames ([R1], [R3])."""

from __future__ import annotations

from archiver.domain.rolling import RollPolicy


def test_a_file_closes_at_its_compressed_size_or_its_age() -> None:
    policy = RollPolicy(roll_size_bytes=100, roll_interval_secs=60)
    assert policy.due(99, 59.9) is None
    assert policy.due(100, 0) == "size"
    assert policy.due(1, 60) == "age"
