"""The page at `/`: how it is going, readable on a phone, whatever is wrong on top.

Rendered whole on the server, without scripts or anything fetched. Everything that comes from
outside (topics, routes, error texts) goes through `_text`, and the policy lets nothing else run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import time
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from archiver.status import FileStatus, PartitionStatus, Status, Trouble
from archiver.telemetry.words import (
    bytes_text,
    count_text,
    counted,
    secs_text,
    sentence,
)

REFRESH_SECS = 5

PARTITIONS_MAX = 50
"""The page shows so many, the furthest behind first; `/status` has them all."""

FILES_MAX = 20
TEXT_CHARS_MAX = 400
NEWS_SECS = 900
"""An error that has neither recurred for so long nor recovered is no longer on top."""

FULL = 0.8
"""Consumption resumes below this share of a bound ([B2]); above it the bar is a warning."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b2027;--soft:#5d6875;--line:#e2e6ea;--ground:#f5f6f8;--card:#fff;
--good:#1a7f4b;--warn:#b06a00;--bad:#c4302b;--good-tint:#e5f4ec;--warn-tint:#fdf1dc;--bad-tint:#fdeae9;--bar:#3b6fd4}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#98a3b0;--line:#2b323b;--ground:#12161b;--card:#1a1f26;
--good:#4cc38a;--warn:#f0a83c;--bad:#ff7b72;--good-tint:#12281e;--warn-tint:#2e2412;--bad-tint:#341a1a;--bar:#6a9bff}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.45;-webkit-text-size-adjust:100%;
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:16px}
header{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;
justify-content:space-between;color:var(--soft);font-size:13px}
header b{color:var(--ink);font-size:15px}
.state{margin:12px 0 16px;padding:16px 20px;border-radius:12px;
background:var(--good-tint);border:1px solid var(--good)}
.state.warn{background:var(--warn-tint);border-color:var(--warn)}
.state.bad{background:var(--bad-tint);border-color:var(--bad)}
.state h1{margin:0;font-size:21px;line-height:1.3;font-weight:650;overflow-wrap:anywhere}
.state ul{margin:8px 0 0;padding-left:20px;overflow-wrap:anywhere}
h2{margin:28px 0 10px;font-size:13px;font-weight:650;
letter-spacing:.04em;text-transform:uppercase;color:var(--soft)}
h2 small{font-size:13px;font-weight:400;letter-spacing:0;text-transform:none}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px}
.trouble{padding:12px 16px;margin:0 0 10px;border-left:4px solid var(--warn);overflow-wrap:anywhere}
.trouble.error{border-left-color:var(--bad)}.trouble.over{border-left-color:var(--good)}
.trouble p{margin:4px 0 0}.trouble .detail{color:var(--soft);font-size:14px}
.trouble .head{display:flex;flex-wrap:wrap;gap:2px 12px;justify-content:space-between;font-weight:600}
.trouble .head span{color:var(--soft);font-weight:400;font-size:13px}
.numbers,.bounds{display:grid;gap:10px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.bounds{grid-template-columns:repeat(auto-fit,minmax(220px,1fr))}
.numbers .card,.bounds .card{padding:12px 16px}
dl,dd,dt{margin:0}dt{color:var(--soft);font-size:13px}dd{font-size:22px;font-weight:600;line-height:1.3}
dd small{font-size:13px;font-weight:400;color:var(--soft);white-space:nowrap}
.numbers small{display:block;min-height:1.4em}
.bounds dd{font-size:17px}
svg{display:block;width:100%;height:8px;margin-top:8px;border-radius:4px;background:var(--line)}
rect{fill:var(--bar)}rect.full{fill:var(--warn)}rect.over{fill:var(--bad)}
.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:14px}
th,td{padding:8px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:14em}
td.wrong{color:var(--warn);font-weight:600}
.key{font:13px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.empty{padding:14px 16px;color:var(--soft);margin:0}
footer{margin:28px 0 8px;color:var(--soft);font-size:13px}a{color:inherit}
@media(max-width:640px){main{padding:12px}.state h1{font-size:19px}
.numbers,.bounds{grid-template-columns:1fr 1fr}.bounds small{display:block}
thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
table,tbody{display:block}
tr{display:grid;grid-template-columns:repeat(auto-fit,minmax(92px,1fr));gap:4px 12px;padding:10px 16px;
border-bottom:1px solid var(--line)}
tr:last-child{border-bottom:0}td,td:first-child{display:block;text-align:left;border:0;padding:0;min-width:0}
td:first-child{grid-column:1/-1;font-weight:600}
td[data-is]::before{content:attr(data-is);display:block;color:var(--soft);font-size:12px;font-weight:400}}
""".strip()

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_TONES = {"good": "#1a7f4b", "warn": "#d98a0b", "bad": "#c4302b"}


def render(
    status: Status | None, troubles: Sequence[Trouble], not_ready: Sequence[str], turn_age_secs: float
) -> str:
    """The whole document. `status` is None before the first snapshot."""
    now = time.time()
    current = [t for t in troubles if not t.over and now - t.at_unix < NEWS_SECS]
    past = [t for t in troubles if t.over or now - t.at_unix >= NEWS_SECS]
    current.sort(key=lambda trouble: trouble.level != "error")
    tone = _tone(status, not_ready, current)
    body = [_header(status, now), _state(status, not_ready, tone)]
    body += [_trouble(trouble, now) for trouble in current]
    if status is not None:
        body += [_numbers(status), _bounds(status)]
        body += [_partitions(status.partitions), _files(status.oldest, status.files_not_durable)]
    if past:
        body += ["<h2>Earlier errors</h2>", *(_trouble(trouble, now) for trouble in past)]
    body.append(_footer(status, turn_age_secs))
    return _document(tone, "".join(body))


def _document(tone: str, body: str) -> str:
    circle = f"<circle cx='8' cy='8' r='7' fill='{_TONES[tone]}'/>"
    icon = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{circle}</svg>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_SECS}"><meta name="robots" content="noindex">'
        f'<link rel="icon" href="data:image/svg+xml,{quote(icon)}">'
        f"<title>dfe-archiver</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def _tone(status: Status | None, not_ready: Sequence[str], current: Sequence[Trouble]) -> str:
    if status is not None and (not_ready or any(trouble.level == "error" for trouble in current)):
        return "bad"
    calm = status is not None and status.state == "running" and not status.paused and not current
    return "good" if calm else "warn"


def _header(status: Status | None, now: float) -> str:
    if status is None:
        return "<header><b>dfe-archiver</b></header>"
    return (
        f"<header><b>dfe-archiver</b><span>version {_text(status.version)} · writer {_text(status.writer_id)}"
        f" · up {secs_text(now - status.started_at_unix)}</span></header>"
    )


def _state(status: Status | None, not_ready: Sequence[str], tone: str) -> str:
    if status is None:
        words = "Starting."
    else:
        words = sentence(
            status.state,
            not_ready=not_ready,
            paused=status.paused,
            partitions=len(status.partitions),
            uploads_failing=status.uploads_failing,
            archive_delay_secs=status.archive_delay_secs,
        )
    told = [reason for reason in not_ready if reason not in words and reason != "starting"]
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in told)
    return (
        f'<div class="state {tone}"><h1>{_text(words)}</h1>{f"<ul>{reasons}</ul>" if reasons else ""}</div>'
    )


def _trouble(trouble: Trouble, now: float) -> str:
    kind = "over" if trouble.over else "error" if trouble.level == "error" else "warning"
    when = f"{secs_text(now - trouble.at_unix)} ago"
    times = f"{count_text(trouble.count)} times, last {when}" if trouble.count > 1 else when
    detail = f'<p class="detail">{_text(trouble.detail)}</p>' if trouble.detail else ""
    way_out = f"<p>→ {_text(trouble.way_out)}</p>" if trouble.way_out and not trouble.over else ""
    return (
        f'<div class="card trouble {kind}"><div class="head">{_text(trouble.message)}'
        f"<span>{times}{', recovered' if trouble.over else ''}</span></div>{detail}{way_out}</div>"
    )


def _numbers(status: Status) -> str:
    lags = [partition.lag for partition in status.partitions if partition.lag is not None]
    numbers = (
        ("Partitions", count_text(len(status.partitions)), "assigned"),
        ("Archive delay", secs_text(status.archive_delay_secs), "the oldest record"),
        ("Consumer lag", count_text(sum(lags)) if lags else "–", "records" if lags else ""),
        ("Open files", count_text(status.open_files), f"{count_text(status.files_not_durable)} not durable"),
        (
            "Uploads waiting",
            count_text(status.uploads_waiting),
            f"{count_text(status.uploads_failing)} failing",
        ),
        ("Not committed", bytes_text(status.uncommitted_archived_bytes), "archived"),
    )
    cards = "".join(
        f'<dl class="card"><dt>{name}</dt><dd>{value} <small>{more}</small></dd></dl>'
        for name, value, more in numbers
    )
    return f'<h2>Now</h2><div class="numbers">{cards}</div>'


def _bounds(status: Status) -> str:
    held, held_max = status.buffered_bytes + status.queued_bytes, status.buffered_bytes_max
    free, least = status.spool_free_bytes, status.spool_free_bytes_min
    bars = (
        _bar("Memory", bytes_text(held), bytes_text(held_max), held, held_max),
        _bar("Spool", bytes_text(status.spool_bytes), bytes_text(status.spool_bytes_max),
             status.spool_bytes, status.spool_bytes_max),
        # how much of what is free is kept free
        _bar("Disk free", bytes_text(free), f"at least {bytes_text(least)}", least, max(free, 1), of=""),
        _bar("Uploads", count_text(status.uploads_in_flight), count_text(status.uploads_in_flight_max),
             status.uploads_in_flight, status.uploads_in_flight_max, warns=False),
    )  # fmt: skip
    return f'<h2>Bounds</h2><div class="bounds">{"".join(bars)}</div>'


def _bar(
    name: str, held: str, bound: str, part: float, whole: float, *, of: str = "of ", warns: bool = True
) -> str:
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    kind = ' class="over"' if warns and share >= 1 else ' class="full"' if warns and share >= FULL else ""
    return (
        f'<dl class="card"><dt>{name}</dt><dd>{held} <small>{of}{bound}</small></dd>'
        f'<svg viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{share:.0%}">'
        f'<rect{kind} width="{share * 100:.1f}" height="8"/></svg></dl>'
    )


def _partitions(partitions: Sequence[PartitionStatus]) -> str:
    if not partitions:
        return '<h2>Partitions</h2><div class="card"><p class="empty">No partition is assigned.</p></div>'
    # what the broker may soon delete, then the furthest behind; those of which nothing is known come after
    worst = sorted(
        partitions,
        key=lambda p: (not p.retention_is_near, -(0.5 if p.lag is None else p.lag), p.topic, p.partition),
    )
    rows = (
        _row(
            _text(f"{p.topic}[{p.partition}]"),
            (
                ("lag", f"<b>{count_text(p.lag)}</b>", False),
                ("position", count_text(p.position), False),
                ("mark", count_text(p.low_water_mark), False),
                ("committed", count_text(p.committed), False),
                ("end", count_text(p.stable_end), False),
                ("headroom", _headroom(p), p.retention_is_near),
            ),
        )
        for p in worst[:PARTITIONS_MAX]
    )
    shown = f"the {PARTITIONS_MAX} furthest behind of {count_text(len(partitions))}"
    note = shown if len(partitions) > PARTITIONS_MAX else count_text(len(partitions))
    heads = ("Partition", "Lag", "Position", "Low-water mark", "Committed", "End", "Headroom")
    return f"<h2>Partitions <small>{note}</small></h2>{_table(heads, rows)}"


def _headroom(partition: PartitionStatus) -> str:
    """In records, and in time where the topic deletes by time."""
    records, secs = partition.retention_headroom_records, partition.retention_headroom_secs
    return count_text(records) if secs is None else f"{count_text(records)} · {secs_text(secs)}"


def _files(files: Sequence[FileStatus], not_durable: int) -> str:
    if not files:
        return '<h2>Files</h2><div class="card"><p class="empty">Nothing waits to become durable.</p></div>'
    rows = (
        _row(
            f'<span class="key">{_text(file.key or file.route)}</span>',
            (
                ("state", _text(file.state), file.state == "refused"),
                ("age", secs_text(file.age_secs), False),
                ("records", count_text(file.records), False),
                ("raw", bytes_text(file.raw_bytes), False),
                ("file", bytes_text(file.size), False),
            ),
        )
        for file in files[:FILES_MAX]
    )
    shown = min(len(files), FILES_MAX)
    note = f"the {shown} oldest of {counted(not_durable, 'file')} that the store has not confirmed"
    heads = ("Key", "State", "Age", "Records", "Raw", "In the file")
    return f"<h2>Files <small>{note}</small></h2>{_table(heads, rows)}"


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(first: str, cells: Iterable[tuple[str, str, bool]]) -> str:
    """`first` and the values are HTML already; each cell carries its name for narrow screens."""
    rest = "".join(
        f'<td data-is="{name}"{" class=wrong" if stands_out else ""}>{value}</td>'
        for name, value, stands_out in cells
    )
    return f"<tr><td>{first}</td>{rest}</tr>"


def _footer(status: Status | None, turn_age_secs: float) -> str:
    made = ""
    if status is not None:
        made = time.strftime("As of %Y-%m-%d %H:%M:%S UTC, ", time.gmtime(status.made_at_unix))
    return (
        f"<footer>{made}the loop turned {secs_text(turn_age_secs)} ago. Reloads every {REFRESH_SECS} s. "
        '<a href="status">status</a> · <a href="metrics">metrics</a> · <a href="readyz">readyz</a></footer>'
    )


def _text(text: str) -> str:
    """Foreign text: escaped, bounded, and kept from turning the direction of what is around it."""
    if len(text) > TEXT_CHARS_MAX:
        text = f"{text[:TEXT_CHARS_MAX]}…"
    return f"<bdi>{html.escape(text)}</bdi>"
