"""Kills at random moments under load on real servers, the short version: `make chaos` is the long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.chaos.run import require_complete, run
from tests.harness.kafka import KafkaServer
from tests.harness.seaweed import SeaweedFS

KILLS = 10


def test_nothing_is_lost_or_torn_by_kills_at_random_moments(
    kafka: KafkaServer, tmp_path: Path, log_dir: Path
) -> None:
    """[D7], [F3], [S2], [D5], [K4]; c10, c11, c33: five codecs, two stores, up to three in a group."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"to repeat what is chosen: CHAOS_SEED={seed}")
    with SeaweedFS(log_dir, tmp_path / "seaweed") as server:
        verdicts = run(kafka, server, tmp_path, log_dir, seed=seed, kills=KILLS, per_sec=1_500)
    require_complete(verdicts)
