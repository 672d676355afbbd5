"""`file://` in groups: nothing is told durable before it is, and one odd file is no other file's trouble."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.events import Event, GroupFlushFailed
from archiver.stores import syncfs
from archiver.stores.file import GROUP_STEPS, FileStore
from archiver.stores.syncfs import FileSystemFlush, file_system_type, flush_times
from tests.contract.store_case import make_sealed
from tests.contract.store_cases.local import other_file_system
from tests.harness.broken_disk import BrokenDisk
from tests.unit.small_disk import fill, small_disk

FILES = 5


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.fixture(autouse=True)
def _a_file_system_that_can(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    flush = FileSystemFlush.of_folder(tmp_path / "spool")
    if flush is None:
        pytest.skip("the tests' folder is on a file system that is not flushed as a whole")
    flush.close()


def sealed_files(tmp_path: Path) -> list[tuple[SealedFile, str]]:
    files = [make_sealed(tmp_path / "spool", b"file %d" % n, f"events/org-{n}/0001") for n in range(FILES)]
    return [(sealed, str(sealed.key)) for sealed in files]


def visible(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_group_is_there_whole_and_its_originals_stay(tmp_path: Path) -> None:
    """[S2]"""
    taken: list[str] = []
    files = sealed_files(tmp_path)
    store = FileStore(tmp_path / "archive", spool=tmp_path / "spool", step=taken.append)
    assert store.group_max >= 64
    assert store.put_group(files) == [True] * FILES
    assert visible(tmp_path / "archive") == {key: sealed.path.read_bytes() for sealed, key in files}
    assert all((tmp_path / "archive" / key).samefile(sealed.path) for sealed, key in files)
    prepared, linked = ["verify", "make_dirs"] * FILES, ["link"] * FILES
    assert taken == [*prepared, "sync_group", *linked, "sync_links"]
    assert set(taken) == set(GROUP_STEPS)
    store.close()


@pytest.mark.parametrize("nth", [1, 2, FILES])
@pytest.mark.parametrize("step", GROUP_STEPS)
def test_a_crash_at_any_step_of_a_group_leaves_each_key_absent_or_whole(
    tmp_path: Path, step: str, nth: int
) -> None:
    """[S2], [D7]: and a process that comes after finishes the work, in a group or file by file."""
    files = sealed_files(tmp_path)
    root, spool = tmp_path / "archive", tmp_path / "spool"
    left = [nth if step in ("verify", "make_dirs", "link") else 1]

    def stop(name: str) -> None:
        if name == step:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    with pytest.raises(Killed):
        FileStore(root, spool=spool, step=stop).put_group(files)
    linked = {"link": nth - 1, "sync_links": FILES}.get(step, 0)
    assert visible(root) == {key: sealed.path.read_bytes() for sealed, key in files[:linked]}

    after = FileStore(root, spool=spool)
    for (sealed, key), durable in zip(files, after.put_group(files), strict=True):
        assert durable is not (key in {key for _, key in files[:linked]})
        if not durable:
            after.put(sealed, key, {})
    assert visible(root) == {key: sealed.path.read_bytes() for sealed, key in files}


def in_a_process(
    tmp_path: Path,
    files: list[tuple[SealedFile, str]],
    *,
    step: str = "pass",
    then: str = "pass",
    tracer: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A group put in a process of its own; `step` is the body of its hook, `then` comes after it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os
        from pathlib import Path
        from archiver.errors import StoreError
        from archiver.stores.file import FileStore
        from archiver.domain.sealed import SealedFile, ObjectKey, Checksums
        def hook(name):
            STEP
        events = []
        store = FileStore(Path(ROOT), spool=Path(SPOOL), step=hook, emit=events.append)
        def sealed(n, path, size, crc):
            key = ObjectKey("a", "3f9a", "b")
            return SealedFile(n, Path(path), key, size, Checksums(crc), 1, 1, "none", "ab")
        files = [(sealed(n, *told), key) for n, (*told, key) in enumerate(FILES)]
        durable = store.put_group(files)
        print(durable, flush=True)
        THEN
        """)
        .replace("STEP", step)
        .replace("ROOT", repr(str(tmp_path / "archive")))
        .replace("SPOOL", repr(str(tmp_path / "spool")))
        .replace("FILES", repr([(str(s.path), s.size, s.checksums.crc32, key) for s, key in files]))
        .replace("THEN", then)
    )
    command = [*(tracer or ()), sys.executable, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})}
    return subprocess.run(command, timeout=60, check=False, text=True, capture_output=True, env=environ)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("step", ["link", "sync_links"])
