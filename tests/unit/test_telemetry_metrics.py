"""What /metrics tells, and that the documentation tells the same."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from archiver import events as e
from archiver.telemetry import Telemetry
from archiver.telemetry.metrics import EXTRA_VALUES_MAX, OTHER
from tests.harness.process import SLACK_SECS
from tests.unit.telemetry_samples import PARTITIONS, a_status

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

EVERY_EVENT: tuple[e.Event, ...] = (
    e.RecordsTaken(10, 2, 1, (("missing", 3),)),
    e.OffsetsSkipped("t", 0, 5, 100, "out_of_range"),
    e.NoCommittedOffset("t", 0, 0, 0, 10),
    e.RetentionNear("t", 0, 100, 90, 10),
    e.PushRefused("full", "the queue is full"),
    e.PushesTaken("full", 1, 0.5),
    e.Rebalanced("assigned", ("t[0]",), 1),
    e.Drained(1, 2, 1, 0.5),
    e.CommitDone(1),
    e.CommitFailed("timed out", 1),
    e.BrokerTrouble("_TRANSPORT", "refused"),
    e.BrokerRecovered(3, 1.0),
    e.TopicsChanged(("t",), (), 4),
    e.TopicMissing("u"),
    e.FileSealedEvent("age", "k", 10, 100, 50),
    e.FileArchived("k", 10, 100, 50, 1, 0.2),
    e.UploadRetried("throttled", "k", 1, 0.5, "SlowDown"),
    e.StoreDown("network", "refused"),
    e.StoreProbed(True, ""),
    e.WriterIdChanged("key taken", "abcd12"),
    e.FileRefusedEvent("too_large", "k", 10, "EntityTooLarge"),
    e.FileDamagedEvent("k", "gone"),
    e.DeadLettered("too_large", "kafka", 10, "k"),
    e.LeftoversFound(2, 1, 100),
    e.Paused("spool", 10, 10),
    e.Resumed("spool", 1.5),
    e.SpoolWriteFailed("EIO", 1),
    e.Fatal("x"),
)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry(log_format="json", stream=io.StringIO())
    yield telemetry
    telemetry.close()


def exposed(telemetry: Telemetry) -> dict[str, float]:
    """Samples by `name{labels}`."""
    lines = generate_latest(telemetry.registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def families(telemetry: Telemetry) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and label names by the name that queries use."""
    found = {}
    for family in telemetry.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(label for sample in family.samples for label in sample.labels if label != "le")
        found[name] = (family.type, labels)
    return found


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    rows = re.findall(
        r"^\| `([a-z_]+)` \| (\w+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", DOCS.read_text(), re.MULTILINE
    )
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_documentation_lists_exactly_what_the_endpoint_gives(telemetry: Telemetry) -> None:
    """[O3]: names, types and labels, after every event has happened once and with partitions assigned."""
    for event in EVERY_EVENT:
        telemetry.emit(event)
    telemetry.status.publish(a_status())
    assert documented() == families(telemetry)
    assert all(name.startswith(("dfe_archiver_", "process_")) for name in families(telemetry))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("with_status", [False, True])
def test_promtool_finds_nothing_to_say(telemetry: Telemetry, with_status: bool) -> None:
    """[O3], before the first status as well as after it."""
    if with_status:
        for event in EVERY_EVENT:
            telemetry.emit(event)
        telemetry.status.publish(a_status())
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(telemetry.registry),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_closed_labels_start_at_zero(telemetry: Telemetry) -> None:
    """[O3]: an alert on an increase needs the series before its first increase."""
    samples = exposed(telemetry)
    for name in (
        'files_sealed_total{reason="space"}',
        'uploads_total{outcome="damaged"}',
        'commits_total{outcome="failed"}',
        'rebalances_total{kind="lost"}',
        'dead_letters_total{outcome="held",reason="too_large"}',
        'default_routed_total{reason="invalid_utf8"}',
        'pushes_refused_total{reason="incomplete"}',
        'paused{reason="no_space"}',
        "skipped_offsets_total",
    ):
        assert samples[f"dfe_archiver_{name}"] == 0, name


