"""One commit in flight, never backwards, never for a partition that is not ours [D4]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import confluent_kafka as ck

from archiver.domain.batch import TopicPartition
from archiver.ports import Clock, PartitionListener
from archiver.sources.kafka_offsets import client_partition, commit_metadata

UNANSWERED_SECS = 30.0
"""After this long a commit without an answer is told as failed, again and again."""


class Commits:
    """Keeps what the broker is known to hold and which commit waits for its answer.

    The slot stays taken until librdkafka answers, which it does: a second commit beside one that is
    being retried could be overtaken by it, and the broker accepts offsets that go back.
    """

    def __init__(self, consumer: ck.Consumer, listener: PartitionListener, clock: Clock) -> None:
        self._consumer = consumer
        self._listener = listener
        self._clock = clock
        self._known: dict[TopicPartition, int] = {}
        self._ids: dict[TopicPartition, str | None] = {}
        self._sent: dict[TopicPartition, int] | None = None
        self._waiting: dict[TopicPartition, int] = {}
        self._say_at = 0.0

    def assigned(self, partition: TopicPartition, committed: int | None, topic_id: str | None) -> None:
        """Begin with what the group has committed on this very topic."""
        self.dropped(frozenset((partition,)))
        self._known[partition] = -1 if committed is None else committed
        self._ids[partition] = topic_id

    def dropped(self, partitions: frozenset[TopicPartition]) -> None:
        """No commits for these any more; an answer that is still to come is not passed on."""
        for partition in partitions:
            self._known.pop(partition, None)
            self._waiting.pop(partition, None)

    @property
    def ids(self) -> Mapping[TopicPartition, str | None]:
        """The id of each partition's topic when it was assigned or begun anew.

        Not one for a topic: of one that is made anew, some partitions are noticed before others.
        """
        return self._ids

    def start(self, marks: Mapping[TopicPartition, int]) -> bool:
        """Send a commit; False while one waits for its answer."""
        if self._sent is not None:
            return False
        ours = {p: mark for p, mark in marks.items() if p in self._known}
        held = {p: self._known[p] for p, mark in ours.items() if mark <= self._known[p]}
        if held:
            self._listener.commit_confirmed(held)
        ahead = {p: mark for p, mark in ours.items() if p not in held}
        if ahead and (refused := self.send(ahead)) is not None:
            self._listener.commit_failed(ahead, refused)
        elif ahead:
            self._sent, self._waiting = ahead, dict(ahead)
            self._say_at = self._clock.monotonic() + UNANSWERED_SECS
        return True

    def send(self, marks: Mapping[TopicPartition, int]) -> str | None:
        """Hand a commit to the client; the reason if it does not take it."""
        offsets = [client_partition(p, mark, commit_metadata(self._ids.get(p))) for p, mark in marks.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except ck.KafkaException as refused:
            error: ck.KafkaError = refused.args[0]
            return str(error.name())
        return None

    def ours(self, marks: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Marks above what the broker is known to hold, of partitions that are ours."""
        return {p: mark for p, mark in marks.items() if p in self._known and mark > self._known[p]}

    def held(self, marks: Mapping[TopicPartition, int]) -> None:
        """The broker holds at least these."""
        for partition, mark in marks.items():
            if mark > self._known.get(partition, mark):
                self._known[partition] = mark

    def answer(self, error: ck.KafkaError | None, partitions: list[Any]) -> dict[TopicPartition, int]:
        """librdkafka's answer to a commit; returns what the broker holds from now on.

        Answers to commits that were sent and confirmed in another way are not ours to pass on.
        """
        answered = {(p.topic, p.partition): (p.offset, error or p.error) for p in partitions}
        if self._sent is None or any(answered.get(p, (None,))[0] != mark for p, mark in self._sent.items()):
            return {}
        waiting, self._sent, self._waiting = self._waiting, None, {}
        errors = {p: answered[p][1] for p in waiting}
        done = {p: mark for p, mark in waiting.items() if errors[p] is None}
        failed = {p: mark for p, mark in waiting.items() if errors[p] is not None}
        self.held(done)
        if done:
            self._listener.commit_confirmed(done)
        if failed:
            reasons = sorted({str(problem.name()) for problem in errors.values() if problem is not None})
            self._listener.commit_failed(failed, ", ".join(reasons))
        return done

    def complain(self) -> None:
        """Say that the answer is late, every 30 s; the slot stays taken."""
        if self._waiting and self._clock.monotonic() >= self._say_at:
            self._say_at = self._clock.monotonic() + UNANSWERED_SECS
            self._listener.commit_failed(dict(self._waiting), "no answer yet")
