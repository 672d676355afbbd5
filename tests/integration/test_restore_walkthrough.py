"""docs/restore.md, run as it stands: its shell blocks, in their order, on a real archive and a real Kafka."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.harness.daemon import Daemon, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.conftest import MakeDaemon

PAGE = Path(__file__).parents[2] / "docs" / "restore.md"
RECORDS = 5_000


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def archived(kafka: KafkaServer, make_daemon: MakeDaemon, topic: str, values: list[bytes]) -> Daemon:
    """A stopped daemon that has archived the values; several frames a file, several files."""
    kafka.create_topic(topic, 2)
    daemon = make_daemon(
        {
            "kafka": {"brokers": kafka.bootstrap, "topics": [topic], "group_id": topic},
            "buffer": {"flush_bytes": "32KiB"},
        }
    ).start()
    for part in (values[: len(values) // 2], values[len(values) // 2 :]):
        before = daemon.metrics().total("records_consumed_total")
        kafka.produce(topic, part)
        wait_until(partial(_has_taken, daemon, before + len(part)), 30, "all taken")
        daemon.roll()
    assert daemon.stop() == 0
    assert kafka.lag(topic, topic) == 0
    return daemon


def _has_taken(daemon: Daemon, records: float) -> bool:
    return daemon.metrics().total("records_consumed_total") == records


def all_values(kafka: KafkaServer, topic: str, count: int) -> list[bytes]:
    """Every value of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": f"read-{topic}",
            "enable.auto.commit": False,
        }
    )
    partitions = kafka.end_offsets(topic)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    assert sum(partitions.values()) == count
    values: list[bytes] = []

    def all_read() -> bool:
        found = consumer.consume(1_000, 0.2)
        assert not any(message.error() for message in found)
        values.extend(message.value() or b"" for message in found)
        return len(values) >= count

    try:
        wait_until(all_read, 30, f"{count} records")
    finally:
        consumer.close()
    return values


def value(n: int, org: str) -> bytes:
    """A record with what a shell or a careless tool could change."""
    text = f'{{"_org_id":"{org}","n":{n},"text":"  é\\n $HOME `x` \\"q\\" \\u0000 {"-" * (n % 97)} "}}'
    return text.encode() + b" " * (n % 3)


@pytest.fixture
def environment(kafka: KafkaServer, tmp_path: Path, topic: str) -> dict[str, str]:
    """What the page asks its reader to set."""
    kafka.create_topic(f"{topic}-target", 1)
    (tmp_path / "work").mkdir()
    return os.environ | {
        "ARCHIVE": str(tmp_path / "archiver" / "archive"),
        "BROKERS": kafka.bootstrap,
        "TARGET": f"{topic}-target",
        "ROUTE": f"{topic}/acme",
        "WORK": str(tmp_path / "work"),
    }


def test_the_pages_commands_bring_every_record_back_byte_for_byte(
    kafka: KafkaServer, make_daemon: MakeDaemon, topic: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """[F1], [F3], [F4]: list, test, count, produce and compare."""
    values = [value(n, "acme" if n % 3 else "other") for n in range(RECORDS)]
    expected = [v for v in values if b'"acme"' in v]
    archived(kafka, make_daemon, topic, values)
    script = "\n".join(blocks("sh"))
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files, lines = map(int, done.stdout.split())
    assert files > 1, "one file would not show that all are read"
    assert lines == len(expected)
    arrived = all_values(kafka, environment["TARGET"], len(expected))
    assert sorted(arrived) == sorted(expected)
    distinct = Path(environment["WORK"], "distinct").read_bytes().split(b"\n")[:-1]
    assert sorted(distinct) == sorted(set(expected))


def test_the_pages_program_brings_empty_values_back_too(
    kafka: KafkaServer, make_daemon: MakeDaemon, topic: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """[F5]: an empty value is an empty line, which kcat passes over."""
    values = [b"", b"not json", b"", b"x" * 100]
    daemon = archived(kafka, make_daemon, topic, values)
    (program,) = blocks("python")
    (tmp_path / "restore.py").write_text(program)
    files = sorted(str(path) for path in (daemon.root / "archive" / topic / "default").rglob("*.jsonl.zst"))
    command = [sys.executable, str(tmp_path / "restore.py"), kafka.bootstrap, environment["TARGET"], *files]
    subprocess.run(command, check=True, timeout=300)
    assert sorted(all_values(kafka, environment["TARGET"], len(values))) == sorted(values)
