"""Every setting, one small model per section [C7]. No SDK is imported here.

A field's description is the one line that the documentation, the example file and the JSON schema
show; its default stands here and nowhere else. Rules over several keys are in `rules.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from archiver.domain.keys import template_problem
from archiver.settings.destination import Destination, parse_destination
from archiver.settings.values import (
    EMPTY_IS_UNSET,
    HOST,
    LOWER,
    MAYBE_SECS_SCHEMA,
    MAYBE_WHOLE_SCHEMA,
    UPPER,
    Flag,
    Listen,
    Properties,
    Secs,
    Size,
    Texts,
    Whole,
    between,
    parse_bool,
    parse_secs,
    parse_whole,
    show_size,
    split_listen,
)

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

Codec = Literal["zstd", "lz4", "snappy", "gzip", "none"]

ROLL_SECS_HELD = 300.0
"""While offsets are held, what a crash repeats grows with the file's age [R1]."""
ROLL_SECS_FREE = 3600.0


class _Section(BaseModel):
    """Frozen, no unknown keys, and no value in an error text (it may be a secret)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)


def _key(default: Any, why: str, *, env: str | None = None, example: Any = None) -> Any:
    """A field: default (`...` is required), its one line, its short environment name, a value to show."""
    extra: dict[str, Any] = {}
    if env:
        extra["x-env"] = env
    if example is not None:
        extra["examples"] = [example]
    if isinstance(default, dict):
        return Field(default_factory=dict, repr=False, description=why, json_schema_extra=extra)
    return Field(default, description=why, json_schema_extra=extra or None)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty: write a value or leave the key out")
    return text


def _broker(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "9092"
    if not HOST.fullmatch(host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"holds {text[:80]!r}, which is not a broker: write host:port, without a scheme")
    return text


def _brokers(brokers: tuple[str, ...]) -> tuple[str, ...]:
    if not brokers:
        raise ValueError("is empty: name at least one broker as host:port")
    return tuple(_broker(broker) for broker in brokers)


def _topic(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) or name in (".", ".."):
        raise ValueError(
            f"holds {name[:80]!r}, which Kafka does not take as a topic: "
            "write the topic's name, and regular expressions into kafka.topic_include"
        )
    return name


def _topics(topics: tuple[str, ...]) -> tuple[str, ...]:
    for name in topics:
        _topic(name)
    if len(set(topics)) < len(topics):
        raise ValueError("names a topic twice: remove one of them")
    return topics


def _patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"holds {pattern[:80]!r}, which is not a Python regular expression ({error}): correct it"
            ) from None
    return patterns


def _fields(fields: tuple[str, ...]) -> tuple[str, ...]:
    if not fields:
        raise ValueError("is empty: name a field, or set routing.mode to topic")
    for name in fields:
        if not all(name.split(".")):
            raise ValueError(f"holds {name[:80]!r}, which has an empty part: write names with single dots")
    if len(set(fields)) < len(fields):
        raise ValueError("names a field twice: remove one of them")
    return fields


def _template(template: str) -> str:
    problem = template_problem(template)
    if problem:
        raise ValueError(problem if ":" in problem else f"{problem}: correct the template")
    return template


def _destination(url: str) -> str:
    parse_destination(url)
    return url.strip()


def _folder(path: object) -> object:
    """Absolute, so that a later change of the working directory changes nothing."""
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ValueError("is not a folder: write its path")
    return Path(os.path.abspath(path))


def _sse(value: object) -> str:
    for known in ("AES256", "aws:kms", "aws:kms:dsse"):
        if str(value).lower() == known.lower():
            return known
    raise ValueError("is not known: write AES256, aws:kms or aws:kms:dsse")


def _checksum(value: object) -> object:
    """The SDK's own two words for it are understood too."""
    words = {"when_required": "none", "when_supported": "crc32"}
    return words.get(value, value) if isinstance(value, str) else value


def _level_name(value: object) -> object:
    return {"warn": "warning", "fatal": "critical"}.get(value, value) if isinstance(value, str) else value


