"""What the cases from the field share: records, settings, a watch over commits, load, an S3 side."""

from __future__ import annotations

import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from tests.harness.archive import Archive, Comparison, compare, read_objects, segment
from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.fault_proxy import FaultProxy
from tests.harness.kafka import KafkaServer
from tests.harness.seaweed import SeaweedFS

PREFIX = "archives"


def name_of(node_name: str) -> str:
    """A topic name for a test, new in every run."""
    return f"{re.sub(r'[^a-zA-Z0-9_.-]', '-', node_name)[:80]}-{secrets.token_hex(3)}"


def value(org: str, n: int, padding: int = 0) -> bytes:
    """A record of an organisation."""
    return f'{{"_org_id":"{org}","n":{n},"note":"{"x" * padding}"}}'.encode()


def by_route(topic: str, records: Iterable[tuple[str, bytes | None]]) -> dict[str, list[bytes | None]]:
    """Values by route, from `(org, value)`s."""
    routes: dict[str, list[bytes | None]] = defaultdict(list)
    for org, record in records:
        routes[f"{topic}/{segment(org)}"].append(record)
    return routes


def settings_for(kafka: KafkaServer, topic: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A daemon on `topic` in the group of the same name: short commit, flush and session times."""
    base = {
        "kafka": {
            "brokers": kafka.bootstrap,
            "topics": [topic],
            "group_id": topic,
            "commit_interval_secs": 0.2,
            "drain_timeout_secs": 20,
            "session_timeout_ms": 6000,
        },
        "buffer": {"flush_age_secs": 0.5},
        "archive": {"roll_interval_secs": 1},
    }
    settings = merged(base, more or {})
    if settings["kafka"].get("group_protocol") == "consumer":
        del settings["kafka"]["session_timeout_ms"]  # the broker decides
    return settings


def commits(kafka: KafkaServer, topic: str) -> dict[int, int]:
    """Committed offsets above 0 (0 says as much as none)."""
    return {partition: offset for partition, offset in kafka.committed(topic, topic).items() if offset}


def committed_nothing(kafka: KafkaServer, topic: str) -> bool:
    """Whether no record has been committed."""
    return not commits(kafka, topic)


def caught_up(kafka: KafkaServer, topic: str, timeout_secs: float = 40, group: str | None = None) -> None:
    """Wait until the group has committed everything that the topic holds."""
    wait_until(lambda: kafka.lag(group or topic, topic) == 0, timeout_secs, f"lag 0 on {topic}")


def consumed(daemon: Daemon, records: int, timeout_secs: float = 20) -> None:
    """Wait until this process has taken so many records."""

    def has() -> bool:
        return daemon.metrics().total("records_consumed_total") == records

    wait_until(has, timeout_secs, f"{records} records taken")


def files_archived(daemon: Daemon, files: int, timeout_secs: float = 15) -> None:
    """Wait until a `file://` destination holds so many files, or more."""
    wait_until(lambda: len(archive_files(daemon)) >= files, timeout_secs, f"{files} files")


def assert_stored(
    topic: str, records: Iterable[tuple[str, bytes | None]], archive: Archive, *, exact: bool = True
) -> Comparison:
    """Every record is in its organisation's files (once, if `exact`), and nothing else is."""
    comparison = compare(by_route(topic, records), archive)
    assert comparison.exact if exact else comparison.complete, comparison
    return comparison


def duplicates(comparison: Comparison) -> int:
    """Lines that are archived more often than they were produced."""
    return sum(lines.total() for lines in comparison.duplicates.values())


def archive_files(daemon: Daemon) -> list[Path]:
    """Archive files under a `file://` destination."""
    root = Path(str(daemon.settings["archive"]["destination"]).removeprefix("file://"))
    return sorted(path for path in root.rglob("*.jsonl*") if path.is_file() and path.suffix != ".tmp")


def spool_files(daemon: Daemon) -> list[Path]:
    """Archive files that are still in the spool."""
    return sorted((daemon.root / "spool").rglob("*.jsonl*"))


@contextmanager
def blocked_route(daemon: Daemon, topic: str, org: str) -> Iterator[Callable[[], None]]:
    """A file stands where a route's folder belongs, until the yielded function is called."""
    root = Path(str(daemon.settings["archive"]["destination"]).removeprefix("file://"))
    obstacle = root / topic / segment(org)
    obstacle.parent.mkdir(parents=True, exist_ok=True)
    obstacle.write_text("in the way")
    yield lambda: obstacle.unlink(missing_ok=True)


class CommitWatch:
    """Samples a group's committed offsets from the broker, and keeps every step of each partition."""

    def __init__(self, kafka: KafkaServer, topic: str, partitions: int, group: str | None = None) -> None:
        self.steps: dict[int, list[int]] = {partition: [] for partition in range(partitions)}
        self._wanted = [KafkaPartition(topic, partition) for partition in range(partitions)]
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "group.id": group or topic,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.03):
            try:
                answers = self._consumer.committed(self._wanted, timeout=2)
            except KafkaException:
                continue
            for answer in answers:
                steps = self.steps[answer.partition]
                if answer.error is None and answer.offset >= 0 and answer.offset not in steps[-1:]:
                    steps.append(answer.offset)

    def assert_never_back(self) -> None:
        """No sample is below an earlier one of its partition."""
        for partition, steps in self.steps.items():
            assert steps == sorted(steps), f"partition {partition} went back: {steps}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()


