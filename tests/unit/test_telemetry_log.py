"""Log lines: one per event, rate-limited, and never with a secret in them."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import sys
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archiver import events as e
from archiver.telemetry import Telemetry
from archiver.telemetry.log import LineWriter
from archiver.telemetry.redact import MASK, TEXT_CHARS_MAX, Redactor
from archiver.telemetry.telemetry import LIMITED
from tests.harness.process import SLACK_SECS
from tests.unit.telemetry_samples import a_status


class Log:
    """A telemetry whose clock and output the test holds."""

    def __init__(self, **settings: Any) -> None:
        self.stream = io.StringIO()
        self.now = 1000.0
        self.telemetry = Telemetry(
            **{"log_format": "json", "stream": self.stream, "monotonic": lambda: self.now, **settings}
        )

    def text(self) -> str:
        assert self.telemetry.flush()
        return self.stream.getvalue()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def names(self) -> list[str]:
        return [line.get("event", line["message"]) for line in self.lines()]


@pytest.fixture
def log_with() -> Iterator[Callable[..., Log]]:
    made: list[Log] = []

    def make(**settings: Any) -> Log:
        made.append(Log(**settings))
        return made[-1]

    yield make
    for log in reversed(made):
        log.telemetry.close()


Make = Callable[..., Log]

RETRIED = e.UploadRetried("throttled", "k1", 3, 4.0, "SlowDown", "ask for a higher rate")


def test_an_event_is_one_line_with_a_constant_message_and_its_values(log_with: Make) -> None:
    """[O4]"""
    log = log_with()
    log.telemetry.emit(RETRIED)
    (line,) = log.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "warning",
        "event": "upload_retried",
        "message": e.UploadRetried.message,
        "kind": "throttled",
        "key": "k1",
        "attempt": 3,
        "wait_secs": 4.0,
        "detail": "SlowDown",
        "way_out": "ask for a higher rate",
    }


def test_every_event_of_a_level_that_is_wanted_is_logged(log_with: Make) -> None:
    log = log_with(level="debug")
    log.telemetry.emit(e.RecordsTaken(1, 0, 0, ()))
    log.telemetry.emit(e.CommitDone(1))
    assert log.names() == ["commit_done"]
    quiet = log_with(level="error")
    quiet.telemetry.emit(e.CommitDone(1))
    quiet.telemetry.emit(RETRIED)
    quiet.telemetry.emit(e.Fatal("x"))
    assert quiet.names() == ["fatal"]


@pytest.mark.parametrize(
    "event",
    [
        RETRIED,
        e.CommitFailed("timed out", 3),
        e.BrokerTrouble("_TRANSPORT", "refused"),
        e.Paused("spool", 10, 10),
        e.SpoolWriteFailed("EIO", 1),
        e.StoreDown("network", "refused"),
        e.TopicMissing("t"),
        e.RetentionNear("t", 0, 5, 4, 1),
        e.DeadLettered("too_large", "held", 1, "k"),
        e.FileRefusedEvent("too_large", "k", 1, ""),
        e.PushRefused("full", "the queue is full"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_repeated_failure_is_one_line_per_interval(log_with: Make, event: e.Event) -> None:
    """[O4], c26: at once, then once in 30 s with the count left out."""
    log = log_with()
    for _ in range(100):
        log.telemetry.emit(event)
        log.now += 0.5
    assert [line.get("suppressed", 0) for line in log.lines()] == [0, 59]


def test_every_kind_of_failure_that_is_limited_is_tried_above() -> None:
    """A new one in the table is to be added to the test."""
    assert len(LIMITED) == 11


@pytest.mark.parametrize(
    "event", [e.OffsetsSkipped("t", 0, 5, 100, "out_of_range"), e.NoCommittedOffset("t", 0, 0, 0, 9)]
)
def test_skipped_offsets_are_never_silent(log_with: Make, event: e.Event) -> None:
    """[D9]: each time, with topic, partition and both offsets."""
    log = log_with()
    log.telemetry.emit(event)
    log.telemetry.emit(event)
    assert len(log.lines()) == 2
    assert {"topic", "partition"} <= log.lines()[1].keys()


def test_a_commit_that_succeeds_again_is_told_with_the_count(log_with: Make) -> None:
    log = log_with()
    for _ in range(7):
        log.telemetry.emit(e.CommitFailed("timed out", 1))
        log.now += 1
    log.telemetry.emit(e.CommitDone(1))
    log.telemetry.emit(e.CommitDone(1))
    assert log.names() == ["commit_failed", "commit_recovered"]
    assert (log.lines()[1]["failures"], log.lines()[1]["secs"]) == (7, 7.0)


def test_a_pause_that_flaps_does_not_fill_the_log_and_one_that_stays_is_told(log_with: Make) -> None:
    """c26"""
    log = log_with()
    for _ in range(200):
        log.telemetry.emit(e.Paused("memory", 10, 10))
        log.now += 0.01
        log.telemetry.emit(e.Resumed("memory", 0.01))
    log.telemetry.emit(e.Paused("memory", 10, 10))
    assert log.names() == ["paused", "resumed"]
    log.now += 31
    log.telemetry.status.publish(a_status())
    log.telemetry.status.publish(a_status())
    assert log.names() == ["paused", "resumed", "paused"]
    assert log.lines()[2]["suppressed"] == 199


def test_pushes_that_are_taken_again_end_the_refusals_of_a_full_queue_alone(log_with: Make) -> None:
    log = log_with()
    for _ in range(3):
        log.telemetry.emit(e.PushRefused("full", "the queue is full"))
        log.telemetry.emit(e.PushRefused("format", "MSGPACK"))
    log.telemetry.emit(e.PushesTaken("full", 3, 1.5))
    assert log.names() == ["push_refused", "push_refused", "pushes_taken"]
    assert {trouble.detail.split(" ")[0]: trouble.over for trouble in log.telemetry.troubles()} == {
        "the": True,
        "MSGPACK": False,
    }
    assert all(trouble.way_out for trouble in log.telemetry.troubles())


def test_what_was_left_out_is_told_at_the_end(log_with: Make) -> None:
    log = log_with()
    for _ in range(5):
        log.telemetry.emit(RETRIED)
    log.telemetry.close()
    assert [json.loads(line).get("suppressed") for line in log.stream.getvalue().splitlines()] == [None, 4]


def test_a_store_that_answers_again_ends_its_troubles(log_with: Make) -> None:
    telemetry = log_with().telemetry
    telemetry.emit(RETRIED)
    telemetry.emit(RETRIED)
    telemetry.emit(e.StoreDown("network", "refused"))
    down, retried = telemetry.troubles()
    assert (down.message, down.over, down.level) == (e.StoreDown.message, False, "error")
    assert (retried.count, retried.over, retried.way_out) == (2, False, "ask for a higher rate")
    telemetry.emit(e.StoreRecovered(3, 2.0))
    assert all(trouble.over for trouble in telemetry.troubles())
    telemetry.emit(RETRIED)
    assert [(t.over, t.count) for t in telemetry.troubles()] == [(False, 1), (True, 1)]


def test_the_file_whose_failure_was_seen_last_ends_the_trouble_as_it_is_archived(log_with: Make) -> None:
    """c02: one object failed, the store was never away."""
    telemetry = log_with().telemetry
    telemetry.emit(RETRIED)
    telemetry.emit(e.FileArchived("another", 1, 1, 1, 2, 0.1))
    assert not telemetry.troubles()[0].over
    telemetry.emit(e.FileArchived("k1", 1, 1, 1, 4, 0.1))
    assert telemetry.troubles()[0].over


def test_troubles_are_bounded_and_many_partitions_are_one(log_with: Make) -> None:
    telemetry = log_with().telemetry
    for partition in range(1_000):
        telemetry.emit(e.RetentionNear("t", partition, 5, 4, 1))
    assert [trouble.count for trouble in telemetry.troubles()] == [1_000]
    for code in range(1_000):
        telemetry.emit(e.BrokerTrouble(f"c{code}", ""))
    assert len(telemetry.troubles()) == 20
    assert "c999" in telemetry.troubles()[0].detail


# --- secrets --------------------------------------------------------------------------------

SECRETS = {
    "plain": "hunter2-but-longer",
    "hostile": "p\"a's\\s é/+=%&<w>",
    "short": "x9",
    "structural": "info",
    "account key": "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4/w==",
    "connection string": "DefaultEndpointsProtocol=https;AccountName=a;"
    "AccountKey=c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA==;EndpointSuffix=x",
    "sas": "sv=2024-11-04&ss=b&sig=Ab%2Bc%2Fdefghijklmn%3D&se=2030",
    "service account": json.dumps(
        {
            "client_email": "a@b",
            "private_key": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwg\n-----END",
        }
    ),
}
INNER = (
    "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA==",
    "Ab%2Bc%2Fdefghijklmn%3D",
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
)


def spellings(secret: str) -> set[str]:
    return {
        secret,
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
        repr(secret.encode())[2:-1],
    }


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_way_of_saying_a_secret_reaches_the_log(log_with: Make, name: str, log_format: str) -> None:
    """[S7], c32: through an event, an SDK's logger, a traceback, a thread, a warning, a trouble."""
    secret = SECRETS[name]
    log = log_with(secrets=[secret], log_format=log_format, level="debug")
    said = sorted(spellings(secret)) + [inner for inner in INNER if inner in secret]
    sdk = logging.getLogger("botocore.endpoint")
    for number, text in enumerate(said):
        log.telemetry.emit(e.BrokerTrouble(f"c{number}", f"login with <{text}> failed", f"not <{text}>"))
        sdk.debug("sending %s", {"a header": f"<{text}>", "body": f"<{text}>".encode()})
        sdk.warning(f"<{text}>")
        try:
            raise ValueError(f"<{text}>") from KeyError(f"<{text}>")
        except ValueError:
            logging.getLogger("google.auth").exception("failed")
        warnings.warn(f"<{text}>", stacklevel=1)
        thread = threading.Thread(target=lambda text=text: int(f"<{text}>"))
        thread.start()
        thread.join()
    shown = log.text()
    assert shown.count("login with") == len(said)
    assert MASK in shown
    for text in said:
        for spelt in spellings(text):
            assert f"<{spelt}>" not in shown
        assert all(
            f"<{text}>" not in trouble.detail + trouble.way_out for trouble in log.telemetry.troubles()
        )
    if log_format == "json":
        assert all("level" in json.loads(line) for line in shown.splitlines())


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (
            "Authorization: AWS4-HMAC-SHA256 Credential=AKIA/x, Signature=0123456789abcdef0123",
            "0123456789abcdef",
        ),
        ("{'Authorization': 'Bearer ya29.abcdefghi', 'Accept': '*/*'}", "ya29"),
        ("headers=[(b'authorization', b'SharedKey acct:c2lnbmF0dXJl')]", "c2lnbmF0dXJl"),
        ("x-amz-security-token:FwoGZXIvYXdzEBYaD", "FwoGZXIvYXdz"),
        ('"X-Amz-Security-Token": "FwoGZXIvYXdzEBYaD"', "FwoGZXIvYXdz"),
        ("GET /c/b?sv=2024&sig=a%2Bb%3D HTTP/1.1", "a%2Bb"),
        ("PUT /b/k?X-Amz-Signature=deadbeef&x=1", "deadbeef"),
        ("<SecretAccessKey>wJalrXUtnFEMI</SecretAccessKey>", "wJalrXUtnFEMI"),
        ('{"access_token": "ya29.c.b0Aaek", "expires_in": 3599}', "ya29.c"),
        ("proxy http://user:pa55word@proxy:3128", "pa55word"),
        ("Set-Cookie: session=abcdef", "abcdef"),
        ("sasl.password=swordfish", "swordfish"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----", "MIIEvQ"),
        ("Proxy-Authorization: Basic " + base64.b64encode(b"u:p").decode(), "dTpw"),
    ],
)
def test_what_an_sdk_says_of_credentials_nobody_told_us_is_hidden(text: str, hidden: str) -> None:
    """[S7]: tokens that an SDK fetched by itself are secrets too."""
    assert hidden in text
    assert hidden not in Redactor().text(text)


