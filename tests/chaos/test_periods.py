"""The bound of copies in an archive that several members write, on made-up logs."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime

from tests.chaos.periods import LAG_SECS, Look, Period, periods, reads

BEGAN = 1_800_000_000.0


class _Produced:
    """Ten records in each of two partitions; record `n` has offset `n // 2`."""

    partitions = 2
    offsets = array("q", (n // 2 for n in range(20)))


def _told(secs: float, kind: str, partitions: Sequence[int]) -> str:
    timestamp = datetime.fromtimestamp(BEGAN + secs, UTC).isoformat().replace("+00:00", "Z")
    names = [f"topic/{partition}" for partition in partitions]
    return json.dumps({"timestamp": timestamp, "event": "rebalanced", "kind": kind, "partitions": names})


def _looks(*commits: int) -> list[Look]:
    """A look every ten seconds, each with that commit of partition 0 and two more records produced."""
    return [
        Look(BEGAN + 10.0 * i, BEGAN + 10.0 * i + 0.1, {0: commit}, 2 * i) for i, commit in enumerate(commits)
    ]


def test_a_partition_that_changes_hands_is_read_again_from_the_commit_before_it() -> None:
    """[D7], [D5]: what was committed by then cannot be read twice, what came later only by the second."""
    first = "\n".join((_told(5, "assigned", [0, 1]), _told(35, "revoked", [0])))
    second = _told(36, "assigned", [0])
    looks = _looks(0, 0, 1, 2, 3, 3, 4, 5, 6, 7)
    found = periods([(first, ()), (second, ())], looks, 20)
    assert sorted(found, key=lambda p: (p.partition, p.produced)) == [
        Period(0, 0, 8),
        Period(0, 2, 20),
        Period(1, 0, 20),
    ]
    counted = reads(_Produced(), 20, found)
    assert list(counted[::2]) == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert list(counted[1::2]) == [1] * 10


def test_a_kill_ends_all_periods_of_a_member_and_a_torn_line_hides_nothing_else() -> None:
    """[D7]: what the process would have said is not needed."""
    log = "\n".join((_told(5, "assigned", [0]), '{"timestamp": "20', _told(50, "assigned", [0])))
    found = periods([(log, [BEGAN + 22])], _looks(0, 0, 1, 2, 3, 4), 20)
    assert found == [Period(0, 0, 6), Period(0, 3, 20)]


def test_a_frozen_member_has_its_partitions_until_it_learns_that_they_are_lost() -> None:
    """[D5], c10: the next owner's period overlaps, and a copy of each is explained."""
    frozen = "\n".join((_told(5, "assigned", [0]), _told(45, "lost", [0])))
    heir = _told(25, "assigned", [0])
    found = periods([(frozen, ()), (heir, ())], _looks(0, 1, 2, 3, 4, 5, 6), 20)
    assert [list(reads(_Produced(), 20, found)[::2])[i] for i in (0, 1, 2, 4, 5, 9)] == [1, 1, 2, 2, 1, 1]


def test_a_look_that_may_have_been_later_than_what_is_told_is_not_believed() -> None:
    """What the bound is made of may only be wider than the truth."""
    log = _told(10.1 + LAG_SECS / 2, "assigned", [0])
    assert periods([(log, ())], _looks(0, 4, 5), 20) == [Period(0, 0, 20)]
