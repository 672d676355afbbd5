"""Settings as text: YAML that says where each value came from, secrets masked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from archiver.settings.keys import CLIENT, MASK, Key, all_keys, is_secret
from archiver.settings.load import DEFAULT, Loaded
from archiver.settings.models import Settings
from archiver.settings.rule_text import value_of
from archiver.settings.values import show_secs, show_size

_PLAIN = re.compile(r"[A-Za-z/_][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def effective_yaml(loaded: Loaded) -> str:
    """Every setting in effect; without secrets it can be loaded again and gives the same settings."""
    lines: list[str] = []
    at: tuple[str, ...] = ()
    for path, key in all_keys().items():
        lines += section_lines(at, path)
        at = path[:-1]
        value = value_of(loaded.settings, key.name)
        if key.name == "kafka.session_timeout_ms" and loaded.settings.kafka.group_protocol == "consumer":
            value = None  # the broker's, and refused when it is set here
        if path == CLIENT and value:
            lines += _client(loaded)
            continue
        note = _in_effect(loaded.settings, key.name)
        source = loaded.sources.get(key.name, DEFAULT)
        lines.append(f"{indent(path)}{path[-1]}: {value_text(key, value)}  # {source}{note}")
    return "\n".join(lines) + "\n"


def section_lines(at: tuple[str, ...], path: tuple[str, ...]) -> list[str]:
    """The `kafka:` lines between the section of the line before and that of this key."""
    sections = path[:-1]
    shared = 0
    while shared < min(len(at), len(sections)) and at[shared] == sections[shared]:
        shared += 1
    return [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]


def indent(path: tuple[str, ...]) -> str:
    """Blanks before a key."""
    return "  " * (len(path) - 1)


def value_text(key: Key, value: Any) -> str:
    """A value on one line of YAML."""
    if value is None:
        return "null"
    if isinstance(value, SecretStr):
        return json.dumps(MASK)
    if isinstance(value, bool):
        return str(value).lower()
    if key.is_size and isinstance(value, int):
        return show_size(value)
    if isinstance(value, int | float):
        return show_secs(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(text_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{text_value(name)}: {text_value(item)}" for name, item in value.items()) + "}"
        )
    return text_value(str(value) if isinstance(value, Path) else value)


def text_value(text: str) -> str:
    """Text as YAML: bare where that is safe, else quoted, and never read as a reference."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text.replace("${", "$${"), ensure_ascii=not text.isprintable())


def _client(loaded: Loaded) -> list[str]:
    lines = ["  client:"]
    for name, text in loaded.settings.kafka.client.items():
        shown = json.dumps(MASK) if is_secret((*CLIENT, name)) else text_value(text)
        source = loaded.sources.get(".".join((*CLIENT, name)), DEFAULT)
        lines.append(f"    {text_value(name)}: {shown}  # {source}")
    return lines


def _in_effect(settings: Settings, name: str) -> str:
    """What an unset or overruled key comes to."""
    match name:
        case "archive.roll_interval_secs" if settings.archive.roll_interval_secs is None:
            return f", {show_secs(settings.roll_interval_secs)} in effect"
        case "compression.codec" if settings.codec != settings.compression.codec:
            return f", {settings.codec} in effect"
        case "dlq.dir" if settings.dlq.dir is None:
            return f", {settings.dlq_dir} in effect"
    return ""
