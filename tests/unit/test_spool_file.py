"""Files that grow by whole frames, whatever the disk does [B2]."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

import archiver.spool.file
from archiver.errors import SpoolError
from archiver.spool.file import CHECKSUMS, SpoolFile, append_to_each, is_no_space
from tests.unit.compiled import needs_native
from tests.unit.small_disk import fill, small_disk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    path = tmp_path / "uploads"
    path.mkdir()
    return path


@pytest.mark.parametrize("fsync", [False, True])
def test_a_sealed_file_is_its_frames_and_their_checksums(tmp_path: Path, uploads: Path, fsync: bool) -> None:
    """[S4]"""
    file = SpoolFile(tmp_path / "a", CHECKSUMS)
    assert [file.append(b"one"), file.append(b"two"), file.append(b"3" * 10_000)] == [3, 6, 10_006]
    checksums = file.seal(uploads, fsync=fsync)
    data = b"onetwo" + b"3" * 10_000
    assert (uploads / "a").read_bytes() == data
    assert file.path == uploads / "a"
    assert not (tmp_path / "a").exists()
    assert checksums.crc32 == zlib.crc32(data)
    assert checksums.crc32c == google_crc32c.value(data)
    assert checksums.md5 == hashlib.md5(data).digest()


def test_only_the_checksums_that_are_wanted_are_computed(tmp_path: Path, uploads: Path) -> None:
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    checksums = file.seal(uploads, fsync=False)
    assert (checksums.crc32, checksums.crc32c, checksums.md5) == (zlib.crc32(b"one"), None, None)


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_nothing_is_on_disk_before_the_first_frame(tmp_path: Path) -> None:
    SpoolFile(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_run_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        SpoolFile(tmp_path / "a").append(b"ours")
    assert (tmp_path / "a").read_bytes() == b"theirs"


def test_a_file_opened_again_goes_on_at_its_end(tmp_path: Path, uploads: Path) -> None:
    """[B3]: handles are closed when there are too many."""
    file = SpoolFile(tmp_path / "a")
    for n in range(5):
        file.append(b"%d" % n)
        file.close()
        assert not file.is_open
    assert file.seal(uploads, fsync=False).crc32 == zlib.crc32(b"01234")
    assert (uploads / "a").read_bytes() == b"01234"


# --- several at once --------------------------------------------------------------------------


@needs_native
def test_frames_for_several_closed_files_are_appended_as_one_by_one(tmp_path: Path, uploads: Path) -> None:
    files = [SpoolFile(tmp_path / f"{n}", CHECKSUMS) for n in range(3)]
    files[1].append(b"begun")
    files[1].close()
    written = [b"", b"begun", b""]
    for frame in (b"x", os.urandom(200_000), b"", b"end"):
        assert append_to_each([(file, frame) for file in files]) == 3
        written = [data + frame for data in written]
        assert not any(file.is_open for file in files)
    files[2].append(b"!")
    written[2] += b"!"
    for file, data in zip(files, written, strict=True):
        assert file.size == len(data)
        checksums = file.seal(uploads, fsync=True)
        assert (uploads / file.path.name).read_bytes() == data
        assert (uploads / file.path.name).stat().st_mode & 0o777 == 0o600
        assert (checksums.crc32, checksums.md5) == (zlib.crc32(data), hashlib.md5(data).digest())


@needs_native
def test_the_first_file_that_fails_ends_it_and_is_left_to_append(tmp_path: Path) -> None:
    """[D10]: not there, somebody else's, or not what was written."""
    lost = SpoolFile(tmp_path / "no-such-folder" / "a")
    (tmp_path / "theirs").write_bytes(b"theirs")
    theirs, spoiled = SpoolFile(tmp_path / "theirs"), SpoolFile(tmp_path / "spoiled")
    spoiled.append(b"one")
    spoiled.close()
    spoil(tmp_path / "spoiled")
    for bad, error in ((lost, FileNotFoundError), (theirs, FileExistsError), (spoiled, SpoolError)):
        before, behind = SpoolFile(tmp_path / f"before-{id(bad)}"), SpoolFile(tmp_path / f"behind-{id(bad)}")
        assert append_to_each([(before, b"1"), (bad, b"2"), (behind, b"3")]) == 1
        assert (before.size, behind.size, behind.path.exists()) == (1, 0, False)
        with pytest.raises(error):
            bad.append(b"2")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / "spoiled").read_bytes() == b"something else"


