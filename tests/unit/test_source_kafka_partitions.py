"""Partitions whose start the broker does not tell at once, and logs that begin anew [D9]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.offsets import LogRange, start_offset
from archiver.events import Event, NoCommittedOffset, OffsetsSkipped
from archiver.sources.kafka_assignment import Assignment
from archiver.sources.kafka_commits import Commits
from archiver.sources.kafka_partitions import RETRY_SECS, Partitions
from archiver.sources.kafka_starts import Found, Wanted

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
LOG = LogRange(0, 100)


class Group:
    """Consumer, listener, clock and broker in one: keeps what the client would, answers as told."""

    def __init__(self, *, eager: bool = False) -> None:
        self.at: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()
        self.committed: list[dict[TopicPartition, int]] = []
        self.told: list[tuple[str, Any]] = []
        self.events: list[Event] = []
        self.answers: dict[TopicPartition, Found] = {}
        self.forgotten: list[TopicPartition] = []
        self.now = 0.0
        me = cast(Any, self)
        commits = Commits(me, me, me)
        assignment = Assignment(me, lambda _: None, eager=eager)
        self.partitions = Partitions(assignment, me, commits, me, self.events.append, me)

    # the client
    def assign(self, partitions: list[Any]) -> None:
        self.at = {}
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: list[Any]) -> None:
        for p in partitions:
            assert (p.topic, p.partition) not in self.at
            self.at[TopicPartition(p.topic, p.partition)] = p.offset

    def unassign(self) -> None:
        self.at = {}

    def incremental_unassign(self, partitions: list[Any]) -> None:
        for p in partitions:
            del self.at[TopicPartition(p.topic, p.partition)]

    def pause(self, partitions: list[Any]) -> None:
        self.paused |= {TopicPartition(p.topic, p.partition) for p in partitions}

    def resume(self, partitions: list[Any]) -> None:
        self.paused -= {TopicPartition(p.topic, p.partition) for p in partitions}

    def commit(self, *, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous
        self.committed.append({TopicPartition(p.topic, p.partition): p.offset for p in offsets})

    # the broker's answers
    def find(
        self, wanted: Mapping[TopicPartition, Wanted], timeout_secs: float
    ) -> dict[TopicPartition, Found]:
        return {p: self.answers[p] for p in wanted if p in self.answers}

    def place(self, answer: Found) -> None:
        """P0, a second later."""
        self.answers[P0] = answer
        self.now += RETRY_SECS
        assert self.partitions.place_pending()

    def forget(self, partition: TopicPartition) -> None:
        self.forgotten.append(partition)

    # the listener
    def assigned(self, committed: Mapping[TopicPartition, int | None]) -> None:
        self.told.append(("assigned", dict(committed)))

    def restarted(self, partitions: frozenset[TopicPartition]) -> None:
        self.told.append(("restarted", partitions))

    def commit_confirmed(self, marks: Mapping[TopicPartition, int]) -> None:
        self.told.append(("confirmed", dict(marks)))

    def monotonic(self) -> float:
        return self.now


def found(committed: int | None, log: LogRange = LOG, **more: Any) -> Found:
    start = start_offset(committed, log, **more)
    first = bool(more.get("at_first_start"))
    return Found(start, log, None if start.anew else committed, "id", at_first_start=first)


@pytest.mark.parametrize("eager", [False, True])
def test_a_partition_without_an_answer_is_paused_and_unknown_until_there_is_one(eager: bool) -> None:
    group = Group(eager=eager)
    group.answers = {P0: found(7)}
    group.partitions.add([P0, P1], leaving=False)
    assert group.told == [("assigned", {P0: 7})]
    assert (group.partitions.active, group.paused) == ({P0}, {P1})
    group.answers[P1] = found(40)
    assert group.partitions.place_pending()
    assert group.told[1:] == [("assigned", {P1: 40})]
    assert (group.at, group.paused) == ({P0: 7, P1: 40}, set())


def test_the_broker_is_asked_again_once_a_second_at_most() -> None:
    group = Group()
    group.partitions.add([P0], leaving=False)
    assert not group.partitions.place_pending()
    group.answers = {P0: found(7)}
    assert not group.partitions.place_pending()
    group.now += RETRY_SECS
    assert group.partitions.place_pending()


def test_a_pending_partition_that_goes_is_forgotten() -> None:
    group = Group()
    group.partitions.add([P0], leaving=False)
    group.partitions.remove([P0])
    group.answers = {P0: found(7)}
    assert not group.partitions.place_pending()
    assert (group.at, group.told) == ({}, [])


def test_a_pause_holds_for_what_is_assigned_and_placed_later() -> None:
    """c13"""
    group = Group()
    group.answers = {P0: found(7)}
    group.partitions.let_flow(False)
    group.partitions.add([P0, P1], leaving=False)
    group.answers[P1] = found(0)
    group.partitions.place_pending()
    assert group.paused == {P0, P1}
    group.partitions.let_flow(True)
    assert group.paused == set()


def test_an_unreadable_offset_pauses_until_the_partition_is_placed_and_stays_the_same_assignment() -> None:
    group = Group()
    group.answers = {P0: found(7)}
    group.partitions.add([P0], leaving=False)
    group.partitions.unreadable(P0, 7, None)
    group.partitions.unreadable(P1, 7, None)  # not ours: an event that came late
    assert (group.paused, group.partitions.readable) == ({P0}, [])
    group.answers = {P0: found(7, LogRange(50, 100))}
    group.partitions.place_pending()
    assert (group.at, group.paused) == ({P0: 50}, set())
    assert group.events == [OffsetsSkipped("t", 0, 7, 50, "below_log_start")]
    assert group.told == [("assigned", {P0: 7})]


def test_another_topic_id_restarts_the_partition_and_its_commits() -> None:
    group = Group()
    group.answers = {P0: found(70)}
    group.partitions.add([P0], leaving=False)
    group.partitions.hand_out([RecordBatch(P0, [b"v"], [79])])
    group.partitions.compare_ids({"t": "id"}, {"t": 2})
    assert not group.partitions.pending
    group.partitions.compare_ids({"t": "another id"}, {"t": 2})
    assert group.partitions.pending == {P0: Wanted(80, "topic_recreated")}
    group.answers = {P0: found(80, LogRange(0, 100), rewritten="topic_recreated")}
    group.partitions.place_pending()
    assert group.told[1:] == [("restarted", frozenset({P0}))]
    assert group.events == [OffsetsSkipped("t", 0, 80, 0, "topic_recreated")]
    assert (group.at, group.forgotten) == ({P0: 0}, [P0])


def test_a_topic_made_anew_is_noticed_on_every_partition_though_one_has_been_read_anew_already() -> None:
    """[D9]: P0's position was beyond the new log's end; P1's lies within it, among other records."""
    group = Group()
    group.answers = {P0: found(70), P1: found(20)}
    group.partitions.add([P0, P1], leaving=False)
    group.partitions.unreadable(P0, 70, None)
    group.answers = {P0: replace(found(70, LogRange(0, 5)), topic_id="another id")}
    group.partitions.place_pending()
    assert group.told[1:] == [("restarted", frozenset({P0}))]
    group.partitions.compare_ids({"t": "another id"}, {"t": 2})
    assert group.partitions.pending == {P1: Wanted(20, "topic_recreated")}


