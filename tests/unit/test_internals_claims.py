"""What docs/internals.md says of the loop, step by step: the unchanged `Archiver` on parts that a test moves.

Schedules nobody thought of are the simulation's; here each claim has one schedule that can be read.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import confluent_kafka as ck
import pytest

from archiver.bounds import Bounds
from archiver.domain.archive_file import FILE_BYTES, HOLD_BYTES
from archiver.domain.batch import RecordBatch, Span, TopicPartition
from archiver.domain.keys import KeyMaker, KeyTemplate
from archiver.domain.ledger import OffsetLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.domain.uncommitted import RUNS_MAX, UncommittedBytes
from archiver.errors import (
    DamagedFileError,
    KeyTakenError,
    SourceFatalError,
    SpoolError,
    StoreError,
    TransientStoreError,
)
from archiver.events import Event
from archiver.inbox import QueueInbox
from archiver.local_failures import LOCAL_FAILURES_MAX, REFUSALS_MAX, WRITE_RETRY_SECS
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import (
    BrokerView,
    FileDamaged,
    FileDurable,
    FileSealed,
    FrameWritten,
    PartitionListener,
    RefusedFile,
    Result,
    RollRequested,
    SealFailed,
    UploadState,
    WriteFailed,
    WriterIdTaken,
)
from archiver.settings.models import Kafka
from archiver.sources.kafka import KafkaSource
from archiver.sources.kafka_feed import ConsumedFeed
from archiver.uploads import (
    BACKOFF_SECS_MAX,
    BACKOFF_SECS_MIN,
    BREAKER_FAILURES,
    PROBE_SECS_MAX,
    UploadSchedule,
)

P, Q = TopicPartition("t", 0), TopicPartition("t", 1)
FILE_WITH_ONE_PARTITION = FILE_BYTES + HOLD_BYTES


@dataclass
class Outside:
    """Source, writers, uploads, disk and clock in one: they do what the test says, when it says so."""

    now: float = 1_000.0
    batches: list[RecordBatch] = field(default_factory=list)
    client_positions: dict[TopicPartition, int] = field(default_factory=dict)
    offered: list[dict[TopicPartition, int]] = field(default_factory=list)
    confirmed: list[dict[TopicPartition, int]] = field(default_factory=list)
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    appended: list[tuple[int, int, list[bytes]]] = field(default_factory=list)
    seals: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    uploads: dict[int, SealedFile] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    # clock, disk, emit
    def monotonic(self) -> float:
        self.now += 0.001
        return self.now

    def wall(self) -> float:
        return 1_790_000_000.0

    def free_bytes(self) -> int:
        return 1 << 40

    # source
    def start(self, listener: PartitionListener) -> None: ...

    def take(self, timeout_secs: float, records_max: int) -> Sequence[RecordBatch]:
        taken, self.batches = self.batches, []
        return taken

    def positions(self) -> Mapping[TopicPartition, int]:
        return self.client_positions

    def commit(self, marks: Mapping[TopicPartition, int]) -> bool:
        self.offered.append(dict(marks))
        return True

    def commit_and_confirm(self, marks: Mapping[TopicPartition, int], timeout_secs: float) -> bool:
        self.calls.append("commit")
        self.confirmed.append(dict(marks))
        return True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def view(self) -> Mapping[TopicPartition, BrokerView]:
        return {}

    def ready(self) -> str | None:
        return None

    def queued_bytes(self) -> int:
        return 0

    def stop_taking(self) -> None:
        self.calls.append("stop taking")

    # writers
    def append(self, file_id: int, chunk: int, lines: list[bytes]) -> None:
        self.appended.append((file_id, chunk, b"\n".join(lines).split(b"\n")))

    def seal(self, file_id: int) -> None:
        self.calls.append("seal")
        self.seals.append(file_id)

    def discard(self, file_id: int) -> None:
        self.discarded.append(file_id)

    def label(self, file_id: int, key: ObjectKey) -> None: ...

    def state(self) -> UploadState:
        return UploadState(0, 0, 0, None)

    def abandon(self, file_id: int) -> None:
        self.abandoned.append(file_id)

    def submit(self, sealed: SealedFile | RefusedFile) -> None:
        assert isinstance(sealed, SealedFile)
        self.uploads[sealed.file_id] = sealed

    def closer(self, name: str) -> Any:
        outside = self

        class Closing:
            def __getattr__(self, wanted: str) -> Any:
                return getattr(outside, wanted)

            def close(self, timeout_secs: float) -> None:
                outside.calls.append(f"close {name}")

        return cast(Any, Closing())


class InboxOfTheTest(QueueInbox):
    """Waiting passes the test's time, not ours."""

    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self._outside = outside

    def wait(self, timeout_secs: float) -> list[Result]:
        results = self.drain()
        if not results:
            self._outside.now += timeout_secs
        return results