def test_a_killed_process_leaves_whole_files_or_none(tmp_path: Path, step: str, nth: int) -> None:
    """[D7]: killed for real."""
    files = sealed_files(tmp_path)
    kill = f"hook.n = getattr(hook, 'n', 0) + (name == {step!r}); hook.n == {nth} and os.kill(os.getpid(), 9)"
    done = in_a_process(tmp_path, files, step=kill)
    assert done.returncode == (-signal.SIGKILL if (step, nth) != ("sync_links", 3) else 0), done.stderr
    originals = {key: sealed.path.read_bytes() for sealed, key in files}
    assert visible(tmp_path / "archive").items() <= originals.items()


def test_a_group_is_on_disk_before_it_is_linked_and_its_links_before_it_is_told(tmp_path: Path) -> None:
    """[S2], [D7]: seen in the system calls."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    trace = tmp_path / "trace"
    calls = "trace=syncfs,fsync,link,linkat,mkdir,write"
    files = sealed_files(tmp_path)
    done = in_a_process(tmp_path, files, tracer=[strace, "-f", "-o", str(trace), "-e", calls])
    if done.returncode:
        pytest.skip("needs the right to trace a process")
    called = [line.split(None, 1)[1].partition("(")[::2] for line in trace.read_text().splitlines()]
    ours = [name for name, rest in called if name in ("syncfs", "fsync") or str(tmp_path / "archive") in rest]
    told = next(n for n, (name, rest) in enumerate(called) if name == "write" and "[True" in rest)
    device = (tmp_path / "spool").stat().st_dev
    spool = os.open(tmp_path / "spool", os.O_RDONLY)
    flush = ["syncfs"] * flush_times(file_system_type(spool), device)
    os.close(spool)
    assert [name for name in ours if name != "mkdir"] == [*flush, *["linkat"] * FILES, *flush]
    assert "mkdir" not in ours[ours.index("syncfs") :], "folders are flushed before anything is linked there"
    assert told > max(n for n, (name, _) in enumerate(called) if name == "syncfs")


def _vanish(sealed: SealedFile, target: Path) -> None:
    sealed.path.unlink()


def _change(sealed: SealedFile, target: Path) -> None:
    sealed.path.write_bytes(b"FILE 2")


def _grow(sealed: SealedFile, target: Path) -> None:
    sealed.path.write_bytes(b"file 2 and more")


def _take(sealed: SealedFile, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"file 2")


def _block(sealed: SealedFile, target: Path) -> None:
    target.parent.parent.mkdir(parents=True)
    target.parent.write_bytes(b"a file where a folder belongs")


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (_vanish, DamagedFileError),
        (_change, DamagedFileError),
        (_grow, DamagedFileError),
        (_take, KeyTakenError),
        (_block, TransientStoreError),
    ],
)
def test_one_odd_file_is_left_to_a_put_of_its_own_and_the_rest_gets_through(
    tmp_path: Path, trouble: Callable[[SealedFile, Path], None], error: type[StoreError]
) -> None:
    """[D1], [D10], [K4]"""
    files = sealed_files(tmp_path)
    root = tmp_path / "archive"
    odd, key = files[2]
    trouble(odd, root / key)
    there = (root / key).read_bytes() if (root / key).exists() else None
    store = FileStore(root, spool=tmp_path / "spool")
    assert store.put_group(files) == [n != 2 for n in range(FILES)]
    with pytest.raises(error):
        store.put(odd, key, {})
    assert ((root / key).read_bytes() if (root / key).exists() else None) == there
    assert store.group_max, "and says nothing about the next group"


@pytest.mark.parametrize("key", ["../x", "a/../x", "a//x", "", "a/\0x", "events/" + "x" * 300])
def test_a_key_that_is_refused_is_refused_alone(tmp_path: Path, key: str) -> None:
    """[K5], [Q1]"""
    files = sealed_files(tmp_path)
    files[0] = (files[0][0], key)
    store = FileStore(tmp_path / "archive", spool=tmp_path / "spool")
    assert store.put_group(files) == [False] + [True] * (FILES - 1)
    with pytest.raises(RefusedError):
        store.put(*files[0], {})


def test_a_folder_that_somebody_removes_is_made_anew(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "archive", spool=tmp_path / "spool")
    first, second = make_sealed(tmp_path / "spool", b"1"), make_sealed(tmp_path / "spool", b"2")
    assert store.put_group([(first, "a/b/1")]) == [True]
    shutil.rmtree(tmp_path / "archive" / "a")
    assert store.put_group([(second, "a/b/2")]) == [False]
    store.put(second, "a/b/2", {})
    assert visible(tmp_path / "archive") == {"a/b/2": b"2"}


TELL_EACH = """
for sealed, key in files:
    try:
        store.put(sealed, key, {})
        print("durable")
    except StoreError as error:
        print(type(error).__name__)
