"""Plots as SVG, written by hand: lines over a linear or logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from bench.compare import Case
from bench.report import Results, cases_of

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 84, 170, 46, 52
COLOURS = ("#0b6e99", "#d9730d", "#3a7d44", "#9065b0", "#c0392b", "#6b6b6b", "#b08d00")

Points = Sequence[tuple[float, float]]


def nice_steps(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= count)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """`1,500,000` as `1.5M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


class _Axis:
    """Values to places between two ends."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        self.log = log
        self._start, self._end = start, end
        if log:
            low = math.floor(math.log10(min(values)))
            high = max(math.ceil(math.log10(max(values)) - 1e-9), low + 1)
            self.ticks = [10.0**power for power in range(low, high + 1)]
            self._low, self._high = float(low), float(high)
        else:
            self.ticks = nice_steps(min(0.0, *values), max(values))
            self._low, self._high = self.ticks[0], self.ticks[-1]

    def at(self, value: float) -> float:
        """Where a value lies."""
        number = math.log10(value) if self.log else value
        return self._start + (number - self._low) / (self._high - self._low) * (self._end - self._start)


def line_chart(
    title: str,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    limits: Mapping[str, float] | None = None,
) -> str:
    """A line with dots per series; `limits` are dashed lines across."""
    limits = limits or {}
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points] + list(limits.values())
    across = _Axis(xs, LEFT, WIDTH - RIGHT, log=log_x)
    up = _Axis(ys, HEIGHT - BOTTOM, TOP, log=log_y)
    parts = _frame(title, x_label, y_label) + _grid(across, up)
    for name, limit in limits.items():
        y = up.at(limit)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#c0392b" stroke-dasharray="6 4"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 8, y + 4, name, colour="#c0392b"))
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(across.at(x), up.at(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts += _legend(number, name, colour)
    return _svg(parts)


def bar_chart(title: str, bars: Mapping[str, tuple[float, float, float]], y_label: str) -> str:
    """A bar per name: median, and a whisker from the lowest to the highest repeat."""
    up = _Axis([high for _, _, high in bars.values()], HEIGHT - BOTTOM, TOP, log=False)
    parts = _frame(title, "", y_label) + _grid(None, up)
    room = (WIDTH - LEFT - 24) / len(bars)
    for number, (name, (median, low, high)) in enumerate(bars.items()):
        middle = LEFT + room * (number + 0.5)
        width = min(room * 0.6, 110)
        top = up.at(median)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{colour}"/>'
        )
        parts.append(
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{up.at(low):.1f}" y2="{up.at(high):.1f}" '
            'stroke="#222" stroke-width="2"/>'
        )
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, name, anchor="middle"))
        parts.append(_text(middle, up.at(high) - 7, short(round(median, -2)), anchor="middle"))
    return _svg(parts)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        _text(LEFT, 24, title, size=15, weight="600"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
        f'<g transform="rotate(-90 20 {middle})">{_text(20, middle, y_label, anchor="middle")}</g>',
    ]


def _grid(across: _Axis | None, up: _Axis) -> list[str]:
    end = WIDTH - RIGHT if across else WIDTH - 24
    parts = []
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, short(tick), anchor="end"))
    for tick in across.ticks if across else ():
        x = across.at(tick) if across else 0.0
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 18, short(tick), anchor="middle"))
    return parts


def _legend(number: int, name: str, colour: str) -> list[str]:
    y = TOP + 8 + number * 20
    x = WIDTH - RIGHT + 12
    return [
        f'<rect x="{x}" y="{y - 6}" width="12" height="12" fill="{colour}"/>',
        _text(x + 18, y + 4, name),
    ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "400",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )


def _svg(parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f"{body}\n</svg>\n"
    )


# --- what is plotted ------------------------------------------------------------------------------


def plots(results: Results) -> dict[str, str]:
    """File name to SVG, for every plot whose part has been measured."""
    drawn = {}
    for name, (part, draw) in _PLOTS.items():
        if part in results["parts"]:
            drawn[f"{name}.svg"] = draw(cases_of(results["parts"][part]))
    return drawn


def _over(cases: Sequence[Case], param: str, figure: str) -> dict[str, list[tuple[float, float]]]:
    """Median of a figure over a parameter, per side."""
    series: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for side in case.runs:
            points = series.setdefault(side, [])
            points.append((float(case.params[param]), case.figure(side, figure).median))
    return series


def _headline(cases: Sequence[Case]) -> str:
    case = cases[0]
    found = {side: case.figure(side, "rate") for side in case.runs}
    bars = {side: (rate.median, rate.low, rate.high) for side, rate in found.items()}
    return bar_chart(f"Records a second: {case.name}", bars, "records/s")


def _sizes(cases: Sequence[Case]) -> str:
    series = _over(cases, "size", "mb_per_sec")
    return line_chart("Throughput by record size", series, "bytes a record", "MB/s", log_x=True)


def _organisations(cases: Sequence[Case]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for law, zipf in (("uniform", False), ("Zipf", True)):
        found = _over([case for case in cases if case.params["zipf"] is zipf], "orgs", "rate")
        series |= {f"{side}, {law}": points for side, points in found.items()}
    title = "Records a second by number of organisations"
    return line_chart(title, series, "organisations", "records/s", log_x=True)


def _growth(cases: Sequence[Case]) -> str:
    series = _over(cases, "records", "secs")
    return line_chart("Time by number of records: start, work, stop", series, "records", "seconds")


def _destinations(cases: Sequence[Case]) -> str:
    series = _over(cases, "destinations", "peak_mb")
    limits = {
        f"target at {short(case.params['destinations'])}": float(case.params["target_peak_mb"])
        for case in cases
        if "target_peak_mb" in case.params
    }
    title = "Peak memory by number of destinations"
    return line_chart(title, series, "destinations", "MB", log_x=True, limits=limits)


def _held(cases: Sequence[Case]) -> str:
    title = "State held per record that is not durable yet"
    series = _over(cases, "records", "bytes_per_record")
    return line_chart(title, series, "records", "bytes a record", log_x=True, log_y=True)


_PLOTS: dict[str, tuple[str, Callable[[Sequence[Case]], str]]] = {
    "headline": ("headline", _headline),
    "sizes": ("sizes", _sizes),
    "organisations": ("organisations", _organisations),
    "growth": ("growth", _growth),
    "destinations": ("destinations", _destinations),
    "held": ("held", _held),
}
