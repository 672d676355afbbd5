"""What `check` says of brokers that do not answer: the cause and the way out, with the real client."""

from __future__ import annotations

import ctypes
import socket

import confluent_kafka as ck

from archiver.settings.models import Kafka
from archiver.sources.kafka_check import look
from tests.harness.embedded import EmbeddedBroker

TIMEOUT_SECS = 1.5
OFFSET_FETCH = ctypes.c_int16(9)
"""Kafka's number of the request."""


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


def test_a_coordinator_that_is_about_to_be_made_is_waited_for() -> None:
    """A new cluster makes it with the first group that asks, and says meanwhile that it is not the one."""
    with EmbeddedBroker() as broker:
        broker.create_topic("t")
        # librdkafka itself tries a few times within one call
        errors = (ctypes.c_int * 8)(*[ck.KafkaError.NOT_COORDINATOR] * 8)
        broker._call("rd_kafka_mock_push_request_errors_array", OFFSET_FETCH, len(errors), errors)
        found = list(look(Kafka(brokers=(broker.bootstrap,), topics=("t",)), (), 10.0))
    assert ("group", True) in [(what, ok) for ok, what, _ in found]
