"""Many small files in one attempt: a short cut, after which each file stands for itself as ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from archiver.app import SystemClock
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.errors import TransientStoreError
from archiver.events import Event, FileArchived, UploadRetried
from archiver.inbox import QueueInbox
from archiver.ports import FileDurable, GroupStore, ProbeReport, Result, WorkerDied
from archiver.uploads import (
    BACKOFF_SECS_MAX,
    BREAKER_FAILURES,
    GROUP_BYTES_MAX,
    GROUP_FILES_MIN,
    UploadPool,
    UploadSchedule,
)


def sealed_file(file_id: int, size: int = 10) -> SealedFile:
    key = ObjectKey(f"t/a/0001-{file_id}", "3f9a", "jsonl")
    return SealedFile(file_id, Path(f"{file_id}"), key, size, Checksums(0), 1, 10, "none", f"nonce-{file_id}")


class Bench:
    """The schedule, and what it has told."""

    def __init__(self, in_flight_max: int = 2) -> None:
        self.inbox = QueueInbox()
        self.events: list[Event] = []
        self.removed: list[int] = []
        self.schedule = UploadSchedule(
            self.inbox,
            self.events.append,
            lambda sealed: self.removed.append(sealed.file_id),
            lambda: "f" * 12,
            random.Random(1),
            in_flight_max,
        )

    def add(self, count: int, first: int = 0, size: int = 10, now: float = 0.0) -> None:
        for file_id in range(first, first + count):
            self.schedule.add(sealed_file(file_id, size), now)

    def group(self, now: float = 0.0, files_max: int = 1_000) -> list[int]:
        return [sealed.file_id for sealed in self.schedule.begin_group(now, files_max)]

    def single(self, now: float = 0.0) -> int | None:
        sealed = self.schedule.begin(now)
        return None if sealed is None else sealed.file_id

    def end(self, file_id: int, error: TransientStoreError | None = None, now: float = 0.0) -> None:
        self.schedule.end(sealed_file(file_id), error, now)


def test_many_small_files_go_in_one_attempt_and_each_is_told() -> None:
    bench = Bench()
    bench.add(40)
    assert bench.group(files_max=30) == list(range(30))
    state = bench.schedule.state()
    assert (state.waiting, state.in_flight) == (10, 1)
    for file_id in range(30):
        bench.end(file_id, now=0.5)
    assert bench.inbox.drain() == [FileDurable(file_id) for file_id in range(30)]
    assert bench.removed == list(range(30))
    told = [event for event in bench.events if isinstance(event, FileArchived)]
    assert [(event.attempts, event.upload_secs) for event in told] == [(1, 0.5)] * 30
    state = bench.schedule.state()
    assert (state.waiting, state.in_flight) == (10, 0)


def test_few_files_and_stores_without_groups_go_one_by_one() -> None:
    bench = Bench()
    bench.add(GROUP_FILES_MIN - 1)
    assert bench.group() == []
    assert bench.single() == 0, "and keep their order"
    bench.add(GROUP_FILES_MIN, first=100)
    assert bench.group(files_max=0) == []
    assert bench.single() == 1


def test_files_that_are_not_due_are_in_no_group() -> None:
    bench = Bench(in_flight_max=64)
    bench.add(GROUP_FILES_MIN)
    for _ in range(3):
        file_id = bench.single()
        assert file_id is not None
        bench.end(file_id, TransientStoreError("integrity", "bad", whole_store=False))
    assert bench.group() == []
    assert len(bench.group(BACKOFF_SECS_MAX)) == GROUP_FILES_MIN


def test_a_file_that_does_not_get_through_in_its_group_is_tried_alone_as_if_for_the_first_time() -> None:
    """[D1]: whatever its error is, the breaker and its wait are those of its own attempts."""
    bench = Bench()
    bench.add(GROUP_FILES_MIN)
    group = bench.schedule.begin_group(0.0, 64)
    for sealed in group[1:]:
        bench.schedule.end(sealed, None, 0.0)
    bench.schedule.put_back(group[0], 0.0)
    bench.add(GROUP_FILES_MIN, first=100)
    assert bench.group() == [], "it is not taken into the next group"
    assert bench.single() == 0
    bench.end(0, TransientStoreError("server", "no", whole_store=False))
    assert [event.attempt for event in bench.events if isinstance(event, UploadRetried)] == [1]
    assert len(bench.group()) == GROUP_FILES_MIN


def test_an_abandoned_file_of_a_group_is_deleted_when_the_group_ends() -> None:
    """[D5]: whether it got through or not; nobody is told of the one that did not."""
    bench = Bench()
    bench.add(GROUP_FILES_MIN)
    group = bench.schedule.begin_group(0.0, 64)
    bench.schedule.abandon(0)
    bench.schedule.abandon(1)
    assert bench.removed == []
    bench.schedule.put_back(group[0], 0.0)
    bench.schedule.end(group[1], None, 0.0)
    assert bench.removed == [0, 1]
    assert bench.inbox.drain() == [FileDurable(1)]
    for sealed in group[2:]:
        bench.schedule.put_back(sealed, 0.0)
    assert bench.schedule.state().waiting == GROUP_FILES_MIN - 2


def test_while_the_store_is_away_there_are_no_groups() -> None:
    """[S6]: one attempt at a time, of one file."""
    bench = Bench(in_flight_max=64)
    bench.add(100)
    group = bench.schedule.begin_group(0.0, 20)
    alone = [bench.schedule.begin(0.0) for _ in range(3)]
    assert alone == [None] * 3, "what will be a group waits for it"
    for sealed in group:
        bench.schedule.end(sealed, None, 0.0)
    for _ in range(BREAKER_FAILURES):
        file_id = bench.single()
        assert file_id is not None
        bench.end(file_id, TransientStoreError("network", "away"))
    assert bench.schedule.state().store_down is not None
    assert bench.group(BACKOFF_SECS_MAX) == []
    probing = bench.single(BACKOFF_SECS_MAX)
    assert probing is not None
    assert bench.group(BACKOFF_SECS_MAX) == []
    assert bench.single(BACKOFF_SECS_MAX) is None


def test_one_group_at_a_time_and_few_files_beside_it_do_not_wait() -> None:
    bench = Bench(in_flight_max=4)
    bench.add(GROUP_FILES_MIN)
    group = bench.schedule.begin_group(0.0, 64)
    bench.add(3, first=100)
    assert bench.single() == 100
    bench.add(GROUP_FILES_MIN, first=200)
    assert bench.single() is None
    assert bench.group() == []
    assert bench.schedule.wait_secs(0.0) == BACKOFF_SECS_MAX, "until the group ends"
    for sealed in group:
        bench.schedule.end(sealed, None, 0.0)
    assert bench.schedule.state().in_flight == 1
    assert len(bench.group()) == GROUP_FILES_MIN + 2


def test_a_large_file_goes_alone_and_in_its_turn() -> None:
    """So that no small one waits for it, and it does not wait for all small ones."""
    bench = Bench(in_flight_max=8)
    bench.add(GROUP_FILES_MIN)
    bench.add(1, first=100, size=GROUP_BYTES_MAX + 1)
    bench.add(GROUP_FILES_MIN, first=200)
    assert bench.group() == list(range(GROUP_FILES_MIN))
    for file_id in range(GROUP_FILES_MIN):
        bench.end(file_id)
    assert bench.group() == []
    assert bench.single() == 100
    assert len(bench.group()) == GROUP_FILES_MIN


class Groups:
    """A store that takes all but every seventh file in groups, and nothing before it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.groups: list[int] = []
        self.alone: list[int] = []
        self.at_once = 0

    group_max = 50

    def put_group(self, files: Sequence[tuple[SealedFile, str]]) -> list[bool]:
        self.at_once += 1
        assert self.at_once == 1, "one group at a time"
        assert all(key == str(sealed.key) for sealed, key in files)
        self.groups.append(len(files))
        time.sleep(0.001)
        self.at_once -= 1
        return [sealed.file_id % 7 != 0 for sealed, _ in files]

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        self.go.wait(10)
        self.alone.append(sealed.file_id)

    def probe(self) -> ProbeReport:
        raise AssertionError("nobody probes")

    def close(self) -> None: ...


