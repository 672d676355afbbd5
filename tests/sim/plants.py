"""Bugs to plant: each breaks the pipeline in one place, and the simulation must find it.

They are what someone could write in good faith. Each takes a `MonkeyPatch` that undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from archiver.bounds import Pauses, Pressure
from archiver.domain.archive_file import ArchiveFile, Chunk
from archiver.domain.batch import TopicPartition
from archiver.domain.keys import KeyMaker
from archiver.domain.ledger import OffsetLedger, ReceiptLedger
from archiver.domain.sealed import ObjectKey, SealedFile
from archiver.drain import Drain
from archiver.local_failures import LocalFailures
from archiver.pipeline import Archiver
from archiver.ports import DeadLettersFailed, FileDurable, FileSealed, FrameWritten, WriteFailed
from archiver.uploads import UploadSchedule

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def commit_the_position(patch: Patch) -> None:
    """The classic: what was read counts as archived."""
    patch.setattr(OffsetLedger, "_mark", lambda self, state: state.position)


def commit_the_newest_hold(patch: Patch) -> None:
    """The mark is the highest instead of the lowest of what is held."""
    patch.setattr(
        OffsetLedger, "_mark", lambda self, state: max(state.holds.values(), default=state.position)
    )


def commit_after_revoke(patch: Patch) -> None:
    """What was revoked is not forgotten."""
    patch.setattr(OffsetLedger, "drop", lambda self, partitions: None)


def drain_what_is_lost(patch: Patch) -> None:
    """A lost assignment is treated as a revoked one."""
    patch.setattr(Archiver, "lost", Archiver.revoked)


def ask_for_positions_in_a_callback(patch: Patch) -> None:
    """A drain before a revocation takes over positions that count records nobody has registered."""
    revoke = Drain.revoke

    def asking(self: Drain, partitions: frozenset[TopicPartition]) -> None:
        self._archiver.advance_positions()
        revoke(self, partitions)

    patch.setattr(Drain, "revoke", asking)


def advance_before_the_hold(patch: Patch) -> None:
    """A batch moves the position on, but a file that has the partition already is taken to hold it."""
    hold = OffsetLedger.hold

    def once(self: OffsetLedger, file_id: int, partition: TopicPartition, first: int) -> None:
        if partition not in self._partitions or not self._partitions[partition].holds:
            hold(self, file_id, partition, first)

    patch.setattr(OffsetLedger, "hold", once)


def release_at_the_seal(patch: Patch) -> None:
    """A sealed file counts as safe."""
    sealed = Archiver._file_sealed

    def release(self: Archiver, result: FileSealed) -> None:
        sealed(self, result)
        self.parts.ledger.release(result.file_id)

    patch.setattr(Archiver, "_file_sealed", release)


def forget_the_hold_of_the_heir(patch: Patch) -> None:
    """A file that takes over what another could not write does not hold its offsets."""
    patch.setattr(LocalFailures, "_hand_over", lambda self, file, heir, spans: None)


def drop_buffers_on_revoke(patch: Patch) -> None:
    """A revocation drops the buffers of files that hold records of other partitions, too."""
    abandon = Archiver.abandon

    def dropping(self: Archiver, partitions: frozenset[TopicPartition]) -> None:
        for file in self.files.values():
            if not file.held.isdisjoint(partitions):
                self.memory -= file.memory
                file.lines, file.buffered_bytes, file.requeued = [], 0, 0
                self.dirty.pop(file.file_id, None)
        abandon(self, partitions)

    patch.setattr(Archiver, "abandon", dropping)


def delete_files_that_hold_others(patch: Patch) -> None:
    """A revocation deletes every file with records of the partitions."""

    def abandon(self: Archiver, partitions: frozenset[TopicPartition]) -> None:
        self._let_go(partitions)
        for file in list(self.files.values()):
            if not file.held.isdisjoint(partitions):
                self.discard(file)

    patch.setattr(Archiver, "abandon", abandon)


def keep_files_open_over_a_revocation(patch: Patch) -> None:
    """A file with records of a partition that went stays open, and takes them again when it is back."""
    close_soon = Archiver.close_soon

    def keeping(self: Archiver, file: ArchiveFile, reason: Any) -> None:
        if reason != "revoked" or self.state == "draining":
            close_soon(self, file, reason)

    patch.setattr(Archiver, "close_soon", keeping)


def delete_what_nobody_reads_again(patch: Patch) -> None:
    """Committed at receipt, and deleted at a revocation all the same."""
    patch.setattr(ReceiptLedger, "reads_again", True)


def forget_what_a_recreated_topic_left(patch: Patch) -> None:
    """A topic that was made again is handled as one that was lost."""

    def restarted(self: Archiver, partitions: frozenset[TopicPartition]) -> None:
        self.abandon(partitions)
        self.parts.ledger.assign(dict.fromkeys(partitions))

    patch.setattr(Archiver, "restarted", restarted)


def reuse_a_key(patch: Patch) -> None:
    """Every file of an hour gets the same number."""
    following = KeyMaker.next

    def first(self: KeyMaker, route: str, unix_secs: float) -> ObjectKey:
        self._seqs.clear()
        return following(self, route, unix_secs)

    patch.setattr(KeyMaker, "next", first)


def forget_numbers_when_the_clock_steps_back(patch: Patch) -> None:
    """An hour that comes again counts from 0001 under the same writer id."""
    patch.setattr(KeyMaker, "rename", _rename_once(KeyMaker.rename))


def _rename_once(rename: Callable[..., str]) -> Callable[..., str]:
    def once(self: KeyMaker, *digits: int) -> str:
        if self.writer_id:
            self._seqs.clear()
            return self.writer_id
        return rename(self, *digits)

    return once


def succeed_a_taken_key(patch: Patch) -> None:
    """ "It is there already" is taken for success without a look at whose it is."""
    patch.setattr(UploadSchedule, "_taken", UploadSchedule._succeeded)


def succeed_a_failed_upload(patch: Patch) -> None:
    """An attempt that failed deletes the file as if it had succeeded."""

    def failed(self: UploadSchedule, waiting: Any, error: object, now: float) -> None:
        self._finish(waiting, FileDurable(waiting.sealed.file_id), keep=False)

    patch.setattr(UploadSchedule, "_failed", failed)


def delete_before_durable(patch: Patch) -> None:
    """The sealed file goes when its upload begins."""
    begin = UploadSchedule.begin

    def removing(self: UploadSchedule, now: float) -> Any:
        sealed = begin(self, now)
        if sealed is not None:
            self._remove(sealed)
        return sealed

    patch.setattr(UploadSchedule, "begin", removing)


def take_a_group_for_one_file(patch: Patch) -> None:
    """A group is over, so all of its files are taken for durable."""
    patch.setattr(UploadSchedule, "put_back", lambda self, sealed, now: self.end(sealed, None, now))


def forget_what_a_group_leaves(patch: Patch) -> None:
    """A file that did not get through in its group is not tried alone."""
    patch.setattr(UploadSchedule, "put_back", lambda self, sealed, now: self._stopped(sealed) and None)


def keep_the_place_of_a_group(patch: Patch) -> None:
    """A group that is over counts as under way."""
    stopped = UploadSchedule._stopped

    def keeping(self: UploadSchedule, sealed: SealedFile) -> Any:
        grouped = self._files[sealed.file_id].grouped
        waiting = stopped(self, sealed)
        self._in_flight += grouped and not self._grouped
        return waiting

    patch.setattr(UploadSchedule, "_stopped", keeping)


def die_of_a_failed_deletion(patch: Patch) -> None:
    """A sealed file that cannot be deleted takes the upload thread along."""
    patch.setattr(UploadSchedule, "_tidy", lambda self, sealed: self._remove(sealed))


def give_up_after_three_attempts(patch: Patch) -> None:
    """A file that fails for long is not tried again."""
    failed = UploadSchedule._failed

    def giving_up(self: UploadSchedule, waiting: Any, error: Any, now: float) -> None:
        if waiting.attempts < 3:
            failed(self, waiting, error, now)

    patch.setattr(UploadSchedule, "_failed", giving_up)


def keep_the_breaker_open(patch: Patch) -> None:
    """A store that is back is not noticed."""
    patch.setattr(UploadSchedule, "_store_answers", lambda self, now: None)
    fails = UploadSchedule._store_fails

    def for_ever(self: UploadSchedule, error: Any, now: float) -> None:
        fails(self, error, now)
        self._probe_at = now + 1e9

    patch.setattr(UploadSchedule, "_store_fails", for_ever)


def release_on_a_failed_dead_letter(patch: Patch) -> None:
    """Any answer of the dead letters releases the offsets [Q1]."""
    settle = Archiver.settle

    def releasing(self: Archiver, results: Any) -> None:
        settle(self, results)
        for result in results:
            if isinstance(result, DeadLettersFailed):
                self.parts.ledger.release(result.file_id)

    patch.setattr(Archiver, "settle", releasing)


def say_nothing_of_held_records(patch: Patch) -> None:
    """The DLQ is off, and readiness does not say that records are held."""
    settle = Archiver.settle

    def silent(self: Archiver, results: Any) -> None:
        settle(self, results)
        self.held_reasons.clear()

    patch.setattr(Archiver, "settle", silent)


def requeue_behind_the_buffer(patch: Patch) -> None:
    """What could not be written goes behind what came later."""

    requeue = ArchiveFile.requeue

    def behind(self: ArchiveFile, chunk: Chunk) -> None:
        later = self.lines[self.requeued :]
        requeue(self, chunk)
        if later:
            del self.lines[-len(later) :]
            self.lines[:0] = later

    patch.setattr(ArchiveFile, "requeue", behind)


def flush_an_heir_at_once(patch: Patch) -> None:
    """An heir does not wait for all that its predecessor could not write."""
    succeed = LocalFailures._succeed

    def hasty(self: LocalFailures, file: ArchiveFile, now: float) -> ArchiveFile:
        heir = succeed(self, file, now)
        heir.waits_for = None
        return heir

    patch.setattr(LocalFailures, "_succeed", hasty)


def drop_what_a_full_disk_refused(patch: Patch) -> None:
    """A frame that did not fit is gone."""
    failed = LocalFailures.write_failed

    def dropping(self: LocalFailures, result: WriteFailed) -> None:
        archiver = self._archiver
        file = archiver.files.get(result.file_id)
        if file is not None and file.chunks:
            archiver.memory -= file.chunks[0].memory
            archiver.writing -= file.chunks[0].memory
            file.chunks[0].lines.clear()
            archiver.spool_bytes -= file.chunks[0].raw_bytes
            file.chunks[0].raw_bytes = 0
        failed(self, result)

    patch.setattr(LocalFailures, "write_failed", dropping)


def never_try_the_disk_again(patch: Patch) -> None:
    """A full disk stops the spool for good."""
    patch.setattr(LocalFailures, "retry", lambda self: None)


def leave_others_open_where_there_is_no_space(patch: Patch) -> None:
    """What other open files take is left to them until they are old [B2]."""
    patch.setattr(LocalFailures, "_make_space", lambda self, file: None)


def never_resume(patch: Patch) -> None:
    """A pause has no end."""
    patch.setattr(Pauses, "end", lambda self, reason: None)


def never_pause(patch: Patch) -> None:
    """At the bounds reading goes on."""
    patch.setattr(Pauses, "begin", lambda self, reason, held, bound: None)


def count_memory_twice(patch: Patch) -> None:
    """A frame that was written is not taken off the account."""
    written = Archiver._frame_written

    def leaking(self: Archiver, result: FrameWritten) -> None:
        before = self.memory
        written(self, result)
        self.memory = before

    patch.setattr(Archiver, "_frame_written", leaking)


def ignore_the_memory_bound(patch: Patch) -> None:
    """Nobody waits for the writers."""
    patch.setattr(Pressure, "hold_memory", lambda self: None)


def never_commit_gaps(patch: Patch) -> None:
    """Positions are not taken over, so a marker at the end leaves lag for ever [D3]."""
    patch.setattr(Archiver, "advance_positions", lambda self: None)


def forget_leftovers(patch: Patch) -> None:
    """What an earlier run left is not uploaded where nobody sends it again [D7]."""
    patch.setattr(Archiver, "adopt", lambda self, leftovers: None)


def forget_a_request_to_roll(patch: Patch) -> None:
    """What cannot be closed at the moment of the request stays open until its interval [R2]."""

    def roll_all(self: Archiver, reason: Any, holding: frozenset[TopicPartition] | None = None) -> None:
        for file in list(self.opened.values()):
            if holding is None or not holding.isdisjoint(file.held):
                self.roll(file, reason)

    patch.setattr(Archiver, "roll_all", roll_all)


def pass_over_files_that_wait(patch: Patch) -> None:
    """A request closes what can be closed; the heir of a failed file is not looked at."""
    close_soon = Archiver.close_soon

    def passing(self: Archiver, file: ArchiveFile, reason: Any) -> None:
        if reason != "request" or file.waits_for is None:
            close_soon(self, file, reason)

    patch.setattr(Archiver, "close_soon", passing)


def leave_the_heir_of_a_closed_file_open(patch: Patch) -> None:
    """A file that was closing fails a write: its heir waits for the interval again."""
    succeed = LocalFailures._succeed

    def forgetting(self: LocalFailures, file: ArchiveFile, now: float) -> ArchiveFile:
        heir = succeed(self, file, now)
        heir.overdue = None
        return heir

    patch.setattr(LocalFailures, "_succeed", forgetting)


def wait_for_the_drain_before_a_stop(patch: Patch) -> None:
    """A stop that is asked for in a drain waits until the drain's own time is over [D6]."""
    patch.setattr(
        Drain, "_revoke_deadline", lambda self: self._started + self._archiver.policy.drain_timeout_secs
    )


