"""`file://` at its seams: a crash between two steps, a taken key, a file system that refuses ([S2], [S3])."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, TransientStoreError
from archiver.events import CaseInsensitiveStore, Event
from archiver.stores.answers import Heals, Refuses
from archiver.stores.file import ERRORS, LEFTOVER_AGE_SECS, PROBE_NAME, STEPS, FileStore
from tests.contract.store_case import make_sealed
from tests.contract.store_cases.local import other_file_system

DATA = os.urandom(200_000)
LINKED = ["verify", "make_dirs", "sync_original", "link", "sync_dir"]
COPIED = [*LINKED[:4], "copy", "sync_copy", "compare", "link_copy", "sync_dir"]


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


class Stop:
    """A step hook that raises before one step, as often as told."""

    def __init__(self, step: str, error: BaseException, times: int = 1) -> None:
        self.step = step
        self.error = error
        self.times = times
        self.taken: list[str] = []

    def __call__(self, step: str) -> None:
        if step == self.step and self.times:
            self.times -= 1
            raise self.error
        self.taken.append(step)


@pytest.fixture(params=["same file system", "another", "another, named copies"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """An archive's folder, and whether copies may go without a name."""
    if request.param == "same file system":
        yield tmp_path / "archive", True
        return
    with other_file_system() as folder:
        yield folder / "archive", "named" not in request.param


def sealed_file(tmp_path: Path, data: bytes = DATA) -> SealedFile:
    return make_sealed(tmp_path / "spool", data, "events/acme/2026/10/29/03-0001")


def visible(root: Path) -> list[str]:
    """What a reader sees: everything but `.tmp` [S2]."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.suffix != ".tmp")


def steps_of(place: tuple[Path, bool]) -> list[str]:
    return COPIED if str(place[0]).startswith("/dev/shm") else LINKED


def test_steps_are_taken_in_the_order_that_makes_a_crash_harmless(
    tmp_path: Path, place: tuple[Path, bool]
) -> None:
    """[S2]: bytes are on disk before the name is, the name before the caller removes the original."""
    taken: list[str] = []
    sealed = sealed_file(tmp_path)
    FileStore(place[0], unnamed_copies=place[1], step=taken.append).put(sealed, str(sealed.key), {})
    assert taken == steps_of(place)
    assert set(LINKED + COPIED) == set(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_the_key_absent_or_whole(
    tmp_path: Path, place: tuple[Path, bool], step: str
) -> None:
    """[S2], [D7]: and a process that comes after finishes the work or finds another key."""
    root, unnamed = place
    sealed = sealed_file(tmp_path)
    stop = Stop(step, Killed())
    store = FileStore(root, unnamed_copies=unnamed, step=stop)
    if step not in steps_of(place):
        pytest.skip("not a step of this road")
    with pytest.raises(Killed):
        store.put(sealed, str(sealed.key), {})
    linked = step == "sync_dir"
    assert visible(root) == ([str(sealed.key)] if linked else [])
    if linked:
        assert (root / str(sealed.key)).read_bytes() == DATA
    assert sealed.path.read_bytes() == DATA

    after = FileStore(root, unnamed_copies=unnamed)
    if linked and steps_of(place) == COPIED:
        # A new process cannot tell this copy from another writer's equal bytes: it takes another key.
        with pytest.raises(KeyTakenError):
            after.put(sealed, str(sealed.key), {})
    else:
        after.put(sealed, str(sealed.key), {})
    assert (root / str(sealed.key)).read_bytes() == DATA


def put_by_a_process(
    sealed: SealedFile, root: Path, step: str = "del step", tracer: Sequence[str] = ()
) -> int:
    """Put in a process of its own, `step` being the body of its step hook; returns its exit status."""
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from archiver.stores.file import FileStore
        from archiver.domain.sealed import SealedFile, ObjectKey, Checksums
        def hook(step):
            {step}
        path, key = Path({str(sealed.path)!r}), ObjectKey("a/b", "3f9a", "jsonl")
        checksums = Checksums({sealed.checksums.crc32})
        sealed = SealedFile(1, path, key, {sealed.size}, checksums, 1, 1, "none", "ab")
        FileStore(Path({str(root)!r}), step=hook).put(sealed, "a/b", {{}})
    """)
    return subprocess.run([*tracer, sys.executable, "-c", script], timeout=60, check=False).returncode