def test_a_partition_that_a_topic_made_anew_has_no_longer_waits_until_it_is_there() -> None:
    """[D9]: its commits would fail for ever; records that come to it later are read from the first on."""
    group = Group()
    group.answers = {P0: found(70), P1: found(20)}
    group.partitions.add([P0, P1], leaving=False)
    for _ in range(2):
        group.partitions.compare_ids({"t": "another id"}, {"t": 1})
    assert group.partitions.pending == {P0: Wanted(70, "topic_recreated")}
    assert group.told[1:] == [("restarted", frozenset({P1}))]
    assert (group.paused, group.partitions.readable) == ({P0, P1}, [])
    group.answers = {P0: found(70, rewritten="topic_recreated"), P1: found(20, rewritten="topic_recreated")}
    group.partitions.place_pending()
    group.partitions.compare_ids({"t": "another id"}, {"t": 2})
    group.now += RETRY_SECS
    group.partitions.place_pending()
    assert (group.at, group.paused) == ({P0: 0, P1: 0}, set())


def test_the_end_that_latest_chose_is_committed_at_once() -> None:
    group = Group()
    group.answers = {P0: found(None, reset="latest", at_first_start=True), P1: found(None)}
    group.partitions.add([P0, P1], leaving=False)
    group.partitions.commit_first_marks()
    group.partitions.commit_first_marks()
    assert group.committed == [{P0: 100}]
    assert group.events == [NoCommittedOffset("t", 0, 100, 0, 100), NoCommittedOffset("t", 1, 0, 0, 100)]


