"""How the Kafka source gets from its start to its group: no wait of ours adds to the client's."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import pytest

from archiver.errors import SourceFatalError
from archiver.settings.models import Kafka
from archiver.sources.kafka import JOINING_TAKE_SECS, TAKE_SECS_MAX, KafkaSource
from archiver.sources.kafka_lookout import Lookout
from archiver.sources.kafka_topics import Listing


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Joining:
    """Lookout, feed and client of a source: they note how long each is waited for."""

    def __init__(self, source: KafkaSource) -> None:
        self.source = source
        self.waited: list[tuple[str, float]] = []
        self.subscribed: list[str] = []

    # the lookout's event: the listing comes while it is waited for
    def wait(self, timeout_secs: float) -> None:
        self.waited.append(("listing", timeout_secs))
        self.source._lookout.listing = Listing(1, {"t": 1}, {"t": None}, ())

    def clear(self) -> None: ...

    # the feed
    def take(self, _wanted: object, timeout_secs: float, _records_max: int) -> tuple[list[Any], list[Any]]:
        self.waited.append(("records", timeout_secs))
        return [], []

    # the client
    def subscribe(self, topics: list[str], **_callbacks: object) -> None:
        self.subscribed += topics


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[KafkaSource]:
    monkeypatch.setattr(Lookout, "start", lambda lookout: None)
    made = a_source({})
    made.start(cast(Any, None))
    yield made
    made.close(0.1)


def a_source(client: Mapping[str, str], broker: str = "127.0.0.1:9") -> KafkaSource:
    kafka = Kafka(brokers=(broker,), topics=("t",), client=dict(client))
    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.CRITICAL)
    return KafkaSource(kafka, lambda _event: None, SystemClock(), logger=quiet)


def test_no_wait_for_records_delays_the_way_into_the_group(
    source: KafkaSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of topics ends the wait for it, and an assignment is looked for every few milliseconds."""
    joining = Joining(source)
    monkeypatch.setattr(source, "_feed", joining)
    monkeypatch.setattr(source, "_consumer", joining)
    monkeypatch.setattr(source._lookout, "listed", joining)
    source.take(0.05, 1)
    assert joining.subscribed == ["t"]
    assert joining.waited == [("listing", TAKE_SECS_MAX), ("records", 0.0)]
    joining.waited.clear()
    source.take(0.05, 1)
    assert joining.waited == [("records", JOINING_TAKE_SECS)]
    source._joined = True
    source.take(0.05, 1)
    assert joining.waited[1:] == [("records", TAKE_SECS_MAX)]
    monkeypatch.undo()


def test_a_listing_ends_the_wait_of_a_take(source: KafkaSource) -> None:
    source._lookout.listed.set()
    assert source._wait_for_topics(60.0) == 0.0
    assert not source._lookout.listed.is_set()


def test_the_consumer_connects_before_there_is_anything_to_join_for() -> None:
    """By itself it would a second later, unlike the admin client. The quickest of five counts."""
    assert any(both_connect_within(0.5) for _ in range(5))


def both_connect_within(secs: float) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as broker, ExitStack() as stack:
        source = a_source({}, f"127.0.0.1:{broker.getsockname()[1]}")
        source.connect()
        broker.settimeout(secs)
        try:
            for _ in range(2):
                stack.enter_context(broker.accept()[0])
        except TimeoutError:
            return False
        return True


def test_settings_that_the_client_refuses_come_out_of_the_start() -> None:
    """Where the loop tells them and ends in order, not where the process is set up."""
    source = a_source({"no.such.property": "1"})
    source.connect()
    with pytest.raises(SourceFatalError, match="does not take the settings"):
        source.start(cast(Any, None))
    source.stop_taking()
    assert source.positions() == {}
    source.close(0.1)
