"""What the Kafka source relies on in confluent-kafka and librdkafka, one test each.

Nothing of ours runs here: when an upgrade of the client breaks one of these, the source has to be
read again before it is taken. The facts themselves are under "The client, as measured" in the design.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.harness.kafka import KafkaServer
from tests.harness.process import PATIENCE, SLACK_SECS, wait_until

SESSION_MS = 6_000
PROTOCOLS = ("classic", "consumer")
WAIT_SECS = 20.0 * PATIENCE


class Client:
    """A consumer as the source configures it, with what it was told."""

    def __init__(self, bootstrap: str, group: str, **properties: Any) -> None:
        classic = properties.get("group.protocol", "classic") == "classic"
        defaults: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
            "on_commit": self._committed,
        }
        if classic:
            defaults |= {
                "session.timeout.ms": SESSION_MS,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        self.consumer = ck.Consumer(defaults | properties, logger=logging.getLogger("client"))
        self.told: list[tuple[str, list[tuple[str, int]], int]] = []
        self.commits: list[tuple[Any, list[Any]]] = []
        self.records: list[tuple[int, int]] = []
        self.events: list[Any] = []
        self.while_revoked: Callable[[ck.Consumer], None] = lambda _consumer: None

    def subscribe(self, *topics: str, start: int = 0) -> Client:
        def assign(consumer: ck.Consumer, partitions: list[Any]) -> None:
            self._say("assigned", partitions)
            consumer.incremental_assign([ck.TopicPartition(p.topic, p.partition, start) for p in partitions])

        def revoke(consumer: ck.Consumer, partitions: list[Any]) -> None:
            self._say("revoked", partitions)
            self.while_revoked(consumer)
            consumer.incremental_unassign(partitions)

        def lose(consumer: ck.Consumer, partitions: list[Any]) -> None:
            self._say("lost", partitions)
            consumer.incremental_unassign(partitions)

        self.consumer.subscribe(list(topics), on_assign=assign, on_revoke=revoke, on_lost=lose)
        return self

    def turn(self, timeout: float = 0.05, count: int = 1_000) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        for message in self.consumer.consume(count, timeout):
            if message.error() is None:
                taken.append((int(message.partition() or 0), int(message.offset() or 0)))
            else:
                self.events.append(message)
        self.records += taken
        return taken

    def until(self, done: Callable[[], object], secs: float = WAIT_SECS) -> None:
        deadline = time.monotonic() + secs
        while not done():
            assert time.monotonic() < deadline, f"told {self.told}, records {len(self.records)}"
            self.turn()

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.told]

    def position(self, topic: str, partition: int = 0) -> int:
        (told,) = self.consumer.position([ck.TopicPartition(topic, partition)])
        return int(told.offset)

    def _say(self, kind: str, partitions: list[Any]) -> None:
        self.told.append((kind, [(p.topic, p.partition) for p in partitions], threading.get_ident()))

    def _committed(self, error: Any, partitions: list[Any]) -> None:
        self.commits.append((error, partitions))


Join = Callable[..., Client]


@pytest.fixture
def name() -> str:
    return f"facts-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def join(kafka: KafkaServer) -> Iterator[Join]:
    """Makes consumers that are closed in the end."""
    made: list[Client] = []

    def make(group: str, **properties: Any) -> Client:
        made.append(Client(kafka.bootstrap, group, **properties))
        return made[-1]

    yield make
    for client in made:
        client.while_revoked = lambda _consumer: None
        client.consumer.close()


def turn_all(clients: list[Client], done: Callable[[], object], secs: float = WAIT_SECS) -> None:
    deadline = time.monotonic() + secs
    while not done():
        assert time.monotonic() < deadline, [client.told for client in clients]
        for client in clients:
            client.turn(0.02)


# --- rebalance callbacks ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_callbacks_run_inside_consume_and_close_on_the_calling_thread(
    kafka: KafkaServer, name: str, protocol: str
) -> None:
    kafka.create_topic(name, 2)
    client = Client(kafka.bootstrap, name, **{"group.protocol": protocol}).subscribe(name)
    time.sleep(0.5)
    assert client.told == []
    client.until(lambda: client.told)
    client.consumer.close()
    assert client.kinds() == ["assigned", "revoked"]
    assert {thread for _, _, thread in client.told} == {threading.get_ident()}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_on_revoke_may_block_longer_than_the_session_and_commit_afterwards(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    kafka.create_topic(name, 2)
    kafka.produce(name, [b"x"] * 10)
    session = {"session.timeout.ms": 1_500, "heartbeat.interval.ms": 300} if protocol == "classic" else {}
    blocked_secs = 3.0 if protocol == "classic" else 7.5
    first = join(name, **{"group.protocol": protocol}, **session).subscribe(name)
    first.until(lambda: len(first.records) == 10)

    def drain(consumer: ck.Consumer) -> None:
        time.sleep(blocked_secs)
        consumer.commit(offsets=[ck.TopicPartition(name, p, 5) for p in (0, 1)], asynchronous=True)
        answers = consumer.committed([ck.TopicPartition(name, p) for p in (0, 1)], timeout=60)
        assert [answer.offset for answer in answers] == [5, 5]

    first.while_revoked = drain
    second = join(name, **{"group.protocol": protocol})
    second.subscribe(name, start=5)
    turn_all([first, second], lambda: "revoked" in first.kinds() and "assigned" in second.kinds())
    turn_all([first, second], lambda: any(parts for kind, parts, _ in second.told if kind == "assigned"))
    assert "lost" not in first.kinds()


def test_nothing_of_a_revoked_partition_is_returned_after_its_callback(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """Even though more of it waits in the queue, and what was popped by the same call."""
    kafka.create_topic(name, 2)
    kafka.produce(name, [b"x" * 100] * 4_000)
    first = join(name).subscribe(name)
    first.until(lambda: first.records)
    second = join(name).subscribe(name)
    gone: list[int] = []
    while not gone:
        second.turn(0.02)
        taken = first.turn(0.2, count=20)
        gone = [p for kind, parts, _ in first.told if kind == "revoked" for _, p in parts]
        assert not [record for record in taken if record[0] in gone]
    taken = [record for _ in range(20) for record in first.turn(0.02)]
    assert not [record for record in taken if record[0] in gone]


def test_what_a_call_had_popped_when_it_served_a_rebalance_is_not_in_the_position_and_comes_again(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """A position that counted it would be committed while nobody has the records."""
    kafka.create_topic(name, 2)
    kafka.produce(name, [b"x"] * 20)
    first = join(name, **{"heartbeat.interval.ms": 500}).subscribe(name)
    first.until(lambda: len(first.records) == 20)
    inside: list[int] = []

    def look(consumer: ck.Consumer) -> None:
        told = consumer.position([ck.TopicPartition(name, p) for p in (0, 1)])
        inside.extend(p.offset for p in told)

    first.while_revoked = look
    second, stop = join(name), threading.Event()
    kafka.produce(name, [b"y"] * 20)

    def meanwhile() -> None:
        time.sleep(0.3)
        second.subscribe(name, start=10)
        while not stop.is_set():
            second.turn(0.02)

    helper = threading.Thread(target=meanwhile)
    helper.start()
    first.turn(4, count=100_000)
    first.until(lambda: inside and len(first.records) >= 30 and len(second.records) >= 10)
    stop.set()
    helper.join()
    ((_, gone),) = next(parts for kind, parts, _ in first.told if kind == "revoked")
    assert inside == [10, 10]
    assert sorted(o for p, o in first.records if p != gone) == list(range(20))
    assert sorted(o for p, o in second.records if p == gone) == list(range(10, 20))


def test_an_exception_in_a_callback_comes_out_of_consume_and_the_partitions_stay_assigned(
    kafka: KafkaServer, name: str
) -> None:
    """The consumer is then silent: it must not be used on."""
    kafka.create_topic(name, 1)
    kafka.produce(name, [b"x"])
    client = Client(kafka.bootstrap, name)

    def fail(_consumer: ck.Consumer, _partitions: list[Any]) -> None:
        raise LookupError("in the callback")

    client.consumer.subscribe([name], on_assign=fail)
    with pytest.raises(LookupError):
        client.until(lambda: False)
    assert [(p.topic, p.partition) for p in client.consumer.assignment()] == [(name, 0)]
    client.turn(1.0)
    assert client.records == []
    client.consumer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_without_partitions_is_told_so_by_the_classic_protocol_alone(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    """With the other one, a look at the group's members tells whether it has joined."""
    kafka.create_topic(name, 1)
    first = join(name, **{"group.protocol": protocol}).subscribe(name)
    first.until(lambda: first.told)
    second = join(name, **{"group.protocol": protocol}).subscribe(name)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})

    def members() -> set[str]:
        described = admin.describe_consumer_groups([name], request_timeout=60)[name].result(60)
        return {member.member_id for member in described.members}

    turn_all([first, second], lambda: second.consumer.memberid() in members())
    turn_all([first, second], lambda: len(members()) == 2)
    if protocol == "classic":
        turn_all([first, second], lambda: second.told)
    else:
        second.turn(2.0)
        assert second.told == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_subscribing_to_one_more_topic_revokes_nothing(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    kafka.create_topic(name, 2)
    kafka.create_topic(f"{name}-more", 1)
    client = join(name, **{"group.protocol": protocol}).subscribe(name)
    client.until(lambda: client.told)
    client.subscribe(name, f"{name}-more")
    client.until(lambda: len(client.told) >= 2)
    assert [(kind, parts) for kind, parts, _ in client.told[1:]] == [("assigned", [(f"{name}-more", 0)])]


def test_the_consumer_protocol_refuses_what_the_broker_decides() -> None:
    for refused in ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"):
        value = "range" if refused.startswith("partition") else "6000"
        properties = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "group.protocol": "consumer"}
        with pytest.raises(ck.KafkaException) as error:
            ck.Consumer(properties | {refused: value}, logger=logging.getLogger("client"))
        assert error.value.args[0].code() == ck.KafkaError._INVALID_ARG


