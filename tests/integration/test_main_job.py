"""The job itself: what was produced to a real broker is in the archive, byte for byte, whatever the codec."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from tests.harness.archive import Archive, compare
from tests.harness.daemon import wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.conftest import MakeDaemon

TOPICS = ("main-orders", "main-clicks")
PARTITIONS = 4
RECORDS = 200_000
ORGS = 50

EXTENSIONS = {
    "zstd": "jsonl.zst",
    "lz4": "jsonl.lz4",
    "snappy": "jsonl.sz",
    "gzip": "jsonl.gz",
    "none": "jsonl",
}


class Origin(msgspec.Struct):
    """What each record says of where it was produced."""

    topic: str
    partition: int
    n: int


@dataclass(frozen=True)
class Produced:
    """Every value by route, and how many there are by topic."""

    by_route: dict[str, list[bytes]]
    by_topic: dict[str, int]


def records() -> Iterator[tuple[str, int, str, bytes]]:
    """Topic, partition, organisation and value, the organisations mixed within every partition."""
    for n in range(RECORDS):
        topic = TOPICS[n % 2]
        partition = n // 2 % PARTITIONS
        org = f"org-{n // 8 % ORGS:02d}"
        value = (
            f'{{"_org_id":"{org}","topic":"{topic}","partition":{partition},"n":{n},'
            f'"at":{1_790_000_000_000 + n},"path":"/v1/items/{n * 31 % 9973}",'
            f'"agent":"client/{n % 13}.{n % 7}",'
            f'"tags":["é","{n % 101}"],"note":"{"lorem ipsum " * (n % 9)}"}}'
        )
        yield topic, partition, org, value.encode()


@pytest.fixture(scope="module")
def produced(kafka: KafkaServer) -> Produced:
    """Two topics of four partitions with all the records."""
    by_route: dict[str, list[bytes]] = defaultdict(list)
    by_topic: dict[str, int] = defaultdict(int)
    batch: list[tuple[str, int, bytes | None]] = []
    for topic, partition, org, value in records():
        batch.append((topic, partition, value))
        by_route[f"{topic}/{org}"].append(value)
        by_topic[topic] += 1
    for topic in TOPICS:
        kafka.create_topic(topic, PARTITIONS)
    kafka.produce_all(batch)
    return Produced(by_route, by_topic)


@pytest.mark.parametrize("codec", EXTENSIONS)
def test_each_organisation_gets_back_exactly_the_bytes_it_produced(
    codec: str, kafka: KafkaServer, produced: Produced, make_daemon: MakeDaemon
) -> None:
    """[F1], [F2], [F3], [D1], [K1]: two topics, four partitions each, 50 organisations, lag 0 at the end."""
    group = f"main-job-{codec}"
    settings = {
        "kafka": {"brokers": kafka.bootstrap, "topics": list(TOPICS), "group_id": group},
        "archive": {"roll_interval_secs": 3, "roll_size_bytes": "1MiB"},
        "compression": {"codec": codec},
        "buffer": {"flush_bytes": "256KiB", "flush_age_secs": 1},
    }
    daemon = make_daemon(settings).start()
    wait_until(lambda: not any(kafka.lag(group, topic) for topic in TOPICS), 90, "lag 0")
    wait_until(lambda: daemon.metrics().total("consumer_lag") == 0, 15, "lag 0 in the metrics")
    metrics = daemon.metrics()
    assert daemon.stop() == 0, daemon.output()[-2000:]

    archive = daemon.archive()
    comparison = compare(produced.by_route, archive)
    assert comparison.exact, comparison
    assert_partition_order(archive)
    assert_keys(archive, EXTENSIONS[codec])
    assert metrics.total("records_archived_total") == RECORDS
    for topic in TOPICS:
        assert kafka.committed(group, topic) == kafka.end_offsets(topic)
    assert not list((daemon.root / "spool").rglob("*.jsonl*")), "the spool still holds archive files"


def assert_partition_order(archive: Archive) -> None:
    """Within a file, the records of each partition are in the order in which they were produced."""
    decode = msgspec.json.Decoder(Origin).decode
    for file in (file for files in archive.values() for file in files):
        last: dict[int, int] = {}
        for origin in map(decode, file.lines):
            assert file.route.startswith(f"{origin.topic}/")
            assert origin.n > last.get(origin.partition, -1), f"{file.key}: partition {origin.partition}"
            last[origin.partition] = origin.n


def assert_keys(archive: Archive, extension: str) -> None:
    """[K1] to [K3]: route, hour, a sequence from 0001 without holes, one writer id of four hex digits."""
    key = re.compile(
        rf"[\w-]+/org-\d\d/(\d{{4}}/\d\d/\d\d/\d\d)-(\d{{4}})-([0-9a-f]{{4}})\.{re.escape(extension)}"
    )
    writers = set()
    for files in archive.values():
        sequences: dict[str, list[int]] = defaultdict(list)
        for file in files:
            match = key.fullmatch(file.key)
            assert match is not None, file.key
            sequences[match[1]].append(int(match[2]))
            writers.add(match[3])
        for path, numbers in sequences.items():
            assert numbers == list(range(1, len(numbers) + 1)), f"{files[0].route} {path}: {numbers}"
    assert len(writers) == 1
