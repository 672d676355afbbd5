"""Kinds of values: how text becomes a size, a duration, a list, an address, and back.

Every kind takes text, because environment, command line and YAML all deliver text, and the Python
value itself, because tests and the code build settings directly. Texts of errors go behind
`key=value`, so they begin with a verb.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

SIZE_BYTES_MAX = 2**63 - 1
SECS_MAX = 366 * 86_400

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "pib": 1 << 50,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)")
_WHOLE = re.compile(r"[0-9]{1,19}")
_IN_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_SECS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")
HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+")
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def _number_text(value: object) -> str | None:
    """Text to parse, or None for what cannot be a number (a bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int) and value.bit_length() > 64:
        return None
    return str(value).strip()


def parse_size(value: object) -> int:
    """Bytes from `1048576`, `64MiB`, `1.5 GiB` or `10MB`. ValueError tells what a size looks like."""
    text = _number_text(value)
    match = _SIZE.fullmatch(text) if text else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            "is not a size: write a number of bytes, or a number with a unit such as 64MiB or 10MB"
        )
    size = Decimal(match[1]) * factor
    if size != int(size):
        raise ValueError("is not a whole number of bytes: choose a smaller unit")
    if size > SIZE_BYTES_MAX:
        raise ValueError(f"is above the largest size, {SIZE_BYTES_MAX} bytes: lower it")
    return int(size)


def show_size(size: int) -> str:
    """The shortest exact text that `parse_size` reads back, e.g. `64MiB`."""
    for unit, shift in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def parse_whole(value: object) -> int:
    """A whole number, zero or more, below 10^19."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = _number_text(value)
    if not text or not _WHOLE.fullmatch(text):
        raise ValueError("is not a whole number, zero or more: write digits alone")
    return int(text)


def parse_secs(value: object) -> float:
    """Seconds above zero, at most 366 days."""
    text = _number_text(value)
    if not text or not _SECS.fullmatch(text):
        raise ValueError("is not a number of seconds: write digits alone, for example 300 for five minutes")
    secs = float(text)
    if not 0 < secs <= SECS_MAX:
        raise ValueError(f"is out of range: a duration is above 0 and at most {SECS_MAX} seconds")
    return secs


def show_secs(secs: float) -> str:
    """`20` rather than `20.0`."""
    return f"{secs:g}" if secs < 1e6 else str(int(secs)) if secs.is_integer() else str(secs)


def parse_bool(value: object) -> bool:
    """true, yes, on, 1 and their opposites, in any case."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text not in _TRUE | _FALSE:
        raise ValueError("is neither true nor false: write one of them")
    return text in _TRUE


def parse_list(value: object) -> tuple[object, ...]:
    """A list as it is; text is a JSON list of strings, or split at commas with blanks removed."""
    if isinstance(value, str):
        listed = _json(value)
        if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
            return tuple(listed)
        if _IN_BRACKETS.fullmatch(value.strip()):  # split at commas it would be names with a bracket
            raise ValueError(
                'is in brackets but no JSON list: write a,b or ["a","b"], and a pattern as ["[ab]"]'
            )
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError("is not a list: write a YAML list, or text with commas")


def parse_properties(value: object) -> dict[str, str]:
    """Names and values of a mapping or of the text of a JSON object; values become text."""
    if isinstance(value, str):
        value = _json(value) if value.strip() else {}
    if not isinstance(value, Mapping):
        raise ValueError("is not a mapping: write property: value lines, or the text of a JSON object")
    properties: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, bool):
            item = str(item).lower()
        if not isinstance(name, str) or not isinstance(item, str | int | float):
            raise ValueError(
                f"holds {str(name)[:80]!r} with a value that is not text: write text or a number"
            )
        properties[name] = str(item)
    return properties


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_listen(value: object) -> str:
    """`host:port`; without a host (`:9090`) it means every IPv4 interface. Port 0 takes a free one."""
    text = value.strip() if isinstance(value, str) else ""
    host, colon, port = text.rpartition(":")
    host = host or "0.0.0.0"
    if not colon or not port.isascii() or not port.isdigit() or not HOST.fullmatch(host):
        raise ValueError(
            "is not an address to listen on: write host:port, for example 0.0.0.0:9090 or [::]:9090"
        )
    if len(port) > 5 or int(port) > 65_535:
        raise ValueError("has a port above 65535: choose a lower one")
    return f"{host}:{int(port)}"


def split_listen(listen: str) -> tuple[str, int]:
    """Host (without brackets) and port of a parsed `host:port`."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def _upper(value: object) -> object:
    return value.strip().upper() if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _empty_is_unset(value: object) -> object:
    return None if value == "" else value


def _schema(kind: str, pattern: str, *more: str) -> WithJsonSchema:
    kinds = [{"type": kind}, {"type": "string", "pattern": pattern}, *({"type": other} for other in more)]
    return WithJsonSchema({"anyOf": kinds})


UPPER = BeforeValidator(_upper)
LOWER = BeforeValidator(_lower)
EMPTY_IS_UNSET = BeforeValidator(_empty_is_unset)

SIZE_SCHEMA = _schema("integer", r"^[0-9]+(\.[0-9]+)? ?([KMGTPkmgtp]?[Ii]?[Bb])?$")
WHOLE_SCHEMA = _schema("integer", r"^[0-9]+$")
SECS_SCHEMA = _schema("number", r"^[0-9]+(\.[0-9]+)?$")
BOOL_SCHEMA = _schema(
    "boolean", r"^([Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF|0|1)$"
)
MAYBE_WHOLE_SCHEMA = _schema("integer", r"^[0-9]*$", "null")
MAYBE_SECS_SCHEMA = _schema("number", r"^([0-9]+(\.[0-9]+)?)?$", "null")
PROPERTIES_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            {"type": "string"},
        ]
    }
)
LIST_SCHEMA = WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]})

Size = Annotated[int, BeforeValidator(parse_size), SIZE_SCHEMA]
"""Bytes."""
Whole = Annotated[int, BeforeValidator(parse_whole), WHOLE_SCHEMA]
Secs = Annotated[float, BeforeValidator(parse_secs), SECS_SCHEMA]
Flag = Annotated[bool, BeforeValidator(parse_bool), BOOL_SCHEMA]
Listen = Annotated[str, BeforeValidator(parse_listen)]
Properties = Annotated[dict[str, str], BeforeValidator(parse_properties), PROPERTIES_SCHEMA]
Texts = Annotated[tuple[str, ...], BeforeValidator(parse_list), LIST_SCHEMA]


def between(low: int, high: int, show: Callable[[int], str] = str) -> AfterValidator:
    """Both bounds of a number, inclusive, named in the error."""

    def check(value: int) -> int:
        if not low <= value <= high:
            raise ValueError(f"is out of range: it goes from {show(low)} to {show(high)}")
        return value

    return AfterValidator(check)
