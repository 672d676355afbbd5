"""Where reading starts [D9], decided without a broker."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archiver.domain.batch import TopicPartition
from archiver.domain.offsets import LogRange, Reset, Start, start_offset
from archiver.events import NoCommittedOffset, OffsetsSkipped
from archiver.sources import kafka_starts
from archiver.sources.kafka_offsets import commit_metadata, topic_id_of
from archiver.sources.kafka_starts import Found, Starts, Wanted

LOG = LogRange(100, 200)


@pytest.mark.parametrize("committed", [100, 150, 200])
def test_a_committed_offset_within_the_log_is_where_it_goes_on(committed: int) -> None:
    start = start_offset(committed, LOG)
    assert start == Start(committed, "committed", committed)
    assert not start.skips


def test_c14_a_committed_offset_below_the_log_start_skips_to_it_aloud() -> None:
    start = start_offset(5, LOG)
    assert start == Start(100, "below_log_start", 5)
    assert start.skips
    assert not start.anew


def test_a_committed_offset_beyond_the_end_means_another_log_and_restarts_at_its_beginning() -> None:
    start = start_offset(201, LOG)
    assert start == Start(100, "beyond_end", 201)
    assert start.skips
    assert start.anew


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_without_a_commit_a_later_partition_starts_at_its_beginning_whatever_the_reset(reset: Reset) -> None:
    start = start_offset(None, LOG, reset=reset)
    assert start == Start(100, "no_committed_offset", None)


def test_latest_applies_to_what_existed_when_the_group_first_started() -> None:
    assert start_offset(None, LOG, reset="latest", at_first_start=True).offset == 200
    assert start_offset(None, LOG, reset="earliest", at_first_start=True).offset == 100
    assert start_offset(150, LOG, reset="latest", at_first_start=True).offset == 150


@pytest.mark.parametrize("rewritten", ["topic_recreated", "log_truncated"])
def test_a_rewritten_log_restarts_even_where_the_old_offset_would_fit(
    rewritten: Literal["topic_recreated", "log_truncated"],
) -> None:
    start = start_offset(150, LOG, reset="latest", at_first_start=True, rewritten=rewritten)
    assert start == Start(100, rewritten, 150)
    assert start.anew


def test_a_commit_that_vanished_but_that_we_know_is_gone_on_from_aloud() -> None:
    assert start_offset(None, LOG, vanished=150) == Start(150, "committed_offset_vanished", 150)
    assert start_offset(None, LOG, vanished=50) == Start(100, "committed_offset_vanished", 50)
    assert start_offset(None, LOG, vanished=201) == Start(100, "beyond_end", 201)


@given(
    st.none() | st.integers(0, 50),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(["earliest", "latest"]),
    st.booleans(),
    st.sampled_from([None, "topic_recreated", "log_truncated"]),
    st.none() | st.integers(0, 50),
)
def test_a_start_is_within_the_log_and_passes_nothing_in_silence(
    expected: int | None,
    first: int,
    length: int,
    reset: Reset,
    at_first: bool,
    rewritten: Literal["topic_recreated", "log_truncated"] | None,
    gone: int | None,
) -> None:
    log = LogRange(first, first + length)
    start = start_offset(
        expected,
        log,
        reset=reset,
        at_first_start=at_first,
        rewritten=rewritten,
        vanished=gone,
    )
    assert log.log_start <= start.offset <= log.end
    if expected is not None and start.offset != expected:
        assert start.skips
    if expected is None and gone is None and not (reset == "latest" and at_first):
        assert start.offset == log.log_start


def test_every_start_that_is_not_ordinary_is_said_with_both_offsets() -> None:
    here = TopicPartition("t", 3)

    def said(start: Start, log: LogRange = LOG) -> list[object]:
        return list(Found(start, log, None, None, at_first_start=False).events(here))

    assert said(start_offset(5, LOG)) == [OffsetsSkipped("t", 3, 5, 100, "below_log_start")]
    assert said(start_offset(None, LOG)) == [NoCommittedOffset("t", 3, 100, 100, 200)]
    assert said(start_offset(None, LogRange(7, 7)), LogRange(7, 7)) == []
    assert said(start_offset(150, LOG)) == []


@pytest.mark.parametrize(
    ("read", "now", "start"),
    [("old", "new", 0), ("old", "old", 50), (None, "new", 50), ("old", None, 50)],
)
def test_a_position_of_a_topic_made_anew_is_no_position_in_it_though_it_fits(
    read: str | None, now: str | None, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[D9]: the client told of it while the new topic was shorter, before anybody had compared the ids."""
    here, log = TopicPartition("t", 3), LogRange(0, 80)
    monkeypatch.setattr(kafka_starts, "committed_offsets", lambda *_: {here: (50, read)})
    monkeypatch.setattr(kafka_starts, "topic_ids", lambda *_: {"t": now})
    monkeypatch.setattr(kafka_starts, "log_ranges", lambda *_, **__: {here: log})
    nobody: Any = None
    found = Starts(nobody, nobody, "earliest").find({here: Wanted(50, None, read)}, 1.0)
    assert found[here].start.offset == start
    assert found[here].start.anew == (start == 0)


@pytest.mark.parametrize("foreign", [None, "", "by another program", "[1]", '{"topic_id": 4}', "[" * 100_000])
def test_metadata_of_other_programs_says_nothing_about_the_topic(foreign: str | None) -> None:
    assert topic_id_of(foreign) is None


def test_the_topic_id_comes_back_from_the_commits_metadata() -> None:
    assert topic_id_of(commit_metadata("FyejiKfCQUSeupR5KWdFpw")) == "FyejiKfCQUSeupR5KWdFpw"
    assert commit_metadata(None) is None
