"""Instructions of the pure parts, counted by valgrind: a figure that neighbours cannot disturb.

    python -m bench.instructions             count and show beside the baseline
    python -m bench.instructions --check     exit status 1 where a part takes more than the baseline allows
    python -m bench.instructions --record    make this the baseline

A part is run with few and with more records, and the difference counted, so that start-up drops out. The
baseline names the versions it is of; with others the tolerance is wider, and a line says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from bench.offline import feed, offline_archiver, record_batches
from bench.workload import Workload

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "bench" / "instructions.json"
TOLERANCE, TOLERANCE_OTHER_VERSIONS = 0.03, 0.15
RECORDS_FEW, RECORDS_MORE = 1_000, 4_000

WORKLOADS = {
    "route 400 B, 20 organisations": Workload(),
    "route 400 B, 1,000 organisations": Workload(orgs=1_000),
    "route 100 B, 20 organisations": Workload(size=100),
    "route 400 B by tags.region": Workload(),
    "route 400 B by _org_id and level": Workload(),
    "register 400 B, 20 organisations": Workload(),
    "register 400 B, 1,000 organisations": Workload(orgs=1_000),
}
FIELDS = {
    "route 400 B by tags.region": ("tags.region",),
    "route 400 B by _org_id and level": ("_org_id", "level"),
}
"""What is routed by where it is not `_org_id`."""

_COLLECTED = re.compile(r"Collected : (\d+)")


def run_part(name: str, records: int) -> None:
    """What is counted: a fixed workload through the router, or through the loop's `register`."""
    work = WORKLOADS[name]
    # the values differ for a thousand records: making them costs more than what is counted
    once = record_batches(Workload(records=1_000, size=work.size, orgs=work.orgs, partitions=1))
    chosen = once * (records // 1_000)
    archiver = offline_archiver(work.partitions, fields=FIELDS.get(name, ("_org_id",)))
    gc.disable()  # when it looks depends on what came before
    if name.startswith("register"):
        feed(archiver, chosen)
        return
    for batch in chosen:
        archiver.parts.router.route_batch(batch)


def count(name: str) -> float:
    """Instructions a record."""
    few, more = (_instructions(name, records) for records in (RECORDS_FEW, RECORDS_MORE))
    return (more - few) / (RECORDS_MORE - RECORDS_FEW)


def _instructions(name: str, records: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
            + [sys.executable, "-m", "bench.instructions", "--run", name, str(records)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
        )
    found = _COLLECTED.search(done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"valgrind ended with {done.returncode}: {done.stderr[-2000:]}")
    return int(found[1])


def versions() -> dict[str, str]:
    """What the count depends on."""
    return {"python": platform.python_version(), "msgspec": version("msgspec"), "cpu": platform.machine()}


def compare(counted: Mapping[str, float], baseline: Mapping[str, object]) -> tuple[list[str], bool]:
    """A line per part, and whether all are within the tolerance."""
    same = baseline["versions"] == versions()
    tolerance = TOLERANCE if same else TOLERANCE_OTHER_VERSIONS
    lines = [] if same else [f"the baseline is of {baseline['versions']}: tolerance {tolerance:.0%}"]
    before = baseline["instructions"]
    assert isinstance(before, Mapping)
    fine = True
    for name, instructions in counted.items():
        was = before.get(name)
        if was is None:
            lines.append(f"{name:<36} {instructions:>9,.0f}  not in the baseline")
            fine = False
            continue
        change = instructions / was - 1
        verdict = "" if change <= tolerance else f"  MORE than {tolerance:.0%} above the baseline"
        fine = fine and change <= tolerance
        lines.append(f"{name:<36} {instructions:>9,.0f}  baseline {was:>9,.0f}  {change:+.1%}{verdict}")
    return lines, fine


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions", description="Instructions a record."
    )
    parser.add_argument("--check", action="store_true", help="fail where it is more than the baseline allows")
    parser.add_argument("--record", action="store_true", help="make this the baseline")
    parser.add_argument("--run", nargs=2, metavar=("PART", "RECORDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_part(options.run[0], int(options.run[1]))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not here (Debian: valgrind)", file=sys.stderr)
        return 2
    counted = {name: round(count(name), 1) for name in WORKLOADS}
    if options.record:
        baseline = {"versions": versions(), "instructions": counted}
        BASELINE.write_text(json.dumps(baseline, indent=1, ensure_ascii=False) + "\n")
        return 0
    lines, fine = compare(counted, json.loads(BASELINE.read_text()))
    print("\n".join(lines))
    return 1 if options.check and not fine else 0


if __name__ == "__main__":
    sys.exit(main())