def test_events_add_up(telemetry: Telemetry) -> None:
    """c14 (95 offsets skipped) and the sums of the rest."""
    for event in (*EVERY_EVENT, *EVERY_EVENT):
        telemetry.emit(event)
    samples = exposed(telemetry)
    expected = {
        "records_consumed_total": 20,
        "tombstones_total": 4,
        "multiline_records_total": 2,
        'default_routed_total{reason="missing"}': 6,
        "skipped_offsets_total": 190,
        'pushes_refused_total{reason="full"}': 2,
        "records_archived_total": 20,
        'archived_bytes_total{kind="raw"}': 200,
        'archived_bytes_total{kind="compressed"}': 100,
        'uploads_total{outcome="retried"}': 2,
        'upload_retries_total{kind="throttled"}': 2,
        "upload_seconds_count": 2,
        'dead_letters_total{outcome="kafka",reason="too_large"}': 20,
        'paused_seconds_total{reason="spool"}': 3,
        'drained_files_total{outcome="durable"}': 4,
        'leftover_files_total{outcome="removed"}': 4,
        "topics": 4,
        "store_down": 1,
    }
    assert {name: samples[f"dfe_archiver_{name}"] for name in expected} == expected


def test_a_recreated_topic_does_not_count_backwards(telemetry: Telemetry) -> None:
    """[D9]: the new topic starts below the old offset; a counter that fell would raise in emit."""
    telemetry.emit(e.OffsetsSkipped("t", 0, 100, 0, "recreated"))
    samples = exposed(telemetry)
    assert samples["dfe_archiver_skipped_offsets_total"] == 0
    assert samples['dfe_archiver_offset_gaps_total{reason="recreated"}'] == 1


def test_a_label_from_outside_is_bounded(telemetry: Telemetry) -> None:
    """[O3]: bounded label sets, whatever codes a broker thinks of."""
    for code in range(10_000):
        telemetry.emit(e.BrokerTrouble(f"code-{code}", ""))
    series = {
        n: v for n, v in exposed(telemetry).items() if n.startswith("dfe_archiver_broker_troubles_total")
    }
    assert len(series) == EXTRA_VALUES_MAX + 1
    assert sum(series.values()) == 10_000
    assert series[f'dfe_archiver_broker_troubles_total{{code="{OTHER}"}}'] == 10_000 - EXTRA_VALUES_MAX


def test_gauges_tell_the_latest_status(telemetry: Telemetry) -> None:
    telemetry.status.publish(a_status())
    telemetry.status.publish(replace(a_status(), open_files=7, paused={"disk": 3.0}, not_ready=("disk",)))
    samples = exposed(telemetry)
    assert samples["dfe_archiver_open_files"] == 7
    assert samples['dfe_archiver_paused{reason="disk"}'] == 1
    assert samples['dfe_archiver_paused{reason="spool"}'] == 0
    assert samples["dfe_archiver_ready"] == 0
    assert samples['dfe_archiver_consumer_lag{partition="0",topic="events"}'] == 100
    assert samples['dfe_archiver_low_water_mark{partition="0",topic="events"}'] == 40


def test_a_partition_of_which_nothing_is_known_has_no_samples(telemetry: Telemetry) -> None:
    """A made-up 0 would look like a position."""
    telemetry.status.publish(replace(a_status(), partitions=PARTITIONS))
    names = [name for name in exposed(telemetry) if 'topic="new"' in name]
    assert names == ['dfe_archiver_log_start{partition="3",topic="new"}']


def test_taking_records_costs_microseconds(telemetry: Telemetry) -> None:
    """Emitted several hundred times a second by the loop; the bound leaves room for a slow machine."""
    event = e.RecordsTaken(1000, 0, 0, ())
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2_000):
            telemetry.emit(event)
        best = min(best, (time.perf_counter() - began) / 2_000)
    assert best < 100e-6
    assert exposed(telemetry)["dfe_archiver_records_consumed_total"] == 10_000_000


def test_a_thousand_partitions_are_exposed_quickly(telemetry: Telemetry) -> None:
    partitions = tuple(replace(PARTITIONS[0], partition=number) for number in range(1_000))
    telemetry.status.publish(replace(a_status(), partitions=partitions))
    began = time.perf_counter()
    samples = exposed(telemetry)
    assert time.perf_counter() - began < SLACK_SECS
    assert sum(name.startswith("dfe_archiver_consumer_lag{") for name in samples) == 1_000
