"""The command line [O1]: reads settings, calls the app, and turns errors into exit statuses.

0 is fine, 1 failed, 2 a wrong configuration (or command line). `version` and `config` import neither
the app nor any SDK.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from archiver import __version__
from archiver.errors import ArchiverError, ConfigError

if TYPE_CHECKING:
    from archiver.settings.load import Loaded

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2

_log = logging.getLogger(__name__)

# Pretty tracebacks print local variables, and those hold secrets.
commands = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, the same wherever it goes; the image has nothing to colour it
    help="Archives Kafka topics (or gRPC pushes) into compressed files that standard tools read.",
)
config_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at the configuration.")
commands.add_typer(config_commands, name="config")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="YAML file; or DFE_ARCHIVER_CONFIG.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="One setting, such as archive.roll_size_bytes=64MiB; repeatable."
    ),
]


def main() -> None:
    """The entry point of `dfe-archiver`."""
    commands(prog_name="dfe-archiver")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit(EXIT_OK)


@commands.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """What goes before a command."""


@commands.command()
def run(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Archive until stopped by SIGTERM or SIGINT."""

    def work() -> int:
        gc.disable()  # until the loop runs: looking for garbage takes a tenth of a start, and there is none
        try:
            settings = _load(config, overrides).settings
            import archiver.app

            return archiver.app.run(settings)
        finally:
            gc.enable()

    _finish(work)


@commands.command()
def check(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Look whether configuration, broker and store are right.

    Nothing is archived. Spool, ports, topics and group are looked at, too.
    """

    def work() -> int:
        settings = _load(config, overrides).settings
        import archiver.app

        return archiver.app.check(settings)

    _finish(work)


@commands.command()
def status(
    url: Annotated[
        str, typer.Option("--url", help="Where the archiver's HTTP port is.")
    ] = "http://127.0.0.1:9090",
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every few seconds.")] = False,
) -> None:
    """Show what a running archiver does.

    Partitions, files, bounds, last errors.
    """

    def work() -> int:
        from archiver.telemetry.terminal import show

        return show(url, watch)

    _finish(work)


@config_commands.command("show")
def config_show(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Print the settings in effect.

    With where each came from; secrets are masked.
    """

    def work() -> int:
        from archiver.settings.show import effective_yaml

        typer.echo(effective_yaml(_load(config, overrides)), nl=False)
        return EXIT_OK

    _finish(work)


@config_commands.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the YAML file."""

    def work() -> int:
        import json

        from archiver.settings.models import Settings

        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
        return EXIT_OK

    _finish(work)


@commands.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"dfe-archiver {__version__}")


_secrets: frozenset[str] | None = None
"""Of the settings that were loaded, for the one place that prints what nobody foresaw."""


def _load(config: Path | None, overrides: list[str] | None) -> Loaded:
    global _secrets
    from archiver.settings.load import load
    from archiver.settings.secrets import secret_values

    loaded = load(config, os.environ, overrides or (), Path(".env"))
    _secrets = secret_values(loaded.settings)
    return loaded


def _finish(work: Callable[[], int]) -> NoReturn:
    """Run a command to its exit status; the only place that catches every error."""
    try:
        status = work()
    except ConfigError as error:
        count = len(error.problems)
        _say(f"dfe-archiver: {count} problem{'s' * (count != 1)} with the configuration")
        for problem in error.problems:
            _say(f"  {problem}")  # masked where it was made
        status = EXIT_CONFIG
    except ArchiverError as error:
        _say(f"dfe-archiver: {_hide_secrets(str(error))}")
        status = EXIT_FAILED
    except Exception:  # noqa: BLE001 - the single one: a status, and a traceback without secrets
        _log.critical("ended by an error that nobody foresaw\n%s", _hide_secrets(traceback.format_exc()))
        status = EXIT_FAILED
    raise typer.Exit(status)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _hide_secrets(text: str) -> str:
    from archiver.settings.secrets import secrets_in_environment, without_secrets

    return without_secrets(text, secrets_in_environment(os.environ) if _secrets is None else _secrets)