class Bench:
    """An `Archiver` with everything around it in the test's hands."""

    def __init__(
        self, *, memory_bytes_max: int = 1 << 30, flush_records: int = 2, flush_bytes: int = 1 << 20
    ) -> None:
        self.outside = Outside()
        self.inbox = InboxOfTheTest(self.outside)
        outside: Any = self.outside
        self.archiver = Archiver(
            Parts(
                source=outside.closer("source"),
                ledger=OffsetLedger(),
                router=Router(["_org_id"], "default", with_topic=True),
                keys=KeyMaker(KeyTemplate("{hour}"), "jsonl", lambda digits: "0" * digits),
                writers=outside.closer("writers"),
                uploader=outside.closer("uploader"),
                dead_letters=outside.closer("dead letters"),
                inbox=self.inbox,
                clock=outside,
                disk=outside,
                emit=self.outside.events.append,
                publish=lambda _: 1.0,
                beat=lambda _: None,
            ),
            Policy(
                roll=RollPolicy(1 << 30, 3_600),
                flush=FlushPolicy(flush_bytes, flush_records, 3_600),
                bounds=Bounds(memory_bytes_max, 1 << 40, 0),
                codec="none",
                commit_interval_secs=0.0,
                drain_timeout_secs=0.05,
                shutdown_timeout_secs=0.3,
            ),
        )
        self.archiver.start()
        self.archiver.assigned({P: None, Q: None})

    def take(self, partition: TopicPartition, first: int, count: int = 1, org: str = "a") -> None:
        """One turn that brings `count` records of an organisation."""
        value = b'{"_org_id":"%s"}' % org.encode()
        offsets = list(range(first, first + count))
        self.outside.batches.append(RecordBatch(partition, [value] * count, offsets))
        self.archiver.turn()

    def seal_and_upload(self, file_id: int, size: int = 10) -> None:
        """The writer seals the file and the store confirms it."""
        self.sealed(file_id, size)
        self.inbox.put(FileDurable(file_id))
        self.archiver.turn()

    def sealed(self, file_id: int, size: int = 10) -> None:
        self.inbox.put(FileSealed(file_id, size, Checksums(0), f"uploads/{file_id}"))
        self.archiver.turn()


# --- the mark ---------------------------------------------------------------------------------------------


def test_nothing_is_offered_before_the_store_has_confirmed_and_then_the_whole_mark_is() -> None:
    """[D1], [D3]: held while buffered, written and sealed; the position once nothing is held."""
    bench = Bench()
    bench.take(P, 0, 2)
    assert [chunk[:2] for chunk in bench.outside.appended] == [(1, 1)]
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.archiver.turn()
    bench.archiver.roll_all("request")
    bench.sealed(1)
    assert set(bench.outside.uploads) == {1}
    assert all(marks.get(P, 0) <= 0 for marks in bench.outside.offered)
    bench.outside.client_positions = {P: 5}  # three markers behind the last record
    bench.inbox.put(FileDurable(1))
    bench.archiver.turn()
    assert bench.outside.offered[-1] == {P: 5}


