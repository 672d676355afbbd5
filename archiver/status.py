"""A snapshot of the running archiver: published by the loop, read by `/status`, `/readyz`, metrics, page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RETENTION_NEAR_SHARE = 0.2
"""As in deploy/prometheus."""


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """One assigned partition. Offsets are None where nothing is known yet; lag in records ([O3])."""

    topic: str
    partition: int
    position: int | None
    low_water_mark: int | None
    committed: int | None
    log_start: int | None
    stable_end: int | None
    lag: int | None
    retention_headroom_records: int | None
    retention_headroom_secs: float | None = None  # for so long the record at the mark is sure to be kept
    retention_secs: float | None = None  # the topic's own, where it deletes by time

    @property
    def retention_is_near(self) -> bool:
        """Less than a fifth of the topic's retention is left for what is to be archived next."""
        left, whole = self.retention_headroom_secs, self.retention_secs
        if left is None or whole is None or not self.lag:
            return False
        return left < whole * RETENTION_NEAR_SHARE


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One file that is not durable yet. `state` is `open`, `sealing`, `uploading` or `refused`."""

    route: str
    key: str
    state: str
    records: int
    raw_bytes: int
    size: int
    age_secs: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """The newest error of its kind, with its way out. `over` once its recovery has been seen."""

    at_unix: float
    message: str
    detail: str
    way_out: str
    count: int
    level: str = "warning"
    over: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Made about once a second. `oldest` lists the oldest files (at most 20) of all that are not durable."""

    version: str
    writer_id: str
    started_at_unix: float
    made_at_unix: float
    turned_at_monotonic: float
    state: str  # starting, running, paused, draining, stopping
    not_ready: tuple[str, ...]
    paused: Mapping[str, float]  # reason -> seconds so far
    partitions: tuple[PartitionStatus, ...]
    oldest: tuple[FileStatus, ...]
    files_not_durable: int
    open_files: int
    buffered_bytes: int
    buffered_bytes_max: int
    queued_bytes: int
    spool_bytes: int
    spool_bytes_max: int
    spool_free_bytes: int
    spool_free_bytes_min: int
    uploads_waiting: int
    uploads_in_flight: int
    uploads_failing: int
    uploads_in_flight_max: int
    archive_delay_secs: float
    uncommitted_archived_bytes: int
