"""The ledger's invariant: the mark never passes an un-durable record and never moves back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from archiver.domain.batch import TopicPartition
from archiver.domain.ledger import NoOffsetsLedger, OffsetLedger, ReceiptLedger

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


class LedgerMachine(RuleBasedStateMachine):
    """A model that keeps every record, beside the ledger that keeps one integer per file."""

    @initialize()
    def begin(self) -> None:
        self.ledger = OffsetLedger()
        self.assigned: dict[TopicPartition, int] = {}
        self.position: dict[TopicPartition, int | None] = {}
        self.undurable: dict[tuple[int, TopicPartition, int], int] = {}
        self.marks: dict[TopicPartition, int] = {}
        self.generation = 0
        self.next_file = 1
        self.broker: dict[TopicPartition, int] = {}

    @rule(partition=st.sampled_from([P0, P1]))
    def assign(self, partition: TopicPartition) -> None:
        if partition in self.assigned:
            return
        self.generation += 1
        self.assigned[partition] = self.generation
        self.position[partition] = None
        self.marks.pop(partition, None)
        self.ledger.assign({partition: self.broker.get(partition)})

    @precondition(lambda self: self.assigned)
    @rule(data=st.data(), count=st.integers(1, 4), gap=st.integers(0, 3), reuse=st.booleans())
    def take(self, data: st.DataObject, count: int, gap: int, reuse: bool) -> None:
        """Records come and are held by a file, an open one or a new one; then the position moves."""
        partition = data.draw(st.sampled_from(sorted(self.assigned)))
        start = self.position[partition]
        first = (self.broker.get(partition, 0) if start is None else start) + gap
        files = sorted({file for file, _, _ in self.undurable})
        file = data.draw(st.sampled_from(files)) if files and reuse else self.next_file
        self.next_file = max(self.next_file, file + 1)
        self.ledger.hold(file, partition, first)
        for offset in range(first, first + count):
            self.undurable[file, partition, offset] = self.assigned[partition]
        self.position[partition] = first + count
        self.ledger.advance(partition, first + count)

    @precondition(lambda self: self.assigned)
    @rule(data=st.data(), gap=st.integers(1, 3))
    def pass_a_gap(self, data: st.DataObject, gap: int) -> None:
        """A transaction's marker: the source's position moves without a record."""
        partition = data.draw(st.sampled_from(sorted(self.assigned)))
        if (position := self.position[partition]) is not None:
            self.position[partition] = position + gap
            self.ledger.advance(partition, position + gap)

    @precondition(lambda self: self.undurable)
    @rule(data=st.data())
    def durable(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted({file for file, _, _ in self.undurable})))
        self.ledger.release(file)
        self.undurable = {key: gen for key, gen in self.undurable.items() if key[0] != file}

    @precondition(lambda self: self.assigned)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        partition = data.draw(st.sampled_from(sorted(self.assigned)))
        self.ledger.drop(frozenset([partition]))
        del self.assigned[partition]

    @rule()
    def commit(self) -> None:
        marks = self.ledger.committable()
        assert set(marks) <= set(self.assigned)
        for partition, mark in marks.items():
            assert mark > self.broker.get(partition, -1)
            self.broker[partition] = mark
        self.ledger.confirmed(marks)
        assert not self.ledger.committable()

    @invariant()
    def the_mark_is_the_lowest_undurable_offset_or_the_position(self) -> None:
        for partition, generation in getattr(self, "assigned", {}).items():
            held = [
                offset
                for (_, p, offset), gen in self.undurable.items()
                if p == partition and gen == generation
            ]
            expected = min(held) if held else self.position[partition]
            mark = self.ledger.low_water(partition)
            assert mark == expected
            if mark is not None:
                assert mark >= self.marks.get(partition, mark)
                self.marks[partition] = mark


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_nothing_is_committable_before_anything_was_delivered() -> None:
    """[D3]"""
    ledger = OffsetLedger()
    ledger.assign({P0: 5, P1: None})
    assert ledger.committable() == {} and ledger.low_water(P0) is None


def test_a_position_never_goes_back() -> None:
    """[D4]: a client that tells an older position than was handed out moves no mark."""
    ledger = OffsetLedger()
    ledger.assign({P0: 0})
    ledger.advance(P0, 10)
    ledger.advance(P0, 7)
    assert ledger.position(P0) == 10
    assert ledger.committable() == {P0: 10}


def test_a_slow_file_holds_back_only_its_own_partition() -> None:
    """[D1], c01"""
    ledger = OffsetLedger()
    ledger.assign({P0: 0, P1: 0})
    ledger.hold(1, P0, 0)
    ledger.hold(2, P1, 0)
    ledger.advance(P0, 10)
    ledger.advance(P1, 10)
    ledger.release(2)
    assert ledger.committable() == {P1: 10}


def test_a_file_of_an_earlier_assignment_releases_nothing_of_the_new_one() -> None:
    """c07: its late success commits nothing."""
    ledger = OffsetLedger()
    ledger.assign({P0: 0})
    ledger.hold(1, P0, 0)
    ledger.advance(P0, 10)
    ledger.drop(frozenset([P0]))
    ledger.release(1)
    ledger.assign({P0: 0})
    ledger.hold(2, P0, 0)
    ledger.advance(P0, 5)
    ledger.release(1)
    assert ledger.committable() == {}


def test_at_receipt_the_position_is_committable_at_once() -> None:
    """[D8]"""
    ledger = ReceiptLedger()
    ledger.assign({P0: None})
    ledger.hold(1, P0, 0)
    ledger.advance(P0, 7)
    assert ledger.committable() == {P0: 7}


def test_a_source_without_offsets_has_nothing_to_commit() -> None:
    ledger = NoOffsetsLedger()
    ledger.hold(1, TopicPartition("", 0), 0)
    ledger.advance(TopicPartition("", 0), 7)
    assert ledger.committable() == {} and ledger.low_water(TopicPartition("", 0)) is None


def test_a_billion_records_cost_no_more_than_ten() -> None:
    """[D2]: one integer per file and partition."""
    ledger = OffsetLedger()
    ledger.assign({P0: 0})
    for start in range(0, 10**9, 10**6):
        ledger.hold(1, P0, start)
        ledger.advance(P0, start + 10**6)
    assert ledger.low_water(P0) == 0
    assert sum(len(state.holds) for state in ledger._partitions.values()) == 1