def test_a_file_that_does_not_upload_holds_back_only_partitions_it_has_records_of() -> None:
    """[D1], c01: a fails, b rolls on; the other partition's commit passes."""
    bench = Bench()
    bench.take(P, 0, 2, "a")
    bench.take(P, 2, 2, "b")
    bench.take(Q, 0, 2, "b")
    for file_id in (1, 2):
        bench.inbox.put(FrameWritten(file_id, 1, 10))
    bench.inbox.put(FrameWritten(2, 2, 20))
    bench.archiver.roll_all("request")
    bench.archiver.turn()
    bench.seal_and_upload(2)
    assert bench.outside.offered[-1] == {P: 0, Q: 2}


def test_records_that_an_error_took_away_again_are_not_passed() -> None:
    """[D1], [D4]: the client dies while it hands out records: its position counts them, no one has them."""

    class Client:
        """Pops its records, moves its position past them, and dies in the same call."""

        at = 0

        def consume(self, most: int, timeout: float) -> list[Any]:
            self.at = 2
            failure = ck.KafkaError(ck.KafkaError._FATAL, "fenced", fatal=True)
            values = [ck.Message(topic="t", partition=0, offset=n, value=b"v") for n in range(2)]
            return [*values, ck.Message(topic="t", partition=0, offset=-1, value=b"text", error=failure)]

        def position(self, partitions: list[Any]) -> list[Any]:
            return [ck.TopicPartition("t", 0, self.at)]

    outside: Any = Outside()
    kafka = Kafka(brokers=("127.0.0.1:9",), topics=("t",))
    source = KafkaSource(kafka, outside.events.append, outside, logger=logging.getLogger("quiet"))
    source.start(outside)
    source._lookout.stop(0.0)
    source._partitions.readable = [ck.TopicPartition("t", 0)]
    source._partitions.active.add(P)
    source._feed = ConsumedFeed(lambda _: None)
    source._feed.open(cast(Any, Client()))
    source._consumer = cast(Any, Client())
    with pytest.raises(SourceFatalError):
        source.take(0.0, 1)
    assert source.positions() == {}


def test_a_buffer_becomes_a_frame_at_its_bytes_or_its_records() -> None:
    """[R3]: the newline behind each record counts."""
    line = len(b'{"_org_id":"a"}\n')
    for bench in (Bench(flush_records=3), Bench(flush_records=100, flush_bytes=3 * line)):
        bench.take(P, 0, 2)
        assert not bench.outside.appended
        bench.take(P, 2, 1)
        assert [len(values) for *_, values in bench.outside.appended] == [3]


# --- failed writes ----------------------------------------------------------------------------------------


def test_what_a_failed_write_leaves_goes_to_a_successor_that_holds_it_before_the_old_file_lets_go() -> None:
    """[B2], [D10]: the mark never passes it, and its order is kept in the successor."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.take(P, 2, 2)
    bench.take(P, 4, 1)
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.inbox.put(WriteFailed(1, 2, 10, True, "full"))
    bench.archiver.turn()
    assert bench.outside.seals == [1]
    bench.seal_and_upload(1)
    assert bench.outside.offered[-1] == {P: 2}
    bench.outside.now += WRITE_RETRY_SECS
    bench.archiver.turn()
    assert [(chunk[0], len(chunk[2])) for chunk in bench.outside.appended] == [(1, 2), (1, 2), (2, 3)]


def test_a_successor_that_was_abandoned_is_replaced() -> None:
    """[D4]: P is lost between the failures of two chunks; what the second holds of Q gets a file."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.take(Q, 0, 2)
    bench.inbox.put(WriteFailed(1, 1, 0, True, "full"))
    bench.archiver.turn()
    bench.archiver.lost(frozenset([P]))
    bench.inbox.put(WriteFailed(1, 2, 0, True, "full"))
    bench.inbox.put(SealFailed(1, False, "there is no frame in it to seal"))
    bench.archiver.turn()
    bench.outside.now += WRITE_RETRY_SECS
    bench.archiver.turn()
    heir, chunk, values = bench.outside.appended[-1]
    assert heir in bench.archiver.files and len(values) == 2
    bench.inbox.put(FrameWritten(heir, chunk, 10))
    bench.archiver.roll_all("request")
    bench.archiver.turn()
    bench.seal_and_upload(heir)
    assert bench.outside.offered[-1] == {Q: 2}