def test_a_killed_process_leaves_no_copy_behind_where_copies_have_no_name(tmp_path: Path) -> None:
    """[S2]: `O_TMPFILE`; killed for real, in the middle of the copy."""
    with other_file_system() as folder:
        kill = 'os.kill(os.getpid(), signal.SIGKILL) if step == "compare" else None'
        assert put_by_a_process(sealed_file(tmp_path), folder, kill) == -signal.SIGKILL
        assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_what_is_named_is_on_disk_first_and_the_name_is_too_at_the_end(
    tmp_path: Path, place: tuple[Path, bool]
) -> None:
    """[S2], [D7]: seen in the system calls: fsync of the bytes, then the link, then fsync of its folder."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    trace = tmp_path / "trace"
    calls = "trace=fsync,fdatasync,link,linkat,mkdir"
    sealed = sealed_file(tmp_path)
    if put_by_a_process(sealed, place[0], tracer=[strace, "-y", "-o", str(trace), "-e", calls]):
        pytest.skip("needs the right to trace a process")
    lines = [
        line for line in trace.read_text().splitlines() if str(place[0]) in line or str(sealed.path) in line
    ]
    link = max(n for n, line in enumerate(lines) if line.startswith("link"))
    bytes_of = str(sealed.path) if place[0].is_relative_to(tmp_path) else f"{place[0]}/a/#"
    assert any(line.startswith("fsync") and bytes_of in line for line in lines[:link])
    assert f"<{place[0]}/a>" in lines[-1]
    assert lines[-1].startswith("fsync")
    made = next(n for n, line in enumerate(lines) if line.startswith("mkdir") and f'{place[0]}/a"' in line)
    assert any(line.startswith("fsync") and f"<{place[0]}>" in line for line in lines[made:link])


def test_a_named_copy_carries_the_writer_id_and_ends_in_tmp(tmp_path: Path) -> None:
    """[S2]: so that readers ignore it and an operator sees whose it is."""
    seen: list[list[str]] = []
    with other_file_system() as folder:
        sealed = sealed_file(tmp_path)

        def look(step: str) -> None:
            if step == "link_copy":
                seen.append([p.name for p in folder.rglob("*.tmp")])

        FileStore(folder, step=look, unnamed_copies=False).put(sealed, str(sealed.key), {})
        assert list(folder.rglob("*.tmp")) == []
    assert len(seen[0]) == 1
    assert re.fullmatch(r"03-0001-3f9a\.jsonl\.zst\.3f9a[0-9a-f]{8}\.tmp", seen[0][0])


@pytest.mark.parametrize(("number", "answer"), ERRORS.items(), ids=lambda v: errno.errorcode.get(v, ""))
def test_every_error_of_a_file_system_has_its_meaning(tmp_path: Path, number: int, answer: object) -> None:
    """[S6]: what can heal is retried, only the object's own fault is permanent."""
    sealed = sealed_file(tmp_path)
    store = FileStore(tmp_path / "archive", step=Stop("link", OSError(number, os.strerror(number))))
    if isinstance(answer, Heals):
        with pytest.raises(TransientStoreError) as failed:
            store.put(sealed, str(sealed.key), {})
        assert (failed.value.kind, failed.value.whole_store) == (answer.kind, answer.whole_store)
        assert answer.way_out in str(failed.value)
    else:
        assert isinstance(answer, Refuses)
        with pytest.raises(RefusedError) as refused:
            store.put(sealed, str(sealed.key), {})
        assert refused.value.reason == answer.reason
    store.put(sealed, str(sealed.key), {})
    assert (tmp_path / "archive" / str(sealed.key)).read_bytes() == DATA


