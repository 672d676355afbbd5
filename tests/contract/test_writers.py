"""The contract of `ports.Writers`, held by the spool's writer threads on a real file system."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from archiver.codecs import CODECS, read_all
from archiver.domain.sealed import ObjectKey
from archiver.events import Event, SpoolWriteFailed
from archiver.inbox import QueueInbox
from archiver.ports import FileSealed, FrameWritten, Result, SealFailed, WorkerDied, WriteFailed
from archiver.spool import SpoolDirectory, SpoolWriters, open_files_max
from tests.harness.process import PATIENCE, SLACK_SECS
from tests.unit.small_disk import fill, small_disk

KEY = ObjectKey("events/acme/2026/10/29/03-0001", "3f9a", "jsonl.zst")


@dataclass
class Spool:
    """Writers over a directory, with all they have answered."""

    directory: SpoolDirectory
    inbox: QueueInbox
    events: list[Event]
    writers: SpoolWriters
    codec: str
    answers: list[Result] = field(default_factory=list)

    def answered(self, count: int) -> list[Result]:
        """The next `count` answers; fails where they do not come."""
        deadline = time.monotonic() + 20 * PATIENCE
        while len(self.answers) < count:
            assert time.monotonic() < deadline, f"only {self.answers} of {count}"
            self.answers += self.inbox.wait(0.5)
        taken, self.answers = self.answers[:count], self.answers[count:]
        return taken

    def answer(self) -> Result:
        return self.answered(1)[0]

    def sealed(self, file_id: int) -> bytes:
        """Seal the file; its decoded bytes."""
        self.writers.seal(file_id)
        answer = self.answer()
        assert isinstance(answer, FileSealed), answer
        return self.decoded(answer)

    def decoded(self, answer: FileSealed) -> bytes:
        path = Path(answer.path)
        assert path.parent == self.directory.uploads_dir
        data = path.read_bytes()
        assert (len(data), zlib.crc32(data)) == (answer.size, answer.checksums.crc32)
        return b"".join(read_all(path, CODECS[self.codec]))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.open_dir.iterdir())


def start(
    path: Path, codec: str = "zstd", *, threads: int = 2, max_open_files: int = 256, keep_labels: bool = False
) -> Spool:
    directory = SpoolDirectory.acquire(path)
    inbox, events = QueueInbox(), list[Event]()
    writers = SpoolWriters(
        directory,
        CODECS[codec],
        None,
        inbox,
        events.append,
        threads=threads,
        max_open_files=max_open_files,
        keep_labels=keep_labels,
    )
    return Spool(directory, inbox, events, writers, codec)


@pytest.fixture(params=["zstd", "none"])
def spool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Spool]:
    spool = start(tmp_path / "spool", request.param)
    yield spool
    spool.writers.close(10)
    spool.directory.release()


def test_each_chunk_is_answered_with_the_size_after_it(spool: Spool) -> None:
    for chunk in range(3):
        spool.writers.append(7, chunk, [b"value", b""])
    answers = spool.answered(3)
    assert [type(answer) for answer in answers] == [FrameWritten] * 3
    assert [(a.file_id, a.chunk) for a in answers if isinstance(a, FrameWritten)] == [(7, 0), (7, 1), (7, 2)]
    sizes = [a.file_size for a in answers if isinstance(a, FrameWritten)]
    assert sizes == sorted(set(sizes))
    assert spool.sealed(7) == b"value\n\n" * 3


def test_a_sealed_file_lies_under_uploads_and_is_forgotten(spool: Spool) -> None:
    spool.writers.append(1, 0, [b"a"])
    spool.answer()
    assert len(spool.names()) == 1
    assert spool.sealed(1) == b"a\n"
    assert spool.names() == []
    spool.writers.seal(1)
    assert isinstance(spool.answer(), SealFailed)


def test_chunks_of_one_file_keep_their_order_among_many_files(spool: Spool) -> None:
    files, chunks = 40, 25
    for chunk in range(chunks):
        for file_id in range(files):
            spool.writers.append(file_id, chunk, [b"%d-%d" % (file_id, chunk)])
    answers = spool.answered(files * chunks)
    for file_id in range(files):
        mine = [a.chunk for a in answers if isinstance(a, FrameWritten) and a.file_id == file_id]
        assert mine == list(range(chunks))
        assert spool.sealed(file_id) == b"".join(b"%d-%d\n" % (file_id, chunk) for chunk in range(chunks))


def test_a_discarded_file_is_deleted_without_an_answer(spool: Spool) -> None:
    spool.writers.append(1, 0, [b"a"])
    spool.writers.discard(1)
    spool.writers.discard(2)
    spool.writers.append(3, 0, [b"b"])
    spool.writers.append(5, 0, [b"b"])
    assert {type(answer) for answer in spool.answered(3)} == {FrameWritten}
    assert len(spool.names()) == 2
    assert spool.inbox.drain() == []


def test_a_file_without_a_frame_cannot_be_sealed(spool: Spool) -> None:
    """[F3]: no empty files."""
    spool.writers.seal(1)
    answer = spool.answer()
    assert isinstance(answer, SealFailed)
    assert not answer.no_space


def test_a_failed_seal_leaves_the_file_as_it_was(spool: Spool) -> None:
    spool.writers.append(1, 0, [b"a"])
    spool.answer()
    spool.directory.uploads_dir.rmdir()
    spool.writers.seal(1)
    answer = spool.answer()
    assert isinstance(answer, SealFailed)
    assert "No such file" in answer.detail
    spool.directory.uploads_dir.mkdir()
    spool.writers.append(1, 1, [b"b"])
    assert isinstance(spool.answer(), FrameWritten)
    assert spool.sealed(1) == b"a\nb\n"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_more_files_are_open_than_allowed_and_each_is_whole(tmp_path: Path, threads: int) -> None:
    """[B3], c21: the longest unused is closed, and opened again where it goes on."""
    spool = start(tmp_path, "lz4", threads=threads, max_open_files=6)
    files, chunks, most = 30, 8, 0
    for chunk in range(chunks):
        for file_id in range(files):
            spool.writers.append(file_id, chunk, [b"%d" % chunk])
            spool.answer()
            most = max(most, open_in(tmp_path / "open"))
    assert 6 // threads * threads == most
    for file_id in range(files):
        assert spool.sealed(file_id) == b"".join(b"%d\n" % chunk for chunk in range(chunks))
        assert open_in(tmp_path / "open") <= 6
    assert open_in(tmp_path / "open") == open_in(tmp_path / "uploads") == 0
    spool.writers.close(5)


def files_open_in(folder: Path) -> set[str]:
    """The files in a folder that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.parent == folder:
                found.add(path.name)
    return found


