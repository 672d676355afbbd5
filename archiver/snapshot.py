"""Makes a `Status` of the loop's state, about once a second, on the loop's own thread."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from archiver import __version__
from archiver.domain.archive_file import ArchiveFile
from archiver.domain.batch import TopicPartition
from archiver.pipeline import Archiver
from archiver.ports import BrokerView
from archiver.status import FileStatus, PartitionStatus, Status

OLDEST_FILES_MAX = 20


class Snapshot:
    """What stays the same over a process's life, and the way to a `Status`."""

    def __init__(
        self,
        *,
        memory_bytes_max: int,
        uploads_in_flight_max: int,
        ready_needs_store: bool,
        store_problem: Callable[[], str | None],
        started_at_unix: float,
    ) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._uploads_in_flight_max = uploads_in_flight_max
        self._ready_needs_store = ready_needs_store
        self._store_problem = store_problem
        self._started_at_unix = started_at_unix

    def of(self, archiver: Archiver) -> Status:
        """The state now. Costs a few µs per partition; files are only counted, but for the oldest."""
        parts, bounds = archiver.parts, archiver.policy.bounds
        now = parts.clock.monotonic()
        uploads = parts.uploader.state()
        view = parts.source.view()
        oldest = next(iter(archiver.files.values()), None)
        return Status(
            version=__version__,
            writer_id=parts.keys.writer_id,
            started_at_unix=self._started_at_unix,
            made_at_unix=parts.clock.wall(),
            turned_at_monotonic=now,
            state="paused" if archiver.pauses.secs() and archiver.state == "running" else archiver.state,
            not_ready=self._not_ready(archiver, uploads.store_down),
            paused=archiver.pauses.secs(),
            partitions=tuple(
                _partition(archiver, p, view.get(p), parts.clock.wall()) for p in parts.ledger.partitions()
            ),
            oldest=tuple(_file(f, now) for f in islice(archiver.files.values(), OLDEST_FILES_MAX)),
            files_not_durable=len(archiver.files),
            open_files=len(archiver.opened),
            buffered_bytes=archiver.memory,
            buffered_bytes_max=self._memory_bytes_max,
            queued_bytes=parts.source.queued_bytes(),
            spool_bytes=archiver.spool_bytes,
            spool_bytes_max=bounds.spool_bytes_max,
            spool_free_bytes=archiver.free_bytes,
            spool_free_bytes_min=bounds.free_bytes_min,
            uploads_waiting=uploads.waiting,
            uploads_in_flight=uploads.in_flight,
            uploads_failing=uploads.failing,
            uploads_in_flight_max=self._uploads_in_flight_max,
            archive_delay_secs=now - oldest.since if oldest is not None else 0.0,
            uncommitted_archived_bytes=archiver.uncommitted.total(),
        )

    def _not_ready(self, archiver: Archiver, store_down: str | None) -> tuple[str, ...]:
        """Reasons in words, each with what holds it up [O2]."""
        reasons = []
        if (joining := archiver.parts.source.ready()) is not None:
            reasons.append(joining)
        if archiver.state in ("starting", "stopping"):
            reasons.append(archiver.state)
        for reason, secs in archiver.pauses.secs().items():
            if reason != "memory" or not self._ready_needs_store or secs > 10:
                reasons.append(f"paused for {secs:.0f} s: {_PAUSE_WORDS[reason]}")
        store_down = store_down or self._store_problem()
        if self._ready_needs_store and store_down is not None:
            reasons.append(f"the store does not take files: {store_down}")
        for file_id, detail in islice(archiver.held_reasons.items(), 5):
            file = archiver.files.get(file_id)
            reasons.append(f"dead letters of {file.key if file else file_id} are held: {detail}")
        return tuple(reasons)


_PAUSE_WORDS = {
    "memory": "buffer.max_bytes is reached, the spool's disk is slower than the source",
    "spool": "buffer.max_spool_bytes is reached, files wait for their upload",
    "disk": "less than buffer.min_free_disk_bytes is free on the spool's disk",
    "no_space": "the spool's disk is full, or this process has no file handle left",
}


def _partition(
    archiver: Archiver, partition: TopicPartition, view: BrokerView | None, now_unix: float
) -> PartitionStatus:
    ledger = archiver.parts.ledger
    mark, committed = ledger.low_water(partition), ledger.committed(partition)
    reached = committed if committed is not None else view.log_start if view else None
    kept = mark if mark is not None else committed
    return PartitionStatus(
        topic=partition.topic,
        partition=partition.partition,
        position=ledger.position(partition),
        low_water_mark=mark,
        committed=committed,
        log_start=view.log_start if view else None,
        stable_end=view.stable_end if view else None,
        lag=max(view.stable_end - max(reached, view.log_start), 0) if view and reached is not None else None,
        retention_headroom_records=kept - view.log_start if view and kept is not None else None,
        retention_headroom_secs=_secs_left(kept, view, now_unix),
        retention_secs=view.kept.retention_secs if view and view.kept else None,
    )


def _secs_left(offset: int | None, view: BrokerView | None, now_unix: float) -> float | None:
    """For how long the broker keeps what is archived next; its whole retention where that is to come."""
    if view is None or view.kept is None:
        return None
    first = view.log_start if offset is None else offset
    return view.kept.retention_secs if first >= view.stable_end else view.kept.secs_left(first, now_unix)


def _file(file: ArchiveFile, now: float) -> FileStatus:
    waiting = sum(chunk.raw_bytes for chunk in file.chunks)
    return FileStatus(
        route=file.route,
        key=str(file.key),
        state=file.state if file.state != "closing" else "sealing",
        records=file.records + file.buffered_records + sum(chunk.records for chunk in file.chunks),
        raw_bytes=file.raw_bytes + file.buffered_bytes + waiting,
        size=file.size,
        age_secs=now - file.since,
    )
