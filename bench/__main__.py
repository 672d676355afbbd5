"""The benchmarks: `make bench`, `make bench PARTS="codecs sizes"`, `make bench ALL=1`.

    python -m bench [part ...] [--all] [--quick] [--force] [--out FOLDER]
    python -m bench --publish          the last results into docs/performance, with plots and tables

Results gather in `bench/out/results.json`, a part at a time. Exit status 1, and nothing is written, where
others use the machine; `--force` measures all the same and says so.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import end_to_end, memory, plots, report, routing_bench, start
from bench.compare import Case
from bench.context import Context, say
from bench.machine import BusyError, Others, describe
from bench.report import Column

ROOT = Path(__file__).parents[1]
OUT = ROOT / "bench" / "out"
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Part:
    """Something to measure, and the columns of its table."""

    run: Callable[[Context], list[Case]]
    columns: Sequence[Column]

    @property
    def title(self) -> str:
        """The first sentence of its documentation."""
        return (self.run.__doc__ or "").split("\n")[0]


PARTS = {
    "headline": Part(end_to_end.headline, report.END_TO_END),
    "codecs": Part(end_to_end.codecs, report.END_TO_END),
    "connect": Part(end_to_end.connect, report.END_TO_END),
    "sizes": Part(end_to_end.sizes, report.END_TO_END),
    "organisations": Part(end_to_end.organisations, report.END_TO_END),
    "routing": Part(end_to_end.routing, report.END_TO_END),
    "partitions": Part(end_to_end.partitions, report.END_TO_END),
    "producers": Part(end_to_end.producers, report.END_TO_END),
    "growth": Part(end_to_end.growth, report.END_TO_END),
    "group": Part(end_to_end.group, report.END_TO_END),
    "hot_path": Part(routing_bench.hot_path, report.HOT_PATH),
    "hot_steps": Part(routing_bench.hot_steps, report.HOT_PATH),
    "held": Part(memory.held, report.HELD),
    "destinations": Part(memory.destinations, report.DESTINATIONS),
    "start": Part(start.start, report.START),
    "imports": Part(start.imports, report.IMPORTS),
    "stop": Part(start.stop, report.STOP),
}
COLUMNS = {name: part.columns for name, part in PARTS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description="Throughput, memory and cost.")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--all", action="store_true", help="every part; takes most of an hour")
    parser.add_argument("--quick", action="store_true", help="small and once: does it work at all")
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results.json")
    parser.add_argument("--publish", action="store_true", help="the results into docs/performance")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.publish:
        return publish(options.out / "results.json", DOCS, force=options.force)
    names = list(PARTS) if options.all else options.parts or ["headline"]
    return measure(names, options.out, quick=options.quick, force=options.force)


def measure(names: Sequence[str], out: Path, *, quick: bool, force: bool) -> int:
    """Run parts, print each one's table, keep each one's results as soon as it is done."""
    path = out / "results.json"
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    context = Context(Path(tempfile.mkdtemp(prefix="run-", dir=out)), Others(force=force), quick=quick)
    try:
        for name in names:
            part = PARTS[name]
            say(f"{name}: {part.title}")
            cases = part.run(context)
            context.drop_topics()
            results = report.load(path)
            entry = report.part_result(part.title, cases, describe(), quick=quick, forced=force)
            results["parts"][name] = entry
            report.save(path, results)
            table = report.text_table(report.rows(cases, part.columns))
            print(f"\n{part.title}\n\n{table}\n\n{report.caption(entry)}\n", flush=True)
    except BusyError as error:
        say(f"refused to report: {error}")
        return 1
    finally:
        context.close()
    say(f"results: {path}")
    return 0


def publish(path: Path, docs: Path, *, force: bool) -> int:
    """Write data, plots and tables of the docs; parts taken quick or forced only with `force`."""
    results = report.load(path)
    doubtful = [name for name, part in results["parts"].items() if part["quick"] or part["forced"]]
    if doubtful and not force:
        say(f"not published: taken quick or forced: {', '.join(doubtful)}")
        return 1
    folder = docs / "performance"
    report.save(folder / "results.json", results)
    for name, svg in plots.plots(results).items():
        (folder / name).write_text(svg)
    page = docs / "performance.md"
    page.write_text(report.fill(page.read_text(), results, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