def test_a_full_file_system_heals_once_there_is_room(tmp_path: Path) -> None:
    """[S6]: a real one, with 128 KiB. No half file is ever seen."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        store = FileStore(mount / "archive")
        ballast = mount / "ballast"
        ballast.write_bytes(bytes(90_000))
        sealed = sealed_file(tmp_path, DATA[:60_000])
        with pytest.raises(TransientStoreError) as failed:
            store.put(sealed, str(sealed.key), {})
        assert failed.value.kind == "no_space"
        assert visible(mount) == ["ballast"]
        ballast.unlink()
        store.put(sealed, str(sealed.key), {})
        assert visible(mount) == [f"archive/{sealed.key}"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_file_beyond_the_size_limit_is_refused_for_good(tmp_path: Path) -> None:
    """[S6]: entity too large, as a real limit reports it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with other_file_system() as folder:
        sealed = sealed_file(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(RefusedError) as refused:
                FileStore(folder).put(sealed, str(sealed.key), {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert refused.value.reason == "too_large"


def test_a_copy_that_differs_is_never_linked(tmp_path: Path) -> None:
    """[S2], [S4]: what was read back is compared with the original before the key exists."""
    with other_file_system() as folder:
        sealed = sealed_file(tmp_path)

        def change(step: str) -> None:
            if step == "compare":
                with sealed.path.open("r+b") as handle:
                    handle.seek(150_000)
                    handle.write(b"\0")

        with pytest.raises(TransientStoreError, match="integrity"):
            FileStore(folder, step=change).put(sealed, str(sealed.key), {})
        assert visible(folder) == []
        with pytest.raises(DamagedFileError):  # and the next attempt knows whose fault it is
            FileStore(folder).put(sealed, str(sealed.key), {})


def test_a_copy_whose_directory_could_not_be_synced_is_found_again(tmp_path: Path) -> None:
    """[K4]: this process linked it, so the second attempt is the same upload, though no inode says so."""
    with other_file_system() as folder:
        sealed = sealed_file(tmp_path)
        store = FileStore(folder, step=Stop("sync_dir", OSError(errno.EIO, "told so")))
        with pytest.raises(TransientStoreError):
            store.put(sealed, str(sealed.key), {})
        store.put(sealed, str(sealed.key), {})
        assert visible(folder) == [str(sealed.key)]


def test_equal_bytes_of_another_file_are_not_ours(tmp_path: Path) -> None:
    """[K4]: two files may hold the same records, and both must be archived; asked for any number of times."""
    with other_file_system() as folder:
        theirs, ours = sealed_file(tmp_path), sealed_file(tmp_path)
        FileStore(folder).put(theirs, str(theirs.key), {})
        store = FileStore(folder)
        for _ in range(3):
            with pytest.raises(KeyTakenError):
                store.put(ours, str(ours.key), {})


def test_the_archived_file_is_the_sealed_one_on_the_same_file_system(tmp_path: Path) -> None:
    """[S2]: linked, not copied."""
    sealed = sealed_file(tmp_path)
    FileStore(tmp_path / "archive").put(sealed, str(sealed.key), {})
    assert (tmp_path / "archive" / str(sealed.key)).samefile(sealed.path)


def test_a_removed_folder_is_made_anew(tmp_path: Path) -> None:
    """[S6]: remembering what exists must not turn a clean-up job into an outage."""
    store = FileStore(tmp_path / "archive")
    first, second = sealed_file(tmp_path), sealed_file(tmp_path)
    store.put(first, "a/b/1", {})
    (tmp_path / "archive" / "a/b/1").unlink()
    (tmp_path / "archive" / "a/b").rmdir()
    with pytest.raises(TransientStoreError):
        store.put(second, "a/b/2", {})
    store.put(second, "a/b/2", {})
    assert visible(tmp_path / "archive") == ["a/b/2"]


@pytest.mark.parametrize("key", ["../x", "a/../x", "/etc/x", "a//x", ".", "a/./x", "", "a/\0x"])
def test_no_key_leaves_the_archive(tmp_path: Path, key: str) -> None:
    """[K5]: keys are encoded before they come here; this is the second lock."""
    sealed = sealed_file(tmp_path)
    with pytest.raises(RefusedError):
        FileStore(tmp_path / "archive").put(sealed, key, {})
    assert not (tmp_path / "x").exists()


def test_leftovers_are_removed_once_an_hour_old_and_nothing_else_is(tmp_path: Path) -> None:
    """[S2], [S9]"""
    root = tmp_path / "archive"
    (root / "a").mkdir(parents=True)
    names = {
        "a/1-3f9a.jsonl.zst.3f9a00000001.tmp": LEFTOVER_AGE_SECS + 1,
        "a/2-3f9a.jsonl.zst.3f9a00000002.tmp": LEFTOVER_AGE_SECS - 60,
        "a/3-3f9a.jsonl.zst": 10 * LEFTOVER_AGE_SECS,
        "a/notes.tmp": 10 * LEFTOVER_AGE_SECS,
        PROBE_NAME: 10 * LEFTOVER_AGE_SECS,
    }
    now = 1_800_000_000.0
    for name, age in names.items():
        (root / name).write_bytes(b"x")
        os.utime(root / name, (now - age, now - age))
    store = FileStore(root, wall=lambda: now)
    store.remove_leftovers_in_background().join(60)
    gone = [name for name in names if not (root / name).exists()]
    assert gone == ["a/1-3f9a.jsonl.zst.3f9a00000001.tmp"]


def test_a_file_system_that_ignores_case_is_warned_about(tmp_path: Path) -> None:
    """[K5]: such a file system finds the probe under its name in capitals too."""
    events: list[Event] = []
    store = FileStore(tmp_path / "archive", emit=events.append)
    store.probe()
    assert events == []
    os.link(tmp_path / "archive" / PROBE_NAME, tmp_path / "archive" / PROBE_NAME.upper())
    store.probe()
    assert events == [CaseInsensitiveStore(path=str(tmp_path / "archive"))]


def test_the_page_lists_every_kind_of_error() -> None:
    """So that an operator finds what the metric says."""
    page = (Path(__file__).parents[2] / "docs/stores/file.md").read_text()
    table = page.partition("## When it does not work")[2]
    rows = [row.split("|")[1] for row in table.split("\n") if "|" in row]
    kinds = {answer.kind for answer in ERRORS.values() if isinstance(answer, Heals)}
    assert set(re.findall(r"`([a-z_]+)`", "\n".join(rows))) == kinds | {"integrity"}
