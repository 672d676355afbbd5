"""The Kafka source alone, on a real broker: what it hands out, what it says aloud, what it commits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import NewPartitions
from pydantic import SecretStr

from archiver.domain.batch import TopicPartition
from archiver.errors import SourceFatalError
from archiver.events import (
    BrokerRecovered,
    BrokerTrouble,
    Event,
    NoCommittedOffset,
    OffsetsSkipped,
    TopicMissing,
    TopicsChanged,
)
from archiver.native import native
from archiver.settings.models import Kafka
from archiver.sources import kafka_feed
from archiver.sources.kafka import KafkaSource
from archiver.sources.kafka_check import look
from archiver.sources.kafka_partitions import Partitions
from archiver.sources.kafka_starts import Starts, Wanted
from tests.harness.kafka import KafkaServer
from tests.harness.process import PATIENCE, SLACK_SECS, free_port, wait_until

WAIT_SECS = 25.0 * PATIENCE
PROTOCOLS = ("classic", "consumer")
E = TypeVar("E", bound=Event)


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


@dataclass
class Member:
    """A source with a listener that keeps what it was told, and every record it was handed."""

    source: KafkaSource
    events: list[Event]
    told: list[tuple[str, Any]] = field(default_factory=list)
    records: list[tuple[TopicPartition, int, bytes | None]] = field(default_factory=list)
    ours: set[TopicPartition] = field(default_factory=set)
    commits: bool = True
    on_revoked: Callable[[frozenset[TopicPartition]], None] = lambda _partitions: None
    on_lost: Callable[[frozenset[TopicPartition]], None] = lambda _partitions: None

    def assigned(self, committed: Mapping[TopicPartition, int | None]) -> None:
        self.told.append(("assigned", dict(committed)))
        self.ours |= set(committed)

    def revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.told.append(("revoked", partitions))
        assert self.source.positions() == {}
        self.on_revoked(partitions)
        self.ours -= partitions

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.told.append(("lost", partitions))
        self.on_lost(partitions)
        self.ours -= partitions

    def restarted(self, partitions: frozenset[TopicPartition]) -> None:
        self.told.append(("restarted", partitions))

    def commit_confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        self.told.append(("confirmed", dict(marks)))

    def commit_failed(self, marks: Mapping[TopicPartition, int], reason: str) -> None:
        self.told.append(("failed", (dict(marks), reason)))

    def turn(self, timeout: float = 0.05) -> int:
        taken = 0
        for batch in self.source.take(timeout, 1_000):
            assert batch.partition in self.ours
            assert len(batch.values) == len(batch.offsets)
            self.records += zip(
                [batch.partition] * len(batch.values), batch.offsets, batch.values, strict=True
            )
            taken += len(batch.values)
        if self.commits and (positions := self.source.positions()):
            self.source.commit(positions)
        return taken

    def until(self, done: Callable[[], object], secs: float = WAIT_SECS) -> None:
        turn_all([self], done, secs)

    def offsets(self, topic: str, partition: int = 0) -> list[int]:
        return [offset for where, offset, _ in self.records if where == (topic, partition)]

    def values(self) -> list[bytes | None]:
        return [value for _, _, value in self.records]

    def said(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def turn_all(members: list[Member], done: Callable[[], object], secs: float = WAIT_SECS) -> None:
    deadline = time.monotonic() + secs
    while not done():
        assert time.monotonic() < deadline, [(m.told[-5:], m.events[-5:], len(m.records)) for m in members]
        for member in members:
            member.turn()


Join = Callable[..., Member]


both_feeds = pytest.mark.parametrize("feed", ["compiled", "consumed"], indirect=True)
"""Everywhere else it is the one that has been built."""


@pytest.fixture
def feed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where sources take from: the compiled feed, or the client's `consume`."""
    if request.param == "consumed":
        monkeypatch.setattr(kafka_feed, "native", None)
    else:
        assert native is not None, "it has not been built: a C compiler and Python's headers are needed"
    return str(request.param)


