"""Rules about where records come from: Kafka or gRPC [C5], [C6]."""

from __future__ import annotations

from collections.abc import Iterator

from archiver.settings.keys import printable
from archiver.settings.models import Settings
from archiver.settings.rule_text import both, readable, value_of

OWN_PROPERTIES: dict[str, str | None] = {
    "auto.offset.reset": "kafka.auto_offset_reset",
    "bootstrap.servers": "kafka.brokers",
    "client.id": "kafka.client_id",
    "enable.auto.commit": "kafka.acknowledgements.enabled",
    "enable.auto.offset.store": "kafka.acknowledgements.enabled",
    "enable.partition.eof": None,
    "group.id": "kafka.group_id",
    "group.instance.id": "kafka.group_instance_id",
    "group.protocol": "kafka.group_protocol",
    "isolation.level": None,
    "max.poll.interval.ms": "kafka.max_poll_interval_ms",
    "metadata.broker.list": "kafka.brokers",
    "sasl.mechanism": "kafka.sasl_mechanism",
    "sasl.mechanisms": "kafka.sasl_mechanism",
    "sasl.password": "kafka.sasl_password",
    "sasl.username": "kafka.sasl_user",
    "security.protocol": "kafka.security_protocol",
    "session.timeout.ms": "kafka.session_timeout_ms",
    "ssl.ca.location": "kafka.ssl_ca_location",
    "ssl.certificate.location": "kafka.ssl_certificate_location",
    "ssl.key.location": "kafka.ssl_key_location",
    "ssl.key.password": "kafka.ssl_key_password",
}
"""librdkafka properties that we set, and the key of ours that says how; None where nothing does [C6]."""

_CODE_PROPERTIES = ("logger", "on_commit", "on_delivery", "key.deserializer", "value.deserializer")
_CLASSIC_PROPERTIES = ("heartbeat.interval.ms", "partition.assignment.strategy")
"""librdkafka refuses these with group.protocol=consumer."""


def kafka_rules(settings: Settings) -> Iterator[str]:
    """What the Kafka source needs."""
    kafka = settings.kafka
    if not kafka.topics and not kafka.topic_include:
        yield (
            "kafka.topics and kafka.topic_include are both empty: list topics (KAFKA_TOPICS=events), "
            "or set an "
            'include (KAFKA_TOPIC_INCLUDE=".*" means all topics)'
        )
    if settings.dlq.topic in kafka.topics and not settings.dlq.allow_in_topics:
        yield (
            "{kafka.topics} holds {dlq.topic}, so dead letters would be archived as records: remove "
            "it, or set "
            "dlq.allow_in_topics if you mean it"
        )
    yield from _poll_times(settings)
    yield from _security(settings)
    yield from _client_properties(settings)


def _poll_times(settings: Settings) -> Iterator[str]:
    kafka = settings.kafka
    if kafka.drain_timeout_secs * 1000 >= kafka.max_poll_interval_ms:
        yield (
            "{kafka.drain_timeout_secs} must be below {kafka.max_poll_interval_ms}: raise the "
            "interval or drain "
            "faster"
        )
    if settings.shutdown_timeout_secs * 1000 >= kafka.max_poll_interval_ms:
        yield (
            "{shutdown_timeout_secs} must be below {kafka.max_poll_interval_ms}: raise the interval or "
            "stop faster, or the group would evict us before the last commit"
        )
    if kafka.group_protocol == "consumer":
        if "session_timeout_ms" in kafka.model_fields_set:
            yield (
                "{kafka.session_timeout_ms} does not go with {kafka.group_protocol}, where the "
                "broker sets it "
                "(group.consumer.session.timeout.ms): remove it"
            )
    elif kafka.session_timeout_ms > kafka.max_poll_interval_ms:
        yield (
            "{kafka.session_timeout_ms} must not be above {kafka.max_poll_interval_ms}: raise the "
            "interval or "
            "lower the timeout"
        )


def _security(settings: Settings) -> Iterator[str]:
    kafka = settings.kafka
    if kafka.security_protocol.startswith("SASL_"):
        if kafka.sasl_mechanism is None:
            yield (
                "kafka.sasl_mechanism is unset, but {kafka.security_protocol} needs one: set PLAIN, "
                "SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER or GSSAPI"
            )
        elif kafka.sasl_mechanism.startswith(("PLAIN", "SCRAM")):
            for name in ("kafka.sasl_user", "kafka.sasl_password"):
                if value_of(settings, name) is None:
                    yield f"{name} is unset, but {{kafka.sasl_mechanism}} needs it: set it"
    if kafka.security_protocol.endswith("SSL"):
        yield from both(settings, "kafka.ssl_certificate_location", "kafka.ssl_key_location")
        for name in ("ssl_ca_location", "ssl_certificate_location", "ssl_key_location"):
            yield from readable(settings, f"kafka.{name}")


def _client_properties(settings: Settings) -> Iterator[str]:
    consumer = settings.kafka.group_protocol == "consumer"
    for name in settings.kafka.client:
        about = f"kafka.client.{printable(name)}"
        if name in OWN_PROPERTIES:
            ours = OWN_PROPERTIES[name]
            way_out = f"remove it and set {ours}" if ours else "remove it, it cannot be chosen"
            yield f"{about} is a property that we set ourselves: {way_out}"
        elif name.endswith("_cb") or name in _CODE_PROPERTIES:
            yield f"{about} takes code and not text: remove it"
        elif consumer and name in _CLASSIC_PROPERTIES:
            yield f"{about} does not go with {{kafka.group_protocol}}: remove it"


def grpc_rules(settings: Settings) -> Iterator[str]:
    """What the gRPC listener needs."""
    yield from both(settings, "grpc.tls_certificate", "grpc.tls_key")
    if settings.grpc.tls_client_ca is not None and settings.grpc.tls_certificate is None:
        yield "{grpc.tls_client_ca} needs grpc.tls_certificate and grpc.tls_key: set them too"
    for name in ("grpc.tls_certificate", "grpc.tls_key", "grpc.tls_client_ca"):
        yield from readable(settings, name)
    if settings.grpc.max_message_bytes > settings.grpc.max_queue_bytes:
        yield (
            "{grpc.max_message_bytes} must not be above {grpc.max_queue_bytes}: a message must fit "
            "into the queue, "
            "raise the queue"
        )
    port = settings.grpc.address[1]
    if port and port == settings.metrics.address[1]:
        yield "{grpc.listen} and {metrics.listen} have the same port: change one of them"