# --- pausing ------------------------------------------------------------------------------------


def test_a_partition_that_went_away_paused_comes_back_paused(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, [b"x"] * 3)
    client = join(name).subscribe(name)
    client.until(lambda: client.told)
    here = [ck.TopicPartition(name, 0, 0)]
    client.consumer.pause(here)
    client.turn(0.3)
    seen = len(client.records)
    client.consumer.incremental_unassign(here)
    client.consumer.incremental_assign(here)
    client.turn(1.0)
    assert len(client.records) == seen
    client.consumer.resume(here)
    client.until(lambda: len(client.records) == seen + 3)


# --- positions and resets -----------------------------------------------------------------------


def test_the_position_passes_aborted_records_and_markers_and_is_nothing_before_there_was_one(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions()
    for commit in (True, False):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(name, b"x", partition=0)
        producer.flush()
        if commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    end = 8
    wait_until(lambda: kafka.end_offsets(name, stable=True)[0] == end, WAIT_SECS, "the abort marker")
    client = join(name).subscribe(name)
    client.until(lambda: client.position(name) == end)
    assert [offset for _, offset in client.records] == [0, 1, 2]
    for start, position in ((3, end), (end, ck.OFFSET_INVALID)):
        client.consumer.incremental_unassign([ck.TopicPartition(name, 0)])
        client.consumer.incremental_assign([ck.TopicPartition(name, 0, start)])
        assert client.position(name) == ck.OFFSET_INVALID
        client.turn(0.5)
        assert client.position(name) == position  # markers alone are enough, nothing is not


def test_an_offset_out_of_range_is_an_event_that_names_it_and_reading_goes_on_after_assigning_again(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, [b"x"] * 3)
    client = join(name).subscribe(name, start=500)
    client.until(lambda: client.events)
    (event,) = client.events
    assert event.error().code() == ck.KafkaError._AUTO_OFFSET_RESET
    assert (event.topic(), event.partition(), event.offset()) == (name, 0, 500)
    assert event.value() == event.error().str().encode()
    with pytest.raises(ck.KafkaException):
        client.consumer.seek(ck.TopicPartition(name, 0, 0))
    client.consumer.incremental_unassign([ck.TopicPartition(name, 0)])
    client.consumer.incremental_assign([ck.TopicPartition(name, 0, 1)])
    client.until(lambda: len(client.records) == 2)
    assert client.position(name) == 3


def test_an_offset_out_of_range_is_told_even_after_the_partition_was_assigned_elsewhere(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """Messages from before are dropped by their version, and such an error has none."""
    kafka.create_topic(name, 1)
    kafka.produce(name, [b"v"] * 10)
    client = join(name).subscribe(name, start=50)
    client.until(lambda: client.told)
    time.sleep(2)  # by then the error waits in the client
    client.consumer.incremental_unassign([ck.TopicPartition(name, 0)])
    client.consumer.incremental_assign([ck.TopicPartition(name, 0, 0)])
    client.until(lambda: len(client.records) == 10)
    assert [(event.error().code(), event.offset()) for event in client.events] == [
        (ck.KafkaError._AUTO_OFFSET_RESET, 50)
    ]


def test_the_records_of_one_partition_come_in_order_and_in_long_runs(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 2)
    kafka.produce(name, [b"x" * 50] * 4_000)
    client = join(name).subscribe(name)
    runs = 0
    while len(client.records) < 4_000:
        taken = client.turn()
        runs += sum(1 for a, b in pairwise(taken) if a[0] != b[0])
    assert runs < 40
    for partition in (0, 1):
        assert [offset for p, offset in client.records if p == partition] == list(range(2_000))


# --- commits ------------------------------------------------------------------------------------


def test_a_commit_brings_its_metadata_and_the_broker_takes_one_that_goes_back(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """So whoever commits has to see to it that marks only rise, and a topic's id can travel along."""
    kafka.create_topic(name, 1)
    client = join(name).subscribe(name)
    client.until(lambda: client.told)
    for offset in (7, 3):
        client.consumer.commit(offsets=[ck.TopicPartition(name, 0, offset, '{"a":1}')], asynchronous=True)
    client.until(lambda: len(client.commits) == 2)
    assert [(error, [(p.offset, p.error) for p in parts]) for error, parts in client.commits] == [
        (None, [(7, None)]),
        (None, [(3, None)]),
    ]
    (stored,) = client.consumer.committed([ck.TopicPartition(name, 0)], timeout=60)
    assert (stored.offset, stored.metadata, stored.error) == (3, '{"a":1}', None)


def test_deleting_a_topic_or_the_group_deletes_the_commits(kafka: KafkaServer, name: str) -> None:
    """It looks like a group that never committed: a program has to remember by itself."""
    kafka.create_topic(name, 1)
    kafka.create_topic(f"{name}-other", 1)
    reader = Client(kafka.bootstrap, name)
    topics = [ck.TopicPartition(name, 0), ck.TopicPartition(f"{name}-other", 0)]
    reader.consumer.commit(
        offsets=[ck.TopicPartition(p.topic, p.partition, 1) for p in topics], asynchronous=False
    )
    before = kafka.topic_id(name)
    kafka.delete_topic(name)
    kafka.create_topic(name, 1)
    assert [p.offset for p in reader.consumer.committed(topics, timeout=60)] == [ck.OFFSET_INVALID, 1]
    assert kafka.topic_id(name) != before
    kafka.delete_group(name)
    assert [p.offset for p in reader.consumer.committed(topics, timeout=60)] == [ck.OFFSET_INVALID] * 2
    reader.consumer.close()


def test_with_a_frozen_broker_an_asynchronous_commit_and_a_look_at_it_keep_their_time(
    weak_kafka: KafkaServer, name: str
) -> None:
    weak_kafka.create_topic(name, 1)
    client = Client(weak_kafka.bootstrap, name).subscribe(name)
    client.until(lambda: client.told)
    weak_kafka.freeze()
    try:
        began = time.monotonic()
        client.consumer.commit(offsets=[ck.TopicPartition(name, 0, 0)], asynchronous=True)
        assert time.monotonic() - began < SLACK_SECS
        with pytest.raises(ck.KafkaException) as error:
            client.consumer.committed([ck.TopicPartition(name, 0)], timeout=1.0)
        assert error.value.args[0].code() == ck.KafkaError._TIMED_OUT
        assert time.monotonic() - began < 1 + SLACK_SECS
        assert client.commits == []
    finally:
        weak_kafka.thaw()
    client.until(lambda: client.commits)
    client.consumer.close()


# --- questions to the cluster ---------------------------------------------------------------------


def test_list_offsets_tells_the_last_stable_offset_apart_from_the_end(kafka: KafkaServer, name: str) -> None:
    kafka.create_topic(name, 1)
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(name, b"x", partition=0)
    producer.flush()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    ends = {}
    for level in (ck.IsolationLevel.READ_COMMITTED, ck.IsolationLevel.READ_UNCOMMITTED):
        asked = {ck.TopicPartition(name, 0): OffsetSpec.latest()}
        (answer,) = admin.list_offsets(asked, isolation_level=level, request_timeout=60).values()
        ends[level] = answer.result(60).offset
    producer.abort_transaction()
    assert list(ends.values()) == [0, 1]


def test_the_logger_gets_what_would_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("facts")
    logger.addHandler(Keep())
    logger.propagate = False
    consumer = ck.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, logger=logger)
    consumer.subscribe(["t"])
    deadline = time.monotonic() + 10 * PATIENCE
    while not lines and time.monotonic() < deadline:
        consumer.consume(1, 0.1)
    consumer.close()
    assert "127.0.0.1:1" in lines[0]
    assert capfd.readouterr().err == ""
