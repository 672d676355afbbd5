"""JSON lines that compress like log records do, the same for the same seed."""

from __future__ import annotations

import json
import random

_WORDS = ["user", "login", "failed", "request", "timeout", "accepted", "denied", "policy", "session", "query"]


def json_lines(count: int, seed: int) -> list[bytes]:
    """`count` objects of about 330 bytes."""
    rng = random.Random(seed)
    return [json.dumps(_record(rng), separators=(",", ":")).encode() for _ in range(count)]


def _record(rng: random.Random) -> dict[str, object]:
    return {
        "_org_id": f"org{rng.randrange(20)}",
        "timestamp": 1_790_000_000_000 + rng.randrange(10**7),
        "level": rng.choice(["info", "warn", "error"]),
        "host": f"node-{rng.randrange(400)}.example.net",
        "source": f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}",
        "trace": f"{rng.getrandbits(128):032x}",
        "duration_ms": round(rng.expovariate(1 / 40), 3),
        "message": " ".join(rng.choices(_WORDS, k=rng.randint(6, 18))),
        "tags": {"category": rng.choice(_WORDS), "environment": rng.choice(["prod", "stage"])},
    }