def test_a_successor_that_was_abandoned_is_not_closed_with_its_predecessor() -> None:
    """[D9]: P is lost, and with it the successor; then Q's topic is made anew."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.take(Q, 0, 2)
    bench.inbox.put(WriteFailed(1, 1, 0, True, "full"))
    bench.archiver.turn()
    bench.archiver.lost(frozenset([P]))
    bench.archiver.restarted(frozenset([Q]))
    bench.archiver.turn()
    assert set(bench.archiver.files) == {1}


def test_a_roll_request_on_a_full_disk_is_kept_until_the_spool_takes_the_buffer() -> None:
    """[R2]: what came before the request closes without waiting for the interval; what comes after
    it goes to the next file."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.inbox.put(WriteFailed(1, 1, 0, True, "full"))
    bench.archiver.turn()
    bench.take(P, 2, 1)
    bench.inbox.put(RollRequested())
    bench.archiver.turn()
    assert bench.outside.seals == [1]  # the file that failed; its successor waits for the disk
    bench.take(P, 3, 1)
    bench.outside.now += WRITE_RETRY_SECS
    bench.archiver.turn()
    assert [(chunk[0], len(chunk[2])) for chunk in bench.outside.appended] == [(1, 2), (2, 3)]
    bench.archiver.turn()
    assert bench.outside.seals == [1, 2]
    assert [file.buffered_records for file in bench.archiver.open.values()] == [1]


def test_a_disk_that_refuses_again_and_again_makes_other_files_close_and_free_what_they_take() -> None:
    """[B2]: no bound of bytes is reached where inodes or somebody else's files are what is short."""
    bench = Bench()
    bench.take(P, 0, 2, "b")
    bench.take(Q, 0, 1, "c")
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.take(P, 2, 2)
    refused: list[int] = []
    for _ in range(REFUSALS_MAX):
        assert bench.outside.seals == refused
        failing, chunk, _ = bench.outside.appended[-1]
        refused.append(failing)
        bench.inbox.put(WriteFailed(failing, chunk, 0, True, "full"))
        bench.inbox.put(SealFailed(failing, False, "there is no frame in it to seal"))
        bench.archiver.turn()
        bench.outside.now += WRITE_RETRY_SECS
        bench.archiver.turn()
    assert 1 in bench.outside.seals
    assert 2 not in bench.outside.seals, "it has nothing on the disk"
    assert bench.archiver.files[1].reason == "space"


def test_a_roll_request_reaches_a_file_that_waits_for_what_its_predecessor_could_not_write() -> None:
    """[R2]: the successor of a file whose failed chunks are not all known yet."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.take(P, 2, 2)
    bench.inbox.put(WriteFailed(1, 1, 0, True, "full"))
    bench.archiver.turn()
    bench.inbox.put(RollRequested())
    bench.archiver.turn()
    bench.inbox.put(WriteFailed(1, 2, 0, True, "full"))
    bench.archiver.turn()
    bench.outside.now += WRITE_RETRY_SECS
    for _ in range(2):
        bench.archiver.turn()
    assert [(chunk[0], len(chunk[2])) for chunk in bench.outside.appended] == [(1, 2), (1, 2), (2, 4)]
    assert bench.outside.seals == [1, 2]


@pytest.mark.parametrize("outcome", ["sealed", "abandoned"])
def test_a_pause_for_a_full_disk_ends_though_no_frame_is_written_any_more(outcome: str) -> None:
    """[B2]: a seal that failed for want of space succeeds later, or nobody wants it any more."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.archiver.roll_all("request")
    bench.inbox.put(SealFailed(1, True, "full"))
    bench.archiver.turn()
    assert bench.outside.paused
    if outcome == "abandoned":
        bench.archiver.lost(frozenset([P]))
    bench.outside.now += WRITE_RETRY_SECS
    bench.archiver.turn()
    if outcome == "sealed":
        assert bench.outside.paused, "the answer is still to come"
        bench.sealed(1)
    bench.archiver.turn()
    assert not bench.outside.paused


