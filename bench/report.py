"""Results as a file that programs read, as tables for people, and as the tables of docs/performance.md."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare import Case, Spread
from bench.machine import Machine

FORMAT = 1

Results = dict[str, Any]
"""`{"format": 1, "parts": {name: {title, machine, taken_at, quick, forced, others_cores, cases}}}`."""


@dataclass(frozen=True)
class Column:
    """A figure in a table: its name in a run, the heading with its unit, and how many decimals."""

    figure: str
    heading: str
    decimals: int = 0
    spread: bool = False
    """Show how far the repeats lie apart."""


END_TO_END = (
    Column("rate", "records/s", spread=True),
    Column("work_rate", "without start and stop"),
    Column("mb_per_sec", "MB/s"),
    Column("secs", "s to drain", 1),
    Column("cpu_secs_per_gb", "CPU s/GB", 1),
    Column("rate_per_core", "records/s per core"),
    Column("peak_mb", "peak RSS MB"),
    Column("ratio", "ratio", 2),
)
HOT_PATH = (Column("nanoseconds", "ns a record", spread=True), Column("blocks", "allocations", 2))
HELD = (
    Column("records", "records"),
    Column("state_bytes", "bytes of state"),
    Column("bytes_per_record", "bytes a record", 4),
)
DESTINATIONS = (
    Column("rate", "records/s", spread=True),
    Column("peak_mb", "peak RSS MB"),
    Column("handles", "handles"),
    Column("files", "files"),
    Column("stop_secs", "s to make durable", 1),
    Column("files_per_sec", "files/s"),
)
START = (
    Column("first_poll_secs", "s to first poll", 2, spread=True),
    Column("ready_secs", "s to ready", 2),
    Column("first_record_secs", "s to first record", 2),
    Column("stop_secs", "s to stop", 2),
)
IMPORTS = (Column("import_ms", "ms of imports", spread=True), Column("modules", "modules"))
STOP = (Column("stop_secs", "s to stop", 2, spread=True), Column("files_per_sec", "files/s"))


# --- the file ---------------------------------------------------------------------------------------


def part_result(
    title: str, cases: Sequence[Case], machine: Machine, *, quick: bool, forced: bool
) -> dict[str, Any]:
    """One part's entry, with the machine it was taken on: parts may be taken at different times."""
    return {
        "title": title,
        "machine": machine.as_dict(),
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": quick,
        "forced": forced,
        "others_cores": max((case.others_cores for case in cases), default=0.0),
        "cases": [case.as_dict() for case in cases],
    }


def load(path: Path) -> Results:
    """What was measured before, or nothing yet."""
    if not path.exists():
        return {"format": FORMAT, "parts": {}}
    results: Results = json.loads(path.read_text())
    if results.get("format") != FORMAT:
        raise ValueError(f"{path} has format {results.get('format')}, not {FORMAT}: delete it")
    return results


def save(path: Path, results: Results) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    partial.rename(path)


def cases_of(part: Mapping[str, Any]) -> list[Case]:
    """A part's cases again."""
    return [Case.from_dict(case) for case in part["cases"]]


# --- tables -----------------------------------------------------------------------------------------


def rows(cases: Iterable[Case], columns: Sequence[Column]) -> list[list[str]]:
    """Headings, and a row per case and side. A figure that a side does not have is a dash."""
    table = [["case", "side", *(column.heading for column in columns)]]
    for case in cases:
        for side, runs in case.runs.items():
            cells = [_cell(case, side, column) if column.figure in runs[0] else "–" for column in columns]
            table.append([case.name, side, *cells])
    return table


def _cell(case: Case, side: str, column: Column) -> str:
    found: Spread = case.figure(side, column.figure)
    text = f"{found.median:,.{column.decimals}f}"
    if column.spread and len(case.runs[side]) > 1:
        text += f" ({found.low:,.{column.decimals}f}–{found.high:,.{column.decimals}f})"
    return text


def text_table(table: Sequence[Sequence[str]]) -> str:
    """For a terminal: text to the left, figures to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """For the docs."""
    head, *body = table
    lines = [head, ["---", "---", *("---:" for _ in head[2:])], *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def caption(part: Mapping[str, Any]) -> str:
    """Where and when, and what makes the figures less than they should be."""
    machine = part["machine"]
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"kernel {machine['kernel']}, Python {machine['python']}; {part['taken_at']}; "
        f"others used {part['others_cores']:.2f} cores at most"
    )
    if part["forced"]:
        text += "; FORCED: taken although others used the machine, so not to be relied on"
    if part["quick"]:
        text += "; QUICK: small and once, so no measurement"
    return text


# --- the docs ---------------------------------------------------------------------------------------

_BLOCK = re.compile(r"(<!-- bench: (?P<part>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(document: str, results: Results, columns: Mapping[str, Sequence[Column]]) -> str:
    """Put each part's table between its `<!-- bench: part -->` and `<!-- end -->`."""

    def table(match: re.Match[str]) -> str:
        name = match["part"]
        part = results["parts"].get(name)
        if part is None:
            return f"{match[1]}Not measured yet.\n{match[3]}"
        filled = markdown_table(rows(cases_of(part), columns[name]))
        return f"{match[1]}{filled}\n\n{caption(part)}.\n{match[3]}"

    return _BLOCK.sub(table, document)