def open_in(folder: Path) -> int:
    return len(files_open_in(folder))


def test_the_file_that_was_not_used_for_longest_is_closed(tmp_path: Path) -> None:
    """[B3]"""
    spool = start(tmp_path, threads=1, max_open_files=2)
    for chunk, file_id in enumerate([1, 2, 1, 3]):
        spool.writers.append(file_id, chunk, [b"x"])
    spool.answered(4)
    still_open = files_open_in(tmp_path / "open")
    assert sorted(name.partition(".")[0].rpartition("-")[2] for name in still_open) == ["1", "3"]
    spool.writers.close(5)


def test_one_open_file_is_enough_for_several_threads(tmp_path: Path) -> None:
    """c41"""
    spool = start(tmp_path, threads=4, max_open_files=1)
    for chunk in range(3):
        for file_id in range(5):
            spool.writers.append(file_id, chunk, [b"x"])
    assert {type(answer) for answer in spool.answered(15)} == {FrameWritten}
    assert open_in(tmp_path / "open") == 1
    spool.writers.close(5)
    assert open_in(tmp_path / "open") == 0


FEW_HANDLES = """
    import resource, sys
    from pathlib import Path
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    from tests.contract.test_writers import start
    spool = start(Path(sys.argv[1]), max_open_files=256)
    for chunk in range(2):
        for file_id in range(300):
            spool.writers.append(file_id, chunk, [b"x"])
    kinds = {type(answer).__name__ for answer in spool.answered(600)}
    for file_id in range(300):
        assert spool.sealed(file_id) == b"x\\nx\\n"
    print(kinds)
"""


