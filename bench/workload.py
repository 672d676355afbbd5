"""The records of the benchmarks: JSON like an application's log, made once and produced fast."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

PATHS = ("/api/v1/orders", "/api/v1/users", "/api/v1/search", "/healthz", "/api/v2/cart/items")
AGENTS = ("Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "okhttp/4.12.0", "python-requests/2.32")
WORDS = ("request", "served", "cache", "miss", "hit", "upstream", "took", "retry")

POOL_BYTES = 48 << 20
POOL_RECORDS_MAX = 500_000
"""Records repeat after so many: more of an organisation's than a frame and a codec's window hold."""

FRAME_BYTES = 1 << 20

QUEUED_MAX = 400_000
BATCH_RECORDS = 20_000


@dataclass(frozen=True)
class Workload:
    """`size` is the bytes of a record, about; `zipf` makes few organisations have most records.

    `compression` is the producers'. `name` tells topics apart and is made of what differs.
    """

    records: int = 2_000_000
    size: int = 400
    orgs: int = 20
    partitions: int = 4
    zipf: bool = False
    compression: str = "lz4"

    @property
    def name(self) -> str:
        """A topic's name for it."""
        law = "zipf" if self.zipf else "uniform"
        shape = f"{self.size}b-{self.orgs}orgs-{law}-{self.partitions}p"
        return f"bench-{self.records}-{shape}-{self.compression}"

    @property
    def distinct(self) -> int:
        """How many different records are made: with many organisations all, or frames would repeat some."""
        frames = self.orgs * (FRAME_BYTES // self.size)
        return min(self.records, max(min(POOL_BYTES // self.size, POOL_RECORDS_MAX), frames))

    def org_ids(self, rng: random.Random, count: int) -> list[str]:
        """One organisation per record. Uniform, each comes once before any comes again."""
        names = [f"org-{i:06d}" for i in range(self.orgs)]
        if self.zipf:
            weights = list(accumulate(1 / (i + 1) for i in range(self.orgs)))
            return rng.choices(names, cum_weights=weights, k=count)
        ids = (names * (count // self.orgs + 1))[:count]
        rng.shuffle(ids)
        return ids


def make_values(work: Workload, rng: random.Random, count: int) -> list[bytes]:
    """`count` records; the same seed makes the same ones."""
    return [_record(work.size, rng, i, org) for i, org in enumerate(work.org_ids(rng, count))]


def _record(size: int, rng: random.Random, i: int, org: str) -> bytes:
    document: dict[str, object] = {
        "_org_id": org,
        "ts": 1_790_000_000_000 + i * 37,
        "level": rng.choice(("info", "info", "info", "warn", "error")),
        "path": rng.choice(PATHS),
        "status": rng.choice((200, 200, 200, 204, 404, 500)),
    }
    if size > 200:
        document |= {
            "trace": f"{rng.getrandbits(64):016x}",
            "agent": rng.choice(AGENTS),
            "tags": {"region": rng.choice(("eu-1", "us-2")), "pod": f"web-{rng.randrange(40)}"},
            "ms": rng.randrange(1, 900),
        }
    text = json.dumps(document)
    room = size - len(text) - len(', "message": ""')
    if room > 0:
        words = " ".join(rng.choices(WORDS, k=room // 4 + 1))[:room]
        text = f'{text[:-1]}, "message": "{words}"}}'
    return text.encode()


def batches_of_values(work: Workload, seed: int = 1) -> Iterator[list[bytes]]:
    """All records, some thousands at a time, from one pool of different ones."""
    pool = make_values(work, random.Random(seed), work.distinct)
    left = work.records
    while left > 0:
        for start in range(0, len(pool), BATCH_RECORDS):
            part = pool[start : start + min(BATCH_RECORDS, left)]
            if part:
                yield part
            left -= len(part)


def shares(work: Workload, values: list[bytes], turn: int) -> list[list[bytes]]:
    """The values of a turn by partition. Each time round the pool a partition gets others of it, so that
    what it holds repeats no sooner than the pool does: a codec would find the repetition."""
    turns_per_pool = -(-work.distinct // BATCH_RECORDS)
    shift = turn // turns_per_pool
    count = work.partitions
    return [values[(partition + shift) % count :: count] for partition in range(count)]


def produce(bootstrap: str, topic: str, work: Workload, seed: int = 1) -> int:
    """Fill the topic; returns the bytes of all values and of a newline behind each."""
    from confluent_kafka import Producer  # not where instructions are counted

    producer: Any = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,  # neither twice nor out of order, whatever a broker is busy with
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "message.max.bytes": 10_000_000,
            "queue.buffering.max.messages": QUEUED_MAX + 2 * BATCH_RECORDS,
            "queue.buffering.max.kbytes": 2_000_000,
            "compression.type": work.compression,
        }
    )
    total = 0
    queued_max = max(BATCH_RECORDS, min(QUEUED_MAX, (1 << 30) // work.size - BATCH_RECORDS))
    for turn, values in enumerate(batches_of_values(work, seed)):
        total += sum(map(len, values)) + len(values)
        for partition, share in enumerate(shares(work, values, turn)):
            messages = [{"value": value} for value in share]
            if messages and producer.produce_batch(topic, messages, partition=partition) != len(messages):
                raise RuntimeError(f"{topic}: the producer's queue is full")
        while len(producer) > queued_max:
            producer.poll(0.01)
        producer.poll(0)
    if producer.flush(120):
        raise RuntimeError(f"{topic}: not everything was delivered")
    return total