print(store.group_max, [event.detail for event in events], store.put_group(files))
"""


@pytest.mark.parametrize("step", ["sync_group", "sync_links"])
@pytest.mark.parametrize("lost", [False, True])
def test_where_the_flush_fails_each_file_is_flushed_and_told_alone(
    tmp_path: Path, step: str, lost: bool
) -> None:
    """[D10]: and no group is trusted any more, since an error is reported to a descriptor once."""
    disk = BrokenDisk(tmp_path)
    files = sealed_files(tmp_path)
    rules = f"syncfs {errno.EIO} /spool 1\n" + (f"fsync {errno.EIO} {files[3][0].path} -1\n" if lost else "")
    fail = f"name == {step!r} and Path({disk.env['DISK_FAULTS']!r}).write_text({rules!r})"
    done = in_a_process(tmp_path, files, step=fail, then=TELL_EACH, env=disk.env)
    each = ["durable"] * FILES
    if lost:
        each[3] = "DamagedFileError"
    assert done.stdout.splitlines() == [
        str([False] * FILES),
        *each,
        f"0 ['Input/output error'] {[False] * FILES}",
    ], done.stderr


def test_an_archive_on_another_file_system_takes_no_groups(tmp_path: Path) -> None:
    """[S2]: found out with the first; its files are copied, as ever."""
    files = sealed_files(tmp_path)
    with other_file_system() as folder:
        store = FileStore(folder / "archive", spool=tmp_path / "spool")
        assert store.put_group(files) == [False] * FILES
        assert store.group_max == 0
        for sealed, key in files:
            store.put(sealed, key, {})
        assert visible(folder / "archive") == {key: sealed.path.read_bytes() for sealed, key in files}


def test_an_archive_that_is_partly_on_another_file_system_takes_no_groups_and_that_is_no_error(
    tmp_path: Path,
) -> None:
    """[S2]: nothing is told durable by a flush of the other one, and nobody is warned of a broken disk."""
    files = sealed_files(tmp_path)
    root = tmp_path / "archive"
    elsewhere = root / Path(files[3][1]).parent
    elsewhere.mkdir(parents=True)
    events: list[Event] = []
    with small_disk(elsewhere, 1 << 20):
        store = FileStore(root, spool=tmp_path / "spool", emit=events.append)
        assert store.put_group(files) == [False] * FILES
        assert store.group_max == 0
        for sealed, key in files:
            store.put(sealed, key, {})
        assert visible(root) == {key: sealed.path.read_bytes() for sealed, key in files}
        store.close()
    assert events == []


def test_files_of_another_file_system_are_not_taken_for_flushed(tmp_path: Path) -> None:
    """What is flushed is the spool's file system, whatever is asked for."""
    with other_file_system() as folder:
        sealed = make_sealed(folder / "spool", b"elsewhere")
        store = FileStore(folder / "archive", spool=tmp_path / "spool")
        assert store.put_group([(sealed, "a/b")]) == [False]
        assert visible(folder / "archive") == {}


