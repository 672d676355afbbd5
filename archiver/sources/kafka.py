"""The Kafka source: joins the group, hands out batches, commits, and tells the pipeline what changes.

Everything here runs on the pipeline's thread; librdkafka calls back only inside `take` (and `close`).
One thread beside it, the lookout, looks at topics and ends of logs. What this module relies on is
measured by `tests/integration/test_client_facts.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.errors import SourceFatalError
from archiver.events import TopicMissing, TopicsChanged
from archiver.ports import BrokerView, Clock, Emit, PartitionListener
from archiver.settings.models import Kafka
from archiver.sources.kafka_assignment import Assignment
from archiver.sources.kafka_client import admin_properties, consumer_properties, is_eager
from archiver.sources.kafka_commits import Commits
from archiver.sources.kafka_feed import make_feed
from archiver.sources.kafka_lookout import Carried, Lookout
from archiver.sources.kafka_offsets import our_partitions, replaced, wait_until_committed
from archiver.sources.kafka_partitions import Partitions
from archiver.sources.kafka_starts import Starts
from archiver.sources.kafka_topics import Selection, Subscription
from archiver.sources.kafka_trouble import FATAL, Trouble, way_out

TAKE_SECS_MAX = 0.05
"""The client waits for all it was asked for, so the last records of a burst wait this long."""
JOINING_TAKE_SECS = 0.005
"""While the group is being joined: the assignment comes by the client's own queue, and only a new take looks
there."""
PREFETCH_BYTES_MAX = 64 << 20
LEARN_SECS = 1.0
REPLACED_ANSWER_SECS = 1.0
"""How long a revoke or a loss waits to hear whether the topics still exist; silence counts as yes."""

_UNREADABLE = frozenset({ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError._LOG_TRUNCATION})


class KafkaSource:
    """`ports.Source` on one consumer of a group.

    `excluded_topics` are never found by `topic_include` (the DLQ). `prefetch_bytes_max` bounds the
    client's queue and is part of the memory bound [B1].
    """

    def __init__(
        self,
        kafka: Kafka,
        emit: Emit,
        clock: Clock,
        *,
        excluded_topics: Collection[str] = (),
        prefetch_bytes_max: int = PREFETCH_BYTES_MAX,
        logger: logging.Logger | None = None,
    ) -> None:
        self._kafka = kafka
        self._emit = emit
        self._clock = clock
        self._prefetch_bytes_max = prefetch_bytes_max
        self._logger = logger or logging.getLogger("librdkafka")
        self._selection = Selection.of(
            kafka.topics, kafka.topic_include, kafka.topic_exclude, excluded_topics
        )
        self._trouble = Trouble(emit, clock)
        self._subscription = Subscription()
        self._listing_number = 0
        self._died = Carried()
        self._connects = self._started = False
        self._joined = self._stopping = self._closing = self._taking = False

    def connect(self) -> None:
        """Make the clients, which begin to connect while the rest of the process is set up.

        Takes part of `start`; what goes wrong comes out there.
        """
        with self._died:
            self._make_clients()

    def _make_clients(self) -> None:
        properties = consumer_properties(self._kafka, self._prefetch_bytes_max)  # has secrets: not kept
        self._eager = is_eager(properties)
        self._feed = make_feed(properties, self._on_error)
        callbacks = {"on_commit": self._on_commit, **self._feed.properties()}
        try:
            self._consumer = ck.Consumer(properties | callbacks, logger=self._logger)
            self._feed.open(self._consumer)
            self._admin = AdminClient(
                admin_properties(self._kafka) | {"error_cb": self._trouble.failed}, logger=self._logger
            )
        except ck.KafkaException as refused:
            raise SourceFatalError(f"the Kafka client does not take the settings: {refused}") from refused
        # A consumer connects once it is asked for something, in two steps that it keeps 50 ms apart: so it is
        # asked for something, and nobody waits for the answer.
        with suppress(ck.KafkaException):
            self._consumer.list_topics(timeout=0.0)
        self._connects = True

    def start(self, listener: PartitionListener) -> None:
        """Begin to look for topics; the group is joined once there are some.

        Raises `SourceFatalError` where librdkafka does not take the settings.
        """
        if not self._connects:
            self.connect()
        self._died.check()
        kafka = self._kafka
        self._listener = listener
        self._commits = Commits(self._consumer, listener, self._clock)
        self._starts = Starts(self._consumer, self._admin, kafka.auto_offset_reset)
        assignment = Assignment(self._consumer, self._feed.attach, eager=self._eager)
        self._partitions = Partitions(
            assignment, self._starts, self._commits, listener, self._emit, self._clock
        )
        self._lookout = Lookout(
            self._admin, self._selection, kafka.topic_refresh_secs, self._trouble, self._clock
        )
        self._lookout.start()
        self._started = True

    # --- records ----------------------------------------------------------------------------

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        """See `ports.Source`. Returns after 50 ms at most unless a rebalance is served meanwhile."""
        self._raise_if_dead()
        timeout_secs = self._wait_for_topics(min(timeout_secs, TAKE_SECS_MAX))
        self._follow_topics()
        if self._partitions.place_pending():
            self._watch()
        self._partitions.commit_first_marks()
        self._commits.complain()
        self._notice_joining()
        self._taking = True
        try:
            taken, events = self._feed.take(self._partitions.active, timeout_secs, records_max)
        except ck.KafkaException as error:
            raise SourceFatalError(f"the Kafka client cannot go on: {error}") from error
        # An error from here on leaves `_taking` set: the client counts as passed what nobody was given.
        self._raise_if_dead()
        for event in events:
            self._notice(event)
        taken = self._partitions.hand_out(taken)
        self._taking = False
        return taken

    def positions(self) -> Mapping[TopicPartition, int]:
        """See `ports.Source`; it passes transaction markers, aborted records and compacted gaps.

        Empty inside a listener's callback: what the running `take` has popped is in nobody's hands
        yet, and must not depend on when the client counts it.
        """
        if self._taking or not self._started:
            return {}
        positions = self._partitions.placed()
        if self._partitions.readable:
            told = self._consumer.position(self._partitions.readable)
            positions |= {TopicPartition(p.topic, p.partition): p.offset for p in told if p.offset >= 0}
        return positions

    def queued_bytes(self) -> int:
        """The bound of the prefetch queue, whose fill librdkafka tells only in its statistics; 0 once
        stopped, since what it holds then is not handed out any more."""
        return 0 if self._stopping else self._prefetch_bytes_max

    def pause(self) -> None:
        """See `ports.Source`."""
        self._partitions.let_flow(False)

    def resume(self) -> None:
        """See `ports.Source`."""
        self._partitions.let_flow(not self._stopping)

    # --- commits ----------------------------------------------------------------------------

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        """See `ports.Source`; the answer comes inside a later `take`."""
        return self._commits.start(marks)

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        """See `ports.Source`; may be called inside `revoked`. A synchronous commit could not be bounded."""
        deadline = self._clock.monotonic() + timeout_secs
        ahead = self._still_committable(self._commits.ours(marks), timeout_secs)
        if not ahead:
            return True
        if self._commits.send(ahead) is not None:
            return False
        done = wait_until_committed(self._consumer, ahead, deadline, self._clock.monotonic)
        if done:
            self._confirmed(ahead)
        return done

    def _still_committable(
        self, ahead: Mapping[TopicPartition, int], timeout_secs: float
    ) -> dict[TopicPartition, int]:
        """Without the partitions of deleted topics: no broker would ever show their marks."""
        ids = {partition: self._commits.ids.get(partition) for partition in ahead}
        gone = replaced(self._admin, ids, min(REPLACED_ANSWER_SECS, timeout_secs / 4))
        return {partition: mark for partition, mark in ahead.items() if partition not in gone}

    # --- state ------------------------------------------------------------------------------

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        """See `ports.Source`; a few seconds old."""
        return self._lookout.view

    def ready(self) -> str | None:
        """None once the group has been joined, with partitions or without."""
        brokers = ",".join(self._kafka.brokers)
        if (away := self._trouble.away) is not None:
            return f"kafka cannot be used at {brokers}: {away}"
        if self._lookout.listing is None:
            return f"not joined: waiting for the list of topics from {brokers}"
        if not self._subscription.topics:
            return "not joined: there is no topic to archive yet"
        if not self._joined:
            return f"not joined: waiting for group {self._kafka.group_id}"
        if pending := len(self._partitions.pending):
            return f"the broker has not told yet where {pending} partitions go on"
        return None

    def stop_taking(self) -> None:
        """See `ports.Source`: pauses for good, and stays in the group."""
        self._stopping = True
        if self._started:
            self._partitions.let_flow(False)

    def close(self, timeout_secs: float) -> None:
        """Leave the group, in `timeout_secs` at most: without a broker the client would wait longer."""
        if not self._started:
            return
        self._closing = True
        deadline = self._clock.monotonic() + timeout_secs
        leaving = threading.Thread(target=self._leave, name="kafka-leave", daemon=True)
        leaving.start()
        self._lookout.stop(timeout_secs)
        leaving.join(max(0.0, deadline - self._clock.monotonic()))

    def _leave(self) -> None:
        with self._died:
            self._feed.close()
            self._consumer.close()

    def _raise_if_dead(self) -> None:
        self._died.check()
        self._lookout.died.check()

    # --- topics -----------------------------------------------------------------------------

    def _wait_for_topics(self, timeout_secs: float) -> float:
        """While there is nothing to join for; returns for how long the take waits for records."""
        if self._joined or self._stopping:
            return timeout_secs
        if self._subscription.topics:
            return min(timeout_secs, JOINING_TAKE_SECS)
        self._lookout.listed.wait(timeout_secs)
        self._lookout.listed.clear()
        return 0.0

    def _follow_topics(self) -> None:
        listing = self._lookout.listing
        if listing is None or listing.number == self._listing_number or self._stopping:
            return
        existing = [TopicPartition(t, p) for t, count in listing.partitions.items() for p in range(count)]
        if not self._starts.learn_first(existing, LEARN_SECS):
            return
        self._listing_number = listing.number
        for topic in listing.missing:
            self._emit(TopicMissing(topic))
        added, removed = self._subscription.update(listing.partitions)
        if added or removed:
            total = len(self._subscription.topics)
            self._emit(TopicsChanged(tuple(sorted(added)), tuple(sorted(removed)), total))
            self._subscribe()
        self._partitions.compare_ids(listing.ids, listing.partitions)

    def _subscribe(self) -> None:
        topics = sorted(self._subscription.topics)
        if not topics:
            self._consumer.unsubscribe()
            return
        self._consumer.subscribe(
            topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _notice_joining(self) -> None:
        """A member without partitions has joined too, though the consumer protocol does not say so."""
        if self._joined or self._kafka.group_protocol != "consumer" or not self._subscription.topics:
            return
        member_id = self._consumer.memberid()
        if member_id and self._lookout.member_seen == member_id:
            self._joined = True
        elif member_id:
            self._lookout.await_member(self._kafka.group_id, member_id)

    # --- what librdkafka tells --------------------------------------------------------------

    def _on_assign(self, _consumer: ck.Consumer, assigned: list[Any]) -> None:
        with self._died:
            self._joined = True
            self._partitions.add(our_partitions(assigned), leaving=self._closing)
            self._watch()

    def _on_revoke(self, _consumer: ck.Consumer, revoked: list[Any]) -> None:
        with self._died:
            partitions = our_partitions(revoked)
            ours = self._partitions.active.intersection(partitions)
            if ours and not self._closing and (there := self._still_there(ours)):
                self._listener.revoked(there)
            self._let_go(partitions)

    def _on_lost(self, _consumer: ck.Consumer, lost: list[Any]) -> None:
        with self._died:
            partitions = our_partitions(lost)
            ours = self._partitions.active.intersection(partitions)
            self._joined = False
            self._commits.dropped(frozenset(partitions))
            if ours and not self._closing and (there := self._still_there(ours)):
                self._listener.lost(there)
            self._let_go(partitions)

    def _still_there(self, ours: Collection[TopicPartition]) -> frozenset[TopicPartition]:
        """Of partitions that go, those whose topic is the one that was read.

        One that is deleted, or made anew since, has no next owner for its records, and no broker takes
        a commit for them: what files hold of them is nowhere else any more, so it is kept.
        """
        ids = {partition: self._commits.ids.get(partition) for partition in ours}
        gone = replaced(self._admin, ids, REPLACED_ANSWER_SECS)
        if gone:
            self._commits.dropped(gone)
            self._listener.restarted(gone)
            self._listener.lost(gone)
        return frozenset(ours) - gone

    def _let_go(self, partitions: Sequence[TopicPartition]) -> None:
        self._partitions.remove(partitions)
        self._watch()

    def _watch(self) -> None:
        self._lookout.watch(frozenset(self._partitions.active))

    def _on_commit(self, error: ck.KafkaError | None, partitions: list[Any]) -> None:
        with self._died:
            done = self._commits.answer(error, partitions)
            if done:
                self._trouble.answered()
                self._starts.remember(done, self._commits.ids)

    def _confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        self._commits.held(marks)
        self._starts.remember(marks, self._commits.ids)

    def _on_error(self, error: ck.KafkaError) -> None:
        with self._died:
            if not (error.fatal() or error.code() in FATAL):
                self._trouble.failed(error)
                return
            advice = way_out(
                ck.KafkaError.FENCED_INSTANCE_ID if self._kafka.group_instance_id else error.code()
            )
            raise SourceFatalError(f"the Kafka client cannot go on: {error.str()}: {advice}".rstrip(": "))

    def _notice(self, event: Any) -> None:
        """An error that came in place of a record."""
        error: Any = event.error()
        code = error.code()
        partition = TopicPartition(event.topic() or "", event.partition())
        if code in _UNREADABLE:
            cut = code == ck.KafkaError._LOG_TRUNCATION
            self._partitions.unreadable(partition, event.offset(), "log_truncated" if cut else None)
        elif code != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._on_error(error)  # a topic that is gone is told by the lookout
            self._raise_if_dead()
