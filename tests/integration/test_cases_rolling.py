"""Cases from the field: when files close and what becomes of them, on a real broker (c18 to c22)."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.harness.daemon import merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.harness.process import SLACK_SECS
from tests.integration.cases import (
    S3Side,
    archive_files,
    assert_stored,
    caught_up,
    consumed,
    files_archived,
    settings_for,
    spool_files,
    value,
)
from tests.integration.conftest import MakeDaemon

MIB = 1 << 20


def test_c18_one_record_and_then_silence_is_archived_and_committed_in_time(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[R1]: within the interval plus seconds, by a timer that needs no traffic."""
    kafka.create_topic(topic)
    more = {"archive": {"roll_interval_secs": 3}, "buffer": {"flush_age_secs": 60}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    began = time.monotonic()
    kafka.produce(topic, [value("a", 1)])
    wait_until(lambda: archive_files(daemon), 10, "the object")
    assert 2.9 <= time.monotonic() - began <= 3 + SLACK_SECS
    wait_until(lambda: kafka.committed(topic, topic) == {0: 1}, 3, "the commit")
    assert daemon.stop() == 0
    assert_stored(topic, [("a", value("a", 1))], daemon.archive())


def has_objects(side: S3Side, number: int) -> bool:
    """Whether the bucket holds so many archive files."""
    return len(side.listing()) == number


def test_c19_files_of_every_size_upload_and_an_empty_one_never_exists(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """[F3], [S5]: 0 and 1 byte, 5 MiB - 1, 5 MiB, 5 MiB + 1, 16 MiB, with parts of 5 MiB."""
    kafka.create_topic(topic, config={"max.message.bytes": str(32 * MIB)})
    more = {
        "compression": {"codec": "none"},
        "archive": {"roll_interval_secs": 3600},
        "routing": {"mode": "topic"},
    }
    daemon = make_daemon(settings_for(kafka, topic, merged(s3_side.settings(), more))).start()
    daemon.roll()  # of nothing: no file
    sizes = [1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 16 * MIB]
    kafka.produce(topic, [None])  # a tombstone opens no file
    for number, size in enumerate(sizes, start=1):
        kafka.produce(topic, [b"x" * (size - 1)])
        taken = number + 1
        consumed(daemon, taken, 20)
        daemon.roll()
        wait_until(partial(has_objects, s3_side, number), 30, f"the object of {size} bytes")
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    archive = s3_side.archive()
    assert [file.size for file in archive[topic]] == sizes
    assert daemon.output().count("upload_retried") == 0


def test_c20_idle_intervals_leave_no_object_and_no_file(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[F3], [R1]: idle for three intervals, before and after a record."""
    kafka.create_topic(topic)
    more = {"archive": {"roll_interval_secs": 0.5}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    time.sleep(1.7)
    assert archive_files(daemon) == spool_files(daemon) == []
    kafka.produce(topic, [value("a", 1)])
    caught_up(kafka, topic)
    time.sleep(1.7)
    assert len(archive_files(daemon)) == 1
    assert spool_files(daemon) == []
    assert daemon.metrics().total("files_sealed_total") == 1
    assert daemon.stop() == 0


def test_c21_one_destination_more_than_open_files_does_not_shred_them(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[B3]: `max_open_files` 10 and 11 organisations round-robin x 10,000: far more than 100 a file."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 11}", value(f"org-{n % 11}", n)) for n in range(110_000)]
    kafka.produce(topic, [record for _, record in records])
    more = {"archive": {"max_open_files": 10, "roll_interval_secs": 3600}, "buffer": {"flush_records": 200}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    consumed(daemon, len(records), 60)
    daemon.roll()
    caught_up(kafka, topic, 60)
    assert daemon.stop() == 0
    archive = daemon.archive()
    assert_stored(topic, records, archive)
    files = sum(len(files) for files in archive.values())
    assert len(records) / files > 2_000, f"{files} files"


def test_c22_a_hundred_rolls_in_a_second_on_two_instances_are_200_objects(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[K3], [K4]: the same routes and one template for all time, two writers, one file per record."""
    kafka.create_topic(topic)
    more = {
        "archive": {
            "destination": f"file://{tmp_path}/shared",
            "path_template": "{year}",
            "roll_size_bytes": 1,
        },
        "buffer": {"flush_records": 1},
    }
    daemons = [make_daemon(settings_for(kafka, topic, more), name=name) for name in "ab"]
    for daemon, name in zip(daemons, "ab", strict=True):
        daemon.settings["kafka"]["group_id"] = f"{topic}-{name}"
        daemon.start()
    records = [(f"org-{n % 10}", value(f"org-{n % 10}", n)) for n in range(100)]
    for at in range(0, 100, 10):
        kafka.produce(topic, [record for _, record in records[at : at + 10]])
        files_archived(daemons[0], 2 * (at + 10))
    for name in "ab":
        caught_up(kafka, topic, group=f"{topic}-{name}")
    assert [daemon.stop() for daemon in daemons] == [0, 0]
    archive = daemons[0].archive(template_segments=1)
    assert [len(files) for files in archive.values()] == [20] * 10
    assert_stored(topic, records * 2, archive)


@pytest.mark.parametrize("codec", ["zstd", "gzip", "lz4", "snappy", "none"])
def test_c34_rolls_every_50_ms_at_full_speed_lose_and_double_nothing(
    codec: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[R1], [F3]: the sum of records is exact, every file decodes whole."""
    kafka.create_topic(topic, 2)
    more = {
        "archive": {"roll_interval_secs": 0.05},
        "buffer": {"flush_records": 300},
        "compression": {"codec": codec},
    }
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    records = [(f"org-{n % 3}", value(f"org-{n % 3}", n, padding=300)) for n in range(30_000)]
    kafka.produce(topic, [record for _, record in records])
    n = len(records)
    while daemon.metrics().total("files_sealed_total", reason="age") <= 30:
        # over as many intervals as it takes, however fast or slow the machine is
        more_of_it = [(f"org-{n % 3}", value(f"org-{n % 3}", at, padding=300)) for at in range(n, n + 300)]
        kafka.produce(topic, [record for _, record in more_of_it])
        records += more_of_it
        n += 300
    caught_up(kafka, topic)
    assert daemon.metrics().total("records_archived_total") == len(records)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())