def test_a_file_system_that_an_error_has_made_read_only_is_not_taken_for_flushed(tmp_path: Path) -> None:
    """[D10]: a kernel may answer that all is well where it has flushed nothing."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "spool").mkdir()
        sealed = make_sealed(disk / "spool", b"lost")
        remounted: list[int] = []

        def break_it(step: str) -> None:
            if step == "sync_links":
                command = ["mount", "-o", "remount,ro", str(disk)]
                remounted.append(subprocess.run(command, capture_output=True, check=False).returncode)

        events: list[Event] = []
        store = FileStore(disk / "archive", spool=disk / "spool", step=break_it, emit=events.append)
        assert store.put_group([(sealed, "a/b")]) == [False]
        assert remounted == [0]
        assert events == [GroupFlushFailed(detail=os.strerror(errno.EROFS))]
        assert store.group_max == 0
        store.close()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextmanager
def small_ext4(folder: Path, *features: str) -> Iterator[Path]:
    """A fresh ext4 in a sparse file on a small tmpfs, `disk/image`, which can be filled.

    With `noatime`, since a time of reading that is noted would show a failed journal by chance.
    """
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    mounted = folder / "mounted"
    mounted.mkdir()
    with small_disk(folder / "disk", 8 << 20) as disk:
        image = disk / "image"
        image.touch()
        os.truncate(image, 64 << 20)
        later = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
        subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-E", later, *features, str(image)], check=True)
        options = "loop,noatime,errors=remount-ro,noinit_itable" + ("" if features else ",commit=1")
        command = ["mount", "-t", "ext4", "-o", options, str(image), str(mounted)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount an image")
        try:
            yield mounted
        finally:
            subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_links_whose_journal_has_failed_are_not_taken_for_flushed(tmp_path: Path) -> None:
    """[D10]: the kernel finds nothing left to flush there, says so, and is not read-only yet."""
    events: list[Event] = []

    def fail_in_the_background(step: str) -> None:
        if step == "sync_links":
            fill(tmp_path / "disk")
            time.sleep(3)  # the journal is written every second

    with small_ext4(tmp_path) as mounted:
        (mounted / "spool").mkdir()
        files = [make_sealed(mounted / "spool", b"lost %d" % n, f"a/{n}") for n in range(FILES)]
        store = FileStore(
            mounted / "archive", spool=mounted / "spool", step=fail_in_the_background, emit=events.append
        )
        assert store.put_group([(sealed, str(sealed.key)) for sealed in files]) == [False] * FILES
        assert store.group_max == 0
        store.close()
    assert len(events) == 1
    assert isinstance(events[0], GroupFlushFailed)


def test_links_whose_journal_fails_as_they_are_flushed_are_not_told_durable_one_by_one(
    tmp_path: Path,
) -> None:
    """[D10]: they are seen there, and each flush after the first says that all is well."""

    def fail(step: str) -> None:
        if step == "sync_links":
            fill(tmp_path / "disk")

    with small_ext4(tmp_path) as mounted:
        (mounted / "spool").mkdir()
        files = [make_sealed(mounted / "spool", b"lost %d" % n, f"a/{n}") for n in range(FILES)]
        store = FileStore(mounted / "archive", spool=mounted / "spool", step=fail)
        assert store.put_group([(sealed, str(sealed.key)) for sealed in files]) == [False] * FILES
        for sealed in files:
            with pytest.raises(StoreError):
                store.put(sealed, str(sealed.key), {})
        store.close()


@pytest.mark.parametrize("pause_secs", [0, 3])
def test_a_link_whose_journal_fails_before_it_is_flushed_is_not_told_durable(
    tmp_path: Path, pause_secs: int
) -> None:
    """[D10]: in the background or under the flush, and at later attempts neither."""

    def fail(step: str) -> None:
        if step == "sync_dir":
            fill(tmp_path / "disk")
            time.sleep(pause_secs)

    with small_ext4(tmp_path) as mounted:
        (mounted / "spool").mkdir()
        sealed = make_sealed(mounted / "spool", b"lost", "a/b")
        store = FileStore(mounted / "archive", step=fail)
        for _ in range(3):
            with pytest.raises(StoreError):
                store.put(sealed, str(sealed.key), {})


@pytest.mark.parametrize(("features", "times"), [((), 1), (("-O", "^has_journal"), 2)])
def test_without_a_journal_the_disk_s_cache_is_emptied_after_the_last_name_too(
    tmp_path: Path, features: tuple[str, ...], times: int
) -> None:
    """[S2]"""
    called: list[int] = []

    def syncfs(fd: int) -> int:
        called.append(fd)
        return 0

    with small_ext4(tmp_path, *features) as mounted:
        fd = os.open(mounted, os.O_RDONLY)
        flush = FileSystemFlush(fd, syncfs, flush_times(file_system_type(fd), os.fstat(fd).st_dev))
        flush.flush()
        assert called == [fd] * times
        flush.close()


def test_a_flush_after_which_nothing_can_be_made_is_not_believed() -> None:
    """[D10]: whatever it has said."""
    flush = FileSystemFlush(os.open("/proc", os.O_RDONLY), lambda fd: 0)
    with pytest.raises(OSError):
        flush.flush()
    assert not flush.usable
    flush.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_shortage_leaves_one_group_untold_and_says_nothing_about_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flush = FileSystemFlush.of_folder(tmp_path / "spool")
    assert flush is not None
    with monkeypatch.context() as patch:

        def refuse(*args: object, **kwargs: object) -> int:
            raise OSError(number, os.strerror(number))

        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError):
            flush.flush()
    flush.flush()
    flush.close()


def test_where_a_flush_cannot_be_relied_on_there_are_no_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old kernel, a file system of another kind, and a spool that is not there."""
    assert FileSystemFlush.of_folder(Path("/proc")) is None
    assert FileStore(tmp_path / "archive", spool=tmp_path / "nothing").group_max == 0
    assert FileStore(tmp_path / "archive").group_max == 0
    with monkeypatch.context() as patch:
        patch.setattr(syncfs, "KERNEL_MIN", (999, 0))
        assert FileSystemFlush.of_folder(tmp_path) is None
    with monkeypatch.context() as patch:
        patch.setattr(syncfs, "TRUSTED", frozenset())
        assert FileSystemFlush.of_folder(tmp_path) is None
    store = FileStore(tmp_path / "archive")
    assert store.put_group(sealed_files(tmp_path)) == [False] * FILES


def test_the_type_of_a_file_system_is_the_mount_table_s() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert file_system_type(fd) == "proc"
    finally:
        os.close(fd)


def test_a_group_keeps_no_descriptor_and_a_closed_store_puts_none(tmp_path: Path) -> None:
    """[B3]: however many files there are in it."""
    before = len(os.listdir("/proc/self/fd"))
    open_files: list[int] = []
    store = FileStore(
        tmp_path / "archive",
        spool=tmp_path / "spool",
        step=lambda step: open_files.append(len(os.listdir("/proc/self/fd"))),
    )
    files = sealed_files(tmp_path)
    assert store.put_group(files) == [True] * FILES
    assert max(open_files) <= before + 2
    store.close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    more = make_sealed(tmp_path / "spool", b"more")
    same_number = os.open("/proc", os.O_RDONLY)  # would be flushed instead, and say that all is well
    assert store.put_group([(more, "a/more")]) == [False]
    os.close(same_number)
    store.put(more, "a/more", {})
