"""Rules over several settings, and what settings come to [C5], [C6], [F2], [K2], [K7], [R1], [S1], [S8]."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archiver.codecs import CODECS
from archiver.domain.keys import KEY_BYTES_MAX
from archiver.errors import ConfigError
from archiver.settings.load import load
from archiver.settings.models import Settings
from archiver.settings.rules import EXTENSIONS, LEVELS

ENOUGH = {"archive.destination": "file:///archive", "kafka.topics": "events"}


def settings_of(values: dict[str, str]) -> Settings:
    return load(None, {}, [f"{key}={value}" for key, value in (ENOUGH | values).items()]).settings


def problems_of(values: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        settings_of(values)
    return error.value.problems


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"kafka.drain_timeout_secs": "400"},
            "400 must be below kafka.max_poll_interval_ms=300000: raise the interval or drain faster",
        ),
        ({"kafka.drain_timeout_secs": "300"}, "kafka.drain_timeout_secs=300 must be below"),
        (
            {"shutdown_timeout_secs": "300"},
            "shutdown_timeout_secs=300 must be below kafka.max_poll_interval_ms=300000: raise the interval",
        ),
        ({"kafka.session_timeout_ms": "300001"}, "kafka.session_timeout_ms=300001 must not be above"),
        (
            {"kafka.group_protocol": "consumer", "kafka.session_timeout_ms": "45000"},
            "does not go with kafka.group_protocol=consumer",
        ),
        (
            {"kafka.group_protocol": "consumer", "kafka.client.partition.assignment.strategy": "range"},
            "kafka.client.partition.assignment.strategy does not go with",
        ),
        (
            {"archive.roll_size_bytes": "1GiB", "buffer.max_spool_bytes": "512MiB"},
            "archive.roll_size_bytes=1GiB must be below buffer.max_spool_bytes=512MiB",
        ),
        ({"buffer.max_spool_bytes": "1GiB"}, "archive.roll_size_bytes=1GiB must be below"),
        ({"buffer.flush_bytes": "256MiB"}, "buffer.flush_bytes=256MiB must be below buffer.max_bytes=256MiB"),
        ({"kafka.topics": ""}, "kafka.topics and kafka.topic_include are both empty"),
        ({"kafka.topics": "a,dfe-archiver-dlq"}, "holds dlq.topic=dfe-archiver-dlq"),
        ({"kafka.topics": "a,a"}, "twice"),
        ({"kafka.topics": "^a.*"}, "kafka.topic_include"),
        ({"kafka.topic_include": "("}, "not a Python regular expression"),
        ({"kafka.topic_exclude": '["a{2,1}"]'}, "not a Python regular expression"),
        ({"kafka.brokers": "kafka://b:1"}, "without a scheme"),
        ({"kafka.brokers": ""}, "kafka.brokers='' is empty"),
        ({"kafka.group_id": ""}, "kafka.group_id='' is empty"),
        ({"routing.default_segment": ""}, "routing.default_segment='' is empty"),
        ({"routing.expression_fields": ""}, "set routing.mode to topic"),
        ({"routing.expression_fields": "a..b"}, "empty part"),
        ({"kafka.security_protocol": "sasl_ssl"}, "kafka.sasl_mechanism is unset"),
        (
            {"kafka.security_protocol": "SASL_SSL", "kafka.sasl_mechanism": "PLAIN", "kafka.sasl_user": "u"},
            "kafka.sasl_password is unset",
        ),
        (
            {"kafka.security_protocol": "SSL", "kafka.ssl_ca_location": "/nope"},
            "kafka.ssl_ca_location=/nope cannot be read",
        ),
        (
            {"transport": "grpc", "grpc.tls_key": "/dev/null"},
            "grpc.tls_key is set without grpc.tls_certificate",
        ),
        ({"transport": "grpc", "grpc.tls_client_ca": "/dev/null"}, "needs grpc.tls_certificate"),
        (
            {"transport": "grpc", "grpc.max_queue_bytes": "1MiB"},
            "must not be above grpc.max_queue_bytes=1MiB",
        ),
        ({"transport": "grpc", "grpc.listen": "127.0.0.1:9090"}, "same port"),
        ({"archive.multipart_chunk_size": "1MiB"}, "from 5MiB to 5GiB"),
        ({"archive.path_template": "{day}/{hours}"}, "{hours}"),
        ({"archive.path_template": "../{day}"}, "archive.path_template"),
        ({"buffer.spool_dir": "/archive", "archive.destination": "file:///archive/x"}, "cleaned at start"),
        ({"buffer.spool_dir": "/archive"}, "cleaned at start"),
        ({"dlq.enabled": "true", "dlq.dir": "/archive/dlq"}, "dlq.dir=/archive/dlq lies inside"),
        ({"metrics.listen": "9090"}, "metrics.listen=9090 is not an address"),
        ({"archive.destination": "file:///" + "x" * 4000}, "above 4095 bytes"),
        ({"archive.path_template": "x" * 240}, "above 255 bytes"),
    ],
)
def test_a_broken_rule_names_the_keys_the_values_and_the_way_out(values: dict[str, str], words: str) -> None:
    """[C5]"""
    (problem,) = problems_of(values)
    assert words in problem
    assert problem.endswith("[command line]")
    assert ":" in problem


STORES = {
    "s3": {"archive.destination": "s3://b/p"},
    "minio": {"archive.destination": "minio://b/p", "minio.endpoint": "http://m:9000"},
    "gs": {"archive.destination": "gs://b/p"},
    "az": {"archive.destination": "az://c/p", "azure.account_name": "a"},
}


@pytest.mark.parametrize(
    ("store", "values", "words"),
    [
        ("s3", {"s3.endpoint": "localhost:9000"}, "write https://localhost:9000, or http://localhost:9000"),
        ("s3", {"s3.endpoint": "minio"}, "write https://minio, or http://minio"),
        ("s3", {"s3.endpoint": "ftp://x"}, "no scheme http or https"),
        ("s3", {"s3.endpoint": "http://x:y"}, "is not a URL"),
        ("s3", {"s3.endpoint": "http://[x"}, "is not a URL"),
        ("s3", {"s3.endpoint": "http://u:p@x"}, "holds credentials"),
        ("s3", {"s3.bucket": "other"}, "s3.bucket=other disagrees with archive.destination=s3://b/p"),
        ("s3", {"archive.destination": "s3://"}, "names no bucket"),
        ("s3", {"archive.destination": "s3:///p", "s3.bucket": "b/p"}, "no bucket name"),
        ("s3", {"s3.access_key_id": "k"}, "s3.access_key_id is set without s3.secret_access_key"),
        ("s3", {"s3.secret_access_key": "k"}, "s3.secret_access_key is set without s3.access_key_id"),
        ("s3", {"s3.session_token": "k"}, "s3.session_token is set without"),
        ("s3", {"s3.sse": "rot13"}, "AES256"),
        ("s3", {"s3.ca_bundle": "/nope"}, "s3.ca_bundle=/nope cannot be read"),
        ("s3", {"s3.kms_key_id": "k"}, "set s3.sse to aws:kms"),
        ("s3", {"minio.endpoint": "http://m:9000"}, "write minio://"),
        (
            "s3",
            {"archive.roll_size_bytes": "5TiB", "buffer.max_spool_bytes": "6TiB"},
            "5TiB that stores take",
        ),
        ("minio", {"minio.endpoint": ""}, "minio.endpoint is required"),
        ("minio", {"minio.endpoint": "m:9000"}, "write https://m:9000"),
        ("minio", {"minio.use_ssl": "true"}, "disagrees with minio.endpoint=http://m:9000"),
        ("minio", {"minio.bucket": "x"}, "disagrees"),
        ("minio", {"minio.secret_key": "x"}, "minio.secret_key is set without minio.access_key"),
        ("gs", {"gcs.credentials_path": "/nope"}, "gcs.credentials_path=/nope cannot be read (no such file"),
        ("gs", {"gcs.credentials_path": "/dev/null"}, "is not a JSON file with credentials"),
        ("gs", {"gcs.service_account_key": "{"}, "is not the JSON text"),
        ("gs", {"gcs.service_account_key": "[]"}, "is not the JSON text"),
        ("gs", {"gcs.endpoint": "localhost:4443"}, "no scheme"),
        ("gs", {"archive.destination": "gs:///p"}, "names no bucket"),
        ("az", {"azure.account_name": ""}, "azure.account_name is unset"),
        ("az", {"azure.account_key": "k", "azure.sas_token": "s"}, "keep one of them"),
        ("az", {"azure.connection_string": "k", "azure.endpoint": "http://e"}, "keep one of them"),
        ("az", {"archive.destination": "az://"}, "names no container"),
    ],
)
def test_a_store_section_that_does_not_fit_is_an_error(
    store: str, values: dict[str, str], words: str
) -> None:
    """[S8]"""
    problems = problems_of(STORES[store] | values)
    assert len(problems) == 1, problems
    assert words in problems[0]


def test_a_section_that_is_not_in_use_is_not_looked_into() -> None:
    settings_of({"s3.access_key_id": "k", "s3.endpoint": "x", "azure.account_key": "k", "minio.bucket": "m"})
    settings_of({"kafka.sasl_password": "p", "kafka.ssl_ca_location": "/nope", "grpc.tls_key": "/nope"})
    settings_of({"transport": "grpc", "kafka.topics": "", "kafka.drain_timeout_secs": "400"})
    settings_of({"transport": "grpc", "shutdown_timeout_secs": "400"})
    settings_of({"compression.enabled": "false", "compression.level": "99"})


def test_each_store_validates_with_what_it_needs(tmp_path: Path) -> None:
    """[S8]"""
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"type": "service_account"}))
    for values in (
        *STORES.values(),
        STORES["s3"]
        | {"s3.endpoint": "http://127.0.0.1:9000", "s3.access_key_id": "a", "s3.secret_access_key": "b"},
        STORES["s3"]
        | {"s3.bucket": "b", "s3.sse": "AWS:KMS", "s3.kms_key_id": "k", "s3.checksum": "when_required"},
        STORES["minio"] | {"minio.use_ssl": "false", "minio.access_key": "a", "minio.secret_key": "b"},
        STORES["gs"] | {"gcs.credentials_path": str(key)},
        STORES["gs"] | {"gcs.service_account_key": key.read_text()},
        {"archive.destination": "az://c", "azure.connection_string": "AccountName=a;AccountKey=k"},
        {
            "archive.destination": "az://c",
            "azure.endpoint": "http://127.0.0.1:10000/a",
            "azure.sas_token": "s",
        },
    ):
        settings_of(values)


def test_levels_and_extensions_are_the_codecs_own() -> None:
    """[F2]"""
    assert set(CODECS) == set(LEVELS) == set(EXTENSIONS)
    for name, codec in CODECS.items():
        levels = None if codec.level_min is None else (codec.level_min, codec.level_max)
        assert (levels, codec.extension) == (LEVELS[name], EXTENSIONS[name])


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_a_level_is_checked_against_the_range_of_its_codec(name: str) -> None:
    """[F2]"""
    levels = LEVELS[name]
    if levels is None:
        (problem,) = problems_of({"compression.codec": name, "compression.level": "1"})
        assert f"compression.level=1 does not go with compression.codec={name}" in problem
        return
    for level in levels:
        settings_of({"compression.codec": name, "compression.level": str(level)})
    (problem,) = problems_of({"compression.codec": name, "compression.level": str(levels[1] + 1)})
    assert f"choose {levels[0]} to {levels[1]}" in problem


def test_a_key_may_be_as_long_as_stores_take_and_not_a_byte_longer() -> None:
    """[K7]"""
    fits, longest = 0, 1000  # of the prefix; the route is a topic and a field of 200 bytes each
    found = {"kafka.topics": "", "kafka.topic_include": ".*"}
    while longest - fits > 1:
        length = (fits + longest) // 2
        try:
            settings_of(found | {"archive.destination": "s3://b/" + "p" * length})
        except ConfigError as error:
            longest, told = length, str(error)
        else:
            fits = length
    assert f"would have {KEY_BYTES_MAX + 1} bytes, but stores take {KEY_BYTES_MAX}" in told
    prefix = "p" * longest
    # the same prefix fits where nothing but the topic is in the route, or a topic's name is shorter
    settings_of({"archive.destination": f"s3://b/{prefix}", "routing.mode": "topic"})
    settings_of({"archive.destination": f"s3://b/{prefix}", "kafka.topics": "short"})
    with pytest.raises(ConfigError, match="the longest key"):
        settings_of({"archive.destination": f"s3://b/{prefix}", "kafka.topic_include": ".*"})


def test_the_longest_key_counts_every_field() -> None:
    """[K7]"""
    settings_of({"routing.expression_fields": "a,b,c"})
    (problem,) = problems_of({"routing.expression_fields": "a,b,c,d,e"})
    assert "route by fewer fields than routing.expression_fields=a,b,c,d,e has" in problem


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("bootstrap.servers", "kafka.brokers"),
        ("metadata.broker.list", "kafka.brokers"),
        ("group.id", "kafka.group_id"),
        ("client.id", "kafka.client_id"),
        ("group.instance.id", "kafka.group_instance_id"),
        ("group.protocol", "kafka.group_protocol"),
        ("auto.offset.reset", "kafka.auto_offset_reset"),
        ("enable.auto.commit", "kafka.acknowledgements.enabled"),
        ("enable.auto.offset.store", "kafka.acknowledgements.enabled"),
        ("session.timeout.ms", "kafka.session_timeout_ms"),
        ("max.poll.interval.ms", "kafka.max_poll_interval_ms"),
        ("security.protocol", "kafka.security_protocol"),
        ("sasl.mechanism", "kafka.sasl_mechanism"),
        ("sasl.mechanisms", "kafka.sasl_mechanism"),
        ("sasl.username", "kafka.sasl_user"),
        ("sasl.password", "kafka.sasl_password"),
        ("ssl.ca.location", "kafka.ssl_ca_location"),
        ("ssl.certificate.location", "kafka.ssl_certificate_location"),
        ("ssl.key.location", "kafka.ssl_key_location"),
        ("ssl.key.password", "kafka.ssl_key_password"),
        ("isolation.level", "cannot be chosen"),
        ("enable.partition.eof", "cannot be chosen"),
        ("error_cb", "takes code"),
        ("logger", "takes code"),
    ],
)
def test_a_client_property_that_we_set_is_an_error_that_names_our_key(name: str, ours: str) -> None:
    """[C6]"""
    (problem,) = problems_of({f"kafka.client.{name}": "x"})
    assert problem.startswith(f"kafka.client.{name} ")
    assert ours in problem


def test_any_other_client_property_passes() -> None:
    """[C6]"""
    passed = {
        "fetch.min.bytes": "1",
        "sasl.oauthbearer.method": "oidc",
        "partition.assignment.strategy": "range",
    }
    settings = settings_of({f"kafka.client.{name}": value for name, value in passed.items()})
    assert settings.kafka.client == passed


def test_the_dlq_topic_is_archived_only_if_asked_for() -> None:
    """[C6]"""
    settings_of({"kafka.topics": "dfe-archiver-dlq", "dlq.allow_in_topics": "true"})
    settings_of({"kafka.topics": "", "kafka.topic_include": ".*"})


def test_a_rule_about_a_wrong_value_is_left_out() -> None:
    problems = problems_of({"kafka.drain_timeout_secs": "400", "kafka.max_poll_interval_ms": "x"})
    assert [problem.split(" ")[0] for problem in problems] == ["kafka.max_poll_interval_ms=x"]


@pytest.mark.parametrize(
    ("values", "held", "secs"),
    [
        ({}, True, 300),
        ({"kafka.acknowledgements.enabled": "false"}, False, 3600),
        ({"transport": "grpc"}, False, 300),
        ({"archive.roll_interval_secs": "7"}, True, 7),
        ({"kafka.acknowledgements.enabled": "false", "archive.roll_interval_secs": "7"}, False, 7),
    ],
)
def test_the_interval_follows_what_a_crash_would_lose(
    values: dict[str, str], held: bool, secs: float
) -> None:
    """[R1]"""
    settings = settings_of(values)
    assert (settings.offsets_held, settings.roll_interval_secs) == (held, secs)


def test_compression_that_is_off_means_none_whatever_the_codec() -> None:
    """[F2]"""
    assert settings_of({"compression.codec": "gzip"}).codec == "gzip"
    assert settings_of({"compression.codec": "gzip", "compression.enabled": "false"}).codec == "none"


def test_the_bucket_may_come_from_its_section() -> None:
    """[S1]"""
    assert (
        str(settings_of({"archive.destination": "s3:///p/q", "s3.bucket": "b"}).destination) == "s3://b/p/q"
    )
    assert str(settings_of({"archive.destination": "s3://", "s3.bucket": "b"}).destination) == "s3://b"
    minio = {"archive.destination": "minio:///p", "minio.bucket": "b", "minio.endpoint": "http://m"}
    assert settings_of(minio).destination.bucket == "b"


def test_the_dlq_folder_is_below_the_spool_unless_set() -> None:
    assert settings_of({"buffer.spool_dir": "/spool"}).dlq_dir == Path("/spool/dlq")
    assert settings_of({"dlq.dir": "/elsewhere"}).dlq_dir == Path("/elsewhere")


def test_settings_are_frozen_and_take_no_unknown_key() -> None:
    settings = settings_of({})
    with pytest.raises(ValueError, match="frozen"):
        settings.log.level = "debug"
    with pytest.raises(ValueError, match="Extra inputs"):
        Settings.model_validate({"archive": {"destination": "file:///x"}, "kafka": {"broker": "x"}})
