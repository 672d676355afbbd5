"""How a rule speaks: a text in which `{kafka.topics}` stands for `kafka.topics=events`, masked if secret.

Every key that a text names is one the rule is about, so the rule can be left out where one of them
is wrong by itself, and the operator learns where each value came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from archiver.settings.keys import CLIENT, all_keys, shown
from archiver.settings.keys import Path as KeyPath
from archiver.settings.models import Settings

_PLACEHOLDER = re.compile(r"\{([a-z0-9_]+(?:\.[a-z0-9_]+)*)\}")
_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[A-Za-z0-9_-]+)+|transport|shutdown_timeout_secs")


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold: the keys it is about and the line for the operator."""

    keys: tuple[KeyPath, ...]
    text: str


def broken(settings: Settings, text: str) -> Broken:
    """The rule's text with values filled in, and the keys it names."""
    names = (tuple(match[0].split(".")) for match in _NAME.finditer(text))
    return Broken(tuple(filter(None, map(_key, names))), _PLACEHOLDER.sub(lambda m: _at(settings, m), text))


def value_of(settings: Settings, name: str) -> object:
    """A value by its dotted name."""
    value: object = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def both(settings: Settings, first: str, second: str) -> Iterator[str]:
    """Two keys that make sense together only."""
    missing = [name for name in (first, second) if value_of(settings, name) is None]
    if len(missing) == 1:
        have = second if missing == [first] else first
        yield f"{have} is set without {missing[0]}: set both or neither"


def readable(settings: Settings, name: str) -> Iterator[str]:
    """A file that is named must be one we can read."""
    path = value_of(settings, name)
    if not isinstance(path, Path):
        return
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        yield f"{{{name}}} cannot be read ({reason}): check path and mode"


def _key(path: KeyPath) -> KeyPath | None:
    if path[: len(CLIENT)] == CLIENT and len(path) > len(CLIENT):
        return (*CLIENT, ".".join(path[len(CLIENT) :]))
    return path if path in all_keys() else None


def _at(settings: Settings, match: re.Match[str]) -> str:
    path = tuple(match[1].split("."))
    if path not in all_keys():
        return match[0]
    return f"{match[1]}={shown(path, value_of(settings, match[1]))}"
