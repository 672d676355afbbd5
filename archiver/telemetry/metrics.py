"""Every metric of the archiver ([O3]): counters from events, gauges from the latest status.

No label ever holds a route or a key. Where a label's values come from outside they are bounded, and
where their list is closed each starts at 0, so that alerts can count on them. `docs/metrics.md`
lists them all, and a test holds it to that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from archiver import events as e
from archiver.domain.rolling import RollReason
from archiver.domain.routing import REASONS as DEFAULT_REASONS
from archiver.status import PartitionStatus, Status
from archiver.telemetry.state import StatusSource

PREFIX = "dfe_archiver"

OTHER = "other"

EXTRA_VALUES_MAX = 32
"""How many values beyond the known ones a label may take; later ones share `other`."""

UPLOAD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DRAIN_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 20, 60, 300)

PAUSE_REASONS: tuple[str, ...] = get_args(e.PauseReason)
PUSH_REFUSALS: tuple[str, ...] = get_args(e.PushRefusal)
ROLL_REASONS: tuple[str, ...] = get_args(RollReason)
REBALANCE_KINDS: tuple[str, ...] = get_args(e.RebalanceKind)
DEAD_LETTER_OUTCOMES = ("kafka", "file", "kept", "held", "failed")
REFUSAL_REASONS = ("key_invalid", "too_large")
UPLOAD_OUTCOMES = ("archived", "retried", "refused", "damaged")
STATES = ("starting", "running", "paused", "draining", "stopping")


class Tally:
    """A counter whose labels take the known values, at 0 from the start, and a bounded number more."""

    def __init__(self, counter: Counter, known: Iterable[tuple[str, ...]]) -> None:
        self._counter = counter
        self._children = {values: counter.labels(*values) for values in known}
        self._room = len(self._children) + EXTRA_VALUES_MAX

    def add(self, amount: float, *values: str) -> None:
        child = self._children.get(values)
        if child is None:
            if len(self._children) >= self._room:
                values = (OTHER,) * len(values)
            child = self._children[values] = self._counter.labels(*values)
        child.inc(amount)


class Metrics:
    """The registry, and what each event adds to it. `record` and `taken` are safe from any thread."""

    def __init__(
        self, status: StatusSource, *, version: str, log_lines_dropped: Callable[[], float] = lambda: 0
    ) -> None:
        # otherwise every counter brings a second metric, its birthday, that nobody asked for
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._on: dict[type[e.Event], Callable[[Any], None]] = {}
        self._count_records()
        self._count_uploads()
        self._count_files()
        self._count_group()
        self._count_stops()
        self._gauge(
            "build_info", "Version of the archiver and of Python; always 1.", "version", "python"
        ).labels(version, platform.python_version()).set(1)
        self.registry.register(StatusCollector(status, log_lines_dropped))
        prometheus_client.ProcessCollector(registry=self.registry)

    def record(self, event: e.Event) -> None:
        """Add `event` to the counters it belongs to; nothing where it has none."""
        count = self._on.get(type(event))
        if count is not None:
            count(event)

    def taken(self, event: e.RecordsTaken) -> None:
        """Several hundred times a second: no more than it must."""
        if event.records:
            self._consumed.inc(event.records)
        if event.tombstones:
            self._tombstones.inc(event.tombstones)
        if event.multiline:
            self._multiline.inc(event.multiline)
        for reason, records in event.defaulted:
            self._defaulted.add(records, reason)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _tally(
        self, name: str, text: str, labels: tuple[str, ...], known: Iterable[tuple[str, ...] | str] = ()
    ) -> Tally:
        counter = Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)
        return Tally(counter, [(values,) if isinstance(values, str) else values for values in known])

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=self.registry)

    def _count_records(self) -> None:
        self._consumed = self._counter("records_consumed", "Records taken from the source.")
        self._tombstones = self._counter("tombstones", "Records without a value, which write no line.")
        self._multiline = self._counter(
            "multiline_records", "Records whose value holds a newline of its own."
        )
        self._defaulted = self._tally(
            "default_routed",
            "Records that went to the default segment, by why.",
            ("reason",),
            DEFAULT_REASONS,
        )
        skipped = self._counter(
            "skipped_offsets", "Offsets that the broker no longer had when they were due."
        )
        gaps = self._tally("offset_gaps", "How often offsets were skipped, by why.", ("reason",))

        def on_skipped(event: e.OffsetsSkipped) -> None:
            skipped.inc(max(0, event.next_offset - event.expected_offset))
            gaps.add(1, event.reason)

        self._on[e.OffsetsSkipped] = on_skipped
        self._once(
            e.NoCommittedOffset, "partitions_without_commit", "Non-empty partitions assigned without one."
        )
        refused = self._tally(
            "pushes_refused", "Pushes that were not taken, by why.", ("reason",), PUSH_REFUSALS
        )
        self._on[e.PushRefused] = lambda event: refused.add(1, event.reason)
        self._once(
            e.RetentionNear, "retention_warnings", "Warnings that records may go before they are archived."
        )

    def _count_uploads(self) -> None:
        records = self._counter("records_archived", "Records that the store has confirmed.")
        size = self._tally(
            "archived_bytes", "Bytes that the store has confirmed.", ("kind",), ("raw", "compressed")
        )
        outcomes = self._tally("uploads", "Uploads of one file, by outcome.", ("outcome",), UPLOAD_OUTCOMES)
        retries = self._tally(
            "upload_retries", "Attempts that failed and are tried again, by why.", ("kind",)
        )
        seconds = self._histogram("upload_seconds", "How long confirmed uploads took.", UPLOAD_SECONDS)

        def on_archived(event: e.FileArchived) -> None:
            records.inc(event.records)
            size.add(event.raw_bytes, "raw")
            size.add(event.size, "compressed")
            outcomes.add(1, "archived")
            seconds.observe(event.upload_secs)

        def on_retried(event: e.UploadRetried) -> None:
            outcomes.add(1, "retried")
            retries.add(1, event.kind)

        self._on[e.FileArchived] = on_archived
        self._on[e.UploadRetried] = on_retried
        self._on[e.FileRefusedEvent] = lambda event: outcomes.add(1, "refused")
        self._on[e.FileDamagedEvent] = lambda event: outcomes.add(1, "damaged")
        down = self._gauge("store_down", "1 while no upload succeeds and one at a time probes the store.")
        outages = self._counter("store_outages", "How often the store went away.")

        def on_down(event: e.StoreDown) -> None:
            down.set(1)
            outages.inc()

        self._on[e.StoreDown] = on_down
        self._on[e.StoreRecovered] = lambda event: down.set(0)
        create_only = self._gauge(
            "store_create_only", "1 where the store itself refuses to replace an object."
        )
        self._on[e.StoreProbed] = lambda event: create_only.set(event.create_only)
        self._on[e.CreateOnlyMissing] = lambda event: create_only.set(0)

    def _count_files(self) -> None:
        sealed = self._tally("files_sealed", "Files closed for good, by why.", ("reason",), ROLL_REASONS)
        self._on[e.FileSealedEvent] = lambda event: sealed.add(1, event.reason)
        dead = self._tally(
            "dead_letters",
            "Records of files that the store refused for good, by why and by what became of them.",
            ("reason", "outcome"),
            [(reason, outcome) for reason in REFUSAL_REASONS for outcome in DEAD_LETTER_OUTCOMES],
        )
        self._on[e.DeadLettered] = lambda event: dead.add(event.records, event.reason, event.outcome)
        leftovers = self._tally(
            "leftover_files",
            "Files of an earlier run found in the spool.",
            ("outcome",),
            ("removed", "uploaded"),
        )

        def on_leftovers(event: e.LeftoversFound) -> None:
            leftovers.add(event.removed, "removed")
            leftovers.add(event.uploaded, "uploaded")

        self._on[e.LeftoversFound] = on_leftovers
        self._once(e.SpoolWriteFailed, "spool_write_failures", "Writes to the spool that failed.")
        self._once(e.WriterIdChanged, "writer_id_changes", "How often a new writer id was taken.")

    def _count_group(self) -> None:
        commits = self._tally("commits", "Offset commits, by outcome.", ("outcome",), ("confirmed", "failed"))
        self._on[e.CommitDone] = lambda event: commits.add(1, "confirmed")
        self._on[e.CommitFailed] = lambda event: commits.add(1, "failed")
        kinds = self._tally("rebalances", "Changes of the assignment, by kind.", ("kind",), REBALANCE_KINDS)
        self._on[e.Rebalanced] = lambda event: kinds.add(1, event.kind)
        files = self._tally(
            "drained_files",
            "Files that a drain ended with, by outcome.",
            ("outcome",),
            ("durable", "abandoned"),
        )
        seconds = self._histogram("drain_seconds", "How long drains before a revoke took.", DRAIN_SECONDS)

        def on_drained(event: e.Drained) -> None:
            files.add(event.files_durable, "durable")
            files.add(event.files_abandoned, "abandoned")
            seconds.observe(event.secs)

        self._on[e.Drained] = on_drained
        errors = self._tally("broker_troubles", "Reports of trouble with the brokers, by code.", ("code",))
        self._on[e.BrokerTrouble] = lambda event: errors.add(1, event.code)
        topics = self._gauge("topics", "Topics that are archived.")
        self._on[e.TopicsChanged] = lambda event: topics.set(event.total)
        self._once(e.TopicMissing, "missing_topic_checks", "Looks for a configured topic that did not exist.")

    def _count_stops(self) -> None:
        pauses = self._tally(
            "pauses", "How often consumption was paused, by bound.", ("reason",), PAUSE_REASONS
        )
        seconds = self._tally(
            "paused_seconds", "How long it was paused, by bound.", ("reason",), PAUSE_REASONS
        )
        self._on[e.Paused] = lambda event: pauses.add(1, event.reason)
        self._on[e.Resumed] = lambda event: seconds.add(max(0.0, event.secs), event.reason)
        self._once(e.Fatal, "fatal_errors", "Errors that end the process with status 1.")

    def _once(self, kind: type[e.Event], name: str, text: str) -> None:
        """A counter of the events of one kind."""
        counter = self._counter(name, text)
        self._on[kind] = lambda event: counter.inc()


class StatusCollector(Collector):
    """Gauges made of the latest status while it is scraped, so that the loop does nothing for them."""

    def __init__(self, source: StatusSource, log_lines_dropped: Callable[[], float]) -> None:
        self._source = source
        self._log_lines_dropped = log_lines_dropped

    def describe(self) -> Iterator[Metric]:
        """Names alone, for the registry; without it registering would need a status."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        status = self._source.latest()
        yield CounterMetricFamily(
            f"{PREFIX}_log_lines_dropped",
            "Log lines lost because the log's reader did not keep up.",
            value=self._log_lines_dropped(),
        )
        yield _gauge("loop_age_seconds", "Since the loop last turned.", self._source.turn_age_secs())
        yield _gauge(
            "ready",
            "1 while nothing speaks against readiness.",
            float(status is not None and not status.not_ready),
        )
        yield _labelled(
            "state", "1 for what it is doing.", "state",
            {state: float(status is not None and status.state == state) for state in STATES},
        )  # fmt: skip
        yield _labelled(
            "paused", "1 while consumption is paused, by bound.", "reason",
            {reason: float(status is not None and reason in status.paused) for reason in PAUSE_REASONS},
        )  # fmt: skip
        for name, text, value in _NUMBERS:
            yield _gauge(name, text, None if status is None else value(status))
        partitions = () if status is None else status.partitions
        for name, text, of in _PARTITION_NUMBERS:
            yield _per_partition(name, text, of, partitions)


