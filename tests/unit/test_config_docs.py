"""Documentation and examples hold what the models say [C7]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from archiver.errors import ConfigError
from archiver.settings.document import EXAMPLE, PAGE, example_yaml, page_with_keys
from archiver.settings.keys import Key, all_keys
from archiver.settings.load import load
from archiver.settings.show import value_text

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "config").glob("*.yaml"))
SPEC_DEFAULTS = {
    "transport": "kafka",
    "shutdown_timeout_secs": 20,
    "kafka.brokers": ("localhost:9092",),
    "kafka.topics": (),
    "kafka.topic_include": (),
    "kafka.topic_exclude": (),
    "kafka.topic_refresh_secs": 60,
    "kafka.group_id": "dfe-archiver",
    "kafka.client_id": "dfe-archiver",
    "kafka.group_instance_id": None,
    "kafka.group_protocol": "classic",
    "kafka.auto_offset_reset": "earliest",
    "kafka.session_timeout_ms": 45_000,
    "kafka.max_poll_interval_ms": 300_000,
    "kafka.drain_timeout_secs": 20,
    "kafka.commit_interval_secs": 5,
    "kafka.security_protocol": "PLAINTEXT",
    "kafka.sasl_mechanism": None,
    "kafka.acknowledgements.enabled": True,
    "kafka.client": {},
    "grpc.listen": "0.0.0.0:50051",
    "grpc.max_message_bytes": 16 << 20,
    "grpc.max_queue_bytes": 64 << 20,
    "archive.path_template": "{year}/{month}/{day}/{hour}",
    "archive.roll_size_bytes": 1 << 30,
    "archive.roll_interval_secs": None,
    "archive.max_open_files": 256,
    "archive.multipart_chunk_size": 8 << 20,
    "compression.enabled": True,
    "compression.codec": "zstd",
    "compression.level": None,
    "routing.mode": "expression",
    "routing.expression_fields": ("_org_id",),
    "routing.default_segment": "default",
    "buffer.spool_dir": Path("/var/spool/dfe-archiver"),
    "buffer.flush_bytes": 1 << 20,
    "buffer.flush_records": 100_000,
    "buffer.flush_age_secs": 60,
    "buffer.max_bytes": 256 << 20,
    "buffer.max_spool_bytes": 10 << 30,
    "buffer.min_free_disk_bytes": 1 << 30,
    "buffer.writer_parallelism": 8,
    "s3.endpoint": None,
    "minio.use_ssl": None,
    "dlq.enabled": False,
    "dlq.mode": "cascade",
    "dlq.topic": "dfe-archiver-dlq",
    "dlq.dir": None,
    "dlq.max_bytes": 1 << 30,
    "dlq.allow_in_topics": False,
    "metrics.listen": "0.0.0.0:9090",
    "metrics.ops_token": None,
    "log.level": "info",
    "log.format": "auto",
}
"""As the contract has them, so that a changed default is noticed."""


def test_the_defaults_are_those_of_the_contract() -> None:
    """[C7]"""
    settings = load(None, {"DFE_ARCHIVER_DESTINATION": "file:///a", "KAFKA_TOPICS": "a"}).settings
    defaults = {key.name: key.default for key in all_keys().values()}
    assert {name: defaults[name] for name in SPEC_DEFAULTS} == SPEC_DEFAULTS
    assert defaults["dlq.dir"] is None
    assert settings.dlq_dir == Path("/var/spool/dfe-archiver/dlq")


def test_every_key_of_the_store_sections_exists() -> None:
    """[S8]"""
    wanted = {
        "s3": "endpoint bucket region access_key_id secret_access_key session_token path_style storage_class "
        "sse kms_key_id checksum ca_bundle",
        "minio": "endpoint bucket access_key secret_key use_ssl",
        "gcs": "project_id credentials_path service_account_key endpoint",
        "azure": "account_name account_key sas_token connection_string endpoint",
    }
    for section, names in wanted.items():
        assert {(section, name) for name in names.split()} <= set(all_keys())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_validates(path: Path) -> None:
    assert load(path, {}).settings.archive.destination


def test_there_are_the_examples_that_the_page_names() -> None:
    page = (ROOT / PAGE).read_text()
    assert {path.name for path in CONFIGS} == set(re.findall(r"\(\.\./config/([a-z.]+)\)", page))
    assert len(CONFIGS) == 5


def test_example_and_page_are_as_the_models_say() -> None:
    """Otherwise run `python -m archiver.settings.document`."""
    assert (ROOT / EXAMPLE).read_text() == example_yaml()
    page = (ROOT / PAGE).read_text()
    assert page == page_with_keys(page)


def _leaves(mapping: dict[str, Any], at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in mapping.items():
        path = (*at, name)
        found |= {path: value} if path in all_keys() else _leaves(value, path)
    return found


@pytest.mark.parametrize("key", all_keys().values(), ids=lambda key: key.name)
def test_every_key_is_in_the_example_with_its_default_and_its_line(key: Key) -> None:
    """[C7]: read from the file itself, not from what would write it."""
    text = (ROOT / EXAMPLE).read_text()
    leaves = _leaves(yaml.safe_load(text))
    assert set(leaves) == set(all_keys())
    shown = leaves[key.path]
    line = next(
        match
        for match in re.finditer(rf"# ([^\n]+)\n( *){key.path[-1]}: ([^\n]*)\n", text)
        if len(match[2]) == 2 * (len(key.path) - 1) and match[1].startswith(key.why)
    )
    if key.example is None:
        assert yaml.safe_load(value_text(key, key.default)) == shown
        assert "#" not in line[3]
    else:
        assert line[3].endswith(
            "# required" if key.required else f"# default: {value_text(key, key.default)}"
        )
    assert key.short is None or f"[{key.short}]" in line[1]
    assert 10 < len(key.why) < 160


@pytest.mark.parametrize("key", all_keys().values(), ids=lambda key: key.name)
def test_every_key_is_in_the_documentation_with_default_and_names(key: Key) -> None:
    """[C7]"""
    rows = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith(f"| `{key.name}` |")]
    assert len(rows) == 1
    _, _, default, names, why, _ = re.split(r"(?<!\\)\|", rows[0])
    assert set(re.findall(r"`([^`]+)`", names)) == {key.env, key.short} - {None}
    assert why.strip().replace("&lt;", "<") == key.why
    if key.required:
        assert default.strip() == "required"
    elif key.default is None:
        assert default.strip() == "–"
    else:
        assert yaml.safe_load(default.strip().strip("`")) == yaml.safe_load(value_text(key, key.default))


def test_the_messages_in_the_page_are_the_real_ones(tmp_path: Path) -> None:
    page = (ROOT / PAGE).read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.S)
    assert shown is not None
    path = tmp_path / "archiver.yaml"
    path.write_text(
        "compresion: zstd\nkafka: {topics: a, drain_timeout_secs: 400}\narchive: {destination: 'file:///a'}"
    )
    with pytest.raises(ConfigError) as error:
        load(path, {"DFE_ARCHIVER_ARCHIVE__ROLL_SIZE_BYTES": "5XB"})
    told = [problem.replace(str(path), "archiver.yaml") for problem in error.value.problems]
    assert [line.strip() for line in shown[1].splitlines()[1:]] == told


def test_the_first_configuration_in_the_page_is_a_whole_one(tmp_path: Path) -> None:
    first = re.search(r"```yaml\n(.*?)```", (ROOT / PAGE).read_text(), re.S)
    assert first is not None
    (tmp_path / "a.yaml").write_text(first[1])
    assert load(tmp_path / "a.yaml", {}).settings.destination.bucket == "company-archive"
