"""The page and the terminal: what is wrong on top, hostile text harmless."""

from __future__ import annotations

import html.parser
import io
import json
import re
import time
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from archiver.status import FileStatus, Status, Trouble
from archiver.telemetry import HttpServer, Telemetry, page, terminal, words
from archiver.telemetry.http import status_json
from archiver.telemetry.state import StatusHolder
from tests.unit.telemetry_samples import FILES, PARTITIONS, a_status

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&\x1b[31m\u202e\udc80"


class Elements(html.parser.HTMLParser):
    """The tags and attributes of a document; void and unclosed ones are checked for balance."""

    VOID = frozenset({"meta", "link", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def a_trouble(**changes: Any) -> Trouble:
    values = {"at_unix": time.time() - 5, "message": "m", "detail": "d", "way_out": "w", "count": 1}
    return Trouble(**{**values, **changes})


def hostile_status() -> Status:
    return replace(
        a_status(),
        version=HOSTILE,
        writer_id=HOSTILE,
        state=HOSTILE,
        not_ready=(HOSTILE, HOSTILE),
        paused={HOSTILE: 1.0},
        partitions=(replace(PARTITIONS[0], topic=HOSTILE),),
        oldest=(replace(FILES[0], key=HOSTILE, route=HOSTILE, state=HOSTILE),),
    )


def test_hostile_text_stays_text() -> None:
    """Routes, topics and error texts are chosen by others."""
    status = hostile_status()
    trouble = a_trouble(message=HOSTILE, detail=HOSTILE, way_out=HOSTILE)
    text = page.render(status, [trouble, replace(trouble, over=True)], status.not_ready, 0.0)
    elements = Elements(text)
    assert elements.open == []
    assert not {"script", "img", "iframe", "form"} & set(elements.tags)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name == "style"]
    assert text.count("&lt;script&gt;alert(1)") >= 10


def test_hostile_text_is_served_whole_under_a_policy_that_lets_nothing_run() -> None:
    """Over HTTP, with a lone surrogate in it."""
    telemetry = Telemetry(stream=io.StringIO(), log_format="json")
    server = HttpServer("127.0.0.1:0", telemetry.status, telemetry.registry, lambda: None, None, 60)
    server.start()
    try:
        telemetry.status.publish(hostile_status())
        answer = httpx.get(f"http://127.0.0.1:{server.port}/", trust_env=False)
    finally:
        server.stop()
        telemetry.close()
    assert answer.status_code == 200
    assert Elements(answer.text).tags.count("html") == 1
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_fetched_from_elsewhere() -> None:
    elements = Elements(page.render(a_status(), [a_trouble()], (), 0.0))
    targets = [value for name, value in elements.attributes if name in ("src", "href")]
    assert all(not re.match(r"(?i)(https?:)?//", target) for target in targets)
    assert "url(" not in page.STYLE


def test_the_page_reloads_itself_and_fits_a_phone() -> None:
    text = page.render(None, [], ("starting",), 0.0)
    assert '<meta http-equiv="refresh" content="5">' in text
    assert "width=device-width" in text
    assert "Starting." in text


def test_trouble_is_on_top_errors_first_and_what_is_over_at_the_end() -> None:
    troubles = [
        a_trouble(message="gone-by", over=True),
        a_trouble(message="a-warning"),
        a_trouble(message="an-error", level="error"),
        a_trouble(message="long-ago", at_unix=time.time() - 86_400),
    ]
    text = page.render(a_status(), troubles, (), 0.0)
    places = [
        text.index(word)
        for word in ("an-error", "a-warning", "<h2>Bounds", "<h2>Partitions", "gone-by", "long-ago")
    ]
    assert places == sorted(places)
    assert 'class="state bad"' in text


def test_the_page_stays_small_however_much_there_is() -> None:
    """1,000 partitions and 100,000 routes: the furthest behind and the oldest, and how many there are."""
    partitions = tuple(replace(PARTITIONS[0], partition=number, lag=number) for number in range(1_000))
    file = FileStatus("r" * 1_000, "k" * 1_000, "open", 1, 1, 1, 1.0)
    status = replace(a_status(), partitions=partitions, oldest=(file,) * 100, files_not_durable=100_000)
    text = page.render(status, [a_trouble(detail="x" * 100_000)] * 20, (), 0.0)
    assert len(text) < 100_000
    assert "events[999]" in text
    assert "events[949]" not in text
    assert "the 50 furthest behind of 1,000" in text
    assert "the 20 oldest of 100,000 files" in text


def test_a_partition_that_the_broker_may_soon_cut_is_on_top_in_red() -> None:
    """Others lag more, and are kept for longer."""
    far = replace(PARTITIONS[0], lag=9_000, retention_headroom_secs=80_000.0, retention_secs=86_400.0)
    near = replace(PARTITIONS[0], partition=7, lag=5, retention_headroom_secs=600.0, retention_secs=86_400.0)
    text = page.render(replace(a_status(), partitions=(far, near)), [], (), 0.0)
    assert text.index("events[7]") < text.index("events[0]")
    assert text.count(" class=wrong>30 · 10 min<") == 1
    assert "30 · 22 h 13 min" in text


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(5, 10, '<rect width="50.0"'), (9, 10, 'class="full"'), (11, 10, 'class="over"'), (1, 0, 'width="0.0"')],
)
def test_a_bar_shows_its_share_and_warns(part: float, whole: float, expected: str) -> None:
    assert expected in page._bar("n", "a", "b", part, whole)


