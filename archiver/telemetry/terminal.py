"""`dfe-archiver status`: the running archiver's status in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from archiver.telemetry.words import bytes_text, count_text, counted, secs_text, sentence

PARTITIONS_MAX = 15
FILES_MAX = 8
TROUBLES_MAX = 5
NAME_CHARS_MAX = 60
TEXT_CHARS_MAX = 1_000
ANSWER_BYTES_MAX = 64 << 20
ANSWER_SECS_MAX = 5.0
WATCH_SECS = 2.0

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLEAR = "\x1b[H\x1b[2J"


def show(url: str, watch: bool) -> int:
    """Print the status found at `url` (`http://host:9090`), again and again with `watch`.

    0 when the archiver is ready, 1 when it is not or does not answer; an interrupt ends `watch`.
    """
    if not watch:
        return _show_once(url, clear=False)
    outcome = 1
    try:
        while True:
            outcome = _show_once(url, clear=sys.stdout.isatty())
            time.sleep(WATCH_SECS)
    except KeyboardInterrupt:
        pass
    return outcome


def _show_once(url: str, *, clear: bool) -> int:
    try:
        body = fetch(url)
    except (OSError, ValueError) as error:
        text, outcome = f"{_plain(url)} does not answer: {_plain(error)}\n", 1
    else:
        text, outcome = render_text(body), 0 if body.get("ready") else 1
    sys.stdout.write((_CLEAR if clear else "") + text)
    sys.stdout.flush()
    return outcome


def fetch(url: str) -> dict[str, Any]:
    """The JSON of `/status`. Raises OSError or ValueError."""
    base = url if "://" in url else f"http://{url}"
    if not base.startswith(("http://", "https://")):
        raise ValueError("only http:// and https:// are known")
    # the archiver is near: a proxy meant for the way out would only be in the way
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{base.rstrip('/').removesuffix('/status')}/status", timeout=ANSWER_SECS_MAX) as answer:
        body = json.loads(answer.read(ANSWER_BYTES_MAX))
    if not isinstance(body, dict):
        raise ValueError("not a status")
    return body


def render_text(status: Mapping[str, Any]) -> str:
    """The status as lines of text. Takes what `/status` gives, from another version too."""
    lines = [_plain(_sentence(status))]
    told = lines[0].lower()
    lines += [f"  - {_plain(r)}" for r in status.get("not_ready", ()) if str(r).lower() not in told]
    for trouble in [t for t in status.get("troubles", ()) if not t.get("over")][:TROUBLES_MAX]:
        lines += ["", f"! {_plain(trouble.get('message'))} ({counted(trouble.get('count', 1), 'time')})"]
        lines += [f"  {_plain(trouble[name])}" for name in ("detail", "way_out") if trouble.get(name)]
    if "partitions" in status:
        lines += ["", *_numbers(status), "", *_partitions(status["partitions"]), "", *_files(status)]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(status: Mapping[str, Any]) -> str:
    return sentence(
        status.get("state", "starting"),
        not_ready=status.get("not_ready", ()),
        paused=status.get("paused", {}),
        partitions=len(status.get("partitions", ())),
        uploads_failing=status.get("uploads_failing", 0),
        archive_delay_secs=status.get("archive_delay_secs", 0.0),
    )


def _numbers(status: Mapping[str, Any]) -> Iterable[str]:
    def number(name: str) -> float:
        return float(status.get(name) or 0)

    up = secs_text(number("made_at_unix") - number("started_at_unix"))
    yield f"version {_plain(status.get('version'))}, writer {_plain(status.get('writer_id'))}, up {up}"
    yield (
        f"memory  {bytes_text(number('buffered_bytes') + number('queued_bytes'))}"
        f" of {bytes_text(number('buffered_bytes_max'))}"
    )
    yield (
        f"spool   {bytes_text(number('spool_bytes'))} of {bytes_text(number('spool_bytes_max'))},"
        f" {bytes_text(number('spool_free_bytes'))} free on disk"
    )
    yield (
        f"uploads {count_text(number('uploads_in_flight'))} of {count_text(number('uploads_in_flight_max'))}"
        f" running, {count_text(number('uploads_waiting'))} waiting,"
        f" {count_text(number('uploads_failing'))} failing"
    )
    yield (
        f"files   {count_text(number('open_files'))} open, {count_text(number('files_not_durable'))}"
        f" not durable; {bytes_text(number('uncommitted_archived_bytes'))} archived and not committed"
    )


def _partitions(partitions: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    worst = sorted(partitions, key=lambda p: -(0.5 if p.get("lag") is None else p["lag"]))
    columns = ("lag", "position", "low_water_mark", "committed", "stable_end")
    rows = [
        [_name(f"{p.get('topic')}[{p.get('partition')}]"), *(count_text(p.get(name)) for name in columns)]
        for p in worst[:PARTITIONS_MAX]
    ]
    yield from _table(["PARTITION", "LAG", "POSITION", "MARK", "COMMITTED", "END"], rows)
    if len(worst) > PARTITIONS_MAX:
        yield f"and {counted(len(worst) - PARTITIONS_MAX, 'partition')} that do not lag more"


def _files(status: Mapping[str, Any]) -> Iterable[str]:
    files = list(status.get("oldest", ()))[:FILES_MAX]
    rows = [
        [
            _name(file.get("key") or file.get("route")),
            _plain(file.get("state")),
            secs_text(file.get("age_secs", 0.0)),
            count_text(file.get("records", 0)),
            bytes_text(file.get("size", 0)),
        ]
        for file in files
    ]
    yield from _table(["OLDEST FILES", "STATE", "AGE", "RECORDS", "SIZE"], rows)


def _table(heads: list[str], rows: list[list[str]]) -> Iterable[str]:
    if not rows:
        return
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    for first, *rest in [heads, *rows]:
        cells = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells])


def _name(text: object) -> str:
    """Plain, and short enough for the first column: both ends tell more than the middle."""
    plain = _plain(text)
    half = NAME_CHARS_MAX // 2
    return plain if len(plain) <= NAME_CHARS_MAX else f"{plain[: half - 1]}…{plain[-half:]}"


def _plain(text: object) -> str:
    """Foreign text without anything a terminal would obey."""
    return _CONTROL.sub("?", str(text))[:TEXT_CHARS_MAX]