class Load:
    """Produces records of `orgs` to every partition of a topic, at a rate, from a thread, until stopped."""

    def __init__(
        self, kafka: KafkaServer, topic: str, partitions: int, orgs: int = 5, per_sec: int = 4_000
    ) -> None:
        self.records: list[tuple[str, bytes]] = []
        self._topic, self._partitions, self._orgs, self._per_sec = topic, partitions, orgs, per_sec
        self._producer = Producer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "linger.ms": 5,
                "enable.idempotence": True,  # a broker that dies must not make it produce twice
                "log_level": 0,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failures: list[str] = []

    def _run(self) -> None:
        n = 0
        while not self._stop.wait(0.05):
            for _ in range(self._per_sec // 20):
                org = f"org-{n % self._orgs}"
                record = value(org, n, padding=n % 200)
                self._producer.produce(
                    self._topic, record, partition=n // 7 % self._partitions, on_delivery=self._answered
                )
                self.records.append((org, record))
                n += 1
            self._producer.poll(0)

    def _answered(self, error: object, message: object) -> None:
        del message
        if error is not None:
            self.failures.append(str(error))

    def stop(self) -> None:
        """Produce no more; returns when every record has been acknowledged."""
        self._stop.set()
        self._thread.join()
        assert self._producer.flush(60) == 0
        assert not self.failures, self.failures[:3]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


class S3Side:
    """A bucket of a real server behind a proxy that fails as told."""

    def __init__(self, server: SeaweedFS, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.bucket = server.create_bucket(f"cases-{secrets.token_hex(6)}")

    def settings(self, endpoint: str | None = None) -> dict[str, Any]:
        """Destination and section `s3`."""
        return {
            "archive": {"destination": f"s3://{self.bucket}/{PREFIX}", "multipart_chunk_size": "5MiB"},
            "s3": {
                "endpoint": endpoint or self.proxy.endpoint,
                "region": "us-east-1",
                "access_key_id": self.server.access_key_id,
                "secret_access_key": self.server.secret_access_key,
            },
        }

    def listing(self) -> list[str]:
        """Keys of archive files."""
        return [key for key in self.server.keys(self.bucket, f"{PREFIX}/") if ".jsonl" in key]

    def archive(self, template_segments: int = 4) -> Archive:
        """All archive files, decoded."""
        objects: dict[str, bytes] = {}
        for key in self.listing():
            content = self.server.read(self.bucket, key)
            assert content is not None
            objects[key.removeprefix(f"{PREFIX}/")] = content
        return read_objects(objects, template_segments=template_segments)
