"""Layers, their order, references, unknown keys, odd files [C1] to [C4]."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from archiver.errors import ConfigError
from archiver.settings.keys import all_keys
from archiver.settings.load import Loaded, load
from archiver.settings.models import Settings
from archiver.settings.show import effective_yaml

ENOUGH = {"DFE_ARCHIVER_DESTINATION": "file:///archive", "KAFKA_TOPICS": "events"}


def from_yaml(
    folder: Path, text: str | bytes, environ: Mapping[str, str] = ENOUGH, overrides: Sequence[str] = ()
) -> Loaded:
    path = folder / "archiver.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(path, environ, overrides)


def problems_of(
    folder: Path, text: str | bytes, environ: Mapping[str, str] = ENOUGH, overrides: Sequence[str] = ()
) -> list[str]:
    with pytest.raises(ConfigError) as error:
        from_yaml(folder, text, environ, overrides)
    return error.value.problems


# --- order ---------------------------------------------------------------------------------------


def test_each_layer_overrides_the_ones_below_and_is_named_as_the_source(tmp_path: Path) -> None:
    """[C1]"""
    dotenv = tmp_path / ".env"
    dotenv.write_text("KAFKA_GROUP_ID=dotenv\nKAFKA_BROKERS=dotenv:1\nLOG_LEVEL=debug\nOTHER_PROGRAM=x\n")
    path = tmp_path / "a.yaml"
    path.write_text(
        "kafka: {group_id: yaml, brokers: [yaml:1], client_id: yaml, auto_offset_reset: latest}\n"
    )
    environ = {**ENOUGH, "KAFKA_GROUP_ID": "environment", "KAFKA_BROKERS": "environment:1"}
    loaded = load(path, environ, ["kafka.group_id=command"], dotenv)
    kafka, sources = loaded.settings.kafka, loaded.sources
    assert (kafka.group_id, sources["kafka.group_id"]) == ("command", "command line")
    assert (kafka.brokers, sources["kafka.brokers"]) == (("environment:1",), "environment KAFKA_BROKERS")
    assert (loaded.settings.log.level, sources["log.level"]) == ("debug", ".env LOG_LEVEL")
    assert (kafka.client_id, sources["kafka.client_id"]) == ("yaml", str(path))
    assert (kafka.drain_timeout_secs, sources["kafka.drain_timeout_secs"]) == (20, "default")


def test_an_empty_variable_is_unset(tmp_path: Path) -> None:
    """[C1]"""
    loaded = from_yaml(tmp_path, "kafka: {group_id: yaml}", {**ENOUGH, "KAFKA_GROUP_ID": "", "S3_BUCKET": ""})
    assert loaded.settings.kafka.group_id == "yaml"
    (tmp_path / ".env").write_text("KAFKA_GROUP_ID=dotenv")
    loaded = load(None, {**ENOUGH, "KAFKA_GROUP_ID": ""}, (), tmp_path / ".env")
    assert loaded.settings.kafka.group_id == "dotenv", "an empty one does not hide the layer below"


@pytest.mark.parametrize("name", [key.short for key in all_keys().values() if key.short])
def test_every_short_name_sets_its_key(name: str) -> None:
    """[C2]"""
    key = next(key for key in all_keys().values() if key.short == name)
    text = {
        "DFE_ARCHIVER_TRANSPORT": "grpc",
        "DFE_ARCHIVER_DESTINATION": "file:///other",
        "DFE_ARCHIVER_COMPRESSION_CODEC": "gzip",
        "DFE_ARCHIVER_SPOOL_DIR": "/elsewhere",
        "DFE_ARCHIVER_GRPC_LISTEN": "127.0.0.1:1",
        "KAFKA_BROKERS": "b:1",
        "KAFKA_SECURITY_PROTOCOL": "ssl",
        "KAFKA_SASL_MECHANISM": "plain",
        "DLQ_ENABLED": "true",
        "DLQ_MODE": "fan_out",
        "METRICS_ADDR": "127.0.0.1:2",
        "LOG_LEVEL": "debug",
        "LOG_FORMAT": "json",
    }.get(name, "some")
    assert load(None, {**ENOUGH, name: text}).sources[key.name] == f"environment {name}"


def test_the_short_names_are_those_of_the_contract() -> None:
    """[C2]"""
    ours = {
        f"{start}{end}"
        for start, ends in {
            "DFE_ARCHIVER_": "DESTINATION TRANSPORT COMPRESSION_CODEC SPOOL_DIR GRPC_LISTEN",
            "KAFKA_": "BROKERS TOPICS GROUP_ID SECURITY_PROTOCOL SASL_MECHANISM SASL_USER SASL_PASSWORD "
            "TOPIC_INCLUDE TOPIC_EXCLUDE",
            "S3_": "ENDPOINT BUCKET REGION ACCESS_KEY_ID SECRET_ACCESS_KEY",
            "DLQ_": "ENABLED MODE TOPIC",
            "METRICS_": "ADDR",
            "LOG_": "LEVEL FORMAT",
        }.items()
        for end in ends.split()
    }
    assert {key.short for key in all_keys().values() if key.short} == ours


def test_the_long_name_wins_over_the_short_one() -> None:
    environ = {**ENOUGH, "KAFKA_GROUP_ID": "short", "DFE_ARCHIVER_KAFKA__GROUP_ID": "long"}
    assert load(None, environ).settings.kafka.group_id == "long"


def test_a_nested_section_has_an_environment_name_too() -> None:
    """[C2]"""
    environ = {**ENOUGH, "DFE_ARCHIVER_KAFKA__ACKNOWLEDGEMENTS__ENABLED": "false"}
    assert load(None, environ).settings.kafka.acknowledgements.enabled is False


def test_client_properties_come_from_every_layer_and_are_merged(tmp_path: Path) -> None:
    """[C6]"""
    environ = {**ENOUGH, "DFE_ARCHIVER_KAFKA__CLIENT__FETCH_MIN_BYTES": "2"}
    text = "kafka: {client: {fetch.min.bytes: 1, debug: broker, x: y}}"
    client = from_yaml(
        tmp_path, text, environ, ["kafka.client.x.y=z", "kafka.client.x="]
    ).settings.kafka.client
    assert client == {"fetch.min.bytes": "2", "debug": "broker", "x": "", "x.y": "z"}
    environ = {**ENOUGH, "DFE_ARCHIVER_KAFKA__CLIENT": '{"fetch.min.bytes": 3}'}
    assert load(None, environ).settings.kafka.client == {"fetch.min.bytes": "3"}


def test_the_config_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    """[C1]"""
    (tmp_path / "a.yaml").write_text("log: {level: warn}")
    loaded = load(None, {**ENOUGH, "DFE_ARCHIVER_CONFIG": str(tmp_path / "a.yaml")})
    assert loaded.settings.log.level == "warning"


# --- references ------------------------------------------------------------------------------------


def test_references_are_expanded_from_environment_then_dotenv(tmp_path: Path) -> None:
    """[C3]"""
    (tmp_path / ".env").write_text("A=dotenv\nB=dotenv\n")
    path = tmp_path / "a.yaml"
    path.write_text(
        "kafka:\n  topics: ['${A}', '${B}', '${C:-c}', '${EMPTY:-d}']\n  group_id: x-${A}-$${A}-$A\n"
        "archive:\n  roll_size_bytes: ${SIZE:-64MiB}\n  path_template: ${T:-{year}/{month}}\n"
    )
    environ = {"DFE_ARCHIVER_DESTINATION": "file:///a", "A": "environ", "EMPTY": ""}
    loaded = load(path, environ, (), tmp_path / ".env")
    assert loaded.settings.kafka.topics == ("environ", "dotenv", "c", "d")
    assert loaded.settings.kafka.group_id == "x-environ-${A}-$A"
    assert loaded.settings.archive.roll_size_bytes == 64 << 20
    assert loaded.settings.archive.path_template == "{year}/{month}"
    assert loaded.sources["kafka.group_id"] == f"{path}, ${{A}}"


def test_an_expanded_value_is_not_expanded_again(tmp_path: Path) -> None:
    loaded = from_yaml(tmp_path, "kafka: {group_id: '${A}'}", {**ENOUGH, "A": "${B}"})
    assert loaded.settings.kafka.group_id == "${B}"


@pytest.mark.parametrize("reference", ["${NOPE}", "a${NOPE}b", "${EMPTY}", "${", "${a b}", "${A:=x}", "${}"])
def test_a_missing_or_malformed_reference_is_an_error(tmp_path: Path, reference: str) -> None:
    """[C3]"""
    problems = problems_of(tmp_path, f"kafka: {{group_id: '{reference}'}}", {**ENOUGH, "EMPTY": ""})
    assert len(problems) == 1
    assert problems[0].startswith("kafka.group_id ")


# --- unknown keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "right"),
    [
        ("compresion: zstd", "compresion", "compression"),
        ("kafka: {broker: x}", "kafka.broker", "kafka.brokers"),
        ("brokers: x", "brokers", "kafka.brokers"),
        ("archive: {rollsize: 1}", "archive.rollsize", "archive.roll_size_bytes"),
        ("kafka: {acknowledgements: {enable: true}}", "kafka.acknowledgements.enable", "enabled"),
        ("true: 1", "true", "known here"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(
    tmp_path: Path, text: str, key: str, right: str
) -> None:
    """[C4], c42"""
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(f"{key} is no setting")
    assert right in problem


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("DFE_ARCHIVER_COMPRESION__CODEC", "DFE_ARCHIVER_COMPRESSION__CODEC"),
        ("DFE_ARCHIVER_KAFKA_BROKERS", "DFE_ARCHIVER_KAFKA__BROKERS"),
        ("DFE_ARCHIVER_GRPC__PORT", "DFE_ARCHIVER_GRPC__LISTEN"),
        ("DFE_ARCHIVER_kafka__brokers", "DFE_ARCHIVER_KAFKA__BROKERS"),
        ("DFE_ARCHIVER_Q", "unset it"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_one(tmp_path: Path, name: str, right: str) -> None:
    """[C4], c42"""
    with pytest.raises(ConfigError, match=f"{name} is no setting.*{right}"):
        load(None, {**ENOUGH, name: "x"})
    (tmp_path / ".env").write_text(f"{name}=x")
    with pytest.raises(ConfigError, match=f"{name} is no setting"):
        load(None, ENOUGH, (), tmp_path / ".env")


def test_what_kubernetes_injects_for_a_service_is_ignored() -> None:
    """[C4]"""
    injected = {
        "DFE_ARCHIVER_SERVICE_HOST": "10.0.0.1",
        "DFE_ARCHIVER_SERVICE_PORT": "9090",
        "DFE_ARCHIVER_SERVICE_PORT_METRICS": "9090",
        "DFE_ARCHIVER_PORT": "tcp://10.0.0.1:9090",
        "DFE_ARCHIVER_PORT_9090_TCP": "tcp://10.0.0.1:9090",
        "DFE_ARCHIVER_PORT_9090_TCP_ADDR": "10.0.0.1",
        "DFE_ARCHIVER_HEADLESS_SERVICE_HOST": "10.0.0.2",
        "DFE_ARCHIVER_HEADLESS_PORT_50051_TCP_PROTO": "tcp",
        "KAFKA_PORT": "tcp://10.0.0.3:9092",
    }
    loaded = load(None, {**ENOUGH, **injected})
    assert loaded.settings == load(None, ENOUGH).settings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("kafka.group_id", "--set key=value"),
        ("kafka=x", "is a section"),
        ("kafka.grup_id=x", "did you mean kafka.group_id"),
        ("=x", "is no setting"),
    ],
)
def test_a_wrong_override_says_how_to_write_it(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, ENOUGH, [override])


def test_an_override_may_hold_equal_signs_and_may_empty_a_value() -> None:
    loaded = load(
        None, {**ENOUGH, "KAFKA_TOPIC_INCLUDE": "x"}, ["kafka.group_id=a=b", "kafka.topic_include="]
    )
    assert (loaded.settings.kafka.group_id, loaded.settings.kafka.topic_include) == ("a=b", ())


# --- problems ----------------------------------------------------------------------------------------


def test_all_problems_are_told_at_once_each_with_key_value_and_source(tmp_path: Path) -> None:
    """[C4]"""
    text = """