def _unset_or(parse: Callable[[object], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None or value == "" else parse(value))


Text = Annotated[str, AfterValidator(_not_empty)]
MaybeText = Annotated[str | None, EMPTY_IS_UNSET]
MaybeSecret = Annotated[SecretStr | None, EMPTY_IS_UNSET]
MaybeFile = Annotated[Path | None, EMPTY_IS_UNSET]
Folder = Annotated[Path, BeforeValidator(_folder)]
Millis = Annotated[Whole, between(1, 86_400_000)]


class Acknowledgements(_Section):
    """When offsets are committed."""

    enabled: Flag = _key(
        True,
        "Commit an offset only when every record below it is durable; false commits at receipt, "
        "so a crash loses what was not archived yet.",
    )


class Kafka(_Section):
    """The Kafka source; read when `transport` is `kafka`."""

    brokers: Annotated[Texts, AfterValidator(_brokers)] = _key(
        ("localhost:9092",),
        "Brokers to ask first, as a list or with commas; any one of them is enough to find the rest.",
        env="KAFKA_BROKERS",
    )
    topics: Annotated[Texts, AfterValidator(_topics)] = _key(
        (),
        "Topics to archive, by name; together with what topic_include finds, if both are set.",
        env="KAFKA_TOPICS",
        example=["events"],
    )
    topic_include: Annotated[Texts, AfterValidator(_patterns)] = _key(
        (),
        "Python regular expressions; a topic whose whole name matches one is archived "
        "(.* means all, internal and DLQ topics left out).",
        env="KAFKA_TOPIC_INCLUDE",
    )
    topic_exclude: Annotated[Texts, AfterValidator(_patterns)] = _key(
        (),
        "Python regular expressions; takes topics out of what topic_include finds.",
        env="KAFKA_TOPIC_EXCLUDE",
    )
    topic_refresh_secs: Secs = _key(60, "How often the broker is asked for new topics.")
    group_id: Text = _key(
        "dfe-archiver",
        "The consumer group; all replicas of one archive share it.",
        env="KAFKA_GROUP_ID",
    )
    client_id: Text = _key("dfe-archiver", "The name the broker's logs and quotas know us by.")
    group_instance_id: MaybeText = _key(
        None,
        "A name of this replica, unique in the group: static membership, so a quick restart "
        "moves no partitions.",
    )
    group_protocol: Annotated[Literal["classic", "consumer"], LOWER] = _key(
        "classic", "The rebalance protocol: classic, or consumer where all brokers speak KIP-848."
    )
    auto_offset_reset: Annotated[Literal["earliest", "latest"], LOWER] = _key(
        "earliest",
        "Where a new group starts; latest skips what partitions hold when the group first starts.",
    )
    session_timeout_ms: Millis = _key(
        45_000,
        "Milliseconds of silence after which the broker gives our partitions away; "
        "leave it out with group_protocol consumer, where the broker sets it.",
    )
    max_poll_interval_ms: Millis = _key(
        300_000, "Milliseconds between two polls after which the client leaves the group."
    )
    drain_timeout_secs: Secs = _key(
        20, "How long a rebalance may wait for files with revoked partitions to become durable."
    )
    commit_interval_secs: Secs = _key(5, "How often the low-water marks are committed.")
    security_protocol: Annotated[Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], UPPER] = _key(
        "PLAINTEXT",
        "How to talk to the brokers.",
        env="KAFKA_SECURITY_PROTOCOL",
    )
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None,
        UPPER,
        EMPTY_IS_UNSET,
    ] = _key(
        None,
        "How to log in, with a SASL_ protocol: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER "
        "or GSSAPI (options of the last two go into kafka.client).",
        env="KAFKA_SASL_MECHANISM",
    )
    sasl_user: MaybeText = _key(None, "User for PLAIN and SCRAM.", env="KAFKA_SASL_USER")
    sasl_password: MaybeSecret = _key(None, "Password for PLAIN and SCRAM.", env="KAFKA_SASL_PASSWORD")
    ssl_ca_location: MaybeFile = _key(None, "PEM file with the CAs to trust; unset, those of the system.")
    ssl_certificate_location: MaybeFile = _key(None, "PEM file with our client certificate.")
    ssl_key_location: MaybeFile = _key(None, "PEM file with the key of our client certificate.")
    ssl_key_password: MaybeSecret = _key(None, "Password of that key.")
    acknowledgements: Acknowledgements = Field(default_factory=Acknowledgements)
    client: Properties = _key(
        {},
        "Any other librdkafka property, passed through as it is; one that a key of ours sets is refused.",
    )


