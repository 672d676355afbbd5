"""The dashboard as data, and a picture of it for where no Grafana runs.

`picture` asks a Prometheus for every panel and draws what Grafana would, plainly: enough to see whether
an operator finds the answers. It is no substitute for Grafana's own layout and colours.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.prometheus import Prometheus

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dfe-archiver.dashboard.json"
CELL, UNIT = 62, 38
COLORS = {"green": "#2f9e44", "yellow": "#e0a800", "red": "#d6303c", "#6e7687": "#6e7687"}
LINES = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#fa6400")


def panels() -> list[dict[str, Any]]:
    """Every panel but rows."""
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def expressions(panel: Mapping[str, Any]) -> list[str]:
    """What a panel asks, with every job and replica chosen."""
    return [target["expr"].replace("$job", ".*").replace("$instance", ".*") for target in panel["targets"]]


def picture(prometheus: Prometheus, start: float, end: float) -> str:
    """An HTML page of all panels with the data between two Unix times."""
    rows = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] == "row"]
    parts = [_box(row["gridPos"], f"<h3>{html.escape(row['title'])}</h3>", "row") for row in rows]
    for panel in panels():
        draw = _lines if panel["type"] == "timeseries" else _values
        body = draw(panel, prometheus, start, end)
        title = f"<h2>{html.escape(panel['title'])}</h2>"
        parts.append(_box(panel["gridPos"], title + body, panel["type"]))
    style = (
        "body{background:#111217;color:#d8d9da;font:12px sans-serif;margin:0}"
        "div.p{position:absolute;box-sizing:border-box;padding:6px;border:2px solid #111217;"
        "background:#181b1f;overflow:hidden}h2{font-size:13px;margin:0 0 4px}h3{margin:6px}"
        ".big{font-size:34px;text-align:center;padding:16px 0;border-radius:3px;color:#fff}"
        ".some{font-size:16px;padding:5px;margin:2px;border-radius:3px;color:#fff}"
    )
    return f"<meta charset=utf-8><style>{style}</style>{''.join(parts)}"


def _box(at: Mapping[str, int], body: str, kind: str) -> str:
    where = (
        f"left:{at['x'] * CELL}px;top:{at['y'] * UNIT}px;width:{at['w'] * CELL}px;height:{at['h'] * UNIT}px"
    )
    return f'<div class="p {kind}" style="{where}">{body}</div>'


def _legend(panel: Mapping[str, Any], number: int, labels: Mapping[str, str]) -> str:
    text: str = panel["targets"][number]["legendFormat"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text or " ".join(labels.get(name, "") for name in ("instance", "state", "version"))


def _shown(value: float, panel: Mapping[str, Any]) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    for mapping in defaults.get("mappings", ()):
        if (known := mapping["options"].get(f"{value:g}")) is not None:
            return str(known["text"])
    unit = defaults["unit"]
    if unit == "percentunit":
        return f"{value:.0%}"
    for size, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if unit in ("bytes", "Bps") and value >= size:
            return f"{value / size:.1f} {name}B{'/s' if unit == 'Bps' else ''}"
    suffix = {"s": " s", "rec/s": " rec/s", "ops": "/s", "bytes": " B", "Bps": " B/s"}.get(unit, "")
    return f"{value:,.{0 if value >= 10 else 2}f}".removesuffix(".00") + suffix


def _color(value: float, panel: Mapping[str, Any]) -> str:
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[reached[-1]] if reached else "#2b2f36"


def _values(panel: Mapping[str, Any], prometheus: Prometheus, _start: float, _end: float) -> str:
    found = [
        (_legend(panel, number, series["metric"]), float(series["value"][1]))
        for number, expression in enumerate(expressions(panel))
        for series in prometheus.query(expression)
    ]
    nothing = panel["fieldConfig"]["defaults"].get("noValue", "No data")
    if not found:
        return f'<div class=big style="background:#2f9e44">{nothing}</div>'
    if len(panel["targets"]) == 1 and panel["type"] == "stat":
        value = found[0][1]
        return f'<div class=big style="background:{_color(value, panel)}">{_shown(value, panel)}</div>'
    return "".join(_some(name, value, panel) for name, value in found)


def _some(name: str, value: float, panel: Mapping[str, Any]) -> str:
    color = _color(value, panel)
    if panel["type"] == "bargauge":
        share = min(max(value, 0), 1) * 100
        color = f"linear-gradient(90deg,{color} {share:.0f}%,#2b2f36 {share:.0f}%)"
    text = name if panel["type"] == "table" else f"{name} {_shown(value, panel)}"
    return f'<div class=some style="background:{color}">{html.escape(text)}</div>'


def _lines(panel: Mapping[str, Any], prometheus: Prometheus, start: float, end: float) -> str:
    series = list(_series(panel, prometheus, start, end))
    width, height = panel["gridPos"]["w"] * CELL - 16, panel["gridPos"]["h"] * UNIT - 62
    top = max((value for _, points in series for _, value in points), default=0) or 1
    drawn, names = [], []
    for number, (name, points) in enumerate(series):
        color = LINES[number % len(LINES)]
        path = " ".join(
            f"{(at - start) / (end - start) * width:.1f},{height - value / top * (height - 8):.1f}"
            for at, value in points
        )
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        names.append(f'<span style="color:{color}">■</span> {html.escape(name)} ')
    axis = f'<text x="2" y="10" fill="#888">{_shown(top, panel)}</text>'
    empty = "" if series else f'<text x="{width // 2}" y="{height // 2}" fill="#888">No data</text>'
    picture = f'<svg width="{width}" height="{height}">{axis}{empty}{"".join(drawn)}</svg>'
    return picture + f"<div>{''.join(names)}</div>"


def _series(
    panel: Mapping[str, Any], prometheus: Prometheus, start: float, end: float
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    for number, expression in enumerate(expressions(panel)):
        for found in prometheus.query_range(expression, start, end, max((end - start) / 200, 1)):
            points = [(at, float(value)) for at, value in found["values"] if value != "NaN"]
            yield _legend(panel, number, found["metric"]), points