def test_threads_put_what_waits_in_groups_and_what_is_left_alone() -> None:
    """All of it, each once."""
    store, inbox, count = Groups(), QueueInbox(), 1_000
    assert isinstance(store, GroupStore)
    removed: list[int] = []
    schedule = UploadSchedule(
        inbox,
        lambda event: None,
        lambda sealed: removed.append(sealed.file_id),
        lambda: "f" * 12,
        random.Random(1),
        8,
    )
    pool = UploadPool(schedule, store, lambda sealed: {}, SystemClock(), inbox, 8)
    for file_id in range(count):
        pool.submit(sealed_file(file_id))
    store.go.set()
    answers: list[Result] = []
    deadline = time.monotonic() + 30
    while len(answers) < count and time.monotonic() < deadline:
        answers += inbox.wait(0.1)
    assert sorted(answer.file_id for answer in answers if isinstance(answer, FileDurable)) == list(
        range(count)
    )
    assert sorted(removed) == list(range(count))
    assert sum(store.groups) >= count - 100
    assert max(store.groups) <= 50
    assert set(store.alone) >= set(range(0, count, 7))
    assert len(store.alone) < count / 4
    pool.close(5)
    assert schedule.state().in_flight == 0


class Dies(Groups):
    """Groups end their thread."""

    def put_group(self, files: Sequence[tuple[SealedFile, str]]) -> list[bool]:
        self.groups.append(len(files))
        raise RuntimeError("nobody foresaw this")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_a_group_leaves_its_files_and_all_others_to_the_rest() -> None:
    """[D1], [D6]: what follows is a drain, in which all that waits is tried once more."""
    store, inbox, count = Dies(), QueueInbox(), 4 * GROUP_FILES_MIN
    schedule = UploadSchedule(
        inbox, lambda event: None, lambda sealed: None, lambda: "f" * 12, random.Random(1), 2
    )
    for file_id in range(count):
        schedule.add(sealed_file(file_id), 0.0)
    store.go.set()
    pool = UploadPool(schedule, store, lambda sealed: {}, SystemClock(), inbox, 2)
    answers: list[Result] = []
    deadline = time.monotonic() + 10
    while len(answers) < count + 1 and time.monotonic() < deadline:
        answers += inbox.wait(0.1)
    assert sorted(answer.file_id for answer in answers if isinstance(answer, FileDurable)) == list(
        range(count)
    )
    assert len([answer for answer in answers if isinstance(answer, WorkerDied)]) == 1
    assert len(store.groups) == 1
    pool.close(5)
    assert schedule.state().in_flight == 0