def test_one_error_counts_once_however_many_chunks_were_under_way() -> None:
    """[D10]: only failures in a row end the process, and chunks behind a failed one fail with it."""
    bench = Bench()
    chunks = LOCAL_FAILURES_MAX + 2
    for n in range(chunks):
        bench.take(P, 2 * n, 2)
    for n in range(chunks):
        bench.inbox.put(WriteFailed(1, n + 1, 0, False, "I/O error"))
    bench.archiver.turn()
    heir = next(iter(bench.archiver.open.values()))
    assert heir.buffered_records == 2 * chunks


def test_a_local_write_that_keeps_failing_ends_the_process() -> None:
    """[D10]"""
    bench = Bench()
    bench.take(P, 0, 2)
    with pytest.raises(SpoolError, match="the spool cannot be written: I/O error"):
        for file_id in range(1, LOCAL_FAILURES_MAX + 1):
            bench.inbox.put(WriteFailed(file_id, 1, 0, False, "I/O error"))
            bench.archiver.turn()
            bench.outside.now += WRITE_RETRY_SECS
            bench.archiver.turn()
            assert bench.outside.appended[-1][0] == file_id + 1
    assert file_id == LOCAL_FAILURES_MAX


# --- bounds -----------------------------------------------------------------------------------------------


def test_at_the_memory_bound_buffers_make_room_also_for_what_the_files_themselves_take() -> None:
    """[B1]: half of the bound in files, half in buffers; otherwise records would wait for the flush age."""
    routes = 100
    bench = Bench(memory_bytes_max=2 * routes * FILE_WITH_ONE_PARTITION, flush_records=1_000)
    for n in range(routes):
        bench.take(P, 12 * n, 12, f"org-{n}")
    assert not bench.outside.appended
    n = routes
    while not bench.outside.appended:
        bench.take(P, 12 * n, 12, f"org-{n % routes}")
        n += 1
    written = bench.outside.appended
    for file_id, chunk, values in written:
        bench.inbox.put(FrameWritten(file_id, chunk, sum(map(len, values))))
    bench.archiver.turn()
    bench.archiver.turn()
    assert bench.archiver.memory < 0.25 * 2 * routes * FILE_WITH_ONE_PARTITION
    assert not bench.outside.paused


def test_a_pause_for_memory_ends_when_the_writers_are_done_though_the_buffers_keep_theirs() -> None:
    """[B1]: what the buffers may keep is below what ends a pause."""
    routes, value = 30, 60
    bench = Bench(memory_bytes_max=5 * routes * FILE_WITH_ONE_PARTITION, flush_records=1 << 30)
    n = 0
    while not bench.archiver.pauses.active("memory"):
        bench.take(P, value * n, value, f"org-{n % routes}")
        n += 1
    written: list[tuple[int, int]] = []
    for _ in range(20):
        for file_id, chunk, lines in bench.outside.appended:
            if (file_id, chunk) not in written:
                bench.inbox.put(FrameWritten(file_id, chunk, 10 * (len(written) + len(lines))))
                written.append((file_id, chunk))
        bench.archiver.turn()
    assert not bench.archiver.pauses.active("memory")
    assert bench.archiver.writing == 0
    assert bench.archiver.memory > 0


