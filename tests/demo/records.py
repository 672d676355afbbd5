"""A few thousand records as several organisations' programs would send them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

PARTITIONS = 3
ORGS = ("acme", "globex", "initech")
WEIGHTS = (60, 30, 10)
PATHS = ("/v1/items", "/v1/carts", "/login", "/search", "/v1/orders", "/health")
START_MS = 1_790_000_000_000


@dataclass(frozen=True)
class DemoRecord:
    """A value, where it is produced, and the route that the archive must hold it under."""

    topic: str
    partition: int
    value: bytes
    route: str


def demo_records(count: int, seed: int = 7) -> Iterator[DemoRecord]:
    """Orders, clicks and audit entries; now and then one that names no organisation or is no JSON."""
    chance = random.Random(seed)
    for n in range(count):
        org = chance.choices(ORGS, WEIGHTS)[0]
        topic = chance.choices(("clicks", "orders", "audit"), (70, 20, 10))[0]
        partition = chance.randrange(PARTITIONS)
        if chance.random() < 0.004:
            yield DemoRecord(topic, partition, b"plain text, entry %d" % n, f"{topic}/default")
            continue
        fields = {"_org_id": org, "ts": START_MS + 37 * n, **_FIELDS[topic](chance, n)}
        yield DemoRecord(topic, partition, json.dumps(fields, ensure_ascii=False).encode(), f"{topic}/{org}")


def _click(chance: random.Random, n: int) -> dict[str, object]:
    return {
        "session": f"{chance.getrandbits(64):016x}",
        "path": f"{chance.choice(PATHS)}/{chance.randrange(500)}",
        "status": chance.choices((200, 304, 404, 500), (90, 5, 4, 1))[0],
        "millis": round(chance.lognormvariate(3, 1), 2),
        "agent": f"Mozilla/5.0 (X11; Linux x86_64; rv:{chance.randrange(110, 140)}.0) Gecko/20100101",
    }


def _order(chance: random.Random, n: int) -> dict[str, object]:
    skus = (f"SKU-{chance.randrange(9000):05d}" for _ in range(chance.randrange(1, 5)))
    return {
        "order": f"ORD-{n:07d}",
        "currency": "EUR",
        "customer": {"city": "Zürich", "vip": n % 9 == 0},
        "lines": [
            {"sku": sku, "count": chance.randrange(1, 5), "cents": chance.randrange(9900)} for sku in skus
        ],
    }


def _audit(chance: random.Random, n: int) -> dict[str, object]:
    return {
        "actor": f"user{chance.randrange(60)}@example.org",
        "action": chance.choice(("login", "logout", "grant", "revoke", "export")),
        "ip": f"192.0.2.{chance.randrange(256)}",
        "allowed": chance.random() < 0.97,
    }


_FIELDS = {"clicks": _click, "orders": _order, "audit": _audit}