@pytest.mark.parametrize(
    "place",
    [
        found(300),  # beyond the end
        found(70, rewritten="topic_recreated"),
        found(None, LogRange(0, 400), vanished=300, reset="latest"),
    ],
    ids=["shorter log", "recreated", "vanished"],
)
def test_a_start_that_another_process_would_not_find_is_committed_at_once(place: Found) -> None:
    """[D9]: what the broker still holds fits the new log once that has grown; a restart would be there."""
    group = Group()
    group.answers = {P0: place}
    group.partitions.add([P0], leaving=False)
    group.partitions.commit_first_marks()
    assert group.committed == [{P0: place.start.offset}]


def test_the_beginning_of_a_log_that_was_cut_under_our_eyes_is_committed_at_once() -> None:
    """[D9]: the commit of the old log would fit the new one as soon as that has grown."""
    group = Group()
    group.answers = {P0: found(70)}
    group.partitions.add([P0], leaving=False)
    group.partitions.unreadable(P0, 70, "log_truncated")
    group.answers = {P0: found(70, LogRange(3, 50), rewritten="log_truncated")}
    group.partitions.place_pending()
    group.partitions.commit_first_marks()
    assert group.committed == [{P0: 3}]
    assert group.told == [("assigned", {P0: 70}), ("restarted", frozenset({P0}))]


@pytest.mark.parametrize("eager", [False, True])
def test_records_from_further_up_than_a_move_went_are_not_handed_out_but_moved_for_again(eager: bool) -> None:
    """[D9]: a client went on at its earlier position in a topic made anew; what lay before was never read."""
    group = Group(eager=eager)
    group.answers = {P0: found(50), P1: found(7)}
    group.partitions.add([P0, P1], leaving=False)
    group.partitions.pending[P0] = Wanted(50, "topic_recreated")
    group.answers = {P0: found(50, LogRange(0, 80), rewritten="topic_recreated")}
    assert group.partitions.place_pending()
    assert group.at[P0] == 0
    assert [(p.topic, p.partition) for p in group.partitions.readable] == [P1]

    wrong = RecordBatch(P0, [b""] * 20, range(50, 70)), RecordBatch(P0, [b""] * 10, range(70, 80))
    other = RecordBatch(P1, [b""], [7])
    group.at[P0] = 80  # as the client does when it hands out
    assert group.partitions.hand_out([wrong[0], other, wrong[1]]) == [other]
    assert group.paused == {P0}
    group.answers = {P0: found(0, LogRange(0, 80))}
    group.now += RETRY_SECS
    assert group.partitions.place_pending()
    assert (group.at, group.paused) == ({P0: 0, P1: 8 if eager else 7}, set())
    right = RecordBatch(P0, [b""] * 80, range(80))
    assert group.partitions.hand_out([right]) == [right]
    assert {(p.topic, p.partition) for p in group.partitions.readable} == {P0, P1}


def moved(log: LogRange, rewritten: Literal["topic_recreated"] | None = "topic_recreated") -> Group:
    """One whose partition was read up to 50 and has been moved to the beginning of `log`."""
    group = Group()
    group.answers = {P0: found(40)}
    group.partitions.add([P0], leaving=False)
    group.partitions.hand_out([RecordBatch(P0, [b""] * 10, range(40, 50))])
    group.partitions.pending[P0] = Wanted(50, rewritten)
    group.place(found(50, log, rewritten=rewritten))
    return group


def test_a_gap_behind_a_move_that_is_there_again_is_the_logs_own_and_is_said() -> None:
    """[D9]: aborted transactions and compaction leave gaps, also at the beginning of a log."""
    group = moved(LogRange(0, 80))
    later = RecordBatch(P0, [b""], [5])
    assert group.partitions.hand_out([later]) == []
    group.place(found(0, LogRange(0, 80)))
    assert group.partitions.hand_out([later]) == [later]
    after = RecordBatch(P0, [b""], [9])
    assert group.partitions.hand_out([after]) == [after]
    assert group.events[1:] == [OffsetsSkipped("t", 0, 0, 5, "not_in_log")]


def test_a_gap_behind_a_move_that_retention_has_made_meanwhile_is_told_as_that() -> None:
    """[D9]: the broker is asked again where the log begins before a gap is believed."""
    group = moved(LogRange(0, 80))
    later = RecordBatch(P0, [b""], [5])
    assert group.partitions.hand_out([later]) == []
    group.place(found(0, LogRange(5, 80)))
    assert group.partitions.hand_out([later]) == [later]
    assert group.events[1:] == [OffsetsSkipped("t", 0, 0, 5, "below_log_start")]


