"""One process per spool, and what a crash left in it."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

from archiver.codecs import CODECS
from archiver.domain.sealed import ObjectKey
from archiver.errors import SpoolError, StartError
from archiver.spool import SpoolDirectory
from archiver.spool.file import CHECKSUMS
from archiver.spool.labels import Label, read_label, write_label
from tests.unit.small_disk import fill, small_disk

ROOT = Path(__file__).parents[2]

KEY = ObjectKey("events/acme/2026/10/29/03-0001", "3f9a", "jsonl.zst")
ZSTD = CODECS["zstd"]


@pytest.fixture
def spool(tmp_path: Path) -> SpoolDirectory:
    return SpoolDirectory.acquire(tmp_path / "spool")


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def frames(*chunks: list[bytes], codec: str = "zstd") -> bytes:
    compressor = CODECS[codec].compressor()
    return b"".join(compressor.frame(chunk) for chunk in chunks)


def label(spool: SpoolDirectory, nonce: str, codec: str = "zstd") -> None:
    write_label(spool.open_dir, Label(KEY, nonce, CODECS[codec]))


# --- lock and layout ------------------------------------------------------------------------


def test_the_layout_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        spool = SpoolDirectory.acquire(tmp_path / "deep" / "spool")
    finally:
        os.umask(old)
    folders = [spool.path, spool.open_dir, spool.uploads_dir, spool.dlq_dir, spool.refused_dir]
    assert [path.name for path in folders[1:]] == ["open", "uploads", "dlq", "refused"]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert (spool.path / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    spool = SpoolDirectory.acquire(tmp_path)
    assert spool.open_dir.stat().st_mode & 0o777 == 0o700


HOLD = """
    import sys, time
    from pathlib import Path
    from archiver.spool import SpoolDirectory
    spool = SpoolDirectory.acquire(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """[B5]: the refusal names the spool and who holds it; a killed holder leaves no lock behind."""
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StartError, match=f"{tmp_path}: the spool is in use by process {holder.pid} on "):
            SpoolDirectory.acquire(tmp_path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    SpoolDirectory.acquire(tmp_path).release()


def test_a_released_spool_can_be_had_again(tmp_path: Path) -> None:
    first = SpoolDirectory.acquire(tmp_path)
    with pytest.raises(StartError, match="in use"):
        SpoolDirectory.acquire(tmp_path)
    first.release()
    first.release()
    SpoolDirectory.acquire(tmp_path).release()


def test_a_spool_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    put(tmp_path, "spool", b"")
    with pytest.raises(StartError, match=r"spool: the spool cannot be used: .*must be a directory"):
        SpoolDirectory.acquire(tmp_path / "spool")


def test_a_read_only_file_system_is_a_clear_error(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 1024 * 1024, "ro") as disk,
        pytest.raises(StartError, match=r"Read-only file system.*set buffer.spool_dir to a writable one"),
    ):
        SpoolDirectory.acquire(disk / "spool")


