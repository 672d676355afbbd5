"""`kill -9` at random moments under load ([D7]): nothing is missing, every object is whole (c33)."""

from __future__ import annotations

import random
import shutil
import time
from typing import Any

import pytest

from archiver.codecs import CODECS, read_all
from archiver.errors import DamagedFileError
from tests.harness.archive import Archive
from tests.harness.daemon import Daemon, wait_until
from tests.harness.kafka import KafkaServer
from tests.harness.process import port_open
from tests.integration.cases import (
    CommitWatch,
    Load,
    archive_files,
    assert_stored,
    blocked_route,
    caught_up,
    consumed,
    duplicates,
    settings_for,
    spool_files,
    value,
)
from tests.integration.conftest import MakeDaemon

PARTITIONS = 3
KILLS = 4
"""For each of five codecs."""
CHAOS_KILLS = 40


def records_in(archive: Archive) -> int:
    """Lines of all files."""
    return sum(len(file.lines) for files in archive.values() for file in files)


def kill_again_and_again(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, codec: str, kills: int, rng: random.Random
) -> None:
    """Kill at random moments from the start-up on, every other time with the spool deleted."""
    kafka.create_topic(topic, PARTITIONS)
    settings: dict[str, Any] = {
        "kafka": {"group_instance_id": "one"},  # a quick restart need not wait for the session
        "archive": {"roll_interval_secs": 0.3},
        "buffer": {"flush_records": 50, "flush_age_secs": 0.2},
        "compression": {"codec": codec},
    }
    daemon = make_daemon(settings_for(kafka, topic, settings))
    bound = 0
    with (
        Load(kafka, topic, PARTITIONS, per_sec=2_000) as load,
        CommitWatch(kafka, topic, PARTITIONS) as watch,
    ):
        for kill in range(kills):
            daemon.launch()
            if kill % 4:  # every fourth is killed while it starts
                daemon.wait_ready()
            time.sleep(rng.uniform(0, 1.5))
            daemon.kill()
            assert_whole_and_above(daemon, kafka, topic)
            bound += records_above_commit(daemon, kafka, topic)
            if kill % 2:
                shutil.rmtree(daemon.root / "spool")
        daemon.start()
        load.stop()
        caught_up(kafka, topic, 60)
        assert daemon.stop() == 0
        watch.assert_never_back()
    comparison = assert_stored(topic, load.records, daemon.archive(), exact=False)
    twice = duplicates(comparison)
    print(f"{codec}: {kills} kills, {len(load.records)} records, {twice} twice, bound {bound}")
    assert twice <= bound
    assert list((daemon.root / "spool" / "uploads").iterdir()) == []


def assert_whole_and_above(daemon: Daemon, kafka: KafkaServer, topic: str) -> None:
    """At the kill every object decodes whole by its codec's tool, and what is committed is there."""
    archive = daemon.archive()
    distinct = {line for files in archive.values() for file in files for line in file.lines}
    assert sum(kafka.committed(topic, topic).values()) <= len(distinct)


def records_above_commit(daemon: Daemon, kafka: KafkaServer, topic: str) -> int:
    """How many archived records no commit had passed at this kill: what it may archive twice."""
    lines = [line for files in daemon.archive().values() for file in files for line in file.lines]
    return len(set(lines)) - sum(kafka.committed(topic, topic).values())


