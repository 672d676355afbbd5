"""Dead letters in a folder: whole, fsynced, rotated, bounded [Q1]."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from archiver.deadletters.file import FileSink
from archiver.deadletters.letters import DeadLetter, GivenUpError
from archiver.errors import DeadLetterError
from archiver.ports import RefusedFile
from tests.unit.refused_files import FOREVER, lines_of, refuse


@pytest.fixture
def refused(tmp_path: Path) -> RefusedFile:
    return refuse(tmp_path / "uploads", [[b"x"]])


def test_a_letter_is_a_json_object_with_all_that_is_known(tmp_path: Path, refused: RefusedFile) -> None:
    letter = DeadLetter(
        value='{"ü":1}\n'.encode(),
        topic="events",
        partition=3,
        offset=10,
        timestamp_ms=1234,
        key=b"\xff",
        headers=(("h", b"v"), ("h", None), ("b", b"\x80")),
    )
    assert FileSink(tmp_path / "dlq", 10_000).write(refused, [letter], FOREVER) == 1
    (line,) = lines_of(tmp_path / "dlq")
    assert json.loads(line) == {
        "reason": "key_invalid",
        "detail": "the store said no",
        "object_key": str(refused.sealed.key),
        "topic": "events",
        "partition": 3,
        "offset": 10,
        "timestamp_ms": 1234,
        "key_base64": base64.b64encode(b"\xff").decode(),
        "headers": [
            {"key": "h", "value": "v"},
            {"key": "h", "value": None},
            {"key": "b", "value_base64": "gA=="},
        ],
        "value": '{"ü":1}\n',
    }


def test_bytes_that_are_not_utf8_survive_as_base64(tmp_path: Path, refused: RefusedFile) -> None:
    values = [b"\xff\xfe", b"", b"\x00", b"\xed\xa0\x80", "\u2028".encode()]
    FileSink(tmp_path / "dlq", 10_000).write(refused, map(DeadLetter, values), FOREVER)
    entries = [json.loads(line) for line in lines_of(tmp_path / "dlq")]
    back = [
        base64.b64decode(one["value_base64"]) if "value_base64" in one else one["value"].encode()
        for one in entries
    ]
    assert back == values
    assert ["value_base64" in one for one in entries] == [True, False, False, True, False]


def test_what_is_not_known_is_left_out(tmp_path: Path, refused: RefusedFile) -> None:
    FileSink(tmp_path / "dlq", 10_000).write(
        refused, [DeadLetter(b"a", span="t/0:1-9", is_line=True)], FOREVER
    )
    (line,) = lines_of(tmp_path / "dlq")
    assert json.loads(line).keys() == {"reason", "detail", "object_key", "span", "is_line", "value"}


def test_files_are_rotated_and_keep_the_order(tmp_path: Path, refused: RefusedFile) -> None:
    letters = [DeadLetter(b"%d" % number) for number in range(100)]
    FileSink(tmp_path / "dlq", 1 << 20, rotate_bytes=1000).write(refused, letters, FOREVER)
    paths = sorted((tmp_path / "dlq").iterdir())
    assert len(paths) > 5
    assert all(path.suffix == ".jsonl" and 0 < path.stat().st_size <= 1000 for path in paths)
    assert [json.loads(line)["value"] for line in lines_of(tmp_path / "dlq")] == [str(n) for n in range(100)]


def test_at_the_bound_nothing_is_written_and_the_error_says_what_to_do(
    tmp_path: Path, refused: RefusedFile
) -> None:
    sink = FileSink(tmp_path / "dlq", 2000, rotate_bytes=300)
    letters = [DeadLetter(b"%d" % number) for number in range(100)]
    sink.write(refused, letters[:3], FOREVER)
    before = list(lines_of(tmp_path / "dlq"))
    with pytest.raises(DeadLetterError, match=r"dlq\.max_bytes=2000"):
        sink.write(refused, letters, FOREVER)
    assert list(lines_of(tmp_path / "dlq")) == before
    assert all(path.suffix == ".jsonl" for path in (tmp_path / "dlq").iterdir())
    assert sink.write(refused, letters[3:6], FOREVER) == 3


def test_an_attempt_that_is_given_up_leaves_nothing(tmp_path: Path, refused: RefusedFile) -> None:
    def broken() -> Iterator[DeadLetter]:
        yield DeadLetter(b"a")
        raise GivenUpError("enough")

    with pytest.raises(GivenUpError):
        FileSink(tmp_path / "dlq", 10_000).write(refused, broken(), FOREVER)
    with pytest.raises(GivenUpError):
        FileSink(tmp_path / "dlq", 10_000).write(refused, [DeadLetter(b"a")], lambda: True)
    assert list((tmp_path / "dlq").iterdir()) == []


def test_what_a_killed_process_left_half_written_goes_with_the_next_write(
    tmp_path: Path, refused: RefusedFile
) -> None:
    folder = tmp_path / "dlq"
    folder.mkdir()
    (folder / "20260101T000000Z-dead-0001.jsonl.tmp").write_bytes(b'{"half')
    (folder / "notes.txt").write_bytes(b"the operator's own")
    FileSink(folder, 10_000).write(refused, [DeadLetter(b"a")], FOREVER)
    assert sorted(path.suffix for path in folder.iterdir()) == [".jsonl", ".txt"]


def test_letters_are_readable_by_their_owner_alone(tmp_path: Path, refused: RefusedFile) -> None:
    FileSink(tmp_path / "dlq", 10_000).write(refused, [DeadLetter(b"a")], FOREVER)
    (path,) = (tmp_path / "dlq").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "dlq").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(
    tmp_path: Path, refused: RefusedFile
) -> None:
    (tmp_path / "dlq").write_bytes(b"a file, not a folder")
    with pytest.raises(DeadLetterError, match=r"dlq\.dir"):
        FileSink(tmp_path / "dlq", 10_000).write(refused, [DeadLetter(b"a")], FOREVER)


def test_letters_are_on_the_disk_before_they_are_confirmed(
    tmp_path: Path, refused: RefusedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is fsynced before it gets its name, and the folder after it: recorded at the system calls."""
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        calls.append(
            "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size > 0}"
        )
        real_fsync(fd)

    def rename(path: Path, target: Path, **more: object) -> None:
        calls.append("name")
        real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    FileSink(tmp_path / "dlq", 10_000).write(refused, [DeadLetter(b"a")], FOREVER)
    assert calls == ["file of True", "name", "folder"]