def test_far_more_files_than_the_process_may_open_are_written(tmp_path: Path) -> None:
    """[B3], c23: as under `ulimit -n 100`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FEW_HANDLES), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "{'FrameWritten'}"


def test_open_files_stay_below_the_limit_of_the_process() -> None:
    """[B3]"""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert [open_files_max(n) for n in (1, 100, 136, 137, 9999)] == [1, 100, 136, 136, 136]
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
        assert open_files_max(256) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- full disks [B2] ------------------------------------------------------------------------


def test_after_a_full_disk_a_file_fails_in_order_and_others_go_on(tmp_path: Path) -> None:
    """[B2], c25: no half frame, no chunk that overtakes a failed one, and recovery once there is room."""
    with small_disk(tmp_path / "disk", 4 * 1024 * 1024) as disk:
        spool = start(disk / "spool", "none", threads=1)
        ballast = fill(disk, leave_bytes=1_000_000)
        spool.writers.append(1, 0, [b"a" * 400_000])
        spool.writers.append(1, 1, [b"b" * 900_000])  # does not fit
        spool.writers.append(1, 2, [b"c"])  # would fit
        spool.writers.append(3, 0, [b"d" * 1000])
        first, second, third, other = spool.answered(4)
        assert first == FrameWritten(1, 0, 400_001)
        assert isinstance(second, WriteFailed)
        assert isinstance(third, WriteFailed)
        assert (second.chunk, second.file_size, second.no_space) == (1, 400_001, True)
        assert (third.chunk, third.file_size, third.no_space) == (2, 400_001, True)
        assert other == FrameWritten(3, 0, 1001)
        assert spool.events == [SpoolWriteFailed("No space left on device", 1)]
        ballast.unlink()
        spool.writers.append(1, 3, [b"e"])
        assert isinstance(spool.answer(), WriteFailed)
        assert spool.sealed(1) == b"a" * 400_000 + b"\n"
        spool.writers.append(5, 0, [b"b" * 900_000])
        assert spool.answer() == FrameWritten(5, 0, 900_001)
        spool.writers.close(5)
        spool.directory.release()


def test_a_file_whose_first_chunk_fails_can_be_discarded(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1024 * 1024) as disk:
        spool = start(disk / "spool", "none", threads=1)
        ballast = fill(disk)
        spool.writers.append(1, 0, [b"a" * 10_000])
        answer = spool.answer()
        assert isinstance(answer, WriteFailed)
        assert (answer.file_size, answer.no_space) == (0, True)
        spool.writers.discard(1)
        ballast.unlink()
        spool.writers.append(2, 0, [b"a" * 10_000])
        assert isinstance(spool.answer(), FrameWritten)
        assert len(spool.names()) == 1
        spool.writers.close(5)
        spool.directory.release()


def test_a_seal_on_a_full_disk_waits_for_room(tmp_path: Path) -> None:
    """Where a new label has to be written first, sealing needs room too."""
    with small_disk(tmp_path / "disk", 1024 * 1024) as disk:
        spool = start(disk / "spool", "none", threads=1, keep_labels=True)
        spool.writers.label(1, KEY)
        spool.writers.append(1, 0, [b"a"])
        spool.answer()
        ballast = fill(disk)
        spool.writers.label(1, KEY.under("0123456789abcdef"))
        spool.writers.seal(1)
        answer = spool.answer()
        assert isinstance(answer, SealFailed)
        assert answer.no_space
        ballast.unlink()
        assert spool.sealed(1) == b"a\n"
        spool.writers.close(5)
        spool.directory.release()
        (left,) = SpoolDirectory.acquire(disk / "spool").leftovers().sealed
        assert left.key == KEY.under("0123456789abcdef")


def test_no_frame_is_written_whose_label_cannot_be(tmp_path: Path) -> None:
    """[D7]: a file without a label would be deleted after a crash."""
    spool = start(tmp_path, "none", threads=1, keep_labels=True)
    spool.directory.open_dir.rename(tmp_path / "away")
    spool.writers.label(1, KEY)
    spool.writers.append(1, 0, [b"a"])
    answer = spool.answer()
    assert isinstance(answer, WriteFailed)
    assert answer.file_size == 0
    (tmp_path / "away").rename(spool.directory.open_dir)
    spool.writers.append(1, 1, [b"b"])
    assert isinstance(spool.answer(), WriteFailed)  # it must not overtake the one before it
    spool.writers.label(3, KEY)
    spool.writers.append(3, 0, [b"a"])
    assert isinstance(spool.answer(), FrameWritten)
    spool.writers.close(5)


def test_a_label_that_could_not_be_written_is_written_before_the_first_frame(tmp_path: Path) -> None:
    """[D7]"""
    spool = start(tmp_path, "none", threads=1, keep_labels=True)
    spool.directory.open_dir.rename(tmp_path / "away")
    spool.writers.label(1, KEY)
    spool.writers.seal(2)
    assert isinstance(spool.answer(), SealFailed)  # so the label has had its turn
    (tmp_path / "away").rename(spool.directory.open_dir)
    spool.writers.append(1, 0, [b"a"])
    assert isinstance(spool.answer(), FrameWritten)
    assert [name.partition(".")[2] for name in spool.names()] == ["jsonl", "key"]
    spool.writers.close(5)


def test_where_others_take_the_handles_writers_do_with_fewer(tmp_path: Path) -> None:
    """[B3]: as many uploads, brokers and HTTP clients as there are may need more than the 64 left free."""
    spool = start(tmp_path, "none", threads=1)
    in_use = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 8, hard))
    try:
        for file_id in range(40):
            spool.writers.append(file_id, 0, [b"a"])
        answers = spool.answered(40)
        assert [type(answer) for answer in answers] == [FrameWritten] * 40, answers
        spool.writers.append(0, 1, [b"b"])
        assert isinstance(spool.answer(), FrameWritten)
        assert spool.sealed(0) == b"a\nb\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    spool.writers.close(5)


def test_where_no_handle_is_left_waiting_helps(tmp_path: Path) -> None:
    """[B3]: others have taken them all; nothing is wrong with the spool, and they may give some back."""
    spool = start(tmp_path, "none", threads=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        spool.writers.append(1, 0, [b"a"])
        answer = spool.answer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(answer, WriteFailed)
    assert answer.no_space
    spool.writers.close(5)


def test_an_open_file_that_vanished_fails_and_is_never_sealed(tmp_path: Path) -> None:
    """[D10]"""
    spool = start(tmp_path, threads=1, max_open_files=1)
    spool.writers.append(1, 0, [b"a"])
    spool.writers.append(2, 0, [b"a"])  # takes the only handle
    spool.answered(2)
    for path in spool.directory.open_dir.iterdir():
        path.unlink()
    spool.writers.append(1, 1, [b"b"])
    spool.writers.seal(1)
    failed, unsealed = spool.answered(2)
    assert isinstance(failed, WriteFailed)
    assert isinstance(unsealed, SealFailed)
    assert "vanished" in failed.detail
    assert not failed.no_space
    assert not unsealed.no_space
    spool.writers.close(5)


# --- labels and crashes [D7] ----------------------------------------------------------------


def test_a_sealed_file_has_the_nonce_that_its_label_has(tmp_path: Path) -> None:
    """[K4]: an upload that a crash interrupts is known again as our own."""
    spool = start(tmp_path, keep_labels=True)
    spool.writers.label(1, KEY)
    spool.writers.append(1, 0, [b"a"])
    spool.writers.seal(1)
    _, answer = spool.answered(2)
    assert isinstance(answer, FileSealed)
    spool.writers.close(5)
    spool.directory.release()
    (left,) = SpoolDirectory.acquire(tmp_path).leftovers().sealed
    assert (left.nonce, left.key, left.codec) == (answer.nonce, KEY, "zstd")
    assert (left.size, left.checksums, str(left.path)) == (answer.size, answer.checksums, answer.path)


def test_without_labels_nothing_lies_beside_the_files(tmp_path: Path) -> None:
    spool = start(tmp_path)
    spool.writers.label(1, KEY)
    spool.writers.append(1, 0, [b"a"])
    spool.answer()
    assert [name.partition(".")[2] for name in spool.names()] == ["jsonl.zst"]
    spool.writers.close(5)


def test_a_discarded_file_takes_its_label_along(tmp_path: Path) -> None:
    spool = start(tmp_path, threads=1, keep_labels=True)
    spool.writers.label(1, KEY)
    spool.writers.append(1, 0, [b"a"])
    spool.writers.discard(1)
    spool.writers.label(2, KEY)
    spool.writers.discard(2)
    spool.writers.close(5)
    assert spool.names() == []


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tests.contract.test_writers import KEY, start
    spool = start(Path(sys.argv[1]), sys.argv[2], max_open_files=4, keep_labels=True)
    for file_id in range(9):
        spool.writers.label(file_id, KEY)
    for chunk in range(400):
        for file_id in range(9):
            spool.writers.append(file_id, chunk, [b"%d %d" % (file_id, chunk), b"x" * 1000])
    spool.writers.seal(0)
    for answer in spool.answered(int(sys.argv[3])):
        print(answer.file_id, getattr(answer, "chunk", -1))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("answers", [10, 400, 3000])
@pytest.mark.parametrize("codec", CODECS)
def test_what_was_answered_before_a_kill_is_recovered(tmp_path: Path, codec: str, answers: int) -> None:
    """[D7], c33: every leftover is whole, in order, and holds at least what was answered."""
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), codec, str(answers)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert killed.returncode == -9, killed.stderr
    answered = [line.split() for line in killed.stdout.splitlines()]
    assert len(answered) == answers
    written: dict[str, int] = {}
    for sealed in SpoolDirectory.acquire(tmp_path).leftovers().sealed:
        lines = b"".join(read_all(sealed.path, CODECS[codec])).decode().splitlines()
        assert len(lines) == sealed.records
        file_id = lines[0].split()[0]
        numbered = [line for line in lines if not line.startswith("x")]
        assert numbered == [f"{file_id} {chunk}" for chunk in range(len(numbered))]
        written[file_id] = len(numbered)
    for file_id, chunk in answered:
        assert written[file_id] > int(chunk)


# --- ends -----------------------------------------------------------------------------------


class Gated:
    """Compresses nothing: notes what it is given at once, and goes on only when `go_on` is set."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, many: list[bytes]) -> list[bytes]:
        self.given.append([len(data) for data in many])
        self.begun.set()
        assert self.go_on.wait(60)
        return many


