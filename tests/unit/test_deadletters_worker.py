"""Who is asked in which mode, what releases offsets, and how long it is tried [Q1]."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from archiver.deadletters.delivery import Mode, RecordDelivery
from archiver.deadletters.letters import DeadLetter, Sink, Stopping, go_on
from archiver.deadletters.reading import Lines
from archiver.deadletters.refused import HoldRefused, KeepRefused
from archiver.deadletters.worker import DeadLetterWorker
from archiver.errors import DeadLetterError
from archiver.inbox import QueueInbox
from archiver.ports import (
    DeadLettersFailed,
    DeadLettersWritten,
    FileDamaged,
    RefusedFile,
    Result,
    WorkerDied,
)
from tests.unit.refused_files import Heard, answers, refuse, remove, spans_of

FAST = (0.01, 0.05)


class MemorySink:
    """Keeps letters; fails as often as told, after some of them."""

    def __init__(self, name: str, failures: int = 0, fails_after: int = 0) -> None:
        self.name = name
        self.confirmed: list[bytes] = []
        self.attempts = 0
        self._failures = failures
        self._fails_after = fails_after

    def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
        self.attempts += 1
        values = []
        for letter in letters:
            go_on(stopping)
            values.append(letter.value)
            if self.attempts <= self._failures and len(values) > self._fails_after:
                raise DeadLetterError(f"{self.name} is away")
        self.confirmed += values
        return len(values)


class StuckSink:
    """Never done by itself; notices when it is asked to stop."""

    name = "kafka"

    def __init__(self) -> None:
        self.begun = threading.Event()

    def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
        self.begun.set()
        while True:
            go_on(stopping)
            time.sleep(0.005)


class Setting:
    """A worker over these sinks."""

    def __init__(self, mode: Mode, *sinks: Sink) -> None:
        self.inbox = QueueInbox()
        self.heard = Heard()
        delivery = RecordDelivery(Lines(), sinks, mode, self.heard)
        self.worker = DeadLetterWorker(delivery, self.inbox, remove, backoff_secs=FAST)

    def until_written(self, count: int = 1) -> list[Result]:
        return answers(
            self.inbox, lambda got: sum(isinstance(one, DeadLettersWritten) for one in got) == count
        )


@pytest.fixture
def build() -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(mode: Mode, *sinks: Sink) -> Setting:
        made.append(Setting(mode, *sinks))
        return made[-1]

    yield make
    for setting in made:
        setting.worker.close(10)


Build = Callable[..., Setting]


@pytest.mark.parametrize("mode", ["kafka_only", "file_only", "cascade", "fan_out"])
def test_a_confirmed_write_is_answered_once_and_the_file_is_gone(
    build: Build, tmp_path: Path, mode: Mode
) -> None:
    sink = MemorySink("kafka")
    setting = build(mode, sink)
    refused = refuse(tmp_path, [[b"a"], [b"b"]])
    setting.worker.submit(refused)
    assert setting.until_written() == [DeadLettersWritten(1)]
    assert sink.confirmed == [b"a", b"b"]
    assert not refused.sealed.path.exists()
    assert setting.heard.outcomes() == [("key_invalid", "kafka", 2)]


def test_a_failed_write_releases_nothing_and_is_tried_again_until_it_is_confirmed(
    build: Build, tmp_path: Path
) -> None:
    sink = MemorySink("kafka", failures=3, fails_after=1)
    setting = build("kafka_only", sink)
    refused = refuse(tmp_path, [[b"a", b"b"]])
    setting.worker.submit(refused)
    results = setting.until_written()
    assert results == [DeadLettersFailed(1, "kafka is away", will_retry=True)] * 3 + [DeadLettersWritten(1)]
    assert sink.confirmed == [b"a", b"b"]
    assert [outcome for _, outcome, _ in setting.heard.outcomes()] == ["failed"] * 3 + ["kafka"]


def test_while_a_file_fails_it_stays_and_other_files_go_on(build: Build, tmp_path: Path) -> None:
    """[Q1]: other destinations go on."""

    class OneIsTooLarge(MemorySink):
        def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
            if refused.sealed.file_id == 1:
                raise DeadLetterError("too large for the topic")
            return super().write(refused, letters, stopping)

    setting = build("kafka_only", OneIsTooLarge("kafka"))
    bad = refuse(tmp_path, [[b"a"]], file_id=1)
    setting.worker.submit(bad)
    answers(setting.inbox, lambda got: len(got) >= 2)
    for file_id in (2, 3, 4):
        setting.worker.submit(refuse(tmp_path, [[b"b"]], file_id=file_id))
    written = {one.file_id for one in setting.until_written(3) if isinstance(one, DeadLettersWritten)}
    assert written == {2, 3, 4}
    assert bad.sealed.path.exists()


def test_cascade_turns_to_the_second_sink_only_when_the_first_fails(build: Build, tmp_path: Path) -> None:
    first, second = MemorySink("kafka", failures=1), MemorySink("file")
    setting = build("cascade", first, second)
    setting.worker.submit(refuse(tmp_path, [[b"a"]], file_id=1))
    assert setting.until_written() == [DeadLettersWritten(1)]
    setting.worker.submit(refuse(tmp_path, [[b"b"]], file_id=2))
    assert setting.until_written() == [DeadLettersWritten(2)]
    assert (first.confirmed, second.confirmed) == ([b"b"], [b"a"])
    assert [outcome for _, outcome, _ in setting.heard.outcomes()] == ["failed", "file", "kafka"]


def test_fan_out_needs_both_and_writes_to_each_once(build: Build, tmp_path: Path) -> None:
    first, second = MemorySink("kafka"), MemorySink("file", failures=2)
    setting = build("fan_out", first, second)
    setting.worker.submit(refuse(tmp_path, [[b"a"]]))
    results = setting.until_written()
    assert [type(one) for one in results] == [DeadLettersFailed, DeadLettersFailed, DeadLettersWritten]
    assert (first.confirmed, second.confirmed) == ([b"a"], [b"a"])
    assert first.attempts == 1


def test_a_file_that_vanished_is_told_as_damaged(build: Build, tmp_path: Path) -> None:
    """[D10]: the process must end so that its records are read again."""
    setting = build("kafka_only", MemorySink("kafka"))
    refused = refuse(tmp_path, [[b"a"]])
    refused.sealed.path.unlink()
    setting.worker.submit(refused)
    (result,) = answers(setting.inbox, lambda got: len(got) == 1)
    assert isinstance(result, FileDamaged)
    assert result.file_id == 1


def test_close_gives_up_the_attempt_under_way_and_keeps_the_file(build: Build, tmp_path: Path) -> None:
    sink = StuckSink()
    setting = build("kafka_only", sink)
    refused = refuse(tmp_path, [[b"a"]])
    setting.worker.submit(refused)
    assert sink.begun.wait(60)
    began = time.monotonic()
    setting.worker.close(60)
    assert time.monotonic() - began < 60 / 2
    assert setting.inbox.drain() == []
    assert refused.sealed.path.exists()


def test_close_does_not_wait_for_a_backoff(tmp_path: Path) -> None:
    inbox = QueueInbox()
    delivery = RecordDelivery(Lines(), [MemorySink("kafka", failures=9)], "kafka_only", Heard())
    worker = DeadLetterWorker(delivery, inbox, remove, backoff_secs=(30, 60))
    worker.submit(refuse(tmp_path, [[b"a"]]))
    answers(inbox, lambda got: len(got) == 1)
    began = time.monotonic()
    worker.close(60)
    assert time.monotonic() - began < 30 / 2


@pytest.mark.parametrize("when", ["under way", "waiting"])
def test_an_abandoned_file_is_deleted_and_no_more_of_it_is_written(
    build: Build, tmp_path: Path, when: str
) -> None:
    """[D5]: it holds only records of partitions that are gone."""
    stuck = StuckSink()
    sink: Sink = stuck if when == "under way" else MemorySink("kafka", failures=1000)
    setting = build("kafka_only", sink)
    refused = refuse(tmp_path, [[b"a"]])
    setting.worker.submit(refused)
    if when == "under way":
        assert stuck.begun.wait(60)
    else:
        answers(setting.inbox, lambda got: len(got) >= 1)
    setting.worker.abandon(1)
    deadline = time.monotonic() + 60
    while refused.sealed.path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(isinstance(one, DeadLettersWritten) for one in setting.inbox.drain())
    setting.worker.abandon(99)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_nobody_foresaw_ends_the_thread_and_is_told(build: Build, tmp_path: Path) -> None:
    class Broken(MemorySink):
        def write(self, refused: RefusedFile, letters: Iterable[DeadLetter], stopping: Stopping) -> int:
            raise ZeroDivisionError

    setting = build("kafka_only", Broken("kafka"))
    setting.worker.submit(refuse(tmp_path, [[b"a"]]))
    (result,) = answers(setting.inbox, lambda got: len(got) == 1)
    assert isinstance(result, WorkerDied)


# --- the DLQ is off ---------------------------------------------------------------------------


def test_with_the_dlq_off_on_kafka_the_file_is_held_and_readiness_can_say_why(tmp_path: Path) -> None:
    inbox, heard = QueueInbox(), Heard()
    hold = HoldRefused(inbox, heard, remove)
    refused = refuse(tmp_path, [[b"a", b"b"]], spans_of(("events", 0, 0, 1, 2)))
    hold.submit(refused)
    (result,) = inbox.drain()
    assert isinstance(result, DeadLettersFailed)
    assert not result.will_retry
    assert "dlq.enabled" in result.detail
    assert "the store said no" in result.detail
    assert refused.sealed.path.exists()
    assert heard.outcomes() == [("key_invalid", "held", 2)]
    hold.abandon(1)
    hold.abandon(1)
    assert not refused.sealed.path.exists()
    hold.close(1)


def test_with_the_dlq_off_on_grpc_the_file_is_kept_with_a_description(tmp_path: Path) -> None:
    inbox, heard = QueueInbox(), Heard()
    worker = DeadLetterWorker(KeepRefused(tmp_path / "refused", 10_000, heard), inbox, remove)
    refused = refuse(tmp_path / "uploads", [[b"a"], [b"b"]], route="acme")
    content = refused.sealed.path.read_bytes()
    worker.submit(refused)
    assert answers(inbox, lambda got: len(got) == 1) == [DeadLettersWritten(1)]
    worker.close(5)
    kept = tmp_path / "refused" / refused.sealed.path.name
    assert kept.read_bytes() == content
    assert not refused.sealed.path.exists()
    described = json.loads((tmp_path / "refused" / (kept.name + ".json")).read_text())
    assert described["object_key"] == str(refused.sealed.key)
    assert described["reason"] == "key_invalid"
    assert described["detail"] == "the store said no"
    assert (described["records"], described["bytes"], described["codec"]) == (2, len(content), "zstd")
    assert heard.outcomes() == [("key_invalid", "kept", 2)]


def test_a_full_refused_folder_holds_the_file_until_there_is_room(tmp_path: Path) -> None:
    inbox, folder = QueueInbox(), tmp_path / "refused"
    worker = DeadLetterWorker(KeepRefused(folder, 3000, Heard()), inbox, remove, backoff_secs=FAST)
    folder.mkdir()
    (folder / "earlier").write_bytes(bytes(2990))
    refused = refuse(tmp_path / "uploads", [[b"a"]])
    worker.submit(refused)
    failed = answers(inbox, lambda got: len(got) >= 2)[0]
    assert isinstance(failed, DeadLettersFailed)
    assert failed.will_retry
    assert "dlq.max_bytes=3000" in failed.detail
    assert refused.sealed.path.exists()
    (folder / "earlier").unlink()
    answers(inbox, lambda got: DeadLettersWritten(1) in got)
    assert (folder / refused.sealed.path.name).exists()
    worker.close(5)


def test_a_move_that_happened_before_a_failure_is_not_taken_for_a_vanished_file(tmp_path: Path) -> None:
    inbox, heard = QueueInbox(), Heard()
    refused = refuse(tmp_path / "uploads", [[b"a"]])
    (tmp_path / "refused").mkdir()
    refused.sealed.path.rename(tmp_path / "refused" / refused.sealed.path.name)
    worker = DeadLetterWorker(KeepRefused(tmp_path / "refused", 10_000, heard), inbox, remove)
    worker.submit(refused)
    assert answers(inbox, lambda got: len(got) == 1) == [DeadLettersWritten(1)]
    worker.close(5)