@pytest.fixture
def name() -> str:
    return f"source-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def join(kafka: KafkaServer, name: str) -> Iterator[Join]:
    """Starts sources on topic and group `name`; closed in the end."""
    made: list[Member] = []

    def start(**settings: Any) -> Member:
        excluded = settings.pop("excluded_topics", ())
        member = make(kafka.bootstrap, name, excluded, **settings)
        made.append(member)
        return member

    yield start
    for member in made:
        member.source.close(5)


def make(bootstrap: str, name: str, excluded: tuple[str, ...] = (), **settings: Any) -> Member:
    chosen: dict[str, Any] = {
        "brokers": (bootstrap,),
        "group_id": name,
        "topic_refresh_secs": 1,
        "session_timeout_ms": 6_000,
    }
    if "topic_include" not in settings:
        chosen["topics"] = (name,)
    chosen |= settings
    chosen["client"] = {
        "topic.metadata.refresh.interval.ms": "1000",
        "heartbeat.interval.ms": "500",
    } | chosen.get("client", {})
    if chosen.get("group_protocol") == "consumer":
        del chosen["client"]["heartbeat.interval.ms"]
    events: list[Event] = []
    source = KafkaSource(Kafka(**chosen), events.append, SystemClock(), excluded_topics=excluded)
    member = Member(source, events)
    source.start(member)
    return member


def of(count: int, mark: str = "v") -> list[bytes | None]:
    return [f"{mark}{index}".encode() for index in range(count)]


def commit_by_hand(kafka: KafkaServer, group: str, topic: str, offset: int, metadata: str = "") -> None:
    consumer = ck.Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})
    consumer.commit(offsets=[ck.TopicPartition(topic, 0, offset, metadata)], asynchronous=False)
    consumer.close()


# --- records ----------------------------------------------------------------------------------------


@both_feeds
@pytest.mark.usefixtures("feed")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_record_comes_once_in_order_with_tombstones_and_empty_values(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    kafka.create_topic(name, 3)
    sent = [None if i % 7 == 0 else b"" if i % 5 == 0 else b"%d" % i for i in range(6_000)]
    kafka.produce(name, sent)
    member = join(group_protocol=protocol)
    member.until(lambda: len(member.records) == 6_000)
    for partition in range(3):
        assert member.offsets(name, partition) == list(range(2_000))
        mine = [value for where, _, value in member.records if where.partition == partition]
        assert mine == sent[partition::3]
    assert member.source.ready() is None
    member.until(lambda: kafka.lag(name, name) == 0)


@both_feeds
@pytest.mark.usefixtures("feed")
def test_c17_compacted_topics_and_aborted_transactions_give_survivors_once_and_lag_0(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """c17, c06, [D3], [D11]."""
    compact = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    kafka.create_topic(name, 1, compact | {"min.compaction.lag.ms": "0"})
    for index in range(6):
        kafka.produce(name, [b"%d" % index], key=b"one")
        time.sleep(0.12)
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name, "log_level": 0})
    producer.init_transactions()
    for commit, value in ((True, b"kept"), (False, b"aborted")):
        producer.begin_transaction()
        producer.produce(name, value, key=value, partition=0)
        producer.flush()
        if commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    wait_until(lambda: kafka.end_offsets(name, stable=True)[0] == 10, WAIT_SECS, "the markers")
    member = join()
    member.until(lambda: kafka.committed(name, name) == {0: 10})
    assert member.values()[-1] == b"kept"
    assert b"aborted" not in member.values()
    assert member.offsets(name) == sorted(set(member.offsets(name)))
    assert not member.said(OffsetsSkipped)