def begin_the_time_of_a_stop_late(patch: Patch) -> None:
    """The time for a stop runs from the end of the drain that it came in."""
    finish = Archiver.finish

    def late(self: Archiver) -> int:
        self.stop_asked_at = None
        return finish(self)

    patch.setattr(Archiver, "finish", late)


def delete_what_was_kept(patch: Patch) -> None:
    """What a topic that was made again has left goes with the last partition that its file holds."""

    def abandon(self: Archiver, partitions: frozenset[TopicPartition]) -> None:
        self._let_go(partitions)
        for file in list(self.files.values()):
            if file.held.isdisjoint(partitions):
                continue
            file.held -= partitions
            if file.held or not self.parts.ledger.reads_again:
                self.close_soon(file, "revoked")
            else:
                self.discard(file)

    patch.setattr(Archiver, "abandon", abandon)


def stop_without_a_flush(patch: Patch) -> None:
    """A stop uploads what is sealed and forgets what is buffered."""

    def nothing(self: Archiver, reason: str, holding: object = None) -> None:
        return None

    patch.setattr(Archiver, "roll_all", nothing)


def leave_pushes_in_the_queue(patch: Patch) -> None:
    """A stop does not take what was answered and waits [G1]."""
    patch.setattr(Drain, "_take_the_rest", lambda self, deadline: None)


