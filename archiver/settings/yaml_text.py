"""YAML as we take it: mappings, lists and plain text; what a value means is for the models to say.

A scalar stays the text it is, so `no`, `010`, `1:30` and `2024-01-01` need no quotes and a huge
number costs nothing. Aliases are followed; size, depth and number of values are bounded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from archiver.errors import ConfigError
from archiver.settings.keys import printable

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 20
VALUES_MAX = 20_000

_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_NULL = "tag:yaml.org,2002:null"
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")
)


def read_text(path: Path, what: str) -> str:
    """A file's text, UTF-8 with or without a byte order mark; ConfigError says why not."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a path"
        raise ConfigError(
            f"{printable(str(path))}: the {what} cannot be read ({reason.lower()}): check its path and mode"
        ) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"{printable(str(path))}: the {what} is larger than 1MiB: it is hardly the right file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{printable(str(path))}: the {what} is not UTF-8 (byte {error.start}): save it as UTF-8"
        ) from None


def parse_yaml(text: str, source: str) -> dict[Any, Any]:
    """The file's mapping, values as text, lists, mappings or None. ConfigError holds every problem."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        problem = printable(_QUOTED.sub(_short, ", ".join(filter(None, (error.context, error.problem)))))
        raise ConfigError(
            f"{source}: {where}: {problem}: correct the YAML, and quote what holds special characters"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply: at most {DEPTH_MAX} levels") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: is not YAML ({type(error).__name__}): correct the file") from None
    reader = _Reader(source)
    plain = reader.plain(root, ()) if root is not None else {}
    if not reader.problems and plain is not None and not isinstance(plain, dict):
        reader.problems.append(f"{source}: holds a single value or a list: write key: value lines")
    if reader.problems:
        raise ConfigError(reader.problems)
    return plain if isinstance(plain, dict) else {}


def _short(quoted: re.Match[str]) -> str:
    """A parser's quotation, left out where it is long enough to be a secret."""
    return quoted[0] if len(quoted[0]) <= 4 else "'…'"


class _Reader:
    """Nodes to plain values, collecting what is wrong with them."""

    def __init__(self, source: str) -> None:
        self.problems: list[str] = []
        self._source = source
        self._values = 0

    def plain(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        self._values += 1
        if len(path) > DEPTH_MAX or self._values > VALUES_MAX:
            if self._values < 2 * VALUES_MAX or not self.problems:
                self._values = 2 * VALUES_MAX
                self._problem(
                    node, (), f"is nested too deeply or holds over {VALUES_MAX} values: simplify it"
                )
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, str(i))) for i, item in enumerate(node.value)]
        if node.tag not in _PLAIN_TAGS:
            self._problem(node, path, "has a tag that settings do not use: remove it")
            return None
        return None if node.tag == _NULL else node.value

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _NULL or key.tag not in _PLAIN_TAGS:
                self._problem(key, path, "has a key that is not text: name the setting")
                continue
            if key.value in mapping:
                self._problem(key, (*path, key.value), "is there twice: remove one of them")
                continue
            mapping[key.value] = self.plain(value, (*path, key.value))
        return mapping

    def _problem(self, node: yaml.Node, path: tuple[str, ...], text: str) -> None:
        name = printable(".".join(path)) if path else "the file"
        self.problems.append(f"{self._source}: line {node.start_mark.line + 1}: {name} {text}")
