"""Reading a refused file's records back [Q1]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archiver.codecs import CODECS
from archiver.deadletters.letters import DeadLetter, GivenUpError, Stopping
from archiver.deadletters.reading import REREAD_ATTEMPTS_MAX, Lines, OriginalsThenLines
from archiver.errors import DamagedFileError, DeadLetterError
from archiver.ports import RefusedFile
from tests.unit.refused_files import FOREVER, refuse, spans_of


def read(refused: RefusedFile) -> list[DeadLetter]:
    return list(Lines().open(refused, 1, FOREVER)())


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_all_frames_are_read_and_dense_spans_give_every_offset(tmp_path: Path, codec: str) -> None:
    """[F4]: a reader that stops after the first frame would lose the rest."""
    frames = [[b"a", b""], [b"\xff\x00"], [b"d" * 200_000, b"e"]]
    refused = refuse(tmp_path, frames, spans_of(("events", 3, 10, 14, 5)), codec=codec)
    assert [(one.value, one.topic, one.partition, one.offset) for one in read(refused)] == [
        (b"a", "events", 3, 10),
        (b"", "events", 3, 11),
        (b"\xff\x00", "events", 3, 12),
        (b"d" * 200_000, "events", 3, 13),
        (b"e", "events", 3, 14),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(frames=st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=5), min_size=1, max_size=4))
def test_every_byte_of_a_file_is_in_its_letters(tmp_path: Path, frames: list[list[bytes]]) -> None:
    values = [value for frame in frames for value in frame]
    letters = read(refuse(tmp_path, frames))
    assert b"".join(one.value + b"\n" for one in letters) == b"".join(value + b"\n" for value in values)
    split = any(b"\n" in value for value in values)
    assert all(one.is_line == split for one in letters)


def test_offsets_with_gaps_are_known_as_a_span_alone(tmp_path: Path) -> None:
    """An offset that is guessed would be worse than none."""
    letters = read(refuse(tmp_path, [[b"a", b"b"]], spans_of(("events", 3, 10, 14, 2))))
    assert [(one.topic, one.partition, one.offset, one.span) for one in letters] == [
        ("events", 3, None, "events/3:10-14")
    ] * 2


def test_records_of_several_partitions_are_not_told_apart(tmp_path: Path) -> None:
    spans = spans_of(("events", 4, 0, 0, 1), ("events", 3, 10, 10, 1))
    letters = read(refuse(tmp_path, [[b"a", b"b"]], spans))
    assert {(one.topic, one.partition, one.offset, one.span) for one in letters} == {
        ("events", None, None, "events/3:10-10,events/4:0-0")
    }


def test_a_value_with_newlines_makes_lines_of_a_file_and_they_say_so(tmp_path: Path) -> None:
    letters = read(refuse(tmp_path, [[b"a\nb", b"c"]], spans_of(("events", 3, 10, 11, 2))))
    assert [(one.value, one.offset, one.is_line) for one in letters] == [
        (b"a", None, True),
        (b"b", None, True),
        (b"c", None, True),
    ]


def test_a_very_long_span_is_cut_short(tmp_path: Path) -> None:
    spans = spans_of(*[("events", number, 10, 10, 1) for number in range(1000)])
    (letter,) = read(refuse(tmp_path, [[b"a"]], spans))
    assert letter.span is not None
    assert len(letter.span) == 500
    assert letter.span.endswith("...")


@pytest.mark.parametrize("damage", ["vanished", "cut", "changed"])
@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_a_file_that_is_not_what_was_sealed_is_damaged(tmp_path: Path, damage: str, codec: str) -> None:
    """[D10]: nothing of it may become a dead letter that releases offsets."""
    refused = refuse(tmp_path, [[b"a" * 100], [b"b" * 100]], codec=codec)
    path = refused.sealed.path
    content = path.read_bytes()
    match damage:
        case "vanished":
            path.unlink()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "changed":
            path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(DamagedFileError):
        read(refused)


def test_reading_stops_when_asked(tmp_path: Path) -> None:
    refused = refuse(tmp_path, [[b"a"]])
    with pytest.raises(GivenUpError):
        Lines().open(refused, 1, lambda: True)


class Originals:
    """Kafka as it may be: it has the records, has them no more, or does not answer."""

    def __init__(self, *answers: str | DeadLetterError | None) -> None:
        self._answers = iter(answers)

    def missing(self, refused: RefusedFile, stopping: Stopping) -> str | None:
        answer = next(self._answers)
        if isinstance(answer, DeadLetterError):
            raise answer
        return answer

    def letters(self, refused: RefusedFile, stopping: Stopping) -> Iterator[DeadLetter]:
        yield DeadLetter(b"a", "events", 3, 10, key=b"k")


def test_records_are_read_from_kafka_while_it_has_them(tmp_path: Path) -> None:
    refused = refuse(tmp_path, [[b"a"]], spans_of(("events", 3, 10, 10, 1)))
    (letter,) = OriginalsThenLines(Originals(None)).open(refused, 1, FOREVER)()
    assert letter.key == b"k"


def test_records_that_kafka_has_no_more_are_read_from_the_file(tmp_path: Path) -> None:
    refused = refuse(tmp_path, [[b"a"]], spans_of(("events", 3, 10, 10, 1)))
    (letter,) = OriginalsThenLines(Originals("gone")).open(refused, 1, FOREVER)()
    assert letter == DeadLetter(b"a", "events", 3, 10)


def test_a_broker_that_does_not_answer_is_asked_again_before_keys_are_given_up(tmp_path: Path) -> None:
    refused = refuse(tmp_path, [[b"a"]], spans_of(("events", 3, 10, 10, 1)))
    reader = OriginalsThenLines(Originals(*[DeadLetterError("no answer")] * REREAD_ATTEMPTS_MAX))
    for attempt in range(1, REREAD_ATTEMPTS_MAX):
        with pytest.raises(DeadLetterError):
            reader.open(refused, attempt, FOREVER)
    (letter,) = reader.open(refused, REREAD_ATTEMPTS_MAX, FOREVER)()
    assert letter == DeadLetter(b"a", "events", 3, 10)


def test_a_file_without_offsets_is_never_looked_for_in_kafka(tmp_path: Path) -> None:
    refused = refuse(tmp_path, [[b"a"]], {})
    (letter,) = OriginalsThenLines(Originals()).open(refused, 1, FOREVER)()
    assert letter == DeadLetter(b"a")
