"""The command line: statuses, what it prints, and what it does not import [O1], [S7]."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner, Result

import archiver
from archiver import __version__, cli
from archiver.errors import ConfigError, SpoolError, StartError
from archiver.settings.models import Settings

ENOUGH = ["--set", "archive.destination=file:///archive", "--set", "kafka.topics=events"]
SECRET = "s3cr3t-hunter2/+ü"

# What costs time to import, and what only running needs.
HEAVY = {"archiver.app", "boto3", "botocore", "confluent_kafka", "google.cloud", "azure", "grpc", "zstandard"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the outside."""
    for name in os.environ:
        if name.startswith(("DFE_", "KAFKA_", "S3_", "DLQ_", "METRICS_", "LOG_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_secrets", None)


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.commands, list(args))


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Settings], int]], None]:
    """Puts an app in the place of the real one."""

    def install(work: Callable[[Settings], int]) -> None:
        module = ModuleType("archiver.app")
        vars(module).update(run=work, check=work)
        monkeypatch.setitem(sys.modules, "archiver.app", module)
        monkeypatch.setattr(archiver, "app", module, raising=False)

    return install


App = Callable[[Callable[[Settings], int]], None]


def raising(error: Exception) -> Callable[[Settings], int]:
    def work(settings: Settings) -> int:
        raise error

    return work


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_prints_the_version(word: str) -> None:
    """[O1]; the option is what people try first."""
    result = call(word)
    assert (result.exit_code, result.stdout) == (0, f"dfe-archiver {__version__}\n")


@pytest.mark.parametrize("args", [["version"], ["config", "show", *ENOUGH], ["config", "schema"]])
def test_looking_at_the_configuration_imports_no_sdk(args: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys\nfrom archiver.cli import main\nsys.argv = ['dfe-archiver', *{args!r}]\n"
        "try:\n    main()\nfinally:\n    print('\\n' + ' '.join(sys.modules), file=sys.stderr)"
    )
    root = Path(archiver.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"]},
        check=True,
    )
    modules = set(done.stderr.split())
    assert "archiver.cli" in modules
    assert not modules & HEAVY
    assert ("archiver.settings.models" in modules) == (args != ["version"])


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("status", [0, 1])
def test_the_app_decides_the_status(command: str, status: int, app: App) -> None:
    """[O1]"""
    seen: list[str] = []

    def work(settings: Settings) -> int:
        seen.append(settings.archive.destination)
        return status

    app(work)
    assert call(command, *ENOUGH).exit_code == status
    assert seen == ["file:///archive"]


@pytest.mark.parametrize("command", [["run"], ["check"], ["config", "show"]])
def test_a_wrong_configuration_is_status_2_with_every_problem_on_stderr(command: list[str], app: App) -> None:
    """[C4], [O1]"""
    app(raising(AssertionError("must not be reached")))
    result = call(*command, "--set", "log.level=x", "--set", "kafka.nope=1", "--set", "kafka.topics=a")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "dfe-archiver: 3 problems with the configuration"
    assert [line.split()[0] for line in lines[1:]] == ["kafka.nope", "archive.destination", "log.level=x"]


def test_a_configuration_that_the_app_finds_wrong_is_status_2(app: App) -> None:
    app(raising(ConfigError("kafka.client.nope is unknown to the client: remove it")))
    result = call("run", *ENOUGH)
    assert (result.exit_code, "kafka.client.nope" in result.stderr) == (2, True)


@pytest.mark.parametrize("error", [StartError("port 9090 is taken"), SpoolError("the disk is gone")])
def test_an_error_of_ours_is_status_1_with_its_text_alone(error: Exception, app: App) -> None:
    """[O1]"""
    app(raising(error))
    result = call("run", *ENOUGH)
    assert (result.exit_code, result.stderr) == (1, f"dfe-archiver: {error}\n")


def test_an_unforeseen_error_is_logged_with_its_traceback_and_without_secrets(
    app: App, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[S7], c32"""
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", SECRET)

    def work(settings: Settings) -> int:
        assert settings.kafka.sasl_password is not None
        raise KeyError(f"login with {settings.kafka.sasl_password.get_secret_value()} failed")

    app(work)
    with caplog.at_level(logging.CRITICAL):
        result = call("run", *ENOUGH)
    assert result.exit_code == 1
    assert "Traceback" in caplog.text
    assert "login with ******** failed" in caplog.text
    assert SECRET not in caplog.text + result.output


def test_an_error_before_settings_are_there_shows_no_secret_either(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[S7]"""
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr("archiver.settings.load.load", lambda *args: os.environ[f"no {SECRET}"])
    assert call("config", "show").exit_code == 1
    assert "KeyError" in caplog.text
    assert SECRET not in caplog.text


def test_show_prints_effective_settings_with_their_sources_and_masks_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[S7], [O1]"""
    (tmp_path / "a.yaml").write_text("archive: {destination: 'file:///archive', roll_size_bytes: 64MiB}\n")
    (tmp_path / ".env").write_text(f"KAFKA_SASL_PASSWORD='{SECRET}'\n")
    monkeypatch.setenv("KAFKA_TOPICS", "a,b")
    monkeypatch.setenv("DFE_ARCHIVER_CONFIG", str(tmp_path / "a.yaml"))
    result = call("config", "show", "--set", f"kafka.client.ssl.key.pem={SECRET}")
    assert result.exit_code == 0, result.stderr
    assert SECRET not in result.output
    assert 'sasl_password: "********"  # .env KAFKA_SASL_PASSWORD' in result.stdout
    assert 'ssl.key.pem: "********"  # command line' in result.stdout
    assert "topics: [a, b]  # environment KAFKA_TOPICS" in result.stdout
    assert f"roll_size_bytes: 64MiB  # {tmp_path}/a.yaml" in result.stdout
    assert "commit_interval_secs: 5  # default" in result.stdout
    shown = yaml.safe_load(result.stdout)
    assert shown["kafka"]["topics"] == ["a", "b"]
    assert list(shown) == list(Settings.model_fields)


def test_the_schema_takes_the_examples_and_refuses_a_misspelt_key() -> None:
    """[O1]"""
    jsonschema = importlib.import_module("jsonschema")  # it publishes no types
    schema = json.loads(call("config", "schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (Path(archiver.__file__).parents[1] / "config").glob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text()))
    right = {"archive": {"destination": "file:///x"}}
    assert validator.is_valid(right)
    assert not validator.is_valid(right | {"compresion": {}})
    assert not validator.is_valid({"archive": {"destination": "file:///x", "roll_size_bytes": "5XB"}})
    assert not validator.is_valid({})


def test_a_wrong_command_line_is_status_2() -> None:
    assert call("run", "--nope").exit_code == 2
    assert call("nope").exit_code == 2
