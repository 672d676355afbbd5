"""Where every log line goes, ours and the SDKs': redacted, one event a line, JSON or for a terminal ([O4]).

Lines are made on the thread that logs and written by a thread of their own, so that a terminal or
pipe that has stopped reading cannot stop the loop; what does not fit in the queue is counted.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from archiver.telemetry.ratelimit import RateLimiter
from archiver.telemetry.redact import Redactor

Format = Literal["auto", "json", "console"]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

SDK_LOGGERS = (
    "asyncio",
    "azure",
    "boto3",
    "botocore",
    "chardet",
    "charset_normalizer",
    "confluent_kafka",
    "google",
    "grpc",
    "httpcore",
    "httpx",
    "librdkafka",
    "msal",
    "requests",
    "s3transfer",
    "starlette",
    "urllib3",
    "uvicorn",
)
"""Other people's loggers: they speak from WARNING on, unless the level is debug."""

QUEUED_LINES_MAX = 10_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DIGITS = re.compile(r"\d+")


class LineWriter:
    """Writes lines to a stream from a thread of its own; never blocks, never raises.

    The queue is one that may be entered again by the same thread, since destructors log too; its
    bound is therefore looked at, not enforced, and may be passed by as many lines as there are threads.
    """

    def __init__(self, stream: TextIO, lines_max: int = QUEUED_LINES_MAX) -> None:
        self._stream = stream
        self._lines_max = lines_max
        self._queue: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        if self._queue.qsize() >= self._lines_max:
            self.dropped += 1
        else:
            self._queue.put(line)

    def flush(self, timeout_secs: float) -> bool:
        """Wait until every line so far is written; False if that took too long."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Write what is queued and end, within the time given."""
        self._queue.put(None)
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._stream.write(item + "\n")
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                # the reader has gone or the stream is closed: there is nowhere left to say so
                self.dropped += 1


class _Handler(logging.Handler):
    """Renders on the caller's thread. A record that cannot be rendered becomes a line that says so."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            # the default would print the record, unredacted, to stderr
            detail = {"logger": record.name, "error": type(error).__name__}
            line = json.dumps({"level": "warning", "message": "a log record could not be rendered", **detail})
        self._writer.write(line)

    def createLock(self) -> None:
        # nothing here is shared but the queue, which has its own
        self.lock = None


class _Flood(logging.Filter):
    """Other libraries repeat themselves too: same logger, level and text but for its numbers."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._limiter = RateLimiter(scopes_max=500)
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "archiver" or record.levelno < logging.WARNING:
            return True
        scope = (record.name, record.levelno, _DIGITS.sub("#", str(record.msg))[:200])
        with self._lock:
            suppressed = self._limiter.occurred(scope, self._monotonic())
        if suppressed:
            record.suppressed = suppressed
        return suppressed is not None


class LogOutput:
    """The process's logging from construction to `close`, which puts everything back.

    `level` is one of `LEVELS`; `auto` means console on a terminal and JSON elsewhere.
    """

    def __init__(
        self,
        redactor: Redactor,
        *,
        level: str = "info",
        log_format: Format = "auto",
        stream: TextIO | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redactor = redactor
        self.level = LEVELS[level]
        self._lines = LineWriter(self._stream)
        console = log_format == "console" or (log_format == "auto" and self._stream.isatty())
        self._handler = _Handler(self._lines)
        self._handler.setFormatter(self._formatter(console))
        self._handler.addFilter(_Flood(monotonic))
        self._ours = structlog.wrap_logger(
            logging.getLogger("archiver"),
            processors=[*_stamps(), ProcessorFormatter.wrap_for_formatter],
            wrapper_class=structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        )
        self._undo = ExitStack()
        self._install()
        atexit.register(self.flush)

    @property
    def dropped(self) -> int:
        """Lines that were not written, because the stream did not keep up or was closed."""
        return self._lines.dropped

    def wants(self, level: str) -> bool:
        return LEVELS[level] >= self.level

    def write(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        self._ours.log(LEVELS[level], message, **fields)

    def flush(self, timeout_secs: float = 2.0) -> bool:
        return self._lines.flush(timeout_secs)

    def close(self, timeout_secs: float = 2.0) -> None:
        """Write what is queued and give logging back as it was."""
        atexit.unregister(self.flush)
        self._undo.close()
        self._lines.close(timeout_secs)

    def _formatter(self, console: bool) -> ProcessorFormatter:
        renderer: list[Processor]
        if console:
            colors = self._stream.isatty()
            renderer = [_one_line, structlog.dev.ConsoleRenderer(colors=colors, event_key="message")]
        else:
            # ASCII alone: no reader's idea of a line end or of an encoding can split or spoil a line
            renderer = [structlog.processors.JSONRenderer(serializer=json.dumps, ensure_ascii=True)]
        return ProcessorFormatter(
            foreign_pre_chain=[*_stamps(), structlog.stdlib.add_logger_name, _suppressed],
            processors=[
                ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.StackInfoRenderer(),
                structlog.processors.EventRenamer("message", "event_name"),
                _message_first,
                self._redact,
                *renderer,
            ],
        )

    def _redact(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        first = {name: line.pop(name) for name in _FIRST if name in line}
        return {**first, **{name: self._redactor.value(value) for name, value in line.items()}}

    def _install(self) -> None:
        root = logging.getLogger()
        self._undo.callback(_set_handlers, root, root.handlers[:])
        _set_handlers(root, [self._handler])
        self._set_level(root, self.level)
        for name in SDK_LOGGERS:
            capped = max(self.level, logging.WARNING) if self.level > logging.DEBUG else logging.DEBUG
            self._set_level(logging.getLogger(name), capped)
        # what logging cannot write it would print to stderr, unredacted
        self._set(logging, "raiseExceptions", False)
        self._undo.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        self._set(sys, "excepthook", self._uncaught)
        self._set(threading, "excepthook", lambda args: self._uncaught(*args[:4]))
        self._set(sys, "unraisablehook", lambda args: self._uncaught(*args[:3]))

    def _set_level(self, logger: logging.Logger, level: int) -> None:
        self._undo.callback(logger.setLevel, logger.level)
        logger.setLevel(level)
        self._undo.callback(setattr, logger, "propagate", logger.propagate)
        logger.propagate = True  # google-auth cuts its own off as soon as it is imported

    def _set(self, module: Any, name: str, value: object) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException | None,
        traceback: TracebackType | None,
        thread: threading.Thread | None = None,
    ) -> None:
        """What Python would print to stderr as it is, secrets and all."""
        if kind is SystemExit:
            return
        exc_info = (kind, error or kind(), traceback)
        where = {} if thread is None else {"thread": thread.name}
        self._ours.error("uncaught error", exc_info=exc_info, **where)


_FIRST = ("timestamp", "level", "event")
"""Ours alone, and so without secrets: a password that reads `info` must not take the levels with it."""


def _set_handlers(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    logger.handlers[:] = handlers


def _stamps() -> Iterable[Processor]:
    return (structlog.stdlib.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True))


def _message_first(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    return {"message": line.pop("message", ""), **line}


def _suppressed(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    record = line.get("_record")
    if (count := getattr(record, "suppressed", 0)) > 0:
        line["suppressed"] = count
    return line


def _one_line(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """On a terminal no value may start a line or an escape sequence; tracebacks keep their lines."""
    for name, value in line.items():
        if isinstance(value, str):
            keep = value.split("\n") if name in ("exception", "stack") else [value]
            line[name] = "\n".join(_CONTROL.sub(_escaped, part) for part in keep)
    return line


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