def test_what_matters_most_is_the_sentence() -> None:
    def said(state: str = "running", **changes: Any) -> str:
        values: dict[str, Any] = {
            "not_ready": (), "paused": {}, "partitions": 2, "uploads_failing": 0, "archive_delay_secs": 0.0
        }  # fmt: skip
        return words.sentence(state, **{**values, **changes})

    assert said() == "Archiving from 2 partitions; everything that was taken is in the archive."
    assert "older than 5 min 1 s is in the archive" in said(archive_delay_secs=301.0)
    assert "3 uploads being tried again" in said(archive_delay_secs=301.0, uploads_failing=3)
    assert said(not_ready=("a", "b")) == "Not ready: a (and 1 more reason)."
    assert said("paused", paused={"disk": 5.0, "spool": 90.0}, not_ready=("a",)).startswith(
        "Consumption has been paused for 1 min 30 s: the spool's bound"
    )
    assert said("stopping", paused={"disk": 5.0}).startswith("Stopping")


def test_numbers_in_words() -> None:
    assert [words.bytes_text(n) for n in (0, 1023, 1024, 10 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "10.0 GiB", "5.0 TiB"
    ]  # fmt: skip
    assert [words.secs_text(n) for n in (-1, 59, 60, 61, 3600, 3660, 86400, 90000)] == [
        "0 s", "59 s", "1 min", "1 min 1 s", "1 h", "1 h 1 min", "1 d", "1 d 1 h"
    ]  # fmt: skip


# --- terminal --------------------------------------------------------------------------------


def as_json(status: Status | None, *troubles: Trouble) -> dict[str, Any]:
    holder = StatusHolder(troubles=lambda: troubles)
    if status is not None:
        holder.publish(status)
    body: dict[str, Any] = json.loads(
        json.dumps(status_json(holder, () if status is None else status.not_ready))
    )
    return body


def test_the_terminal_tells_the_same() -> None:
    text = terminal.render_text(
        as_json(a_status(), a_trouble(message="broken", count=3), a_trouble(over=True))
    )
    lines = text.splitlines()
    assert lines[0] == "Archiving from 2 partitions; everything older than 12 s is in the archive."
    assert [line for line in lines if line.startswith("!")] == ["! broken (3 times)"]
    assert next(line for line in lines if line.startswith("events[0]")).split() == [
        "events[0]", "100", "50", "40", "40", "140"
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("new[3]")).split() == ["new[3]", *"–––––"]
    assert any("03-0001-3f9a.jsonl.zst" in line for line in lines)


def test_a_terminal_is_not_driven_by_foreign_text() -> None:
    trouble = a_trouble(message=HOSTILE, detail="a\nb\r\x9b2J")
    text = terminal.render_text(as_json(hostile_status(), trouble))
    assert not set(text) & set("\x1b\r\x9b\u202e")
    assert "\nb" not in text


def test_a_status_of_another_version_or_before_the_first_is_shown_as_far_as_it_goes() -> None:
    assert terminal.render_text({}) == "Starting.\n"
    assert terminal.render_text(as_json(None)).startswith("Starting.")
    body = as_json(a_status())
    for name in list(body):
        assert terminal.render_text({key: value for key, value in body.items() if key != name})


def test_show_asks_the_server_and_its_outcome_is_readiness(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(stream=io.StringIO(), log_format="json")
    server = HttpServer("127.0.0.1:0", telemetry.status, telemetry.registry, lambda: None, None, 60)
    server.start()
    try:
        telemetry.status.publish(a_status())
        assert terminal.show(f"http://127.0.0.1:{server.port}", watch=False) == 0
        assert terminal.show(f"127.0.0.1:{server.port}/", watch=False) == 0
        telemetry.status.publish(replace(a_status(), not_ready=("store: denied",)))
        assert terminal.show(f"http://127.0.0.1:{server.port}/status", watch=False) == 1
    finally:
        server.stop()
        telemetry.close()
    assert "Not ready: store: denied." in capsys.readouterr().out
    assert terminal.show(f"http://127.0.0.1:{server.port}", watch=False) == 1
    assert "does not answer" in capsys.readouterr().out
    assert terminal.show("file:///etc/passwd", watch=False) == 1
    assert "only http" in capsys.readouterr().out


def test_a_status_survives_json_whole() -> None:
    """What `/status` gives is all there is: it turns back into the same value."""
    status = a_status()
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(status))), Status) == status
