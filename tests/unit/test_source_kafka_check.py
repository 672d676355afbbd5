"""What `check` says of brokers that do not answer: the cause and the way out, with the real client."""

from __future__ import annotations

import socket

from archiver.settings.models import Kafka
from archiver.sources.kafka_check import look

TIMEOUT_SECS = 1.5


def what_is_said(kafka: Kafka) -> str:
    findings = list(look(kafka, (), TIMEOUT_SECS))
    assert [(ok, what) for ok, what, _ in findings] == [(False, "broker")]
    return findings[0][2]


def test_a_refused_connection_is_told_with_its_cause_and_the_way_out() -> None:
    """[O1]; the client tells causes to its callbacks alone, the call itself ends in words without any."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        broker = f"127.0.0.1:{taken.getsockname()[1]}"
        said = what_is_said(Kafka(brokers=(broker,), topics=("t",)))
    assert said.startswith(f"{broker} does not answer within 1.5 s: ")
    assert "Connection refused" in said
    assert "brokers are down" not in said, "says less than the cause beside it"
    assert said.endswith(
        "(check kafka.brokers, kafka.security_protocol, the network and whether the brokers run)"
    )


def test_a_host_name_that_is_wrong_is_named() -> None:
    said = what_is_said(Kafka(brokers=("broker.invalid:9092",), topics=("t",)))
    assert "broker.invalid" in said and "esolve" in said
    assert said.endswith(
        "(check the host names in kafka.brokers and the advertised listeners of the brokers)"
    )


def test_one_cause_is_told_once_however_often_it_was_tried() -> None:
    said = what_is_said(Kafka(brokers=("127.0.0.1:1",), topics=("t",)))
    assert said.count("Connect to") == 1
