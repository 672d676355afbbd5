"""`python -m tests.mutation [WORD...]`: which tests catch which wrong change; 1 if one lives unexplained.

Works on a copy: the source is not touched. A WORD takes only the mutants whose path or text holds it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/unit/test_internals_claims.py",
    "tests/unit/test_ledger.py",
    "tests/unit/test_uploads_abandoned.py",
    "tests/unit/test_spool_file.py",
    "tests/unit/test_spool_directory.py",
    "tests/contract/test_writers.py",
    "tests/sim",
)
CAUGHT_MAX = 2
TIMEOUT_SECS = 300


def copy(target: Path) -> None:
    """What the tests need, without caches and environments."""
    ignore = shutil.ignore_patterns("__pycache__", "logs")
    for name in ("archiver", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


def run_tests(folder: Path) -> tuple[bool, list[str]]:
    """Whether they pass, and the first few that do not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--maxfail={CAUGHT_MAX}"]
    command += ["-m", "not servers", "-k", "not planted", "--no-header", *TESTS]
    env = {**os.environ, "PYTHONPATH": str(folder), "SIM_SECS": "6", "SIM_FIRST_SEED": "500000"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECS
        )
    except subprocess.TimeoutExpired:
        return False, ["(the tests hang)"]
    caught = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 0, caught or ([] if done.returncode == 0 else [done.stdout[-300:]])


def apply(folder: Path, mutant: Mutant) -> None:
    """Change the copy; the text to replace must be there exactly once."""
    path = folder / mutant.path
    text = path.read_text()
    path.with_suffix(".whole").write_text(text)
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.path}: {mutant.old!r} is there {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def undo(folder: Path, mutant: Mutant) -> None:
    """Back to the copy's own text, whatever the source has become meanwhile."""
    path = folder / mutant.path
    path.with_suffix(".whole").replace(path)


def main() -> int:
    words = sys.argv[1:] or [""]
    chosen = [m for m in MUTANTS if any(word in m.path or word in m.what for word in words)]
    lived = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        folder = Path(temporary)
        copy(folder)
        for mutant in chosen:
            apply(folder, mutant)  # all of them first: a stale one is told at once
            undo(folder, mutant)
        passes, failed = run_tests(folder)
        if not passes:
            raise SystemExit(f"the tests fail without a mutant: {failed}")
        for mutant in chosen:
            started = time.monotonic()
            apply(folder, mutant)
            passes, caught = run_tests(folder)
            undo(folder, mutant)
            lived += passes and not mutant.equivalent
            verdict = ("lives: " + (mutant.equivalent or "UNEXPLAINED")) if passes else ", ".join(caught)
            secs = time.monotonic() - started
            print(f"{mutant.path}: {mutant.what}\n    [{secs:.0f} s] {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {lived} live without an explanation")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