@pytest.mark.parametrize("codec", ["zstd", "gzip", "lz4", "snappy", "none"])
def test_c33_kills_at_random_moments_leave_every_object_whole_and_nothing_missing(
    codec: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D7], [S2]: the spool stays, or goes with the machine; duplicates stay within what was uncommitted."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    kill_again_and_again(kafka, topic, make_daemon, codec, KILLS, random.Random(seed))


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["zstd", "gzip", "lz4", "snappy", "none"])
def test_c33_two_hundred_kills(codec: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon) -> None:
    """[D7]: the same for longer."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    kill_again_and_again(kafka, topic, make_daemon, codec, CHAOS_KILLS, random.Random(seed))


def test_stops_at_random_moments_archive_every_record_exactly_once(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: SIGTERM under load, at any moment of joining, taking, rolling: status 0, nothing doubled."""
    kafka.create_topic(topic, PARTITIONS)
    settings = {
        "archive": {"roll_interval_secs": 0.5},
        "buffer": {"flush_records": 50, "flush_age_secs": 0.2},
    }
    daemon = make_daemon(settings_for(kafka, topic, settings))
    rng = random.Random()
    with (
        Load(kafka, topic, PARTITIONS, per_sec=2_000) as load,
        CommitWatch(kafka, topic, PARTITIONS) as watch,
    ):
        for _ in range(5):
            daemon.launch()
            wait_until(lambda: port_open(daemon.port), 20, "its endpoint")
            time.sleep(rng.uniform(0, 1.5))
            assert daemon.stop() == 0, daemon.server.tail()
        daemon.start()
        load.stop()
        caught_up(kafka, topic, 60)
        assert daemon.stop() == 0
        watch.assert_never_back()
    assert_stored(topic, load.records, daemon.archive())


def lines_in_frames(daemon: Daemon) -> int:
    """Records in whole frames of open files."""
    try:
        return sum(b"".join(read_all(path, CODECS["zstd"])).count(b"\n") for path in spool_files(daemon))
    except DamagedFileError:
        return 0  # a frame is being written


def test_a_kill_at_receipt_loses_only_what_no_frame_held(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D7], [D8]: offsets committed at receipt; frames that were written are uploaded after the restart."""
    kafka.create_topic(topic)
    settings = {
        "kafka": {"acknowledgements": {"enabled": False}, "group_instance_id": "one"},
        "archive": {"roll_interval_secs": 3600},
        "buffer": {"flush_records": 100, "flush_age_secs": 0.5},
    }
    daemon = make_daemon(settings_for(kafka, topic, settings)).start()
    records = [(f"org-{n % 3}", value(f"org-{n % 3}", n)) for n in range(3_000)]
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: kafka.lag(topic, topic) == 0, 15, "the commit at receipt")
    consumed(daemon, 3_000)
    wait_until(lambda: lines_in_frames(daemon) == 3_000, 10, "frames of all records")
    daemon.kill()
    assert archive_files(daemon) == []
    daemon.start()
    wait_until(lambda: len(archive_files(daemon)) == 3, 15, "the leftovers")
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_a_kill_doubles_no_more_than_the_metric_said(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D7]: one route of the partition fails, so everything else that is uploaded stays uncommitted."""
    kafka.create_topic(topic)
    more = {
        "kafka": {"group_instance_id": "one"},
        "archive": {"roll_interval_secs": 0.3},
        "compression": {"codec": "none"},
    }
    daemon = make_daemon(settings_for(kafka, topic, more))
    records = [("bad", value("bad", 0))] + [("good", value("good", n)) for n in range(1, 1_000)]
    with blocked_route(daemon, topic, "bad") as heal:
        daemon.start()
        kafka.produce(topic, [record for _, record in records])
        wait_until(lambda: daemon.metrics().total("records_archived_total") == 999, 15)
        uploaded = sum(path.stat().st_size for path in archive_files(daemon))
        wait_until(
            lambda: daemon.metrics().total("uncommitted_archived_bytes") == uploaded, 5, "the metric's word"
        )
        daemon.kill()
        heal()
    daemon.start()
    caught_up(kafka, topic)
    wait_until(lambda: daemon.metrics().total("uncommitted_archived_bytes") == 0, 5)
    assert daemon.stop() == 0
    comparison = assert_stored(topic, records, daemon.archive(), exact=False)
    doubled = sum(len(line) + 1 for lines in comparison.duplicates.values() for line in lines.elements())
    print(f"{duplicates(comparison)} records, {doubled} bytes twice; the metric said {uploaded}")
    assert doubled <= uploaded