def test_a_gap_is_believed_of_the_log_in_which_it_was_seen_and_of_no_later_one() -> None:
    """[D9]: the topic is made anew once more between the two."""
    group = moved(LogRange(0, 80))
    later = RecordBatch(P0, [b""], [50])
    assert group.partitions.hand_out([later]) == []
    group.partitions.compare_ids({"t": "a third id"}, {"t": 1})
    group.place(found(0, LogRange(0, 80), rewritten="topic_recreated"))
    assert group.partitions.hand_out([later]) == []


def test_a_gap_at_a_first_start_that_had_to_wait_is_not_said() -> None:
    """[D3]: it is one as any other; nothing was read before it."""
    group = Group()
    group.partitions.add([P0], leaving=False)
    group.place(found(7))
    later = RecordBatch(P0, [b""], [9])
    assert group.partitions.hand_out([later]) == []
    group.place(found(7))
    assert group.partitions.hand_out([later]) == [later]
    assert group.events == []


def test_an_error_from_before_a_move_does_not_bring_the_old_position_back() -> None:
    """[D9]: it fits the new log once that has grown, and what lies before would never be read."""
    group = moved(LogRange(0, 0))
    group.partitions.unreadable(P0, 50, None)
    assert group.paused == {P0}
    assert group.partitions.pending == {P0: Wanted(0, None, "id")}
    group.place(found(0, LogRange(0, 80)))
    assert (group.at, group.paused) == ({P0: 0}, set())


def test_an_error_from_an_earlier_assignment_does_not_bring_its_position_back() -> None:
    """[D9]: the topic was made anew while the partition was nobody's."""
    group = moved(LogRange(0, 80))
    group.partitions.hand_out([RecordBatch(P0, [b""] * 80, range(80))])
    group.partitions.remove([P0])
    group.answers = {P0: found(80, LogRange(0, 0), rewritten="topic_recreated")}
    group.partitions.add([P0], leaving=False)
    group.partitions.unreadable(P0, 80, None)
    assert group.partitions.pending == {P0: Wanted(0, None, "id")}


def test_what_was_read_of_a_partition_is_committed_although_it_was_placed_again_and_nothing_more_comes() -> (
    None
):
    """[D3]: by its place, since the client's position counts only once a record has shown it."""
    group = moved(LogRange(0, 80))
    group.partitions.hand_out([RecordBatch(P0, [b""] * 80, range(80))])
    group.partitions.unreadable(P0, 50, None)
    assert (group.partitions.readable, group.partitions.placed()) == ([], {})
    group.place(found(80, LogRange(0, 80)))
    assert (group.partitions.readable, group.partitions.placed()) == ([], {P0: 80})
    group.partitions.hand_out([RecordBatch(P0, [b""], [80])])
    assert [(p.topic, p.partition) for p in group.partitions.readable] == [P0]
    assert group.partitions.placed() == {}


def test_records_that_come_in_the_same_take_as_an_error_are_not_read_again() -> None:
    """The error is noticed first, and its offset is not believed: nothing had been handed out before."""
    group = Group()
    group.answers = {P0: found(10)}
    group.partitions.add([P0], leaving=False)
    group.partitions.unreadable(P0, 13, None)
    batch = RecordBatch(P0, [b"{}"] * 3, [10, 11, 12])
    assert group.partitions.hand_out([batch]) == [batch]
    assert group.partitions.pending[P0].position == 13


def test_an_error_behind_records_tells_where_the_client_was_which_passes_gaps() -> None:
    group = moved(LogRange(0, 80))
    group.partitions.hand_out([RecordBatch(P0, [b""] * 10, range(10))])
    group.partitions.unreadable(P0, 15, None)
    assert group.partitions.pending == {P0: Wanted(15, None, "id")}
    group.partitions.unreadable(P0, -1001, "log_truncated")  # the client names no offset there
    assert group.partitions.pending == {P0: Wanted(10, "log_truncated", "id")}


def test_a_topic_known_to_be_another_one_stays_that_when_the_old_position_proves_unreadable() -> None:
    """[D9]: the broker has not answered yet where the new one begins."""
    group = Group()
    group.answers = {P0: found(50)}
    group.partitions.add([P0], leaving=False)
    group.partitions.compare_ids({"t": "another id"}, {"t": 1})
    group.partitions.unreadable(P0, 50, None)
    assert group.partitions.pending == {P0: Wanted(50, "topic_recreated")}
