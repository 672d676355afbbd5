"""What becomes of a file that nobody waits for any more, while an attempt for it is under way."""

from __future__ import annotations

import random
from pathlib import Path

from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.errors import StoreError, TransientStoreError
from archiver.events import Event
from archiver.inbox import QueueInbox
from archiver.uploads import BACKOFF_SECS_MAX, UploadSchedule


class Spool:
    """Remembers what was deleted."""

    def __init__(self) -> None:
        self.deleted: list[int] = []
        self.broken = False

    def remove(self, sealed: SealedFile) -> None:
        if self.broken:
            raise OSError("the file cannot be deleted")
        self.deleted.append(sealed.file_id)


def _nothing(event: Event) -> None:
    del event


def _schedule(spool: Spool, inbox: QueueInbox) -> UploadSchedule:
    return UploadSchedule(inbox, _nothing, spool.remove, lambda: "0123456789ab", random.Random(1), 2)


def _sealed() -> SealedFile:
    return SealedFile(
        file_id=1,
        path=Path("uploads/1"),
        key=ObjectKey("events/acme/0001", "3f9a", "jsonl"),
        size=10,
        checksums=Checksums(crc32=0),
        records=1,
        raw_bytes=10,
        codec="none",
        nonce="n-1",
    )


def _abandoned(outcome: StoreError | None) -> tuple[UploadSchedule, Spool, QueueInbox]:
    """Abandoned in the middle of its first attempt, which then ended so."""
    spool, inbox = Spool(), QueueInbox()
    schedule = _schedule(spool, inbox)
    schedule.add(_sealed(), 0.0)
    running = schedule.begin(0.0)
    assert running is not None
    schedule.abandon(1)
    assert not spool.deleted, "deleted under its running attempt"
    schedule.end(running, outcome, 1.0)
    return schedule, spool, inbox


def test_an_abandoned_file_whose_attempt_fails_is_deleted_and_not_tried_again() -> None:
    """[D5]"""
    schedule, spool, inbox = _abandoned(TransientStoreError("server", "told so"))
    assert spool.deleted == [1]
    assert schedule.begin(1.0 + 2 * BACKOFF_SECS_MAX) is None
    assert schedule.state().waiting == 0
    assert not inbox.drain()


def test_an_abandoned_file_whose_attempt_succeeds_is_deleted() -> None:
    """c07: its late success is no more than an object that is there twice."""
    schedule, spool, _ = _abandoned(None)
    assert spool.deleted == [1]
    assert schedule.state().in_flight == 0


def test_a_file_that_cannot_be_deleted_is_durable_all_the_same() -> None:
    """[S2]: the store has it, and the next start clears the spool."""
    spool, inbox = Spool(), QueueInbox()
    spool.broken = True
    schedule = _schedule(spool, inbox)
    schedule.add(_sealed(), 0.0)
    running = schedule.begin(0.0)
    assert running is not None
    schedule.end(running, None, 1.0)
    assert [type(result).__name__ for result in inbox.drain()] == ["FileDurable"]