def test_while_the_spool_takes_nothing_no_turn_goes_through_all_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With very many of them each turn would be spent on what cannot be flushed."""
    bench = Bench(flush_records=200)
    archiver = bench.archiver
    bench.take(P, 0, 200, "refused")
    bench.inbox.put(WriteFailed(1, 1, 0, True, "full"))
    archiver.turn()
    for n in range(1, 20):
        bench.take(P, 200 * n, 199, f"org-{n}")
    asked: list[object] = []
    monkeypatch.setattr(archiver, "flush", asked.append)
    held = archiver.memory + archiver.pressure._files_memory()
    archiver.policy = replace(archiver.policy, bounds=Bounds(int(held / 0.95), 1 << 40, 0))
    archiver.turn()
    assert asked == []
    bench.outside.now += WRITE_RETRY_SECS
    archiver.turn()
    archiver.turn()
    assert asked


def test_where_files_take_most_of_the_memory_the_smallest_buffers_are_not_flushed_for_it() -> None:
    """[B1]: with very many destinations the frames are small as it is."""
    routes = 100
    bound = int(routes * FILE_WITH_ONE_PARTITION / 0.74)
    bench = Bench(memory_bytes_max=bound, flush_records=1 << 30)
    n = 0
    for route in range(routes):
        bench.take(P, n, 1, f"org-{route}")
        n += 1
    while not bench.outside.appended:
        bench.take(P, n, 5, f"org-{n // 5 % (routes // 2)}")
        n += 5
    archiver = bench.archiver
    assert 0.04 * bound < archiver.memory - archiver.writing <= 0.05 * bound
    flushed = {file_id for file_id, *_ in bench.outside.appended}
    smallest = {file.file_id for file in archiver.files.values() if file.buffered_records == 1}
    assert len(smallest) >= routes // 2
    assert flushed.isdisjoint(smallest)
    assert not bench.outside.paused


def test_files_with_records_of_many_partitions_are_closed_before_their_spans_fill_the_memory() -> None:
    """[B1], [D2]: state per file and partition counts too, also when the records have been flushed."""
    files, partitions = 20, [TopicPartition("t", n) for n in range(100)]
    bound = 10 * (FILE_BYTES + HOLD_BYTES * len(partitions))
    bench = Bench(memory_bytes_max=bound, flush_records=1)
    bench.archiver.assigned(dict.fromkeys(partitions))
    for n, partition in enumerate(partitions):
        for route in range(files):
            bench.take(partition, files * n + route, 1, f"org-{route}")
            file_id, chunk, _ = bench.outside.appended[-1]
            bench.inbox.put(FrameWritten(file_id, chunk, 10 * (n + 1)))
    held = bench.archiver.parts.ledger.holds
    assert held == sum(len(file.held) for file in bench.archiver.files.values())
    assert bench.outside.seals
    assert HOLD_BYTES * sum(len(file.held) for file in bench.archiver.opened.values()) < bound


def test_while_the_store_is_away_open_files_are_not_shredded_at_the_memory_bound() -> None:
    """[B1]: files that wait for their upload free memory by that alone; closing more of them helps nobody."""
    bench = Bench(memory_bytes_max=40 * FILE_WITH_ONE_PARTITION, flush_records=1)
    for n in range(25):
        bench.take(P, n, 1, f"waits-{n}")
        bench.inbox.put(FrameWritten(n + 1, 1, 10))
    bench.archiver.roll_all("request")
    for n in range(25):
        bench.sealed(n + 1)
    for n in range(16):
        bench.take(P, 25 + n, 1, f"open-{n}")
        bench.inbox.put(FrameWritten(26 + n, 1, 10))
    for _ in range(3):
        bench.archiver.turn()
    assert bench.outside.paused
    assert len(bench.archiver.opened) == 16
    for n in range(25):
        bench.inbox.put(FileDurable(n + 1))
    for _ in range(2):
        bench.archiver.turn()
    assert not bench.outside.paused


def test_what_a_crash_would_double_is_known_in_bounded_memory_and_never_understated() -> None:
    """[D7]: thousands of files above one commit are few runs; each counts until the commit has passed it."""
    uncommitted = UncommittedBytes()
    files = 10 * RUNS_MAX
    for n in range(files):
        uncommitted.archived({P: Span(n, n, 1)}, 10)
    assert uncommitted.total() == 10 * files
    assert len(uncommitted._runs[P]) <= RUNS_MAX
    uncommitted.committed({P: files // 2})
    assert 10 * files // 2 <= uncommitted.total() <= 10 * files // 2 * 1.05
    uncommitted.committed({P: files})
    assert uncommitted.total() == 0


# --- partitions that go, and the end ------------------------------------------------------------------------


def test_a_revoked_partition_is_sealed_uploaded_and_committed_and_other_files_stay_open() -> None:
    """[D5], step by step; what is not durable in time is abandoned."""
    bench = Bench()
    bench.take(P, 0, 2, "a")
    bench.take(Q, 0, 2, "b")
    for file_id in (1, 2):
        bench.inbox.put(FrameWritten(file_id, 1, 10))
    bench.inbox.put(FileSealed(1, 10, Checksums(0), "uploads/1"))
    bench.inbox.put(FileDurable(1))
    bench.outside.calls.clear()
    bench.archiver.revoked(frozenset([P]))
    assert bench.outside.calls == ["seal", "commit"]
    assert bench.outside.seals == [1]
    assert bench.outside.confirmed == [{P: 2}]
    assert [file.file_id for file in bench.archiver.open.values()] == [2]


def test_a_file_with_only_abandoned_records_is_deleted_and_one_with_others_is_uploaded_whole() -> None:
    """[D5]"""
    bench = Bench()
    bench.take(P, 0, 2, "a")
    bench.take(P, 2, 2, "both")
    bench.take(Q, 0, 2, "both")
    for file_id, chunk in ((1, 1), (2, 1), (2, 2)):
        bench.inbox.put(FrameWritten(file_id, chunk, 10 * chunk))
    bench.archiver.turn()
    bench.archiver.lost(frozenset([P]))
    assert bench.outside.discarded == [1]
    assert bench.outside.seals == [2]
    bench.seal_and_upload(2)
    assert bench.outside.uploads[2].records == 4
    assert bench.outside.offered[-1] == {Q: 2}


def test_a_late_success_of_an_abandoned_upload_commits_nothing() -> None:
    """[D4], c07: also not after the partition has come back."""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.archiver.roll_all("request")
    bench.sealed(1)
    bench.archiver.lost(frozenset([P]))
    assert bench.outside.abandoned == [1]
    bench.archiver.assigned({P: None})
    bench.outside.offered.clear()
    bench.inbox.put(FileDurable(1))
    bench.archiver.turn()
    assert all(P not in marks for marks in bench.outside.offered)


def test_a_stop_takes_nothing_more_seals_uploads_commits_and_leaves_in_this_order() -> None:
    """[D6]"""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.inbox.put(FileSealed(1, 10, Checksums(0), "uploads/1"))
    bench.inbox.put(FileDurable(1))
    bench.outside.calls.clear()
    bench.archiver.stop("SIGTERM")
    assert bench.archiver.finish() == 0
    assert bench.outside.calls == [
        "stop taking",
        "seal",
        "commit",
        "close source",
        "close writers",
        "close uploader",
        "close dead letters",
    ]
    assert bench.outside.confirmed == [{P: 2}]


def test_a_damaged_file_ends_the_process_with_status_1_and_no_commit_passes_it() -> None:
    """[D10], c35"""
    bench = Bench()
    bench.take(P, 0, 2)
    bench.inbox.put(FrameWritten(1, 1, 10))
    bench.archiver.roll_all("request")
    bench.sealed(1)
    bench.inbox.put(FileDamaged(1, "gone"))
    assert bench.archiver.run() == 1
    assert all(marks.get(P, 0) <= 0 for marks in [*bench.outside.offered, *bench.outside.confirmed])


# --- uploads ------------------------------------------------------------------------------------------------


class Pool:
    """The schedule with attempts that a test ends."""

    def __init__(self, in_flight_max: int = 2) -> None:
        self.inbox = QueueInbox()
        self.removed: list[int] = []
        self.schedule = UploadSchedule(
            self.inbox,
            lambda event: None,
            lambda sealed: self.removed.append(sealed.file_id),
            lambda: "f" * 12,
            random.Random(1),
            in_flight_max,
        )
        self.now = 0.0

    def add(self, file_id: int) -> None:
        key = ObjectKey(f"t/a/0001-{file_id}", "3f9a", "jsonl")
        sealed = SealedFile(
            file_id, Path(f"{file_id}"), key, 10, Checksums(0), 1, 10, "none", f"nonce-{file_id}"
        )
        self.schedule.add(sealed, self.now)

    def attempt(self, outcome: StoreError | None) -> SealedFile | None:
        """Whose turn it is, ended at once; None where it is nobody's."""
        sealed = self.schedule.begin(self.now)
        if sealed is not None:
            self.schedule.end(sealed, outcome, self.now)
        return sealed