_NUMBERS: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("start_time_seconds", "Unix time of the start.", lambda s: s.started_at_unix),
    ("status_time_seconds", "Unix time at which these gauges were taken.", lambda s: s.made_at_unix),
    ("assigned_partitions", "Partitions assigned to this process.", lambda s: len(s.partitions)),
    ("files_not_durable", "Files that the store has not confirmed yet.", lambda s: s.files_not_durable),
    ("open_files", "Archive files that still grow.", lambda s: s.open_files),
    ("buffered_bytes", "Bytes of records that are not in a frame yet.", lambda s: s.buffered_bytes),
    ("buffered_bytes_max", "Bound of buffered_bytes and queued_bytes.", lambda s: s.buffered_bytes_max),
    ("queued_bytes", "Bytes that the source holds and has not handed out.", lambda s: s.queued_bytes),
    ("spool_bytes", "Bytes of files in the spool.", lambda s: s.spool_bytes),
    ("spool_bytes_max", "Bound of spool_bytes.", lambda s: s.spool_bytes_max),
    ("spool_free_bytes", "Bytes free on the spool's file system.", lambda s: s.spool_free_bytes),
    ("spool_free_bytes_min", "Below this many free bytes it pauses.", lambda s: s.spool_free_bytes_min),
    ("uploads_waiting", "Sealed files that wait for their turn.", lambda s: s.uploads_waiting),
    ("uploads_in_flight", "Uploads that are running.", lambda s: s.uploads_in_flight),
    ("uploads_in_flight_max", "Bound of uploads_in_flight.", lambda s: s.uploads_in_flight_max),
    ("uploads_failing", "Files whose last attempt failed.", lambda s: s.uploads_failing),
    (
        "archive_delay_seconds",
        "Since the oldest record that is not durable yet arrived.",
        lambda s: s.archive_delay_secs,
    ),
    (
        "uncommitted_archived_bytes",
        "Bytes archived above the committed offsets: what a crash would archive twice.",
        lambda s: s.uncommitted_archived_bytes,
    ),
)