def test_a_spool_of_somebody_else_is_a_clear_error(tmp_path: Path) -> None:
    """As a process without root's rights sees it."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    tmp_path.chmod(0o755)
    script = f"""
        import os
        from pathlib import Path
        from archiver.errors import StartError
        from archiver.spool import SpoolDirectory
        os.chdir("/")
        os.setuid(65534)
        try:
            SpoolDirectory(Path({str(tmp_path)!r})).require_writable()
        except StartError as error:
            print(error)
    """
    (tmp_path / "open").mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert "Permission denied" in done.stdout
    assert "make it writable for uid 65534" in done.stdout


def test_a_full_disk_is_a_clear_error_but_leftovers_go_first(tmp_path: Path) -> None:
    """A crash on a full disk must not make every later start fail."""
    with small_disk(tmp_path / "disk", 1024 * 1024) as disk:
        spool = SpoolDirectory.acquire(disk / "spool")
        spool.require_writable()
        spool.release()
        fill(disk).rename(spool.open_dir / "left.jsonl.zst")
        spool = SpoolDirectory.acquire(disk / "spool")
        with pytest.raises(StartError, match=r"No space left.*free some space"):
            spool.require_writable()
        assert spool.leftovers().removed == 1
        spool.require_writable()
        assert list(spool.open_dir.iterdir()) == []


def test_free_bytes_are_what_is_left_to_write(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * 1024 * 1024) as disk:
        spool = SpoolDirectory.acquire(disk)
        before = spool.free_bytes()
        assert 3 * 1024 * 1024 < before <= 4 * 1024 * 1024
        put(disk, "x", bytes(1024 * 1024))
        assert before - spool.free_bytes() == 1024 * 1024


# --- leftovers [D7] -------------------------------------------------------------------------


def test_files_whose_offsets_were_held_are_removed(spool: SpoolDirectory) -> None:
    put(spool.open_dir, "r-1.jsonl.zst", frames([b"{}"]))
    put(spool.uploads_dir, "r-2.jsonl.zst", frames([b"{}"]))
    kept = [put(spool.dlq_dir, "d", b"1"), put(spool.refused_dir, "r-3.jsonl.zst", b"2")]
    found = spool.leftovers()
    assert (found.sealed, found.removed) == ([], 2)
    assert list(spool.open_dir.iterdir()) == list(spool.uploads_dir.iterdir()) == []
    assert [path.read_bytes() for path in kept] == [b"1", b"2"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_labelled_file_is_cut_to_its_last_whole_frame_and_sealed(spool: SpoolDirectory, codec: str) -> None:
    whole = frames([b"one", b"", b"{}"], [b"four"], codec=codec)
    torn = frames([b"lost" * 100], codec=codec)[:-3]
    put(spool.open_dir, "r-1.jsonl.x", whole + torn)
    label(spool, "r-1", codec)
    found = spool.leftovers(CHECKSUMS)
    (sealed,) = found.sealed
    assert (found.removed, found.cut_bytes) == (0, len(torn))
    assert sealed.path == spool.uploads_dir / "r-1.jsonl.x"
    assert sealed.path.read_bytes() == whole
    assert (sealed.key, sealed.codec, sealed.nonce, sealed.spans) == (KEY, codec, "r-1", {})
    assert (sealed.size, sealed.records, sealed.raw_bytes) == (len(whole), 4, len(b"one\n\n{}\nfour\n"))
    assert sealed.checksums.crc32 == zlib.crc32(whole)
    assert sealed.checksums.md5 == hashlib.md5(whole).digest()
    assert sealed.file_id < 0


def test_sealed_and_open_leftovers_all_come_back_with_ids_of_their_own(spool: SpoolDirectory) -> None:
    for n, folder in enumerate([spool.open_dir, spool.uploads_dir, spool.open_dir, spool.uploads_dir]):
        put(folder, f"r-{n}.jsonl.zst", frames([b"%d" % n]))
        label(spool, f"r-{n}")
    put(spool.open_dir, "r-9.jsonl.zst", frames([b"held"]))
    found = spool.leftovers()
    assert sorted(sealed.nonce for sealed in found.sealed) == ["r-0", "r-1", "r-2", "r-3"]
    assert len({sealed.file_id for sealed in found.sealed}) == 4
    assert found.removed == 1


def test_a_leftover_that_waits_survives_the_next_crash_too(spool: SpoolDirectory) -> None:
    """The same key and nonce again, so that a store which has it knows it [K4]."""
    put(spool.open_dir, "r-1.jsonl.zst", frames([b"{}"]))
    label(spool, "r-1")
    assert spool.leftovers().sealed == spool.leftovers().sealed != []


def test_a_labelled_file_without_a_whole_frame_goes_with_its_label(spool: SpoolDirectory) -> None:
    """[F3]: no empty files."""
    put(spool.open_dir, "r-1.jsonl.zst", frames([b"{}"])[:-1])
    put(spool.open_dir, "r-2.jsonl.zst", b"")
    label(spool, "r-1")
    label(spool, "r-2")
    found = spool.leftovers()
    assert (found.sealed, found.removed) == ([], 2)
    assert list(spool.open_dir.iterdir()) == []


def test_labels_without_files_and_unfinished_writes_go(spool: SpoolDirectory) -> None:
    label(spool, "r-1")
    put(spool.open_dir, "r-2.tmp", b"{")
    put(spool.uploads_dir, "copy.tmp", b"")
    (spool.uploads_dir / "folder").mkdir()
    found = spool.leftovers()
    assert (found.sealed, found.removed) == ([], 0)
    assert list(spool.open_dir.iterdir()) == list(spool.uploads_dir.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"stem": "a", "codec": "brotli"}'])
def test_a_file_whose_label_makes_no_sense_is_set_aside(spool: SpoolDirectory, text: bytes) -> None:
    data = frames([b"{}"])
    put(spool.open_dir, "r-1.jsonl.zst", data)
    put(spool.open_dir, "r-1.key", text)
    found = spool.leftovers()
    assert (found.sealed, found.removed, found.set_aside) == ([], 0, 1)
    assert (spool.refused_dir / "r-1.jsonl.zst").read_bytes() == data
    assert (spool.refused_dir / "r-1.key").read_bytes() == text


def test_a_label_keeps_any_key(spool: SpoolDirectory) -> None:
    """[K5]"""
    wanted = Label(ObjectKey("t/a=2Fb=22\\~é/x-0001", "0123456789ab", "jsonl.lz4"), "r-1", CODECS["lz4"])
    write_label(spool.open_dir, wanted)
    assert read_label(spool.open_dir, "r-1") == wanted
    assert (spool.open_dir / "r-1.key").stat().st_mode & 0o777 == 0o600


def test_an_archived_leftover_is_removed_with_its_label(spool: SpoolDirectory) -> None:
    put(spool.open_dir, "r-1.jsonl.zst", frames([b"{}"]))
    label(spool, "r-1")
    (sealed,) = spool.leftovers().sealed
    spool.remove(sealed)
    spool.remove(sealed)
    assert list(spool.open_dir.iterdir()) == list(spool.uploads_dir.iterdir()) == []


def test_an_error_that_has_no_way_out_of_its_own_still_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    spool = SpoolDirectory.acquire(tmp_path)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StartError, match=r"Input/output error.*buffer.spool_dir"):
        spool.require_writable()


def test_a_spool_that_has_gone_says_so_in_an_error_that_ends_the_process_in_order(tmp_path: Path) -> None:
    """[D10]: somebody removed the directory, or its disk; what can be drained is drained first."""
    spool = SpoolDirectory.acquire(tmp_path / "spool")
    shutil.rmtree(tmp_path / "spool")
    with pytest.raises(SpoolError, match="the spool has gone"):
        spool.free_bytes()
    spool.release()
