"""The table of all keys, read from the models: names, environment names, defaults, who is secret."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from archiver.settings.models import Settings
from archiver.settings.values import SIZE_SCHEMA, show_secs, show_size

ENV_PREFIX = "DFE_ARCHIVER_"
CONFIG_ENV = "DFE_ARCHIVER_CONFIG"
MASK = "********"
CLIENT = ("kafka", "client")
"""The one key whose value has keys of its own: librdkafka's."""

_SECRET_PROPERTY = re.compile(
    r"password|secret|token|credential|\.pem$|jaas|oauthbearer\.config|private", re.I
)
_USERINFO = re.compile(r"[^\s/'\"=,\[]*:[^\s/'\"@]*@|(?<=://)[^\s/@]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
_SHOWN_CHARS_MAX = 120

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `env` is the long name, `short` the short one; `default` is `None` where unset."""

    path: Path
    field: FieldInfo
    section_why: str

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def env(self) -> str:
        return ENV_PREFIX + "__".join(part.upper() for part in self.path)

    @property
    def short(self) -> str | None:
        extra = self.field.json_schema_extra
        name = extra.get("x-env") if isinstance(extra, dict) else None
        return str(name) if name else None

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        value = self.field.get_default(call_default_factory=True, validated_data={})
        return None if value is PydanticUndefined else value

    @property
    def example(self) -> Any:
        """A value to show where the default would not do (None: there is none)."""
        extra = self.field.json_schema_extra
        examples = extra.get("examples") if isinstance(extra, dict) else None
        return examples[0] if isinstance(examples, list) else None

    @property
    def why(self) -> str:
        return self.field.description or ""

    @property
    def secret(self) -> bool:
        return SecretStr in (self.field.annotation, *get_args(self.field.annotation))

    @property
    def is_size(self) -> bool:
        return any(item is SIZE_SCHEMA for item in self.field.metadata)


@cache
def sections() -> dict[Path, type[BaseModel]]:
    """Every section by its path; the root is `()`."""
    found: dict[Path, type[BaseModel]] = {}

    def visit(path: Path, model: type[BaseModel]) -> None:
        found[path] = model
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                visit((*path, name), field.annotation)

    visit((), Settings)
    return found


@cache
def all_keys() -> dict[Path, Key]:
    """Every key that holds a value, in the order of the models."""
    keys: dict[Path, Key] = {}
    for section, model in sections().items():
        why = " ".join((model.__doc__ or "").split())
        for name, field in model.model_fields.items():
            path = (*section, name)
            if path not in sections():
                keys[path] = Key(path, field, why)
    return keys


@cache
def env_names() -> dict[str, Path]:
    """Every environment name to its key, short names first, so that long ones override them."""
    short = {key.short: path for path, key in all_keys().items() if key.short}
    return short | {key.env: path for path, key in all_keys().items()}


def dotted(path: Iterable[str]) -> str:
    """How a key is written in messages."""
    return printable(".".join(path))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like this one, if any is like it."""
    found = difflib.get_close_matches(name[:200].lower(), {item.lower(): item for item in known}, 1, 0.6)
    return next((item for item in known if item.lower() == found[0]), None) if found else None


def printable(text: str) -> str:
    """On one line, of bounded length, with nothing that a terminal or a log would choke on."""
    cut = text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in cut)


def is_secret(path: Path) -> bool:
    """Whether a value under this path is never shown."""
    if path[: len(CLIENT)] == CLIENT and len(path) > len(CLIENT):
        return bool(_SECRET_PROPERTY.search(path[-1]))
    key = all_keys().get(path)
    return key is None or key.secret


def without_credentials(text: str) -> str:
    """The text with user:password@ and the query of URLs masked."""
    return _QUERY.sub(rf"\1{MASK}", _USERINFO.sub(f"{MASK}@", text))


def shown(path: Path, value: object) -> str:
    """A raw or parsed value as messages show it: masked if secret."""
    if value is None:
        return "unset"
    if isinstance(value, SecretStr) or is_secret(path) or path == CLIENT:
        return MASK
    key = all_keys().get(path)
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, int) and key is not None and key.is_size:
        text = show_size(value)
    elif isinstance(value, float):
        text = show_secs(value)
    elif isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    if not text or text != text.strip():
        text = repr(text)
    return printable(without_credentials(text))