def test_a_failed_attempt_gives_its_worker_back_and_the_next_file_has_its_turn() -> None:
    """[D1], c41: one worker, one file that always fails, and nine that get through."""
    pool = Pool(in_flight_max=1)
    for file_id in range(10):
        pool.add(file_id)
    assert pool.attempt(TransientStoreError("server", "no", whole_store=False)) is not None
    others = [pool.attempt(None) for _ in range(9)]
    assert [sealed.file_id for sealed in others if sealed is not None] == list(range(1, 10))
    assert pool.inbox.drain() == [FileDurable(file_id) for file_id in range(1, 10)]
    assert pool.removed == list(range(1, 10))
    assert pool.attempt(None) is None, "it waits before it is tried again"
    pool.now += BACKOFF_SECS_MAX
    again = pool.attempt(None)
    assert again is not None and again.file_id == 0


def test_while_the_store_is_away_one_attempt_at_a_time_goes_and_its_success_frees_all() -> None:
    """[S6]"""
    pool = Pool(in_flight_max=4)
    for file_id in range(BREAKER_FAILURES + 4):
        pool.add(file_id)
    for _ in range(BREAKER_FAILURES):
        assert pool.attempt(TransientStoreError("network", "away")) is not None
    assert pool.schedule.state().store_down is not None
    pool.now += BACKOFF_SECS_MAX
    probing = pool.schedule.begin(pool.now)
    assert probing is not None
    assert pool.schedule.begin(pool.now) is None, "one at a time"
    pool.schedule.end(probing, None, pool.now)
    assert pool.schedule.state().store_down is None
    assert len([pool.schedule.begin(pool.now) for _ in range(4)]) == 4


