"""What the parts of the benchmark share: servers, filled topics, a folder, and the watch over the machine."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from bench.compare import ROUNDS, Case, Figures, compare
from bench.machine import Others
from bench.sides import Topic
from bench.workload import Workload, produce
from tests.harness.kafka import KafkaServer
from tests.harness.seaweed import SeaweedFS

COORDINATOR_SECS = 60.0

QUICK_SHARE = 20
"""With QUICK a part takes this fraction of its records, once: to see that it works, not to measure."""

BUCKET = "bench"


class Context:
    """Servers start when first asked for and stop with `close`; topics are filled once."""

    def __init__(self, root: Path, watch: Others, *, quick: bool) -> None:
        self.root = root
        self.watch = watch
        self.quick = quick
        self.rounds = 1 if quick else ROUNDS
        self._stack = ExitStack()
        self._kafka: KafkaServer | None = None
        self._seaweed: SeaweedFS | None = None
        self._topics: dict[str, Topic] = {}
        self._runs = 0

    def records(self, count: int) -> int:
        """That many, or a fraction with `quick`."""
        return max(1_000, count // QUICK_SHARE) if self.quick else count

    def fresh(self) -> Path:
        """A folder name nobody has used."""
        self._runs += 1
        return self.root / f"run-{self._runs}"

    # --- servers ---------------------------------------------------------------------------

    @property
    def kafka(self) -> KafkaServer:
        """One broker."""
        if self._kafka is None:
            server = KafkaServer(self.root / "kafka", self.root / "logs")
            self._kafka = self._stack.enter_context(server)
            _make_coordinator(server.bootstrap)
        return self._kafka

    @property
    def seaweed(self) -> SeaweedFS:
        """An S3 server with the bucket `bench`."""
        if self._seaweed is None:
            server = SeaweedFS(self.root / "logs", self.root / "seaweed")
            self._seaweed = self._stack.enter_context(server)
            server.create_bucket(BUCKET)
        return self._seaweed

    def s3_settings(self) -> dict[str, Any]:
        """Settings for a destination of its own in that bucket."""
        server, self._runs = self.seaweed, self._runs + 1
        return {
            "archive": {"destination": f"s3://{BUCKET}/run-{self._runs}"},
            "s3": {
                "endpoint": server.endpoint,
                "region": "us-east-1",
                "access_key_id": server.access_key_id,
                "secret_access_key": server.secret_access_key,
            },
        }

    # --- topics ----------------------------------------------------------------------------

    def topic(self, work: Workload) -> Topic:
        """A filled topic; `work.records` is cut down with `quick`."""
        work = replace(work, records=self.records(work.records))
        topic = self._topics.get(work.name)
        if topic is None:
            began = time.perf_counter()
            self.kafka.create_topic(work.name, work.partitions)
            raw_bytes = produce(self.kafka.bootstrap, work.name, work)
            topic = self._topics[work.name] = Topic(self.kafka.bootstrap, work.name, work.records, raw_bytes)
            took = time.perf_counter() - began
            say(f"  filled {work.name}: {raw_bytes / 1e6:,.0f} MB in {took:.1f} s")
        return topic

    def drop_topics(self) -> None:
        """Free the broker's disk."""
        for name in self._topics:
            self.kafka.delete_topic(name)
        self._topics.clear()

    # --- measuring ---------------------------------------------------------------------------

    def compare(self, name: str, sides: Mapping[str, Callable[[], Figures]], **params: Any) -> Case:
        """See `bench.compare.compare`."""
        return compare(name, sides, self.watch, rounds=self.rounds, params=params)

    def close(self) -> None:
        """Stop the servers and remove everything."""
        self._stack.close()
        shutil.rmtree(self.root, ignore_errors=True)


def say(line: str) -> None:
    """Progress, beside the tables on stdout."""
    print(line, file=sys.stderr, flush=True)


def _make_coordinator(bootstrap: str) -> None:
    """The first group of a new broker waits for seconds until it has made its topic of offsets."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench-first"})
    nowhere = TopicPartition("bench-first", 0)
    deadline = time.monotonic() + COORDINATOR_SECS
    while time.monotonic() < deadline:
        try:
            consumer.committed([nowhere], timeout=5)
            break
        except KafkaException:
            time.sleep(0.2)
    consumer.close()