def gated(path: Path) -> tuple[Spool, Gated]:
    """One thread that is busy with the file 1; what is asked for now waits behind it."""
    gate, directory, inbox, events = Gated(), SpoolDirectory.acquire(path), QueueInbox(), list[Event]()
    codec = replace(CODECS["none"], _compress=lambda _level: gate)
    writers = SpoolWriters(directory, codec, None, inbox, events.append, threads=1)
    writers.append(1, 0, [b"first"])
    assert gate.begun.wait(60)
    return Spool(directory, inbox, events, writers, "none"), gate


def test_small_frames_are_made_together_and_a_large_one_alone(tmp_path: Path) -> None:
    """Nobody waits for it, and what it takes to compress it is there once."""
    spool, gate = gated(tmp_path)
    small, large = [b"s" * 99], [b"l" * 999_999]
    for file_id, lines in enumerate((small, small, large, small, small, [b"m" * 399_999], small), 2):
        spool.writers.append(file_id, 0, lines)
    spool.writers.append(8, 1, small)
    gate.go_on.set()
    answers = [(a.file_id, a.chunk) for a in spool.answered(9) if isinstance(a, FrameWritten)]
    assert answers == [*((file_id, 0) for file_id in range(1, 9)), (8, 1)]
    assert gate.given == [[6], [100, 100], [1_000_000], [100, 100, 400_000, 100], [100]]
    assert spool.sealed(8) == b"".join((*small, b"\n")) * 2
    spool.writers.close(10)
    spool.directory.release()