def end_with_the_source(patch: Patch) -> None:
    """A source that dies once more during the shutdown ends it before anything is flushed."""

    def take_the_rest(self: Drain, deadline: float) -> None:
        while self._parts.source.queued_bytes():
            self._archiver.register(self._parts.source.take(0.1, 1_000))

    patch.setattr(Drain, "_take_the_rest", take_the_rest)


def commit_unconfirmed_marks(patch: Patch) -> None:
    """A commit that failed counts as done: the mark is not offered again."""

    def failed(self: Archiver, marks: Mapping[TopicPartition, int], reason: str) -> None:
        self.parts.ledger.confirmed(marks)

    patch.setattr(Archiver, "commit_failed", failed)


PLANTS: tuple[Plant, ...] = (
    commit_the_position,
    commit_the_newest_hold,
    commit_after_revoke,
    drain_what_is_lost,
    ask_for_positions_in_a_callback,
    advance_before_the_hold,
    release_at_the_seal,
    forget_the_hold_of_the_heir,
    drop_buffers_on_revoke,
    delete_files_that_hold_others,
    keep_files_open_over_a_revocation,
    delete_what_nobody_reads_again,
    forget_what_a_recreated_topic_left,
    reuse_a_key,
    forget_numbers_when_the_clock_steps_back,
    succeed_a_taken_key,
    succeed_a_failed_upload,
    delete_before_durable,
    take_a_group_for_one_file,
    forget_what_a_group_leaves,
    keep_the_place_of_a_group,
    die_of_a_failed_deletion,
    give_up_after_three_attempts,
    keep_the_breaker_open,
    release_on_a_failed_dead_letter,
    say_nothing_of_held_records,
    requeue_behind_the_buffer,
    flush_an_heir_at_once,
    drop_what_a_full_disk_refused,
    never_try_the_disk_again,
    leave_others_open_where_there_is_no_space,
    never_resume,
    never_pause,
    count_memory_twice,
    ignore_the_memory_bound,
    never_commit_gaps,
    forget_leftovers,
    forget_a_request_to_roll,
    pass_over_files_that_wait,
    leave_the_heir_of_a_closed_file_open,
    wait_for_the_drain_before_a_stop,
    begin_the_time_of_a_stop_late,
    delete_what_was_kept,
    stop_without_a_flush,
    leave_pushes_in_the_queue,
    end_with_the_source,
    commit_unconfirmed_marks,
)