compresion: zstd
kafka:
  drain_timeout_secs: 400
  client: {group.id: x}
archive: {roll_size_bytes: 5XB, path_template: "{years}"}
log: {format: xml}
"""
    environ = {**ENOUGH, "DFE_ARCHIVER_DESTINATION": "ftp://x", "DFE_ARCHIVER_NOPE": "1"}
    problems = problems_of(tmp_path, text, environ, ["compression.level=44", "buffer.max_bytes=x"])
    starts = [problem.split(" ")[0] for problem in problems]
    assert sorted(starts) == sorted(
        [
            "compresion",
            "DFE_ARCHIVER_NOPE",
            "archive.destination=ftp://x",
            "archive.path_template={years}",
            "archive.roll_size_bytes=5XB",
            "buffer.max_bytes=x",
            "compression.level=44",
            "kafka.client.group.id",
            "kafka.drain_timeout_secs=400",
            "log.format=xml",
        ]
    )
    assert all(problem.endswith("]") and ":" in problem and "\n" not in problem for problem in problems)


def test_a_missing_destination_is_told_with_its_name() -> None:
    with pytest.raises(
        ConfigError, match=r"archive\.destination is required: set it or DFE_ARCHIVER_DESTINATION"
    ):
        load(None, {"KAFKA_TOPICS": "a"})


SECRET = "s3cr3t-hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"kafka: {{sasl_pasword: {SECRET}}}",
        f"kafka: {{sasl_password: [{SECRET}]}}",
        f"kafka: {{sasl_password: {{a: {SECRET}}}}}",
        f"kafka: {{sasl_password: *{SECRET}}}",
        f"kafka: {{sasl_password: !{SECRET} x}}",
        f"kafka: {{sasl_password: !a!{SECRET} x}}",
        f"kafka: {{sasl_password: &{SECRET} x}}\ngrpc: &{SECRET} y",
        f"kafka: {{sasl_password: '{SECRET}\\0'",
        f'kafka: {{sasl_password: "{SECRET}\\ud800"}}',
        f"kafka: {{sasl_password: {SECRET}${{NOPE}}}}",
        f"kafka: {{client: {{ssl.key.password: {SECRET}, sasl.password: {SECRET}}}}}",
        f"kafka: {{client: {SECRET}}}",
        f"archive: {{destination: 's3://key:{SECRET}@bucket'}}",
        f"archive: {{destination: 's3://{SECRET}@bucket'}}",
        f"s3: {{endpoint: 'https://u:{SECRET}@host'}}\narchive: {{destination: 's3://b'}}",
        f"azure: {{endpoint: 'https://host/?sig={SECRET}'}}\narchive: {{destination: 'az://b'}}",
        f"kafka: {{brokers: ['u:{SECRET}@host:9092']}}",
        f"azure: {{account_key: {SECRET}, sas_token: {SECRET}}}\narchive: {{destination: 'az://b'}}",
        f"gcs: {{service_account_key: {SECRET}}}\narchive: {{destination: 'gs://b'}}",
        f"metrics: {{ops_token: [{SECRET}]}}",
    ],
)
def test_no_problem_ever_shows_a_secret(tmp_path: Path, text: str) -> None:
    """[S7]"""
    problems = problems_of(
        tmp_path, text, {"KAFKA_TOPICS": "a", "DFE_ARCHIVER_S3__SECRET_ACCESS_KEY": SECRET}
    )
    assert problems
    assert SECRET not in "\n".join(problems)


def test_secrets_are_not_in_the_repr_of_settings() -> None:
    """[S7]"""
    names = [key for key in all_keys().values() if key.secret]
    environ = {**ENOUGH, **{key.env: f"{SECRET}{i}" for i, key in enumerate(names)}}
    loaded = load(None, environ, [f"kafka.client.ssl.key.pem={SECRET}"])
    assert len(names) == 10
    assert SECRET not in repr(loaded)
    assert SECRET not in str(loaded.settings)
    assert SECRET not in effective_yaml(loaded)


# --- odd files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"5", "key: value"),
        (b"- a", "key: value"),
        (b"text", "key: value"),
        (b"\tkafka: 1", "cannot start any token"),
        (b"kafka: {group_id: a, group_id: b}", "kafka.group_id is there twice"),
        (b"log: {}\nlog: {}", "log is there twice"),
        (b"a: \xff\xfe", "not UTF-8"),
        (bytes(range(256)), "not UTF-8"),
        (b"\0\1\2", "not YAML"),
        (b"? [a]\n: b", "key that is not text"),
        (b"~: b", "key that is not text"),
        (b"? ''\n: b", "no setting"),
        (b"a: " + b"[" * 30 + b"]" * 30, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b"&a [*a]", "nested too deeply"),
        (b"kafka: &a {client: *a}", "nested too deeply"),
        (b"x: !!binary aGk=", "tag"),
        (b"log: !!python/object/apply:os.system [id]", "log is a section"),
        (b'a: "\\UFFFFFFFF"', "not YAML"),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1", "not YAML|YAML"),
        (b"a: 1\n---\nb: 2", "single document"),
        (b"archive: {roll_size_bytes: " + b"9" * 6000 + b"}", "is not a size"),
        (b"buffer: {flush_records: .nan}", "whole number"),
        (b"buffer: {flush_records: true}", "whole number"),
        (b"kafka: {topic_include: [[a]]}", "not text"),
        (b"kafka: {topics: {a: b}}", "takes one value"),
        (b"kafka: x", "is a section"),
        (b" " * (1 << 20) + b" ", "larger than 1MiB"),
    ],
)
def test_an_odd_file_is_a_clean_error(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_yaml(tmp_path, data)


def test_a_chain_of_aliases_does_not_blow_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="over 20000 values"):
        from_yaml(tmp_path, "\n".join(lines))


def test_aliases_nulls_a_byte_order_mark_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, b"").settings == load(None, ENOUGH).settings
    assert from_yaml(tmp_path, b"# nothing\n").settings == load(None, ENOUGH).settings
    text = "\ufeffkafka: {topics: &t [a, b], topic_exclude: *t, group_id: null, client:}\nlog:\n"
    kafka = from_yaml(tmp_path, text, {"DFE_ARCHIVER_DESTINATION": "file:///a"}).settings.kafka
    assert (kafka.topics, kafka.topic_exclude, kafka.group_id) == (("a", "b"), ("a", "b"), "dfe-archiver")


def test_a_scalar_stays_the_text_it_is(tmp_path: Path) -> None:
    text = "kafka: {topics: [no, 010, 1_000, 2024-01-01], group_id: 1.10, acknowledgements: {enabled: off}}"
    kafka = from_yaml(tmp_path, text, {"DFE_ARCHIVER_DESTINATION": "file:///a"}).settings.kafka
    assert kafka.topics == ("no", "010", "1_000", "2024-01-01")
    assert (kafka.group_id, kafka.acknowledgements.enabled) == ("1.10", False)


def test_a_file_that_cannot_be_read_is_the_only_thing_told(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.yaml", tmp_path):
        with pytest.raises(ConfigError, match="configuration file cannot be read") as error:
            load(path, {})
        assert len(error.value.problems) == 1


def test_a_dotenv_with_broken_lines_of_other_programs_is_fine_and_with_ours_is_not(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("export KAFKA_GROUP_ID='a $b'  # why\nif [ x ]; then\n")
    assert load(None, ENOUGH, (), dotenv).settings.kafka.group_id == "a $b"
    dotenv.write_text("KAFKA_GROUP_ID='a\n")
    with pytest.raises(ConfigError, match="line 1"):
        load(None, ENOUGH, (), dotenv)
    dotenv.write_bytes(b"A=\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(None, ENOUGH, (), dotenv)
    assert load(None, ENOUGH, (), tmp_path) == load(None, ENOUGH), "a folder called .env is not ours"


def test_bytes_that_are_no_text_in_a_variable_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.group_id holds bytes that are not UTF-8"):
        load(None, {**ENOUGH, "KAFKA_GROUP_ID": "\udcff"})


_names = st.sampled_from([part for path in all_keys() for part in path])
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["${X}", "s3://b/p", "file:///x", "zstd", "1GiB", "{year}", "https://h", "(", "a,b"]),
)
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_names | _scalars.filter(lambda v: v == v), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), _values))
@example("archive: {destination: file:///x}\nkafka: {topics: a}")
def test_any_yaml_gives_settings_or_a_clean_error(tmp_path: Path, data: object) -> None:
    """[C4]: never a traceback."""
    if isinstance(data, bytes):
        raw = data
    elif isinstance(data, str):
        raw = data.encode("utf-8", "surrogatepass")
    else:
        raw = yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
    try:
        loaded = from_yaml(tmp_path, raw)
    except ConfigError as error:
        assert error.problems
        assert all(problem and problem.isprintable() for problem in error.problems)
    else:
        assert isinstance(loaded.settings, Settings)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([key.env for key in all_keys().values()]), st.text(max_size=30), max_size=6
    )
)
def test_any_environment_gives_settings_or_a_clean_error(environ: dict[str, str]) -> None:
    """[C4]: never a traceback."""
    try:
        load(None, {**ENOUGH, **environ})
    except ConfigError as error:
        assert all(problem.isprintable() for problem in error.problems)


# --- shown and loaded again ----------------------------------------------------------------------------


def test_what_show_prints_can_be_loaded_again(tmp_path: Path) -> None:
    environ = {
        **ENOUGH,
        "DFE_ARCHIVER_KAFKA__CLIENT": json.dumps({"a.b": "yes # no: 'x' ${A}", "ü": "\u2028"}),
    }
    overrides = ["kafka.group_id=${x}: y", "archive.roll_size_bytes=1000001", "buffer.flush_age_secs=0.5"]
    overrides += [
        "kafka.group_protocol=consumer",
        'kafka.topic_include=["a{1,2}", "b"]',
        "kafka.client_id=true",
    ]
    first = load(None, environ, overrides)
    second = from_yaml(tmp_path, effective_yaml(first), {})
    assert second.settings == first.settings


def test_show_says_what_an_unset_interval_comes_to() -> None:
    """[R1]"""
    shown = effective_yaml(load(None, {**ENOUGH, "DFE_ARCHIVER_TRANSPORT": "grpc"}))
    assert "roll_interval_secs: null  # default, 300 in effect" in shown
    shown = effective_yaml(load(None, ENOUGH, ["kafka.acknowledgements.enabled=false"]))
    assert "roll_interval_secs: null  # default, 3600 in effect" in shown