def test_what_a_failed_file_does_not_take_is_not_compressed_for_it(tmp_path: Path) -> None:
    spool, gate = gated(tmp_path)
    shutil.rmtree(spool.directory.open_dir)
    spool.writers.append(1, 1, [b"second"])
    spool.writers.append(2, 0, [b"others"])
    gate.go_on.set()
    assert [type(answer) for answer in spool.answered(3)] == [WriteFailed] * 3
    assert gate.given == [[6], [7]]
    spool.writers.close(10)
    spool.directory.release()


def test_close_carries_out_what_is_queued(tmp_path: Path) -> None:
    spool = start(tmp_path)
    for chunk in range(200):
        spool.writers.append(chunk % 4, chunk, [b"x" * 1000])
    for file_id in range(4):
        spool.writers.seal(file_id)
    spool.writers.close(20)
    answers = spool.inbox.drain()
    assert sum(isinstance(answer, FrameWritten) for answer in answers) == 200
    assert sum(isinstance(answer, FileSealed) for answer in answers) == 4


def test_close_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    directory = SpoolDirectory.acquire(tmp_path)
    inbox = QueueInbox()
    go_on = threading.Event()

    def held(frames: list[bytes]) -> list[bytes]:
        go_on.wait()
        return frames

    codec = replace(CODECS["none"], _compress=lambda _level: held)
    writers = SpoolWriters(directory, codec, None, inbox, lambda _: None, threads=1)
    for chunk in range(3):
        writers.append(1, chunk, [b"x"])
    begun = time.monotonic()
    writers.close(0.05)
    assert time.monotonic() - begun < SLACK_SECS
    assert inbox.drain() == []
    go_on.set()
    writers.close(60)
    assert [type(answer) for answer in inbox.drain()] == [FrameWritten] * 3


