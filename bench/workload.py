"""The records of the benchmarks: JSON like an application's log, made once and produced fast."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from confluent_kafka import Producer

PATHS = ("/api/v1/orders", "/api/v1/users", "/api/v1/search", "/healthz", "/api/v2/cart/items")
AGENTS = ("Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "okhttp/4.12.0", "python-requests/2.32")


@dataclass(frozen=True)
class Workload:
    """`size` is the bytes of a record, about; `zipf` makes few organisations have most records."""

    records: int = 2_000_000
    size: int = 400
    orgs: int = 20
    partitions: int = 4
    zipf: bool = False
    compression: str = "lz4"

    def org_ids(self, rng: random.Random, count: int) -> list[str]:
        """One organisation per record."""
        names = [f"org-{i:05d}" for i in range(self.orgs)]
        if not self.zipf:
            return rng.choices(names, k=count)
        return rng.choices(names, weights=[1 / (i + 1) for i in range(self.orgs)], k=count)


def make_values(work: Workload, rng: random.Random, count: int) -> list[bytes]:
    """`count` records; the same seed makes the same ones."""
    values = []
    for i, org in enumerate(work.org_ids(rng, count)):
        document: dict[str, object] = {
            "_org_id": org,
            "ts": 1_790_000_000_000 + i * 37,
            "level": rng.choice(("info", "info", "info", "warn", "error")),
            "path": rng.choice(PATHS),
            "status": rng.choice((200, 200, 200, 204, 404, 500)),
        }
        if work.size > 200:
            document |= {
                "trace": f"{rng.getrandbits(64):016x}",
                "agent": rng.choice(AGENTS),
                "tags": {"region": rng.choice(("eu-1", "us-2")), "pod": f"web-{rng.randrange(40)}"},
                "ms": rng.randrange(1, 900),
            }
        text = json.dumps(document)
        room = work.size - len(text) - len(', "message": ""')
        if room > 0:
            words = rng.choices(
                ("request", "served", "cache", "miss", "hit", "upstream", "took", "retry"), k=room
            )
            text = text[:-1] + ', "message": ' + json.dumps(" ".join(words)[:room]) + "}"
        values.append(text.encode())
    return values


def produce(bootstrap: str, topic: str, work: Workload, seed: int = 1) -> int:
    """Fill the topic; returns the bytes of all values. Records repeat after 200,000."""
    rng = random.Random(seed)
    pool = make_values(work, rng, min(work.records, 200_000))
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 1_000_000,
            "compression.type": work.compression,
        }
    )
    total = 0
    for i in range(work.records):
        value = pool[i % len(pool)]
        total += len(value)
        while True:
            try:
                producer.produce(topic, value, partition=i % work.partitions)
                break
            except BufferError:
                producer.poll(0.1)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return total
