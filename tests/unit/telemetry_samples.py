"""A status as the loop would publish it, for the tests of what shows it."""

from __future__ import annotations

import time

from archiver.status import FileStatus, PartitionStatus, Status

PARTITIONS = (
    PartitionStatus("events", 0, 50, 40, 40, 10, 140, 100, 30, 7200.0, 86_400.0),
    PartitionStatus("new", 3, None, None, None, 0, None, None, None),
)

FILES = (
    FileStatus("events/acme", "events/acme/2026/10/29/03-0001-3f9a.jsonl.zst", "open", 9, 900, 90, 12.0),
)


def a_status() -> Status:
    """Running, ready, two partitions, one open file; made now."""
    now = time.time()
    return Status(
        version="0.1.0",
        writer_id="3f9a",
        started_at_unix=now - 3700,
        made_at_unix=now,
        turned_at_monotonic=time.monotonic(),
        state="running",
        not_ready=(),
        paused={},
        partitions=PARTITIONS,
        oldest=FILES,
        files_not_durable=1,
        open_files=1,
        buffered_bytes=100 << 20,
        buffered_bytes_max=256 << 20,
        queued_bytes=1 << 20,
        spool_bytes=9 << 30,
        spool_bytes_max=10 << 30,
        spool_free_bytes=50 << 30,
        spool_free_bytes_min=1 << 30,
        uploads_waiting=0,
        uploads_in_flight=0,
        uploads_failing=0,
        uploads_in_flight_max=8,
        archive_delay_secs=12.0,
        uncommitted_archived_bytes=0,
    )
