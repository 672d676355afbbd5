"""Where a record's file goes in the archive: segments, templates, keys ([K1]-[K7])."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime

from archiver.domain.sealed import ObjectKey
from archiver.errors import ConfigError

SEGMENT_BYTES_MAX = 200
CUT_BYTES_MAX = 183
"""A longer segment is cut to this many bytes and ends in `~` and 16 hex digits: 200 in all [K7]."""

KEY_BYTES_MAX = 1024
"""S3's limit for a key, the lowest of the stores."""

WRITER_ID_DIGITS = 4
WRITER_ID_DIGITS_LONG = 12
"""Digits of the id taken after a collision."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")
_FIELD = re.compile(r"\{([^{}]*)\}")
_FIELD_NAMES = ("year", "month", "day", "hour", "minute", "timestamp", "seq")
_LITERALS = re.compile(r"[A-Za-z0-9._=/-]*")
_FIELD_BYTES = {"year": 4, "month": 2, "day": 2, "hour": 2, "minute": 2, "timestamp": 11, "seq": 10}

SEQ_ENTRIES_MAX = 250_000
"""More routes than this in one expansion: the writer takes a new id and counts from the start. An entry
takes 0.2 to 0.6 KiB, and nothing else bounds how many routes an hour sees."""


def encode_segment(value: str) -> str:
    """Exactly one path segment for `value`, injective up to the cut of very long ones [K5], [K7]."""
    raw = value.encode()
    text = _UNSAFE.sub(lambda m: b"=%02X" % m[0][0], raw)
    if text.startswith(b"."):
        text = b"=2E" + text[1:]
    if len(text) > SEGMENT_BYTES_MAX:
        cut = text[:CUT_BYTES_MAX]
        escape = cut.rfind(b"=", CUT_BYTES_MAX - 2)
        if escape >= 0:
            cut = cut[:escape]
        text = cut + b"~" + hashlib.sha256(raw).hexdigest()[:16].encode()
    return text.decode("ascii")


def decode_segment(segment: str) -> str:
    """The value of a segment that was not cut (a `~` marks a cut one: ValueError)."""
    if "~" in segment:
        raise ValueError(f"segment {segment!r} was cut: its value is not in the key")
    return _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), segment.encode("ascii")).decode()


class KeyTemplate:
    """`archive.path_template`, checked when made [K2]."""

    def __init__(self, template: str) -> None:
        problem = template_problem(template)
        if problem:
            raise ConfigError(f"archive.path_template={template!r} {problem}")
        self.text = template
        self.has_seq = "{seq}" in template
        self.recurs = _recurs(template)

    def expand(self, unix_secs: float, seq: str = "") -> str:
        """The template at a time, UTC and zero-padded; `seq` fills `{seq}`."""
        utc = datetime.fromtimestamp(int(unix_secs), UTC)
        return self.text.format_map(
            {
                "year": f"{utc.year:04d}",
                "month": f"{utc.month:02d}",
                "day": f"{utc.day:02d}",
                "hour": f"{utc.hour:02d}",
                "minute": f"{utc.minute:02d}",
                "timestamp": str(int(unix_secs)),
                "seq": seq,
            }
        )

    def longest_bytes(self) -> int:
        """Bytes of the longest expansion."""
        return len(_FIELD.sub(lambda m: "x" * _FIELD_BYTES[m[1]], self.text))


def _recurs(template: str) -> bool:
    """Whether an expansion can come again while the clock only goes forward, as `{hour}` does daily."""
    names = set(_FIELD.findall(template))
    if "timestamp" in names:
        return False
    used = [unit in names for unit in ("year", "month", "day", "hour", "minute")]
    return used != sorted(used, reverse=True)


def template_problem(template: str) -> str | None:
    """What is wrong with a template and the way out, or None."""
    known = ", ".join(f"{{{name}}}" for name in _FIELD_NAMES)
    for name in _FIELD.findall(template):
        if name not in _FIELD_NAMES:
            return f"uses {{{name}}}: only {known} are known"
    literals = _FIELD.sub("", template)
    if "{" in literals or "}" in literals:
        return f"has an unpaired brace: only {known} are known"
    if not _LITERALS.fullmatch(literals):
        return "may hold only letters, digits and . _ - = / beside its fields"
    segments = template.split("/")
    if any(segment in ("", ".", "..") or segment.startswith(".") for segment in segments):
        return "must not start or end with /, nor hold an empty segment or one that starts with a dot"
    return None


def longest_key_bytes(
    prefix: str, fields: int, template: str, extension: str, *, has_topic: bool, topic_only: bool = False
) -> int:
    """Bytes of the longest key a configuration can produce [K7]."""
    segments = (1 if has_topic else 0) + (0 if topic_only and has_topic else max(fields, 1))
    route = segments * (SEGMENT_BYTES_MAX + 1)
    prefix_bytes = len(prefix.strip("/").encode()) + 1 if prefix.strip("/") else 0
    tail = 1 + _FIELD_BYTES["seq"] + 1 + WRITER_ID_DIGITS_LONG + 1 + len(extension)
    return prefix_bytes + route + KeyTemplate(template).longest_bytes() + tail


class KeyMaker:
    """Hands out keys, never the same one twice in this process.

    A re-used key under which the same bytes lie would look like our own upload whose answer was
    lost, and its records would be gone. So the counts of an expansion are forgotten only when it
    cannot come again, and when a clock that steps back brings it again all the same, or when the
    table is full, the writer id changes, which makes all keys new.
    """

    def __init__(self, template: KeyTemplate, extension: str, new_id: Callable[[int], str]) -> None:
        self._template = template
        self._extension = extension
        self._new_id = new_id
        self._used = set[str]()
        self._seqs: dict[str, int] = {}
        self._expansion = ""
        self._second = 0
        self.writer_id = ""
        self.renamed_because = ""
        """Why `next` last took another writer id."""
        self.rename(WRITER_ID_DIGITS)

    def rename(self, digits: int = WRITER_ID_DIGITS_LONG) -> str:
        """Take a writer id this process has not had, and count from 0001 again."""
        fresh = self._new_id(digits)
        while fresh in self._used:
            fresh = self._new_id(digits)
        self._used.add(fresh)
        self._seqs.clear()
        self.writer_id = fresh
        return fresh

    def next(self, route: str, unix_secs: float) -> ObjectKey:
        """The key of a file of `route` that opens now."""
        if int(unix_secs) != self._second:
            self._move_to(int(unix_secs))
        if len(self._seqs) >= SEQ_ENTRIES_MAX:
            self.rename()
            self.renamed_because = "there are very many routes"
        place = f"{route}/{self._expansion}"
        seq = self._seqs[place] = self._seqs.get(place, 0) + 1
        number = f"{seq:04d}"
        if self._template.has_seq:
            place = f"{route}/{self._template.expand(unix_secs, number)}"
        return ObjectKey(f"{place}-{number}", self.writer_id, self._extension)

    def _move_to(self, second: int) -> None:
        """Follow the clock, forgetting the counts of an expansion that has passed for good."""
        expansion = self._template.expand(second)
        if expansion != self._expansion and not self._template.recurs:
            if second < self._second:
                self.rename()
                self.renamed_because = "the clock went back"
            self._seqs.clear()
        if expansion == self._expansion:
            second = max(second, self._second)
        self._expansion, self._second = expansion, second
