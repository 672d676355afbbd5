"""What the composition root itself does: when it makes snapshots, and what it leaves switched on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from archiver import app
from archiver.settings.load import load
from archiver.telemetry import Telemetry
from tests.unit.hand_clock import HandClock
from tests.unit.telemetry_samples import a_status


class Joining:
    """A snapshot of a process that is ready once the test says so."""

    not_ready: tuple[str, ...] = ("not joined",)

    def of(self, _archiver: object) -> Any:
        return replace(a_status(), not_ready=self.not_ready)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.close()


def test_a_start_is_seen_to_be_ready_soon_after_it_is(telemetry: Telemetry) -> None:
    """[O2]: whoever waits for `/readyz` does not wait for the next second too."""
    clock, joining, archiver = HandClock(), Joining(), cast(Any, None)
    publish = app._publisher(cast(Any, joining), telemetry, clock)
    assert publish(archiver) == app.JOINING_PUBLISH_SECS
    joining.not_ready = ()
    assert publish(archiver) == app.PUBLISH_SECS
    joining.not_ready = ("stopping",)
    assert publish(archiver) == app.PUBLISH_SECS


def test_a_process_that_does_not_get_ready_is_looked_at_once_a_second(telemetry: Telemetry) -> None:
    clock, archiver = HandClock(), cast(Any, None)
    publish = app._publisher(cast(Any, Joining()), telemetry, clock)
    clock.now += app.JOINING_SECS_MAX
    assert publish(archiver) == app.PUBLISH_SECS


def test_the_loop_looks_for_garbage_though_the_start_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[bool, tuple[int, int, int]]] = []

    def loop() -> int:
        seen.append((gc.isenabled(), gc.get_threshold()))
        return 0

    built = SimpleNamespace(run=loop, stop=lambda reason: None)
    monkeypatch.setattr(app, "_build", lambda *_: built)
    monkeypatch.setattr(app, "_Signals", lambda: SimpleNamespace(stop_with=lambda stop: None))
    chosen = ["archive.destination=file:///archive", "kafka.topics=events"]
    settings = load(None, {}, chosen, tmp_path / ".env").settings
    before = gc.get_threshold()
    gc.disable()
    try:
        assert app.run(settings) == 0
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        gc.enable()
    assert seen == [(True, app.GC_THRESHOLDS)]
