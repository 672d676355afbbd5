"""Settings become librdkafka properties, once for the consumer and once for the admin client."""

from __future__ import annotations

from typing import Any

from archiver.settings.models import Kafka

FETCH_BACKOFF_MS = 5
"""The default of 1,000 lets a fast consumer stall for a second whenever its prefetch queue was full."""
HEARTBEAT_MS_MAX = 3_000
FETCH_BYTES_MAX = 16 << 20
"""One fetch answer; the broker still sends a first record that is larger."""
PARTITION_FETCH_BYTES = 1 << 20

_CONNECTION_PREFIXES = (
    "api.version.",
    "bootstrap.",
    "broker.",
    "client.",
    "connections.",
    "debug",
    "enable.sasl.",
    "enable.ssl.",
    "https.",
    "log",
    "metadata.broker.",
    "oauthbearer.",
    "reconnect.",
    "resolve.",
    "retry.",
    "sasl.",
    "security.",
    "socket.",
    "ssl.",
)


def connection_properties(kafka: Kafka) -> dict[str, Any]:
    """What every client of this cluster needs: brokers, name, security. Holds secrets: never log it."""
    properties: dict[str, Any] = {
        "bootstrap.servers": ",".join(kafka.brokers),
        "client.id": kafka.client_id,
        "security.protocol": kafka.security_protocol.lower(),
        "socket.keepalive.enable": True,
        "log.connection.close": False,  # idle connections are closed all the time: no news
        "statistics.interval.ms": 0,
    }
    optional = {
        "sasl.mechanism": kafka.sasl_mechanism,
        "sasl.username": kafka.sasl_user,
        "sasl.password": kafka.sasl_password and kafka.sasl_password.get_secret_value(),
        "ssl.ca.location": kafka.ssl_ca_location and str(kafka.ssl_ca_location),
        "ssl.certificate.location": kafka.ssl_certificate_location and str(kafka.ssl_certificate_location),
        "ssl.key.location": kafka.ssl_key_location and str(kafka.ssl_key_location),
        "ssl.key.password": kafka.ssl_key_password and kafka.ssl_key_password.get_secret_value(),
    }
    properties.update({name: value for name, value in optional.items() if value is not None})
    return properties


def admin_properties(kafka: Kafka) -> dict[str, Any]:
    """For the AdminClient: the connection, with what `kafka.client` says about connections."""
    passed = {name: value for name, value in kafka.client.items() if name.startswith(_CONNECTION_PREFIXES)}
    return connection_properties(kafka) | passed


def consumer_properties(kafka: Kafka, prefetch_bytes_max: int) -> dict[str, Any]:
    """For the Consumer; `kafka.client` comes last. `prefetch_bytes_max` bounds librdkafka's queue [B1].

    The queue may exceed its bound by what one fetch answer holds.
    """
    properties = connection_properties(kafka) | {
        "group.id": kafka.group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": False,
        # an offset out of range becomes an event, and our own policy decides [D9]
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",  # [D11]
        "allow.auto.create.topics": False,
        "max.poll.interval.ms": kafka.max_poll_interval_ms,
        "topic.metadata.refresh.interval.ms": max(1_000, int(kafka.topic_refresh_secs * 1_000)),
        "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
        "queued.max.messages.kbytes": max(1, prefetch_bytes_max // 1024),
        "queued.min.messages": 50_000,
        "fetch.max.bytes": max(PARTITION_FETCH_BYTES, min(FETCH_BYTES_MAX, prefetch_bytes_max // 2)),
        "fetch.message.max.bytes": PARTITION_FETCH_BYTES,
        "fetch.wait.max.ms": 100,
    }
    if kafka.group_instance_id:
        properties["group.instance.id"] = kafka.group_instance_id
    properties["group.protocol"] = kafka.group_protocol
    if kafka.group_protocol == "classic":
        # librdkafka refuses these three with the consumer protocol, where the broker decides
        properties["session.timeout.ms"] = kafka.session_timeout_ms
        properties["heartbeat.interval.ms"] = max(1, min(HEARTBEAT_MS_MAX, kafka.session_timeout_ms // 3))
        properties["partition.assignment.strategy"] = "cooperative-sticky"
    return properties | kafka.client


def is_eager(properties: dict[str, Any]) -> bool:
    """Whether a rebalance takes every partition away first (an assignor of the user's own choice)."""
    strategy = str(properties.get("partition.assignment.strategy", "cooperative-sticky"))
    return "cooperative" not in strategy