_PARTITION_NUMBERS: tuple[tuple[str, str, Callable[[PartitionStatus], float | None]], ...] = (
    ("position", "Next offset that will be taken.", lambda p: p.position),
    ("low_water_mark", "Lowest offset that is not durable yet.", lambda p: p.low_water_mark),
    ("committed", "Offset that the group has committed.", lambda p: p.committed),
    ("log_start", "First offset that the broker still has.", lambda p: p.log_start),
    ("stable_end", "Last stable offset, exclusive.", lambda p: p.stable_end),
    ("consumer_lag", "Records between the committed and the last stable offset.", lambda p: p.lag),
    (
        "retention_headroom_records",
        "Records between what the broker deletes next and what is not durable yet.",
        lambda p: p.retention_headroom_records,
    ),
    (
        "retention_headroom_seconds",
        "For how long at least the broker still keeps the first record that is not durable yet.",
        lambda p: p.retention_headroom_secs,
    ),
    ("retention_seconds", "For how long the topic keeps its records.", lambda p: p.retention_secs),
)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _per_partition(
    name: str, text: str, of: Callable[[PartitionStatus], float | None], partitions: Iterable[PartitionStatus]
) -> GaugeMetricFamily:
    """A partition of which the number is not known yet has no sample."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["topic", "partition"])
    for partition in partitions:
        if (number := of(partition)) is not None:
            family.add_metric([partition.topic, str(partition.partition)], number)
    return family
