"""Ten quiet hours on a made-up clock, small; `python -m tests.soak.hours` is the large one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from archiver.domain.ledger import OffsetLedger
from tests.soak.hours import growth, run

DESTINATIONS = 150
HOURS = (1.25, 6.25)


@pytest.fixture(autouse=True)
def only_what_the_run_makes() -> Iterator[None]:
    """Growth is a share of what there is: what other tests have left in the process does not count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_record_a_minute_for_each_destination_grows_nothing_over_hours() -> None:
    """[B1], [D2]: files open, close and are forgotten; resident memory says nothing at this size."""
    samples = run(DESTINATIONS, HOURS)
    assert samples[-1].records > 50_000
    assert not growth(samples, DESTINATIONS, rss=False)


def test_what_is_kept_of_each_file_is_seen_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One list for each file that is durable: what the test before would have to find."""
    release = OffsetLedger.release
    kept = []

    def keeping(self: OffsetLedger, file_id: int) -> None:
        kept.append([self, file_id])
        release(self, file_id)

    monkeypatch.setattr(OffsetLedger, "release", keeping)
    found = growth(run(DESTINATIONS, HOURS), DESTINATIONS, rss=False)
    assert any(line.startswith("objects") for line in found), found