def test_one_waiting_file_is_enough_to_find_out_soon_that_the_store_is_away() -> None:
    """[O2], c28: with its growing waits, one file alone would take a minute to fail eight times."""
    pool = Pool()
    pool.add(1)
    while pool.schedule.state().store_down is None:
        assert pool.attempt(TransientStoreError("access_denied", "no")) is not None
        pool.now += pool.schedule.wait_secs(pool.now)
        assert pool.now < 25
    assert pool.now > 5, "a short stumble is no outage"
    assert pool.attempt(None) is not None
    assert pool.schedule.state().store_down is None


def test_a_store_that_is_back_is_found_within_seconds_however_long_it_was_away() -> None:
    """[S6]: while it is away its files are tried in turn, each file's own wait aside; never in a hurry."""
    pool = Pool()
    pool.add(1)
    error = TransientStoreError("network", "away")
    for _ in range(BREAKER_FAILURES):
        pool.now += BACKOFF_SECS_MAX
        assert pool.attempt(error) is not None
    for about_the_file in (False, True, False):
        wait = pool.schedule.wait_secs(pool.now)
        assert BACKOFF_SECS_MIN / 2 <= wait <= PROBE_SECS_MAX
        assert pool.attempt(error) is None, "not before"
        pool.now += wait
        again = TransientStoreError("integrity", "bad", whole_store=False) if about_the_file else error
        assert pool.attempt(again) is not None


def test_a_taken_key_gets_a_longer_writer_id_and_the_pipeline_hears_of_it() -> None:
    """[K4]: the object that is there is left alone."""
    pool = Pool()
    pool.add(1)
    pool.attempt(KeyTakenError("somebody else's"))
    again = pool.attempt(None)
    assert again is not None
    assert str(again.key) == f"t/a/0001-1-{'f' * 12}.jsonl"
    assert pool.inbox.drain() == [WriterIdTaken(), FileDurable(1)]


def test_a_damaged_file_is_told_once_and_stays() -> None:
    """[D10]: it is never taken for uploaded, and never tried again."""
    pool = Pool()
    pool.add(1)
    pool.attempt(DamagedFileError("gone"))
    assert pool.inbox.drain() == [FileDamaged(1, "gone")]
    assert not pool.removed
    assert pool.attempt(None) is None
