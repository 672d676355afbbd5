"""Layers of settings before they are merged: each key's raw value and where it came from."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream

from archiver.settings.keys import (
    CLIENT,
    CONFIG_ENV,
    ENV_PREFIX,
    all_keys,
    dotted,
    env_names,
    nearest,
    printable,
    sections,
    shown,
)
from archiver.settings.keys import Path as KeyPath
from archiver.settings.values import parse_properties
from archiver.settings.yaml_text import read_text

_CLIENT_ENV = f"{ENV_PREFIX}KAFKA__CLIENT__"
_SERVICE = re.compile(r".*_SERVICE_HOST|.*_SERVICE_PORT(_.*)?|.*_PORT|.*_PORT_[0-9]+_(TCP|UDP|SCTP)(_.*)?")
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^{}]|\{[^{}]*\})*))?\}|)")


@dataclass(frozen=True, slots=True)
class Value:
    """A raw value and its source, such as `environment KAFKA_BROKERS`."""

    raw: Any
    source: str


@dataclass(slots=True)
class Layer:
    """What one source says; `unread` where it could not be read at all."""

    values: dict[KeyPath, Value] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: bool = False

    def put(self, path: KeyPath, raw: Any, source: str) -> None:
        """Take a value; the properties of `kafka.client` become keys of their own."""
        if path != CLIENT:
            self.values[path] = Value(raw, source)
            return
        try:
            properties = parse_properties(raw)
        except ValueError as error:
            self.problems.append(f"{dotted(path)} {error} [{source}]")
            return
        for name, value in properties.items():
            self.values[(*CLIENT, name)] = Value(value, source)


# --- environment and .env ---------------------------------------------------------------------


def read_dotenv(path: Path | None) -> tuple[dict[str, str], list[str]]:
    """Variables of a `.env` file, without interpolation, and what is wrong with it; no file, none."""
    if path is None or not os.path.isfile(path):
        return {}, []
    problems: list[str] = []
    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(read_text(path, ".env file"))):
        if binding.error and any(name in binding.original.string for name in env_names()):
            line = binding.original.line
            problems.append(f"{printable(str(path))}: line {line} is not NAME=value: correct or remove it")
        elif binding.key is not None and binding.value:
            variables[binding.key] = binding.value
    return variables, problems


def environment_layer(variables: Mapping[str, str], origin: str) -> Layer:
    """Settings among environment variables; an empty one is unset [C1]. The long name wins [C2]."""
    layer = Layer()
    for name, path in env_names().items():
        if variables.get(name):
            layer.put(path, variables[name], f"{origin} {name}")
    for name, text in variables.items():
        if not text or not name.startswith(ENV_PREFIX) or name in env_names() or name == CONFIG_ENV:
            continue
        if name.startswith(_CLIENT_ENV):
            prop = name.removeprefix(_CLIENT_ENV).lower().replace("_", ".")
            layer.put((*CLIENT, prop), text, f"{origin} {name}")
        elif not _from_a_service(name):
            near = _nearest_variable(name)
            way_out = (
                f"did you mean {near}?" if near else "unset it, or see the list of keys in the documentation"
            )
            layer.problems.append(f"{printable(name)} is no setting: {way_out} [{origin}]")
    return layer


def _nearest_variable(name: str) -> str | None:
    """Compared without the prefix, which would make all of them alike."""
    known = {n.removeprefix(ENV_PREFIX): n for n in env_names() if n.startswith(ENV_PREFIX)}
    near = nearest(name.removeprefix(ENV_PREFIX), known)
    return known[near] if near else None


def _from_a_service(name: str) -> bool:
    """Kubernetes describes every Service of the namespace in variables; ours is `dfe-archiver…` [C4].

    A section of ours behind the prefix shows a misspelt key all the same (`…_GRPC__PORT`).
    """
    section = name.removeprefix(ENV_PREFIX).partition("__")
    ours = bool(section[1]) and (section[0].lower(),) in sections()
    return not ours and _SERVICE.fullmatch("_" + name.removeprefix(ENV_PREFIX)) is not None


# --- command line -----------------------------------------------------------------------------


def command_line_layer(overrides: Sequence[str]) -> Layer:
    """`key=value` texts; later ones win."""
    layer = Layer()
    for text in overrides:
        name, equals, raw = text.partition("=")
        parts = tuple(name.strip().split("."))
        if parts[:2] == CLIENT and len(parts) > 2:
            parts = (*CLIENT, ".".join(parts[2:]))
        if not equals:
            layer.problems.append(f"--set {dotted(parts)} has no value: write --set key=value [command line]")
        elif parts in all_keys() or parts[:-1] == CLIENT:
            layer.put(parts, raw, "command line")
        elif parts in sections():
            layer.problems.append(f"{_is_a_section(parts)} [command line]")
        else:
            layer.problems.append(f"{_unknown(parts)} [command line]")
    return layer


# --- YAML -------------------------------------------------------------------------------------


def yaml_layer(mapping: Mapping[str, Any], source: str, variables: Mapping[str, str]) -> Layer:
    """Settings of a parsed YAML file with `${VAR}` expanded [C3]; null leaves a key unset."""
    layer = Layer()
    _visit(mapping, (), source, variables, layer)
    return layer


def _visit(
    mapping: Mapping[str, Any], at: KeyPath, source: str, variables: Mapping[str, str], layer: Layer
) -> None:
    for name, raw in mapping.items():
        path = (*at, name)
        if path in sections():
            if isinstance(raw, Mapping):
                _visit(raw, path, source, variables, layer)
            elif raw is not None:
                layer.problems.append(f"{_is_a_section(path)} [{source}]")
        elif path not in all_keys():
            layer.problems.append(f"{_unknown(path)} [{source}]")
        elif isinstance(raw, Mapping) and path != CLIENT:
            layer.problems.append(f"{dotted(path)} has keys below it, but takes one value [{source}]")
        elif raw is not None:
            _put_expanded(path, raw, source, variables, layer)


def _put_expanded(path: KeyPath, raw: Any, source: str, variables: Mapping[str, str], layer: Layer) -> None:
    expansion = _Expansion(variables)
    value = expansion.of(raw)
    if expansion.problems:
        layer.problems.extend(f"{dotted(path)} {problem} [{source}]" for problem in expansion.problems)
    else:
        used = "".join(f", ${{{name}}}" for name in dict.fromkeys(expansion.used))
        layer.put(path, value, source + used)


class _Expansion:
    """`${VAR}`, `${VAR:-default}`, and `$${` for a `${` that is meant."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.used: list[str] = []
        self.problems: list[str] = []

    def of(self, raw: Any) -> Any:
        """The value with the references in all its texts expanded; names are left alone."""
        if isinstance(raw, str):
            return _REFERENCE.sub(self._replace, raw) if "${" in raw else raw
        if isinstance(raw, list):
            return [self.of(item) for item in raw]
        if isinstance(raw, dict):
            return {name: self.of(item) for name, item in raw.items()}
        return raw

    def _replace(self, match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if match[0] == "$${":
            return "${"
        if name is None:
            self.problems.append(
                "holds a ${ that is no reference: write ${VAR}, ${VAR:-default}, or $${ for itself"
            )
            return ""
        self.used.append(name)
        value = self._variables.get(name) or default
        if value is None:
            self.problems.append(
                f"needs ${{{name}}}, which is not set: set it, or write ${{{name}:-default}}"
            )
        return value or ""


# --- texts ------------------------------------------------------------------------------------


def _unknown(path: KeyPath) -> str:
    """An unknown key and the nearest valid one: among its neighbours, else anywhere."""
    at = path[:-1]
    known = [*(".".join(p) for p in all_keys()), *(".".join(p) for p in sections() if p)]
    neighbours = [name for name in known if tuple(name.split(".")[:-1]) == at]
    same_end = [name for name in known if name.split(".")[-1] == path[-1]]
    name = ".".join(path)
    near = nearest(name, neighbours) or next(iter(same_end), None) or nearest(name, known)
    listed = ", ".join(neighbours)
    way_out = f"did you mean {near}?" if near else f"known here: {listed}" if listed else "remove it"
    return f"{dotted(path)} is no setting: {way_out}"


def _is_a_section(path: KeyPath) -> str:
    keys = ", ".join(".".join(key) for key in all_keys() if key[:-1] == path)
    return f"{dotted(path)} is a section, not a value: write its keys below it ({keys})"


def show_value(path: KeyPath, value: Value) -> str:
    """`key=value` for a message, masked where secret."""
    return f"{dotted(path)}={shown(path, value.raw)}"