def test_ordinary_texts_stay_as_they_are() -> None:
    for text in (
        "s3://bucket/archives/events/acme/2026/10/29/03-0001-3f9a.jsonl.zst",
        "NoSuchKey: the specified key does not exist",
        "kafka.sasl_password is missing",
        "token bucket is empty; signature mismatch; basic checks passed",
        "broker-1:9092/bootstrap: Connect to ipv4#127.0.0.1:9092 failed: Connection refused",
    ):
        assert Redactor(["hunter2-but-longer"]).text(text) == text


@given(st.text(min_size=4), st.text(), st.text())
@settings(max_examples=200, deadline=None)
def test_no_text_around_a_secret_saves_it(secret: str, before: str, after: str) -> None:
    """[S7]; a mask may stand for more than the secret, never for less."""
    secret = f"{secret.strip()}#4t"
    shown = Redactor([secret]).text(f"{before}{secret}{after}")
    assert secret not in shown.replace(MASK, "")
    assert MASK in shown


def test_a_redactor_does_not_show_itself() -> None:
    assert "hunter2" not in repr(Redactor(["hunter2"]))


def test_a_long_text_is_cut_after_it_was_searched() -> None:
    secret = "s3cr3t-" * 4
    shown = Redactor([secret]).text("x" * (TEXT_CHARS_MAX - 10) + secret + "y" * 100_000)
    assert "s3cr3t" not in shown
    assert len(shown) < TEXT_CHARS_MAX + 100


