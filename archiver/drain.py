"""What happens when partitions go and when the process ends, step by step ([D5], [D6])."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archiver.domain.batch import TopicPartition
from archiver.domain.rolling import RollReason
from archiver.errors import FatalError
from archiver.events import Drained, Stopped, Stopping

if TYPE_CHECKING:
    from archiver.pipeline import Archiver

WAIT_SECS = 0.1
"""Longest wait for a result before deadlines and the heartbeat are looked at again."""

COMMIT_SECS = 3.0
"""Kept back from a drain for the commit, where the drain has that much."""

CLOSE_SECS = 2.0
"""Kept back from a shutdown for leaving the group and ending the threads."""


class Drain:
    """Makes durable what the time allows, commits it, and says what it left."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver
        self._parts = archiver.parts
        self._started = archiver.parts.clock.monotonic()

    def revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """Seal and upload the files that hold these partitions, then commit their marks.

        Runs inside the source's callback, so positions are not asked for: records that the client
        has taken off its queue but not handed out would count as passed.
        """
        commit_secs = min(COMMIT_SECS, self._archiver.policy.drain_timeout_secs / 4)
        before = self._undurable(partitions)
        self._until_durable(partitions, lambda: self._revoke_deadline() - commit_secs)
        marks = {p: mark for p, mark in self._parts.ledger.committable().items() if p in partitions}
        if marks:
            left_secs = self._revoke_deadline() - self._parts.clock.monotonic()
            self._parts.source.commit_and_confirm(marks, left_secs)
        left = self._undurable(partitions)
        self._parts.emit(
            Drained(
                partitions=len(partitions),
                files_durable=max(before - left, 0),
                files_abandoned=left,
                secs=round(self._parts.clock.monotonic() - self._started, 3),
            )
        )

    def _revoke_deadline(self) -> float:
        """The drain's own, or earlier: a process that is to stop takes half of a stop's time for it."""
        policy, asked_at = self._archiver.policy, self._archiver.stop_asked_at
        deadline = self._started + policy.drain_timeout_secs
        return deadline if asked_at is None else min(deadline, asked_at + policy.shutdown_timeout_secs / 2)

    def shutdown(self, reason: str) -> None:
        """Stop taking, seal everything, upload, commit, leave: in that order, within the timeout."""
        archiver, parts = self._archiver, self._parts
        timeout = archiver.policy.shutdown_timeout_secs
        asked_at = self._started if archiver.stop_asked_at is None else archiver.stop_asked_at
        deadline = asked_at + timeout
        parts.emit(
            Stopping(
                reason=reason, open_files=len(archiver.open), pending_uploads=parts.uploader.state().waiting
            )
        )
        parts.source.stop_taking()
        self._take_the_rest(asked_at + timeout / 2)
        kept_back = min(COMMIT_SECS + CLOSE_SECS, timeout / 3)
        self._until_durable(None, lambda: deadline - kept_back)
        self._commit_all(deadline - min(CLOSE_SECS, timeout / 6))
        left = len(archiver.files)
        remaining = max(deadline - parts.clock.monotonic(), 0.5)
        parts.source.close(remaining / 2)
        parts.writers.close(remaining / 4)
        parts.uploader.close(remaining / 4)
        parts.dead_letters.close(remaining / 4)
        parts.emit(Stopped(undurable_files=left, secs=round(parts.clock.monotonic() - self._started, 3)))

    def _take_the_rest(self, deadline: float) -> None:
        """What a source has accepted and answered is still handed out (gRPC); Kafka has nothing.

        A source that has died hands out nothing more: what came before is archived all the same.
        """
        archiver, parts = self._archiver, self._parts
        while parts.source.queued_bytes() and parts.clock.monotonic() < deadline:
            try:
                batches = parts.source.take(WAIT_SECS, archiver.take_records)
            except FatalError as error:
                archiver.fail(str(error))
                return
            if batches:
                archiver.register(batches)
            archiver.settle(parts.inbox.drain())
            archiver.pulse(parts.clock.monotonic())

    def _until_durable(
        self, partitions: frozenset[TopicPartition] | None, deadline: Callable[[], float]
    ) -> None:
        """Seal, and seal again what failed writes moved to successors, until there is nothing to wait for.

        The deadline is asked for again and again: a request to stop brings it forward.
        """
        archiver, parts = self._archiver, self._parts
        reason: RollReason = "shutdown" if partitions is None else "revoked"
        archiver.roll_all(reason, partitions)
        while left := self._undurable(partitions):
            now, until = parts.clock.monotonic(), deadline()
            if now >= until:
                return
            archiver.pulse(now)
            self._settle(left, min(now + WAIT_SECS, until))
            archiver.failures.retry()
            archiver.roll_all(reason, partitions)

    def _settle(self, results_max: int, until: float) -> None:
        """Take in results until there may be nothing left to wait for, or it is time to look again.

        Looking goes over all files, so it is not done for every single result.
        """
        archiver, parts = self._archiver, self._parts
        while results_max > 0 and (now := parts.clock.monotonic()) < until:
            results = parts.inbox.wait(until - now)
            archiver.settle(results)
            results_max -= len(results)

    def _undurable(self, partitions: frozenset[TopicPartition] | None) -> int:
        """Files that hold these partitions (all, if None) and may still become durable."""
        return sum(
            1
            for file in self._archiver.files.values()
            if file.state not in ("refused", "damaged")
            and (partitions is None or not partitions.isdisjoint(file.held))
        )

    def _commit_all(self, deadline: float) -> None:
        archiver, parts = self._archiver, self._parts
        archiver.advance_positions()
        marks = parts.ledger.committable()
        if marks:
            parts.source.commit_and_confirm(marks, max(deadline - parts.clock.monotonic(), 0.5))
