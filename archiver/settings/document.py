"""Writes what the models say into `docs/configuration.md` and `config/archiver.example.yaml`.

    python -m archiver.settings.document

run in the repository's root. A test tells when one of them is out of date.
"""

from __future__ import annotations

from pathlib import Path

from archiver.settings.keys import Key, all_keys
from archiver.settings.show import indent, section_lines, value_text

PAGE = Path("docs/configuration.md")
EXAMPLE = Path("config/archiver.example.yaml")
BEGIN = "<!-- keys: written by python -m archiver.settings.document -->"
END = "<!-- keys: end -->"

_TOP = """\
# Every setting with its default and what it is for. Where a line names a default, the value is an example.
# Copy what you change: all but the destination and the topics can be left out.
#
# Sizes take bytes or a unit (64MiB, 1GiB, 10MB), durations take seconds, null leaves a key unset.
# ${VAR} and ${VAR:-default} are replaced by environment variables.
# Every key can be set as DFE_ARCHIVER_<SECTION>__<KEY>; names in brackets are short names for it.
"""


def example_yaml() -> str:
    """The example file: every key, in the models' order."""
    lines = [_TOP]
    at: tuple[str, ...] = ()
    for path, key in all_keys().items():
        opened = section_lines(at, path)
        if opened:
            lines += ["", f"{'  ' * (len(path) - 2)}# {key.section_why}", *opened]
        at = path[:-1]
        value = key.default if key.example is None else key.example
        lines += [
            f"{indent(path)}# {key.why}" + (f" [{key.short}]" if key.short else ""),
            f"{indent(path)}{path[-1]}: {value_text(key, value)}" + _default_note(key),
        ]
    return "\n".join(lines) + "\n"


def keys_markdown() -> str:
    """One table per section."""
    lines: list[str] = []
    section: tuple[str, ...] | None = None
    for path, key in all_keys().items():
        if path[:-1] != section:
            section = path[:-1]
            title = f"`{'.'.join(section)}`" if section else "Top level"
            why = f"{key.section_why}\n\n" if section else ""
            lines.append(
                f"\n### {title}\n\n{why}| key | default | environment | |\n| --- | --- | --- | --- |"
            )
        lines.append(f"| `{key.name}` | {_default(key)} | {_names(key)} | {_cell(key.why)} |")
    return "\n".join(lines).strip() + "\n"


def page_with_keys(page: str) -> str:
    """The page with its tables replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{keys_markdown()}\n{END}{after}"


def _default_note(key: Key) -> str:
    if key.example is None:
        return ""
    return "  # required" if key.required else f"  # default: {value_text(key, key.default)}"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "–" if key.default is None else f"`{_cell(value_text(key, key.default))}`"


def _names(key: Key) -> str:
    names = dict.fromkeys(filter(None, (key.short, key.env)))
    return "<br>".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    """Text inside a table: bars escaped, and nothing taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write both files."""
    EXAMPLE.write_text(example_yaml(), encoding="utf-8")
    PAGE.write_text(page_with_keys(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