def test_a_thread_that_dies_tells_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker stops the process; close does not wait for it."""
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    spool = start(tmp_path, threads=1)
    spool.writers.append(1, 0, [None])  # type: ignore[list-item]
    answer = spool.answer()
    assert isinstance(answer, WorkerDied)
    assert answer.worker == "writer-0"
    assert answer.detail.startswith("TypeError: ")
    spool.writers.append(1, 1, [b"a"])
    spool.writers.close(20)
    assert spool.inbox.drain() == []
    assert [args.exc_type for args in seen] == [TypeError]


def test_a_checksum_nobody_knows_is_refused(tmp_path: Path) -> None:
    directory = SpoolDirectory.acquire(tmp_path)
    with pytest.raises(ValueError, match="sha1"):
        SpoolWriters(
            directory, CODECS["zstd"], None, QueueInbox(), lambda _: None, checksums=frozenset({"sha1"})
        )


# --- the inbox ------------------------------------------------------------------------------


def test_the_inbox_hands_out_in_order_and_at_once() -> None:
    inbox = QueueInbox()
    results = [FrameWritten(1, chunk, 1) for chunk in range(5)]
    assert inbox.drain() == []
    for result in results[:3]:
        inbox.put(result)
    assert inbox.drain() == results[:3]
    for result in results[3:]:
        inbox.put(result)
    assert inbox.wait(0) == results[3:]
    assert inbox.drain() == []


def test_the_inbox_waits_for_the_first_result_and_no_longer() -> None:
    inbox = QueueInbox()
    begun = time.monotonic()
    assert inbox.wait(0.05) == []
    assert 0.04 < time.monotonic() - begun < SLACK_SECS
    assert inbox.wait(-1) == []
    threading.Timer(0.05, inbox.put, [FrameWritten(1, 0, 1)]).start()
    assert inbox.wait(60) == [FrameWritten(1, 0, 1)]
    assert time.monotonic() - begun < 60 / 2
