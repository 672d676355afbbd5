"""`python -m tests.sim SEED` tells one schedule; `python -m tests.sim --seeds N [--from M]` runs many."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.schedule import run_schedule
from tests.sim.world import CROWDS, Violation

TOLD_EVERY = 20_000


def _run_range(first: int, count: int, crowd: str | None) -> list[tuple[int, str]]:
    failures = []
    for seed in range(first, first + count):
        try:
            run_schedule(seed, crowd=crowd)
        except Violation as violation:
            failures.append((seed, str(violation)))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--crowd", choices=sorted(CROWDS))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if args.seed is not None:
        return _tell(args.seed, args.crowd)
    started = time.monotonic()
    step = 200
    ranges = [
        (first, min(step, args.first + args.seeds - first))
        for first in range(args.first, args.first + args.seeds, step)
    ]
    failures: list[tuple[int, str]] = []
    done = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        run_range = partial(_run_range, crowd=args.crowd)
        for found in pool.map(run_range, *zip(*ranges, strict=True)):
            failures += found
            done += step
            if done % TOLD_EVERY == 0:
                print(f"{done} schedules in {time.monotonic() - started:.0f} s", flush=True)
            for seed, text in found:
                print(f"seed {seed}: {text}\n  trace: make sim SEED={seed}", flush=True)
    secs = time.monotonic() - started
    rate = args.seeds / secs * 60
    print(f"{args.seeds} schedules in {secs:.1f} s ({rate:.0f} a minute), {len(failures)} failed")
    return 1 if failures else 0


def _tell(seed: int, crowd: str | None) -> int:
    story: list[str] = []
    try:
        run_schedule(seed, story, crowd)
        verdict = "no violation"
    except Violation as violation:
        verdict = f"VIOLATION: {violation}"
    print(*story, verdict, sep="\n")
    return 0 if verdict == "no violation" else 1


if __name__ == "__main__":
    sys.exit(main())