class Grpc(_Section):
    """The gRPC listener; read when `transport` is `grpc`."""

    listen: Listen = _key(
        "0.0.0.0:50051",
        "Address and port for pushes; port 0 takes a free one.",
        env="DFE_ARCHIVER_GRPC_LISTEN",
    )
    max_message_bytes: Annotated[Size, between(KIB, 2**31 - 1, show_size)] = _key(
        16 * MIB, "The largest push that is taken; a larger one gets RESOURCE_EXHAUSTED."
    )
    max_queue_bytes: Annotated[Size, between(KIB, TIB, show_size)] = _key(
        64 * MIB, "Accepted pushes waiting to be routed; above it new ones get UNAVAILABLE."
    )
    tls_certificate: MaybeFile = _key(
        None, "PEM file with the listener's certificate; unset, the listener speaks plain text."
    )
    tls_key: MaybeFile = _key(None, "PEM file with the key of that certificate.")
    tls_client_ca: MaybeFile = _key(
        None, "PEM file with the CAs of clients; set, a client must show a certificate of theirs."
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return split_listen(self.listen)


class Archive(_Section):
    """Where archive files go and when they close."""

    destination: Annotated[str, AfterValidator(_destination)] = _key(
        ...,
        "URL of the store: file:///path, s3://bucket/prefix, minio://bucket/prefix, "
        "gs://bucket/prefix or az://container/prefix.",
        env="DFE_ARCHIVER_DESTINATION",
        example="file:///var/lib/dfe-archiver/archive",
    )
    path_template: Annotated[str, AfterValidator(_template)] = _key(
        "{year}/{month}/{day}/{hour}",
        "Folders below the route, from the time the file opens in UTC; knows {year} {month} {day} "
        "{hour} {minute} {timestamp} {seq}.",
    )
    roll_size_bytes: Annotated[Size, between(1, 2**60, show_size)] = _key(
        GIB, "A file closes when a flush takes it to this size, compressed."
    )
    roll_interval_secs: Annotated[float | None, _unset_or(parse_secs), MAYBE_SECS_SCHEMA] = _key(
        None,
        "A file closes at this age, counted from its first record; unset, 300 while offsets are "
        "held and on gRPC, otherwise 3600.",
    )
    max_open_files: Annotated[Whole, between(1, 1_000_000)] = _key(
        256, "Files open at once; never more than the process's limit less 64."
    )
    multipart_chunk_size: Annotated[Size, between(5 * MIB, 5 * GIB, show_size)] = _key(
        8 * MIB,
        "Above this size an upload goes in parts of it; the parts grow where 10,000 would not do.",
    )


class Compression(_Section):
    """How frames are compressed."""

    enabled: Flag = _key(True, "false writes plain .jsonl files whatever codec says.")
    codec: Annotated[Codec, LOWER] = _key(
        "zstd",
        "zstd (.jsonl.zst), lz4 (.jsonl.lz4), snappy (.jsonl.sz), gzip (.jsonl.gz) or none (.jsonl).",
        env="DFE_ARCHIVER_COMPRESSION_CODEC",
    )
    level: Annotated[int | None, _unset_or(parse_whole), MAYBE_WHOLE_SCHEMA] = _key(
        None, "zstd 1-22, lz4 1-12, gzip 1-9; snappy and none have no level; unset, the codec's own."
    )


class Routing(_Section):
    """Which route a record takes."""

    mode: Annotated[Literal["expression", "topic"], LOWER] = _key(
        "expression", "expression: topic and fields of the record; topic: the topic alone."
    )
    expression_fields: Annotated[Texts, AfterValidator(_fields)] = _key(
        ("_org_id",),
        "Fields whose values become path segments, in this order; dots reach into nested objects.",
    )
    default_segment: Text = _key(
        "default", "The segment for a record whose field is missing, empty or no plain value."
    )


class Buffer(_Section):
    """Bounds of memory and disk between source and store."""

    spool_dir: Folder = _key(
        Path("/var/spool/dfe-archiver"),
        "Local folder in which files grow and wait for their upload; one process each.",
        env="DFE_ARCHIVER_SPOOL_DIR",
    )
    flush_bytes: Annotated[Size, between(1, GIB, show_size)] = _key(
        MIB, "A route's records become one compressed frame at this size."
    )
    flush_records: Annotated[Whole, between(1, 100_000_000)] = _key(
        100_000, "A route's records become one compressed frame at this number."
    )
    flush_age_secs: Secs = _key(60, "A route's records become one compressed frame at this age.")
    max_bytes: Annotated[Size, between(1, TIB, show_size)] = _key(
        256 * MIB, "Records in memory over all routes; above it the largest buffers are flushed."
    )
    max_spool_bytes: Annotated[Size, between(1, 2**60, show_size)] = _key(
        10 * GIB, "Bytes in the spool; above it files are sealed and consumption pauses."
    )
    min_free_disk_bytes: Size = _key(
        GIB, "Free space to leave on the spool's disk; below it consumption pauses."
    )
    writer_parallelism: Annotated[Whole, between(1, 1024)] = _key(8, "Uploads at once.")


class S3(_Section):
    """Options for `s3://`. What is unset comes from the SDK's own chain."""

    endpoint: MaybeText = _key(
        None,
        "URL of a store that speaks S3, with its scheme; unset, AWS.",
        env="S3_ENDPOINT",
    )
    bucket: MaybeText = _key(
        None,
        "The bucket, if the destination names none (s3:///prefix).",
        env="S3_BUCKET",
    )
    region: MaybeText = _key(
        None,
        "The region; unset, AWS_REGION, AWS_DEFAULT_REGION or the profile's.",
        env="S3_REGION",
    )
    access_key_id: MaybeText = _key(None, "Access key.", env="S3_ACCESS_KEY_ID")
    secret_access_key: MaybeSecret = _key(None, "Secret of the access key.", env="S3_SECRET_ACCESS_KEY")
    session_token: MaybeSecret = _key(None, "Session token of temporary credentials.")
    path_style: Annotated[bool | None, _unset_or(parse_bool)] = _key(
        None, "true puts the bucket into the path instead of the host name; unset, true with an endpoint."
    )
    storage_class: Annotated[MaybeText, UPPER] = _key(
        None, "Storage class of new objects, for example STANDARD_IA."
    )
    sse: Annotated[str | None, _unset_or(_sse)] = _key(
        None, "Server-side encryption: AES256, aws:kms or aws:kms:dsse."
    )
    kms_key_id: MaybeText = _key(None, "Key for aws:kms; unset, the bucket's or the account's own.")
    checksum: Annotated[Literal["crc32", "none"], BeforeValidator(_checksum), LOWER] = _key(
        "crc32", "none sends no checksum header, for stores that refuse it; size is still compared."
    )
    ca_bundle: MaybeFile = _key(
        None, "PEM file with the CAs to trust for the endpoint; unset, AWS_CA_BUNDLE or the SDK's own."
    )


class Minio(_Section):
    """Options for `minio://`."""

    endpoint: MaybeText = _key(None, "URL of the server, with its scheme; required with minio://.")
    bucket: MaybeText = _key(None, "The bucket, if the destination names none (minio:///prefix).")
    access_key: MaybeText = _key(None, "Access key.")
    secret_key: MaybeSecret = _key(None, "Secret of the access key.")
    use_ssl: Annotated[bool | None, _unset_or(parse_bool)] = _key(
        None, "Must agree with the endpoint's scheme; unset, the scheme decides."
    )


class Gcs(_Section):
    """Options for `gs://`. What is unset comes from application default credentials."""

    project_id: MaybeText = _key(None, "Project; unset, that of the credentials.")
    credentials_path: MaybeFile = _key(None, "JSON file with credentials.")
    service_account_key: MaybeSecret = _key(
        None, "The JSON text of a service account's key, instead of a file."
    )
    endpoint: MaybeText = _key(None, "URL of another server that speaks the GCS API.")


class Azure(_Section):
    """Options for `az://`: account_key, sas_token or connection_string; without any, managed identity."""

    account_name: MaybeText = _key(
        None, "Storage account; required unless an endpoint or a connection string names it."
    )
    account_key: MaybeSecret = _key(None, "Key of the account.")
    sas_token: MaybeSecret = _key(None, "Shared access signature.")
    connection_string: MaybeSecret = _key(None, "Connection string, with everything in it.")
    endpoint: MaybeText = _key(
        None, "URL of the blob service; unset, https://<account_name>.blob.core.windows.net."
    )


class Dlq(_Section):
    """Dead letters: records of a file that the store refuses for good [Q1]."""

    enabled: Flag = _key(
        False,
        "Write them; off, their offsets are held and readiness says why.",
        env="DLQ_ENABLED",
    )
    mode: Annotated[Literal["kafka_only", "file_only", "cascade", "fan_out"], LOWER] = _key(
        "cascade",
        "kafka_only, file_only, cascade (Kafka, then file) or fan_out (both).",
        env="DLQ_MODE",
    )
    topic: Annotated[Text, AfterValidator(_topic)] = _key(
        "dfe-archiver-dlq", "Topic for dead letters.", env="DLQ_TOPIC"
    )
    dir: Annotated[Folder | None, EMPTY_IS_UNSET] = _key(
        None, "Folder for dead letters; unset, dlq below buffer.spool_dir."
    )
    max_bytes: Annotated[Size, between(1, 2**60, show_size)] = _key(
        GIB, "Bytes the folder may take; above it dead letters fail and offsets are held."
    )
    allow_in_topics: Flag = _key(False, "true permits kafka.topics to name the DLQ topic.")


class Metrics(_Section):
    """The HTTP listener for metrics, health and status."""

    listen: Listen = _key(
        "0.0.0.0:9090",
        "Address and port; port 0 takes a free one.",
        env="METRICS_ADDR",
    )
    ops_token: MaybeSecret = _key(
        None, "Bearer token for POST /ops/roll from elsewhere; unset, only loopback may ask."
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return split_listen(self.listen)


class Log(_Section):
    """Logs, one event a line."""

    level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_level_name), LOWER
    ] = _key(
        "info",
        "debug, info, warning, error or critical.",
        env="LOG_LEVEL",
    )
    format: Annotated[Literal["auto", "json", "console"], LOWER] = _key(
        "auto",
        "json, console, or auto: console on a terminal, otherwise json.",
        env="LOG_FORMAT",
    )