@both_feeds
@pytest.mark.usefixtures("feed")
def test_a_record_larger_than_every_fetch_bound_comes_and_so_does_the_next(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """c39."""
    kafka.create_topic(name, 1, {"max.message.bytes": str(32 << 20)})
    kafka.produce(name, [b"x" * (20 << 20), b"small"])
    member = join()
    member.until(lambda: len(member.records) == 2)
    assert [len(value or b"") for value in member.values()] == [20 << 20, 5]


# --- start offsets ------------------------------------------------------------------------------------


def test_c14_records_deleted_while_down_are_said_and_counted(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(110))
    commit_by_hand(kafka, name, name, 5)
    kafka.delete_records(name, {0: 100})
    member = join()
    member.until(lambda: len(member.records) == 10)
    assert member.offsets(name) == list(range(100, 110))
    assert member.said(OffsetsSkipped) == [OffsetsSkipped(name, 0, 5, 100, "below_log_start")]
    member.until(lambda: kafka.committed(name, name) == {0: 110})


@both_feeds
@pytest.mark.usefixtures("feed")
def test_records_deleted_before_our_eyes_are_said_too(kafka: KafkaServer, name: str, join: Join) -> None:
    """[D9]: with the client's own reset they would be a log line."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join(client={"queued.max.messages.kbytes": "1", "fetch.message.max.bytes": "1000"})
    member.until(lambda: len(member.records) == 10)
    member.source.pause()
    kafka.produce(name, of(100))
    kafka.delete_records(name, {0: 60})
    member.source.resume()
    member.until(lambda: len(member.records) == 60)
    assert member.offsets(name) == [*range(10), *range(60, 110)]
    assert member.said(OffsetsSkipped) == [OffsetsSkipped(name, 0, 10, 60, "below_log_start")]
    assert "restarted" not in member.kinds()
    member.until(lambda: kafka.committed(name, name) == {0: 110})


def test_c15_a_group_deleted_while_down_is_loud_and_loses_nothing(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    commit_by_hand(kafka, name, name, 8)
    kafka.delete_group(name)
    member = join()
    member.until(lambda: len(member.records) == 10)
    assert member.said(NoCommittedOffset) == [NoCommittedOffset(name, 0, 0, 0, 10)]
    assert ("assigned", {TopicPartition(name, 0): None}) in member.told


def test_a_commit_beyond_the_end_restarts_at_the_beginning(kafka: KafkaServer, name: str, join: Join) -> None:
    """[D9]: the topic is a shorter one than the group read."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    commit_by_hand(kafka, name, name, 500)
    member = join()
    member.until(lambda: len(member.records) == 10)
    assert member.said(OffsetsSkipped) == [OffsetsSkipped(name, 0, 500, 0, "beyond_end")]
    assert ("assigned", {TopicPartition(name, 0): None}) in member.told
    member.until(lambda: kafka.committed(name, name) == {0: 10})


def test_a_topic_recreated_while_down_is_known_by_the_id_beside_the_commit(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """[D9]: even where the new topic is already longer than what was committed on the old one."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    commit_by_hand(kafka, name, name, 5, '{"topic_id":"FyejiKfCQUSeupR5KWdFpw"}')
    member = join()
    member.until(lambda: len(member.records) == 10)
    assert member.said(OffsetsSkipped) == [OffsetsSkipped(name, 0, 5, 0, "topic_recreated")]


def test_what_was_read_is_committed_although_an_old_error_places_the_partition_again(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """[D3]: no record comes behind it that would show the client's position."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(30))
    member = join()
    member.commits = False
    member.until(lambda: len(member.records) == 30)
    member.source._partitions.unreadable(TopicPartition(name, 0), 10, None)
    member.commits = True
    member.until(lambda: kafka.committed(name, name) == {0: 30})
    assert member.offsets(name) == list(range(30))
    kafka.produce(name, of(1, "more"))
    member.until(lambda: kafka.committed(name, name) == {0: 31})
    assert member.offsets(name) == list(range(31))


def test_a_topic_recreated_while_running_is_read_from_its_beginning(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join()
    member.until(lambda: kafka.committed(name, name) == {0: 10})
    kafka.delete_topic(name)
    kafka.create_topic(name, 1)
    kafka.produce(name, of(30, "new"))
    expected = set(of(30, "new"))
    member.until(lambda: expected <= set(member.values()))
    # where reading stood when it was noticed depends on who was first, the client or our look
    (skipped,) = member.said(OffsetsSkipped)
    assert (skipped.next_offset, skipped.reason) == (0, "topic_recreated")
    assert ("restarted", {TopicPartition(name, 0)}) in member.told
    member.until(lambda: kafka.committed(name, name) == {0: 30})


@both_feeds
@pytest.mark.usefixtures("feed")
def test_an_error_from_before_a_topic_was_known_to_be_made_anew_does_not_bring_its_position_back(
    kafka: KafkaServer, name: str, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[D9]: the client fails at the old position while the broker is asked where the new log begins.

    Once the new topic is longer than the old one was, that position fits it.
    """
    told = list[int]()
    unreadable = Partitions.unreadable

    def is_told(self: Partitions, partition: TopicPartition, offset: int, rewritten: Any) -> None:
        told.append(offset)
        if len(told) == 1:
            kafka.produce(name, of(80, "new"))
        unreadable(self, partition, offset, rewritten)

    find = Starts.find

    def find_while_it_fails(self: Starts, wanted: Mapping[TopicPartition, Wanted], secs: float) -> Any:
        found = find(self, wanted, secs)
        if found and any(place.rewritten for place in wanted.values()):
            member.source._consumer.resume([ck.TopicPartition(name, 0)])
            time.sleep(2)
        return found

    kafka.create_topic(name, 1)
    kafka.produce(name, of(50))
    member = join()
    member.until(lambda: kafka.committed(name, name) == {0: 50})
    monkeypatch.setattr(Starts, "find", find_while_it_fails)
    monkeypatch.setattr(Partitions, "unreadable", is_told)
    member.source.pause()  # so that we notice before the client does
    kafka.delete_topic(name)
    kafka.create_topic(name, 1)
    member.until(lambda: "restarted" in member.kinds())
    member.source.resume()
    member.until(lambda: kafka.committed(name, name) == {0: 80})
    assert told == [50]
    assert member.offsets(name) == [*range(50), *range(80)]
    assert member.said(OffsetsSkipped) == [OffsetsSkipped(name, 0, 50, 0, "topic_recreated")]


def test_what_a_topic_made_anew_lacks_at_its_beginning_is_said_and_holds_nothing_up(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """[D9]: seen twice, it is a gap of the log and no client that has not moved."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join()
    member.until(lambda: kafka.committed(name, name) == {0: 10})
    kafka.delete_topic(name)
    kafka.create_topic(name, 1)
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name, "log_level": 0})
    producer.init_transactions()
    producer.begin_transaction()
    for value in of(5, "aborted"):
        producer.produce(name, value, partition=0)
    producer.flush()
    producer.abort_transaction()
    kafka.produce(name, of(20, "new"))
    member.until(lambda: kafka.committed(name, name) == {0: 26})
    new = [(offset, value) for _, offset, value in member.records if (value or b"").startswith(b"new")]
    assert set(new) == set(zip(range(6, 26), of(20, "new"), strict=True))
    assert member.said(OffsetsSkipped)[-1] == OffsetsSkipped(name, 0, 0, 6, "not_in_log")


def test_latest_is_for_what_existed_when_the_group_first_started(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """[D9]: not for what comes later, and not once more after a restart that had nothing to commit."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10, "old"))
    member = join(auto_offset_reset="latest")
    member.commits = False
    member.until(lambda: kafka.committed(name, name) == {0: 10})
    member.source.close(5)
    kafka.produce(name, of(5, "between"))
    later = join(auto_offset_reset="latest")
    later.until(lambda: len(later.records) == 5)
    assert later.values() == of(5, "between")
    kafka.admin.create_partitions([NewPartitions(name, 2)])[name].result(60)
    kafka.produce(name, of(5, "added"), partition=1)
    later.until(lambda: len(later.records) == 10)
    assert later.offsets(name, 1) == list(range(5))


# --- topics -------------------------------------------------------------------------------------------


def test_c16_a_topic_that_appears_later_is_read_from_its_first_record(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """c16, [C6]: internal, excluded and DLQ topics are left out; nothing is revoked for the new one."""
    for topic in ("a", "no", "dlq"):
        kafka.create_topic(f"{name}-{topic}", 1)
        kafka.produce(f"{name}-{topic}", of(3))
    member = join(
        topic_include=[".*" + name[7:] + "-.*", "__.*"],
        topic_exclude=[".*-no"],
        excluded_topics=(f"{name}-dlq",),
    )
    member.until(lambda: len(member.records) == 3)
    kafka.create_topic(f"{name}-b", 2)
    kafka.produce(f"{name}-b", of(100))
    member.until(lambda: len(member.records) == 103)
    assert {where.topic for where, _, _ in member.records} == {f"{name}-a", f"{name}-b"}
    assert "revoked" not in member.kinds()
    assert [(e.added, e.total) for e in member.said(TopicsChanged)] == [
        ((f"{name}-a",), 1),
        ((f"{name}-b",), 2),
    ]


def test_a_listed_topic_that_does_not_exist_is_waited_for_and_not_created(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    member = join()
    member.until(lambda: member.said(TopicMissing))
    assert member.source.ready() == "not joined: there is no topic to archive yet"
    member.turn(1.0)
    assert name not in kafka.admin.list_topics(timeout=5).topics
    kafka.create_topic(name, 1)
    kafka.produce(name, of(3))
    member.until(lambda: len(member.records) == 3)
    assert member.source.ready() is None


def test_an_added_partition_is_picked_up_and_read_from_its_beginning(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(3))
    member = join()
    member.until(lambda: len(member.records) == 3)
    kafka.admin.create_partitions([NewPartitions(name, 2)])[name].result(60)
    kafka.produce(name, of(40), partition=1)
    member.until(lambda: len(member.records) == 43)
    assert member.offsets(name, 1) == list(range(40))


# --- rebalances -----------------------------------------------------------------------------------------


@both_feeds
@pytest.mark.usefixtures("feed")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_that_come_and_go_hand_out_every_record_and_take_over_at_the_commit(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    """c11: what is committed inside `revoked` is where the next owner begins."""
    kafka.create_topic(name, 8)
    kafka.produce(name, of(800))
    first = join(group_protocol=protocol)
    first.until(lambda: len(first.records) == 800)

    def drain(partitions: frozenset[TopicPartition]) -> None:
        assert first.source.commit_and_confirm(dict.fromkeys(partitions, 100), 60)

    first.on_revoked = drain
    second = join(group_protocol=protocol)
    turn_all([first, second], lambda: len(second.ours) == 4 and len(first.ours) == 4)
    moved = set(second.ours)
    assert {
        partition: offset for _, told in second.told for partition, offset in told.items()
    } == dict.fromkeys(moved, 100)
    kafka.produce(name, of(800, "w"))
    turn_all([first, second], lambda: len(first.records) + len(second.records) == 1_600)
    for partition in moved:
        assert second.offsets(*partition) == list(range(100, 200))
    turn_all([first, second], lambda: kafka.lag(name, name) == 0)
    second.source.close(5)
    turn_all([first], lambda: len(first.ours) == 8)
    kafka.produce(name, of(80, "x"))
    turn_all([first], lambda: len([v for v in first.values() if v and v.startswith(b"x")]) == 80)
    assert "lost" not in first.kinds()


@both_feeds
@pytest.mark.usefixtures("feed")
def test_an_eager_assignor_of_the_users_choice_works(kafka: KafkaServer, name: str, join: Join) -> None:
    kafka.create_topic(name, 4)
    kafka.produce(name, of(40))
    settings = {"client": {"partition.assignment.strategy": "range"}}
    first = join(**settings)
    first.until(lambda: len(first.records) == 40)
    first.until(lambda: kafka.lag(name, name) == 0)
    second = join(**settings)
    turn_all([first, second], lambda: len(first.ours) == 2 and len(second.ours) == 2)
    kafka.produce(name, of(40))
    turn_all([first, second], lambda: len(first.records) + len(second.records) == 80)
    first.source.pause()
    kafka.produce(name, of(40))
    kafka.delete_records(name, dict.fromkeys(range(4), 25))
    first.source.resume()
    turn_all([first, second], lambda: kafka.lag(name, name) == 0)
    for partition in first.ours:
        assert first.offsets(*partition)[-5:] == list(range(25, 30))


@both_feeds
@pytest.mark.usefixtures("feed")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c13_partitions_that_were_paused_over_a_rebalance_flow_again_from_the_commit(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    kafka.create_topic(name, 4)
    kafka.produce(name, of(40))
    first = join(group_protocol=protocol)
    first.until(lambda: len(first.records) == 40 and kafka.lag(name, name) == 0)
    first.source.pause()
    kafka.produce(name, of(40))
    second = join(group_protocol=protocol)
    second.source.pause()
    turn_all([first, second], lambda: len(first.ours) == 2 and len(second.ours) == 2)
    second.source.close(5)
    turn_all([first], lambda: len(first.ours) == 4)
    for _ in range(20):
        first.turn()
    assert (len(first.records), second.records) == (40, [])
    first.source.resume()
    first.until(lambda: len(first.records) == 80)
    for partition in range(4):
        assert first.offsets(name, partition) == list(range(20))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_without_partitions_is_ready(
    kafka: KafkaServer, name: str, join: Join, protocol: str
) -> None:
    kafka.create_topic(name, 1)
    first, second = join(group_protocol=protocol), join(group_protocol=protocol)
    turn_all([first, second], lambda: first.source.ready() is None and second.source.ready() is None)
    assert sorted([len(first.ours), len(second.ours)]) == [0, 1]


def test_a_member_that_was_away_too_long_loses_its_partitions_and_commits_nothing_for_them(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """[D4]: evicted for not polling; it joins again and begins at the commit."""
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join(max_poll_interval_ms=6_000)
    member.commits = False
    member.until(lambda: len(member.records) == 10)
    assert member.source.commit({TopicPartition(name, 0): 4})
    member.until(lambda: "confirmed" in member.kinds())
    time.sleep(7.5)
    member.on_lost = lambda _partitions: asked.append(member.source.commit({TopicPartition(name, 0): 10}))
    asked: list[bool] = []
    member.until(lambda: asked)
    member.until(lambda: len(member.records) == 16)
    assert member.offsets(name)[10:] == list(range(4, 10))
    assert kafka.committed(name, name) == {0: 4}


def test_an_error_of_the_listener_comes_out_of_take_and_stays(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    """A callback that failed leaves the consumer assigned and silent: the process has to end."""
    kafka.create_topic(name, 2)
    first = join()
    first.until(lambda: first.ours)

    def fail(_partitions: frozenset[TopicPartition]) -> None:
        raise LookupError("in the listener")

    first.on_revoked = fail
    second = join()
    with pytest.raises(LookupError):
        turn_all([first, second], lambda: False)
    with pytest.raises(LookupError):
        first.turn()


def test_a_fenced_static_member_ends(kafka: KafkaServer, name: str, join: Join) -> None:
    """[D4]: a fatal client error."""
    kafka.create_topic(name, 1)
    first = join(group_instance_id="one")
    first.until(lambda: first.ours)
    second = join(group_instance_id="one")
    second.until(lambda: second.ours)
    with pytest.raises(SourceFatalError, match=r"fenced.*kafka\.group_instance_id"):
        first.until(lambda: False)


# --- commits --------------------------------------------------------------------------------------------


def test_one_commit_is_in_flight_and_none_goes_back_or_to_a_partition_that_is_not_ours(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join()
    member.commits = False
    here, other = TopicPartition(name, 0), TopicPartition("not-ours", 3)
    member.until(lambda: member.ours)
    assert member.source.commit({here: 6, other: 7})
    assert not member.source.commit({here: 7})
    member.until(lambda: ("confirmed", {here: 6}) in member.told)
    assert member.source.commit({here: 3})
    assert member.told[-1] == ("confirmed", {here: 6})
    assert member.source.commit_and_confirm({here: 2}, 1)
    assert kafka.committed(name, name) == {0: 6}
    assert member.source.commit({here: 7})
    member.until(lambda: ("confirmed", {here: 7}) in member.told)


# --- brokers that are away --------------------------------------------------------------------------------


def test_with_a_frozen_broker_everything_keeps_its_time_and_recovery_is_said(
    weak_kafka: KafkaServer, name: str
) -> None:
    """[D4], c44."""
    weak_kafka.create_topic(name, 1)
    weak_kafka.produce(name, of(10))
    # the session outlasts the silence, so that the commit counts which waits in the broker
    member = make(weak_kafka.bootstrap, name, session_timeout_ms=120_000)
    member.commits = False
    member.until(lambda: len(member.records) == 10)
    here = TopicPartition(name, 0)
    weak_kafka.freeze()
    try:
        began = time.monotonic()
        assert member.source.commit({here: 5})
        assert not member.source.commit_and_confirm({here: 10}, 1.0)
        assert time.monotonic() - began < 1 + SLACK_SECS
        slowest = 0.0
        told = ""
        # it may be said first that the session has ended
        while not ("no answer" in told or "down" in told):
            turned = time.monotonic()
            assert turned - began < 40 * PATIENCE, told
            member.turn()
            slowest = max(slowest, time.monotonic() - turned)
            told = member.source.ready() or ""
        assert slowest < SLACK_SECS
        (trouble, *_) = member.said(BrokerTrouble)
        assert "kafka.brokers" in trouble.way_out
    finally:
        weak_kafka.thaw()
    member.until(lambda: member.source.ready() is None and member.said(BrokerRecovered))
    member.until(lambda: member.ours and weak_kafka.committed(name, name).get(0, 0) >= 5)
    weak_kafka.freeze()
    try:
        began = time.monotonic()
        member.source.close(2.0)
        assert time.monotonic() - began < 2 + SLACK_SECS
    finally:
        weak_kafka.thaw()


def test_a_broker_that_is_away_is_waited_for_from_the_start(weak_kafka: KafkaServer, name: str) -> None:
    weak_kafka.create_topic(name, 1)
    weak_kafka.produce(name, of(10))
    weak_kafka.kill()
    began = time.monotonic()
    member = make(weak_kafka.bootstrap, name)
    assert time.monotonic() - began < SLACK_SECS
    member.until(lambda: member.said(BrokerTrouble))
    assert (member.source.ready() or "").startswith("kafka cannot be used at 127.0.0.1:")
    weak_kafka.start()
    member.until(lambda: len(member.records) == 10 and member.source.ready() is None)
    member.source.close(5)


def test_close_is_bounded_without_any_broker(name: str) -> None:
    member = make(f"127.0.0.1:{free_port()}", name)
    member.turn(0.5)
    began = time.monotonic()
    member.source.close(2.0)
    assert time.monotonic() - began < 2 + SLACK_SECS


def test_a_wrong_password_is_said_with_the_way_out_and_without_the_password(
    secure_kafka: KafkaServer, name: str
) -> None:
    """[S7], c32; the client keeps trying, so a corrected account is enough."""
    listener = secure_kafka.secure_listener
    assert listener is not None
    secure_kafka.create_topic(name, 1)
    secure_kafka.produce(name, of(3))
    access: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_user": listener.user,
        "ssl_ca_location": listener.ca_location,
    }
    wrong = make(listener.bootstrap, name, sasl_password="not-the-password", **access)
    wrong.until(lambda: any("sasl_password" in event.way_out for event in wrong.said(BrokerTrouble)))
    assert "uthentication" in (wrong.source.ready() or "")
    assert "not-the-password" not in repr(wrong.events) + repr(wrong.source.__dict__) + str(
        wrong.source.ready()
    )
    wrong.source.close(2)
    kafka = Kafka(
        brokers=(listener.bootstrap,), topics=(name,), sasl_password=SecretStr("not-the-password"), **access
    )
    [(fine, what, said)] = look(kafka, (), 5.0)
    assert (fine, what) == (False, "broker")
    assert "uthentication" in said and "kafka.sasl_password" in said and "not-the-password" not in said
    right = make(listener.bootstrap, name, sasl_password=listener.password, **access)
    right.until(lambda: len(right.records) == 3)
    right.source.close(5)


# --- the view ---------------------------------------------------------------------------------------------


def test_the_view_shows_log_start_and_last_stable_offset_without_a_wait(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    kafka.delete_records(name, {0: 4})
    producer = ck.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name, "log_level": 0})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(name, b"open", partition=0)
    producer.flush()
    member = join()
    member.until(lambda: member.source.view())
    (view,) = member.source.view().values()
    assert (view.log_start, view.stable_end) == (4, 10)
    producer.abort_transaction()


def test_after_stop_taking_nothing_more_comes_but_the_group_is_kept(
    kafka: KafkaServer, name: str, join: Join
) -> None:
    kafka.create_topic(name, 1)
    kafka.produce(name, of(10))
    member = join()
    member.until(lambda: len(member.records) == 10)
    member.source.stop_taking()
    member.source.resume()
    kafka.produce(name, of(10))
    for _ in range(20):
        member.turn()
    assert len(member.records) == 10
    assert kafka.group_members(name) == 1
