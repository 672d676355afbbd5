"""From layers to checked settings: command line, environment, `.env`, YAML, defaults [C1].

Everything that is wrong is found and told at once, before anything connects [C4].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from archiver.errors import ConfigError
from archiver.settings.keys import (
    CONFIG_ENV,
    all_keys,
    dotted,
    printable,
    without_credentials,
)
from archiver.settings.keys import Path as KeyPath
from archiver.settings.layers import (
    Layer,
    Value,
    command_line_layer,
    environment_layer,
    read_dotenv,
    show_value,
    yaml_layer,
)
from archiver.settings.models import Settings
from archiver.settings.rules import broken_rules
from archiver.settings.yaml_text import parse_yaml, read_text

DEFAULT = "default"
_DESTINATION = ("archive", "destination")
_STAND_IN = Value("file:///unset", DEFAULT)
"""For a destination that is missing or wrong, so that the rest can be checked."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings and, per dotted key, where its value came from (`default` where nowhere)."""

    settings: Settings
    sources: Mapping[str, str]


def load(
    config_path: Path | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    dotenv: Path | None = None,
) -> Loaded:
    """Settings from all layers; `ConfigError` holds every problem, one line each.

    `overrides` are `key=value` texts of the command line. Without `config_path`, the variable
    `DFE_ARCHIVER_CONFIG` names the YAML file; without that there is none. A `.env` file that does
    not exist is no error.
    """
    problems: list[str] = []
    values: dict[KeyPath, Value] = {}
    unread = False
    for layer in _layers(config_path, environ, overrides, dotenv, problems):
        values |= layer.values
        problems += layer.problems
        unread = unread or layer.unread
    if unread:
        raise ConfigError(_told(problems))  # what an unread file does not say would look missing
    odd = [path for path, value in values.items() if not _is_text([*path, value.raw])]
    for path in odd:
        source = values.pop(path).source
        problems.append(f"{dotted(path)} holds bytes that are not UTF-8, or NUL: remove them [{source}]")
    settings, failed = _validate(values, problems, frozenset(odd))
    for rule in broken_rules(settings):
        if failed.isdisjoint(rule.keys):
            problems.append(_with_sources(rule.text, rule.keys, values))
    if problems:
        raise ConfigError(_told(problems))
    sources = {".".join(path): DEFAULT for path in all_keys()}
    return Loaded(settings, sources | {".".join(path): value.source for path, value in values.items()})


def _told(problems: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(map(without_credentials, problems)))


def _layers(
    config_path: Path | None,
    environ: Mapping[str, str],
    overrides: Sequence[str],
    dotenv: Path | None,
    problems: list[str],
) -> list[Layer]:
    """The layers, lowest first; what cannot be read becomes a problem and an empty layer."""
    try:
        from_file, wrong = read_dotenv(dotenv)
        problems += wrong
    except ConfigError as error:
        from_file = {}
        problems += error.problems
    environment = {name: text for name, text in environ.items() if text}
    variables = from_file | environment
    if config_path is None and CONFIG_ENV in variables:
        config_path = Path(variables[CONFIG_ENV])
    return [
        _yaml(config_path, variables),
        environment_layer(from_file, ".env"),
        environment_layer(environment, "environment"),
        command_line_layer(overrides),
    ]


def _yaml(path: Path | None, variables: Mapping[str, str]) -> Layer:
    if path is None:
        return Layer()
    try:
        mapping = parse_yaml(read_text(path, "configuration file"), printable(str(path)))
    except ConfigError as error:
        return Layer(problems=error.problems, unread=True)
    return yaml_layer(mapping, printable(str(path)), variables)


def _is_text(raw: Any) -> bool:
    if isinstance(raw, list):
        return all(map(_is_text, raw))
    return not isinstance(raw, str) or not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in raw)


def _validate(
    values: Mapping[KeyPath, Value], problems: list[str], odd: frozenset[KeyPath]
) -> tuple[Settings, frozenset[KeyPath]]:
    """Settings from what is valid, and the keys that are not; each of those adds its problem."""
    failed = set(odd)
    while True:
        usable = {path: value for path, value in values.items() if failed.isdisjoint((path, path[:2]))}
        if _DESTINATION in failed:
            usable[_DESTINATION] = _STAND_IN
        try:
            return Settings.model_validate(_nested(usable)), frozenset(failed)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = _key_of(detail["loc"])
                if path not in failed:
                    failed.add(path)
                    problems.append(_problem(path, values.get(path), detail))


def _nested(values: Mapping[KeyPath, Value]) -> dict[str, Any]:
    root: dict[str, Any] = {"archive": {}}
    for path, value in values.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value.raw
    return root


def _key_of(location: tuple[int | str, ...]) -> KeyPath:
    """The key that an error inside one of its items belongs to."""
    path = tuple(map(str, location))
    while path not in all_keys():
        path = path[:-1]
    return path


def _problem(path: KeyPath, value: Value | None, detail: ErrorDetails) -> str:
    if value is None:
        key = all_keys()[path]
        return f"{key.name} is required: set it or {key.short or key.env}, for example to {key.example}"
    match detail["type"]:
        case "value_error":
            text = str(detail["ctx"]["error"])
        case "literal_error":
            text = f"is not known: write {detail['ctx']['expected']}"
        case "string_type" | "path_type":
            text = "is not text: write one value"
        case _:
            text = f"is not valid ({detail['msg']}): correct it"
    return f"{show_value(path, value)} {text} [{value.source}]"


def _with_sources(text: str, keys: tuple[KeyPath, ...], values: Mapping[KeyPath, Value]) -> str:
    """Where the values that a rule is about came from, as far as somebody set them."""
    sources = dict.fromkeys(
        value.source for path, value in values.items() if not {path, path[:2]}.isdisjoint(keys)
    )
    return f"{text} [{'; '.join(sources)}]" if sources else text