# --- other people's loggers -------------------------------------------------------------------


def test_sdks_speak_from_warning_on_unless_the_level_is_debug(log_with: Make) -> None:
    """[O4]: in the same JSON."""
    for name in ("botocore.hooks", "azure.core", "urllib3.connectionpool", "librdkafka", "google.auth"):
        log = log_with(level="info")
        logging.getLogger(name).info("no")
        logging.getLogger(name).warning("yes %d", 1)
        assert [(line["message"], line["logger"]) for line in log.lines()] == [("yes 1", name)]
        log.telemetry.close()
    log = log_with(level="debug")
    logging.getLogger("botocore.hooks").debug("now")
    assert log.names() == ["now"]


def test_an_sdk_that_repeats_itself_is_limited_too(log_with: Make) -> None:
    """An outage gives hundreds of lines that differ in their numbers alone."""
    log = log_with()
    for number in range(500):
        logging.getLogger("librdkafka").error("FAIL: refused (%s identical errors)" % number)  # noqa: UP031, G002
    logging.getLogger("librdkafka").error("another thing")
    log.now += 31
    logging.getLogger("librdkafka").error("FAIL: refused (7 identical errors)")
    assert [line.get("suppressed", 0) for line in log.lines()] == [0, 0, 499]


def test_a_record_that_cannot_be_rendered_is_a_line_without_its_values(
    log_with: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python would print message and arguments to stderr as they are."""
    log = log_with()
    logging.getLogger("sdk").warning("%d", "hunter2")
    assert log.names() == ["a log record could not be rendered"]
    assert "hunter2" not in log.text() + capfd.readouterr().err


def test_hostile_text_cannot_start_a_line_or_an_escape_sequence(log_with: Make) -> None:
    text = 'a\n{"level":"error"}\r\x1b[31m\u2028\x85\udc80 end'
    for log_format in ("json", "console"):
        log = log_with(log_format=log_format)
        log.telemetry.emit(e.BrokerTrouble("c", text))
        logging.getLogger("sdk").warning("%s", text)
        assert len(log.text().splitlines()) == 2
        assert "\x1b[31m" not in log.text()
        log.telemetry.close()


def test_auto_is_console_on_a_terminal_alone(log_with: Make) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    log = log_with(log_format="auto", stream=terminal)
    log.telemetry.emit(e.Fatal("broken"))
    log.telemetry.flush()
    assert "broken" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    log.telemetry.close()
    piped = log_with(log_format="auto")
    piped.telemetry.emit(e.Fatal("broken"))
    assert piped.lines()[0]["reason"] == "broken"


def test_a_reader_that_stopped_reading_stops_nobody() -> None:
    """Emit must never block: lines beyond the bound are dropped and counted."""
    read_end, write_end = os.pipe()
    stream = os.fdopen(write_end, "w")
    lines = LineWriter(stream, lines_max=50)
    began = time.monotonic()
    for _ in range(5_000):
        lines.write("x" * 10_000)
    assert time.monotonic() - began < SLACK_SECS
    assert lines.dropped > 0
    assert not lines.flush(0.05)
    os.close(read_end)
    lines.close(5)
    assert not lines._thread.is_alive()


def test_closing_gives_logging_back_as_it_was(log_with: Make) -> None:
    root = logging.getLogger()
    before = (
        root.handlers[:],
        root.level,
        logging.getLogger("botocore").level,
        sys.excepthook,
        threading.excepthook,
    )
    log = log_with(level="debug")
    assert root.handlers != before[0]
    log.telemetry.close()
    after = (
        root.handlers[:],
        root.level,
        logging.getLogger("botocore").level,
        sys.excepthook,
        threading.excepthook,
    )
    assert after == before


def test_threads_may_emit_at_once(log_with: Make) -> None:
    log = log_with()

    def emit_many() -> None:
        for number in range(200):
            log.telemetry.emit(e.FileArchived(f"k{number}", 1, 1, 1, 1, 0.1))

    threads = [threading.Thread(target=emit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.lines()) == 800
