"""The Kafka source: joins the group, hands out batches, commits, and tells the pipeline what changes.

Everything here runs on the pipeline's thread; librdkafka calls back only inside `take` (and `close`).
One thread beside it, the lookout, looks at topics and ends of logs. What this module relies on is
measured by `tests/integration/test_client_facts.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
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
from archiver.sources.kafka_columns import batches, split_events
from archiver.sources.kafka_commits import Commits
from archiver.sources.kafka_lookout import Carried, Lookout
from archiver.sources.kafka_offsets import client_partition, our_partitions, wait_until_committed
from archiver.sources.kafka_starts import NEW, Found, Starts, Wanted
from archiver.sources.kafka_topics import Listing, Selection, Subscription
from archiver.sources.kafka_trouble import FATAL, Trouble, way_out

TAKE_RECORDS = 1_000
"""More leave the processor's cache: 5,000 and above cost 10–25 %."""
TAKE_SECS_MAX = 0.05
"""`consume` waits for all it was asked for, so the last records of a burst wait this long."""
PREFETCH_BYTES_MAX = 64 << 20
ASSIGN_ANSWER_SECS = 5.0
"""How long a rebalance waits for each answer about start offsets; then it goes on without them."""
RETRY_ANSWER_SECS = 1.0
RETRY_SECS = 1.0

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
        self._active: set[TopicPartition] = set()
        self._readable: list[ck.TopicPartition] = []  # those of `_active` whose position means something
        self._pending: dict[TopicPartition, Wanted] = {}
        self._retry_at = 0.0
        self._first_marks: dict[TopicPartition, int] = {}
        self._joined = self._paused = self._stopping = self._closing = self._taking = False

    def start(self, listener: PartitionListener) -> None:
        """Make the clients and begin to look for topics; the group is joined once there are some.

        Raises `SourceFatalError` where librdkafka does not take the settings.
        """
        kafka, callbacks = self._kafka, {"error_cb": self._on_error, "on_commit": self._on_commit}
        properties = consumer_properties(kafka, self._prefetch_bytes_max)
        try:
            self._consumer = ck.Consumer(properties | callbacks, logger=self._logger)
            self._admin = AdminClient(
                admin_properties(kafka) | {"error_cb": self._trouble.failed}, logger=self._logger
            )
        except ck.KafkaException as refused:
            raise SourceFatalError(f"the Kafka client does not take the settings: {refused}") from refused
        self._listener = listener
        self._assignment = Assignment(self._consumer, eager=is_eager(properties))
        self._commits = Commits(self._consumer, listener, self._clock)
        self._starts = Starts(self._consumer, self._admin, kafka.auto_offset_reset)
        self._lookout = Lookout(
            self._admin, self._selection, kafka.topic_refresh_secs, self._trouble, self._clock
        )
        self._lookout.start()

    # --- records ----------------------------------------------------------------------------

    def take(self, timeout_secs: float) -> Sequence[RecordBatch]:
        """See `ports.Source`. Returns after 50 ms at most unless a rebalance is served meanwhile."""
        self._raise_if_dead()
        self._follow_topics()
        self._place_pending()
        self._commit_first_marks()
        self._commits.complain()
        self._notice_joining()
        self._taking = True
        try:
            messages = self._consumer.consume(TAKE_RECORDS, min(timeout_secs, TAKE_SECS_MAX))
        except ck.KafkaException as error:
            raise SourceFatalError(f"the Kafka client cannot go on: {error}") from error
        self._taking = False
        self._raise_if_dead()
        if not messages:
            return ()
        records, events = split_events(messages)
        for event in events:
            self._notice(event)
        taken = batches(records, self._active)
        for batch in taken:
            self._assignment.passed(batch.partition, batch.offsets[-1] + 1)
        return taken

    def positions(self) -> Mapping[TopicPartition, int]:
        """See `ports.Source`; it passes transaction markers, aborted records and compacted gaps.

        Empty inside a listener's callback: the client counts records there that this `take` has not
        returned yet, and drops those of a partition that goes without ever returning them.
        """
        if self._taking or not self._readable:
            return {}
        told = self._consumer.position(self._readable)
        return {TopicPartition(p.topic, p.partition): p.offset for p in told if p.offset >= 0}

    def queued_bytes(self) -> int:
        """The bound of the prefetch queue, whose fill librdkafka tells only in its statistics; 0 once
        stopped, since what it holds then is not handed out any more."""
        return 0 if self._stopping else self._prefetch_bytes_max

    def pause(self) -> None:
        """See `ports.Source`."""
        if not self._paused:
            self._paused = True
            self._set_flow()

    def resume(self) -> None:
        """See `ports.Source`."""
        if self._paused:
            self._paused = False
            self._set_flow()

    # --- commits ----------------------------------------------------------------------------

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        """See `ports.Source`; the answer comes inside a later `take`."""
        return self._commits.start(marks)

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        """See `ports.Source`; may be called inside `revoked`. A synchronous commit could not be bounded."""
        deadline = self._clock.monotonic() + timeout_secs
        ahead = self._commits.ours(marks)
        if not ahead:
            return True
        if self._commits.send(ahead) is not None:
            return False
        done = wait_until_committed(self._consumer, ahead, deadline, self._clock.monotonic)
        if done:
            self._confirmed(ahead)
        return done

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
        if self._pending:
            return f"the broker has not told yet where {len(self._pending)} partitions start"
        return None

    def stop_taking(self) -> None:
        """See `ports.Source`: pauses for good, and stays in the group."""
        self._stopping = True
        self._set_flow()

    def close(self, timeout_secs: float) -> None:
        """Leave the group, in `timeout_secs` at most: without a broker the client would wait longer."""
        self._closing = True
        deadline = self._clock.monotonic() + timeout_secs
        leaving = threading.Thread(target=self._leave, name="kafka-leave", daemon=True)
        leaving.start()
        self._lookout.stop(timeout_secs)
        leaving.join(max(0.0, deadline - self._clock.monotonic()))

    def _leave(self) -> None:
        with self._died:
            self._consumer.close()

    def _raise_if_dead(self) -> None:
        self._died.check()
        self._lookout.died.check()

    def _set_flow(self) -> None:
        readable = self._active - self._pending.keys()
        self._readable = [client_partition(partition) for partition in readable]
        self._assignment.let_flow(() if self._paused or self._stopping else readable)

    # --- topics -----------------------------------------------------------------------------

    def _follow_topics(self) -> None:
        listing = self._lookout.listing
        if listing is None or listing.number == self._listing_number or self._stopping:
            return
        existing = [TopicPartition(t, p) for t, count in listing.partitions.items() for p in range(count)]
        if not self._starts.learn_first(existing, RETRY_ANSWER_SECS):
            return
        self._listing_number = listing.number
        for topic in listing.missing:
            self._emit(TopicMissing(topic))
        added, removed = self._subscription.update(listing.partitions)
        if added or removed:
            total = len(self._subscription.topics)
            self._emit(TopicsChanged(tuple(sorted(added)), tuple(sorted(removed)), total))
            self._subscribe()
        self._notice_recreated(listing)

    def _subscribe(self) -> None:
        topics = sorted(self._subscription.topics)
        if not topics:
            self._consumer.unsubscribe()
            return
        self._consumer.subscribe(
            topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _notice_recreated(self, listing: Listing) -> None:
        """A topic made anew keeps its partitions assigned and its positions, but means other records."""
        for partition in self._active:
            now, before = listing.ids.get(partition.topic), self._commits.ids.get(partition.topic)
            if now is not None and before is not None and now != before:
                position = self._assignment.position(partition)
                self._pending[partition] = Wanted(position, "topic_recreated")

    def _notice_joining(self) -> None:
        """A member without partitions has joined too, though the consumer protocol does not say so."""
        if self._joined or self._kafka.group_protocol != "consumer" or not self._subscription.topics:
            return
        member_id = self._consumer.memberid()
        if member_id and self._lookout.member_seen == member_id:
            self._joined = True
        elif member_id:
            self._lookout.await_member(self._kafka.group_id, member_id)

    # --- start offsets ----------------------------------------------------------------------

    def _place_pending(self) -> None:
        """Ask again where partitions go on that could not be placed, or that cannot be read on."""
        if not self._pending or self._clock.monotonic() < self._retry_at:
            return
        found = self._starts.find(self._pending, RETRY_ANSWER_SECS)
        self._retry_at = self._clock.monotonic() + RETRY_SECS
        if not found:
            return
        wanted = {partition: self._pending.pop(partition) for partition in found}
        self._assignment.move({partition: place.start.offset for partition, place in found.items()})
        self._begin({p: place for p, place in found.items() if wanted[p].position is None})
        self._go_on({p: place for p, place in found.items() if wanted[p].position is not None})
        self._set_flow()

    def _begin(self, found: Mapping[TopicPartition, Found]) -> None:
        """New partitions of ours, placed."""
        for partition, place in found.items():
            self._tell(partition, place)
            self._active.add(partition)
            self._commits.assigned(partition, place.committed, place.topic_id)
            if place.at_first_start and place.committed is None:
                # otherwise a restart before the first commit would skip what came meanwhile
                self._first_marks[partition] = place.start.offset
        self._lookout.watch(frozenset(self._active))
        if found:
            self._listener.assigned({partition: place.committed for partition, place in found.items()})

    def _go_on(self, found: Mapping[TopicPartition, Found]) -> None:
        """Partitions that stay ours and are read on elsewhere."""
        anew = frozenset(partition for partition, place in found.items() if place.start.anew)
        for partition, place in found.items():
            self._tell(partition, place)
            if partition in anew:
                self._starts.forget(partition)
                self._first_marks.pop(partition, None)
                self._commits.assigned(partition, None, place.topic_id)
        if anew:
            self._listener.restarted(anew)

    def _tell(self, partition: TopicPartition, place: Found) -> None:
        for event in place.events(partition):
            self._emit(event)

    def _commit_first_marks(self) -> None:
        """`latest` chose the end for a new group: commit that, so the choice outlives the process [D9]."""
        if self._first_marks and self._commits.start(self._first_marks):
            self._first_marks = {}

    # --- what librdkafka tells --------------------------------------------------------------

    def _on_assign(self, _consumer: ck.Consumer, assigned: list[Any]) -> None:
        with self._died:
            self._joined = True
            partitions = our_partitions(assigned)
            wanted = dict.fromkeys(() if self._closing else partitions, NEW)
            found = self._starts.find(wanted, ASSIGN_ANSWER_SECS)
            self._pending.update({p: NEW for p in wanted if p not in found})
            # those that could not be placed are paused, whatever offset stands here
            offsets = {p: place.start.offset for p, place in found.items()}
            self._assignment.add({p: offsets.get(p, ck.OFFSET_END) for p in partitions})
            self._begin(found)
            self._set_flow()

    def _on_revoke(self, _consumer: ck.Consumer, revoked: list[Any]) -> None:
        with self._died:
            partitions = our_partitions(revoked)
            ours = self._active.intersection(partitions)
            if ours and not self._closing:
                self._listener.revoked(frozenset(ours))
            self._let_go(partitions)

    def _on_lost(self, _consumer: ck.Consumer, lost: list[Any]) -> None:
        with self._died:
            partitions = our_partitions(lost)
            ours = self._active.intersection(partitions)
            self._joined = False
            self._commits.dropped(frozenset(partitions))
            if ours and not self._closing:
                self._listener.lost(frozenset(ours))
            self._let_go(partitions)

    def _let_go(self, partitions: Sequence[TopicPartition]) -> None:
        self._active.difference_update(partitions)
        for partition in partitions:
            self._pending.pop(partition, None)
            self._first_marks.pop(partition, None)
        self._commits.dropped(frozenset(partitions))
        self._assignment.remove(partitions)
        self._set_flow()
        self._lookout.watch(frozenset(self._active))

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
        if code in _UNREADABLE and partition in self._active:
            cut = code == ck.KafkaError._LOG_TRUNCATION
            self._pending[partition] = Wanted(event.offset(), "log_truncated" if cut else None)
            self._set_flow()
        elif code not in _UNREADABLE and code != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._on_error(error)  # a topic that is gone is told by the lookout
            self._raise_if_dead()
