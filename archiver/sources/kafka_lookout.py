"""A thread that looks at the cluster from time to time, so that the loop never waits for an answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import wait
from types import TracebackType

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import TopicPartition
from archiver.domain.offsets import LogRange
from archiver.ports import BrokerView, Clock, Kept
from archiver.sources.kafka_offsets import answer_of, log_ranges, topic_ids
from archiver.sources.kafka_retention import kept
from archiver.sources.kafka_topics import Listing, Selection
from archiver.sources.kafka_trouble import Trouble

VIEW_SECS = 5.0
RETENTION_SECS = 60.0
"""Retentions are hours and days, and looking for old records costs the broker more than for the ends."""
RETRY_SECS = 1.0
"""Between attempts while the first listing has not been had."""
ANSWER_SECS = 5.0


class Carried:
    """Keeps the first error of a block that must not raise where it runs; the loop raises it later."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and self.error is None:
            self.error = error
        return error is not None

    def check(self) -> None:
        """Raise what was kept."""
        if self.error is not None:
            raise self.error


class Lookout:
    """Publishes what topics there are and what each watched partition's log holds.

    `listing` and `view` are replaced whole, never changed in place, so that the loop can read them
    without a lock.
    """

    def __init__(
        self, admin: AdminClient, selection: Selection, refresh_secs: float, trouble: Trouble, clock: Clock
    ) -> None:
        self.listing: Listing | None = None
        self.listed = threading.Event()
        """Set with each listing; whoever waits for the next one clears it first."""
        self.view: Mapping[TopicPartition, BrokerView] = {}
        self.died = Carried()
        self._admin = admin
        self._selection = selection
        self._refresh_secs = refresh_secs
        self._trouble = trouble
        self._clock = clock
        self.member_seen: str | None = None
        self._member: tuple[str, str] | None = None
        self._watched: frozenset[TopicPartition] = frozenset()
        self._kept: Mapping[TopicPartition, Kept] = {}
        self._kept_of: frozenset[TopicPartition] = frozenset()
        self._kept_at = float("-inf")
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kafka-lookout", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def watch(self, partitions: frozenset[TopicPartition]) -> None:
        """Look at these from now on, beginning at once."""
        self._watched = partitions
        self.view = {p: seen for p, seen in self.view.items() if p in partitions}
        self._wake.set()

    def await_member(self, group: str, member_id: str) -> None:
        """Look for this member in the group until it is there; `member_seen` tells.

        The consumer protocol does not call back for an assignment without partitions.
        """
        self._member = (group, member_id)

    def stop(self, timeout_secs: float) -> None:
        """Ask the thread to end and wait for it; it is a daemon, should an answer not come."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_secs)

    def _run(self) -> None:
        with self.died:
            list_at = self._clock.monotonic()
            while not self._stopping:
                self._admin.poll(0)
                # first, so that one that joins with this round's list has its assignment before it is seen
                self._look_for_member()
                now = self._clock.monotonic()
                if now >= list_at:
                    listed = self._list()
                    list_at = now + (self._refresh_secs if listed else min(RETRY_SECS, self._refresh_secs))
                self._look()
                pause = VIEW_SECS if self.listing is not None and self._member is None else RETRY_SECS
                self._wake.wait(max(0.05, min(pause, list_at - self._clock.monotonic())))
                self._wake.clear()

    def _list(self) -> bool:
        try:
            cluster = self._admin.list_topics(timeout=ANSWER_SECS)
        except ck.KafkaException:
            self._trouble.unanswered("a request for the list of topics")
            return False
        self._trouble.answered()
        existing = {
            name: len(topic.partitions)
            for name, topic in cluster.topics.items()
            if topic.error is None or topic.error.code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART
        }
        chosen = self._selection.among(existing)
        self.listing = Listing(
            number=1 if self.listing is None else self.listing.number + 1,
            partitions={name: existing[name] for name in chosen},
            ids=topic_ids(self._admin, chosen, ANSWER_SECS),
            missing=self._selection.missing(existing),
        )
        self.listed.set()
        return True

    def _look(self) -> None:
        watched = self._watched
        if not watched:
            return
        ranges = log_ranges(self._admin, watched, ANSWER_SECS, committed_only=True)
        if ranges:
            self._trouble.answered()
        else:
            self._check_that_it_answers("a request for the ends of our partitions")
            return
        self._publish(watched, ranges)
        now = self._clock.monotonic()
        if watched != self._kept_of or now - self._kept_at >= RETENTION_SECS:
            self._kept = kept(self._admin, watched, self._clock.wall(), ANSWER_SECS)
            self._kept_of, self._kept_at = watched, now
            self._publish(watched, ranges)

    def _publish(self, watched: frozenset[TopicPartition], ranges: Mapping[TopicPartition, LogRange]) -> None:
        seen = {p: BrokerView(log.log_start, log.end, self._kept.get(p)) for p, log in ranges.items()}
        if watched == self._watched:
            self.view = dict(self.view) | seen

    def _check_that_it_answers(self, question: str) -> None:
        """No answer about our partitions may only mean that their topic is gone."""
        try:
            self._admin.list_topics(timeout=ANSWER_SECS)
        except ck.KafkaException:
            self._trouble.unanswered(question)

    def _look_for_member(self) -> None:
        if self._member is None:
            return
        group, member_id = self._member
        answers = self._admin.describe_consumer_groups([group], request_timeout=ANSWER_SECS)
        wait(answers.values(), ANSWER_SECS + 1.0)
        described = answer_of(answers[group])
        if described is not None and any(member.member_id == member_id for member in described.members):
            self.member_seen = member_id
            self._member = None
