"""`python -m tests.chaos --kills 200`, or `--minutes 30`; `--seed` chooses what happens."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

from tests.chaos.archive import temporary_root
from tests.chaos.run import require_complete, run
from tests.harness.kafka import KafkaServer
from tests.harness.seaweed import SeaweedFS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--per-sec", type=int, default=3_000)
    args = parser.parse_args()
    root = temporary_root()
    log_dir = Path(__file__).parents[1] / "logs" / f"chaos-{args.seed}"
    print(f"seed {args.seed}, files under {root}, logs under {log_dir}", flush=True)
    with (
        KafkaServer(root / "kafka", log_dir) as kafka,
        SeaweedFS(log_dir, root / "seaweed") as server,
    ):
        verdicts = run(
            kafka,
            server,
            root,
            log_dir,
            seed=args.seed,
            kills=args.kills,
            minutes=args.minutes,
            per_sec=args.per_sec,
        )
        require_complete(verdicts)
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