@needs_native
def test_nothing_is_left_of_a_frame_that_did_not_fit(tmp_path: Path) -> None:
    """[B2], c25"""
    with small_disk(tmp_path / "disk", 2 * 1024 * 1024) as disk:
        one, other, third = (SpoolFile(disk / name) for name in "abc")
        assert append_to_each([(one, b"1" * 900_000), (other, b"2" * 900_000)]) == 2
        assert append_to_each([(third, b"3"), (other, b"2" * 900_000), (one, b"1")]) == 1
        assert (disk / "b").stat().st_size == other.size == 900_000
        assert (one.size, third.size) == (900_000, 1)
        with pytest.raises(OSError, match="No space"):
            other.append(b"2" * 900_000)


def test_a_close_that_failed_counts_the_frame_and_spoils_the_file(tmp_path: Path, uploads: Path) -> None:
    """Some network disks tell only then that they have lost it: the file is not sealed."""
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    file.close()
    (tmp_path / "a").write_bytes(b"onetwo")
    assert file._appended_elsewhere(b"two", archiver.spool.file._NOT_CLOSED, errno.EIO)
    assert file.size == 6
    with pytest.raises(OSError, match="Input/output error"):
        file.append(b"three")
    with pytest.raises(SpoolError, match="what is on disk is unknown"):
        file.seal(uploads, fsync=False)