class Settings(_Section):
    """All settings, valid each for itself; `load` also checks the rules between them [C5]."""

    transport: Annotated[Literal["kafka", "grpc"], LOWER] = _key(
        "kafka",
        "Where records come from: kafka or grpc.",
        env="DFE_ARCHIVER_TRANSPORT",
    )
    shutdown_timeout_secs: Secs = _key(
        20, "How long a stop may take to flush, upload and commit; keep it below the supervisor's."
    )
    kafka: Kafka = Field(default_factory=Kafka)
    grpc: Grpc = Field(default_factory=Grpc)
    archive: Archive
    compression: Compression = Field(default_factory=Compression)
    routing: Routing = Field(default_factory=Routing)
    buffer: Buffer = Field(default_factory=Buffer)
    s3: S3 = Field(default_factory=S3)
    minio: Minio = Field(default_factory=Minio)
    gcs: Gcs = Field(default_factory=Gcs)
    azure: Azure = Field(default_factory=Azure)
    dlq: Dlq = Field(default_factory=Dlq)
    metrics: Metrics = Field(default_factory=Metrics)
    log: Log = Field(default_factory=Log)

    @property
    def offsets_held(self) -> bool:
        """Whether an offset is committed only once its record is durable ([D1], [D8])."""
        return self.transport == "kafka" and self.kafka.acknowledgements.enabled

    @property
    def roll_interval_secs(self) -> float:
        """The age at which a file closes, worked out where it is unset [R1]."""
        if self.archive.roll_interval_secs is not None:
            return self.archive.roll_interval_secs
        return ROLL_SECS_HELD if self.offsets_held or self.transport == "grpc" else ROLL_SECS_FREE

    @property
    def codec(self) -> Codec:
        """The codec in effect [F2]."""
        return self.compression.codec if self.compression.enabled else "none"

    @property
    def destination(self) -> Destination:
        """Parsed, with the bucket from section `s3` or `minio` where the URL names none."""
        parsed = parse_destination(self.archive.destination)
        named = {"s3": self.s3.bucket, "minio": self.minio.bucket}.get(parsed.scheme)
        return parsed if parsed.bucket or not named else replace(parsed, bucket=named)

    @property
    def dlq_dir(self) -> Path:
        """Where dead letters go on disk."""
        return self.dlq.dir or self.buffer.spool_dir / "dlq"
