"""Sides of one comparison, run in turns and repeated; medians, and how far the repeats lie apart."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.machine import BusyError

ROUNDS = 3
RETRIES = 2
"""How often a run that others disturbed is taken again before the whole is given up."""

Figures = Mapping[str, float]


class Watch(Protocol):
    """What a comparison asks of the machine."""

    def wait_until_quiet(self) -> None: ...
    def begin(self) -> None: ...
    def cores(self) -> float: ...
    def busy(self, cores: float) -> bool: ...


@dataclass(frozen=True)
class Spread:
    """Median of the repeats and their range."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """The range as a share of the median: 0.1 is ten percent."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass
class Case:
    """One row of a table: what was varied, and each side's runs. Runs are flat dicts of figures."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    others_cores: float = 0.0

    def figure(self, side: str, name: str) -> Spread:
        """A figure of one side over its repeats."""
        return spread([run[name] for run in self.runs[side]])

    def as_dict(self) -> dict[str, Any]:
        """For the result file: every run, and the medians beside them for readers in a hurry."""
        medians = {
            side: {name: spread([run[name] for run in runs]).median for name in runs[0]}
            for side, runs in self.runs.items()
            if runs
        }
        return {
            "name": self.name,
            "params": self.params,
            "others_cores": round(self.others_cores, 3),
            "median": medians,
            "runs": self.runs,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        """The inverse of `as_dict`."""
        runs = {side: [dict(run) for run in runs] for side, runs in data["runs"].items()}
        return cls(data["name"], dict(data["params"]), runs, data["others_cores"])


def compare(
    name: str,
    sides: Mapping[str, Callable[[], Figures]],
    watch: Watch,
    *,
    rounds: int = ROUNDS,
    params: Mapping[str, Any] | None = None,
) -> Case:
    """Every side once per round, in turns, so that the machine's moods meet all of them.

    The order turns round every other round. Raises `BusyError` where others do not let go.
    """
    case = Case(name, dict(params or {}), {side: [] for side in sides})
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for side in order:
            figures, others_cores = _undisturbed(f"{name}, {side}", sides[side], watch)
            case.runs[side].append(dict(figures))
            case.others_cores = max(case.others_cores, others_cores)
            _say(f"  {name:<34} {side:<22} round {number + 1}: {_brief(figures)}")
    return case


def _undisturbed(what: str, run: Callable[[], Figures], watch: Watch) -> tuple[Figures, float]:
    """A run that counts, and the cores that others used meanwhile."""
    for _ in range(RETRIES + 1):
        watch.wait_until_quiet()
        watch.begin()
        figures = run()
        cores = watch.cores()
        if not watch.busy(cores):
            return figures, cores
        _say(f"  {what}: others used {cores:.2f} cores meanwhile: once more")
    raise BusyError(f"{what}: others used the machine in each of {RETRIES + 1} attempts (FORCE=1 overrides)")


def _brief(figures: Figures) -> str:
    shown = [name for name in ("rate", "secs", "peak_mb", "nanoseconds") if name in figures]
    return ", ".join(f"{name} {figures[name]:,.1f}" for name in shown or list(figures)[:3])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