def test_what_is_torn_is_cut_before_the_next_frame(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    file.close()
    (tmp_path / "a").write_bytes(b"onetw")
    assert not file._appended_elsewhere(b"two", archiver.spool.file._TORN, errno.EIO)
    assert not file.is_idle
    assert file.append(b"two") == 6
    assert (tmp_path / "a").read_bytes() == b"onetwo"


def spoil(path: Path) -> None:
    path.write_bytes(b"something else")


def cut_short(path: Path) -> None:
    os.truncate(path, 2)


@pytest.mark.parametrize(
    ("damage", "words"), [(spoil, "has 14 bytes"), (cut_short, "has 2 bytes"), (Path.unlink, "vanished")]
)
def test_a_file_that_is_not_what_was_written_is_not_appended_to(
    tmp_path: Path, uploads: Path, damage: Callable[[Path], None], words: str
) -> None:
    """[D10]"""
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    file.close()
    damage(tmp_path / "a")
    with pytest.raises(SpoolError, match=words):
        file.append(b"two")
    with pytest.raises(SpoolError, match=words):
        file.seal(uploads, fsync=False)
    assert list(uploads.iterdir()) == []


def test_a_file_that_was_changed_while_it_was_open_is_not_sealed(tmp_path: Path, uploads: Path) -> None:
    """[D10]"""
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    cut_short(tmp_path / "a")
    with pytest.raises(SpoolError, match="has 2 bytes"):
        file.seal(uploads, fsync=False)


def test_a_file_without_a_frame_is_not_sealed(tmp_path: Path, uploads: Path) -> None:
    """[F3]: no empty files."""
    with pytest.raises(SpoolError, match="no frame"):
        SpoolFile(tmp_path / "a").seal(uploads, fsync=False)
    assert list(uploads.iterdir()) == []


def test_a_removed_file_is_gone_and_removing_it_again_is_fine(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


# --- full disks -----------------------------------------------------------------------------


def test_a_full_disk_in_the_middle_of_a_frame_cuts_back_to_the_last_whole_one(tmp_path: Path) -> None:
    """[B2], c25"""
    with small_disk(tmp_path / "disk", 2 * 1024 * 1024) as disk:
        file = SpoolFile(disk / "a", CHECKSUMS)
        frame = os.urandom(600_000)
        file.append(frame)
        file.append(frame)
        file.append(frame)
        with pytest.raises(OSError) as caught:
            file.append(frame)
        assert is_no_space(caught.value)
        assert (disk / "a").stat().st_size == file.size == 1_800_000
        with pytest.raises(OSError, match="No space"):
            file.append(b"x")  # would fit, but must not overtake the frame before it
        (disk / "uploads").mkdir()
        checksums = file.seal(disk / "uploads", fsync=True)
        assert (disk / "uploads" / "a").read_bytes() == frame * 3
        assert checksums.crc32 == zlib.crc32(frame * 3)
        assert checksums.md5 == hashlib.md5(frame * 3).digest()


def test_a_disk_that_is_full_from_the_start_leaves_an_empty_file_that_goes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1024 * 1024) as disk:
        fill(disk)
        file = SpoolFile(disk / "a")
        with pytest.raises(OSError, match="No space"):
            file.append(b"x" * 5000)
        assert file.size == 0
        file.remove()
        assert not (disk / "a").exists()


def test_a_full_quota_is_no_space() -> None:
    assert is_no_space(OSError(errno.EDQUOT, "quota"))
    assert is_no_space(OSError(errno.ENOSPC, "full"))
    assert not is_no_space(OSError(errno.EIO, "broken"))
    assert not is_no_space(SpoolError("gone"))


def test_a_seal_that_fails_can_be_asked_again(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    with pytest.raises(FileNotFoundError):
        file.seal(tmp_path / "uploads", fsync=False)
    assert (tmp_path / "a").read_bytes() == b"one"
    file.append(b"two")
    (tmp_path / "uploads").mkdir()
    assert file.seal(tmp_path / "uploads", fsync=False).crc32 == zlib.crc32(b"onetwo")
    assert (tmp_path / "uploads" / "a").read_bytes() == b"onetwo"


def test_a_write_beyond_the_file_size_limit_is_cut_back(tmp_path: Path) -> None:
    """Any other error than a full disk, made by the kernel: EFBIG half-way through a frame."""
    script = f"""
        import resource
        from pathlib import Path
        from archiver.spool.file import SpoolFile, is_no_space
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        file = SpoolFile(Path({str(tmp_path / "a")!r}))
        file.append(b"a" * 6_000)
        try:
            file.append(b"b" * 6_000)
        except OSError as error:
            print(type(error).__name__, error.errno, is_no_space(error), file.size)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == ["OSError", str(errno.EFBIG), "False", "6000"]
    assert (tmp_path / "a").read_bytes() == b"a" * 6_000


class StubbornFile(SpoolFile):
    """A disk on which cutting fails too, as after an I/O error, until it heals."""

    __slots__ = ("heals",)
    heals: bool

    def _cut(self, fd: int) -> None:
        if self.heals:
            super()._cut(fd)


def test_where_cutting_back_fails_too_the_torn_frame_is_cut_at_the_seal(tmp_path: Path) -> None:
    """[B2]: no half frame is uploaded."""
    with small_disk(tmp_path / "disk", 1024 * 1024) as disk:
        (disk / "uploads").mkdir()
        file = StubbornFile(disk / "a")
        file.heals = False
        file.append(b"x" * 500_000)
        with pytest.raises(OSError, match="No space"):
            file.append(b"y" * 900_000)
        assert (disk / "a").stat().st_size > 500_000
        file.close()
        checksums = file.seal(disk / "uploads", fsync=False)
        assert (disk / "uploads" / "a").read_bytes() == b"x" * 500_000
        assert checksums.crc32 == zlib.crc32(b"x" * 500_000)


def test_a_failed_fsync_is_not_believed_the_second_time(
    tmp_path: Path, uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel forgets a lost write once it has reported it, so only reading again from Kafka helps."""
    real, failures = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def fsync(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    file = SpoolFile(tmp_path / "a")
    file.append(b"one")
    with pytest.raises(OSError, match="Input/output"):
        file.seal(uploads, fsync=True)
    with pytest.raises(SpoolError, match="what is on disk is unknown"):
        file.seal(uploads, fsync=True)
    assert list(uploads.iterdir()) == []
