"""The pipeline under faults, schedule by schedule; and that the simulation would notice if it were broken.

`SIM_SEEDS` sets how many fresh schedules run (`SIM_SECS` otherwise, for how long); a seed that fails is
told with the command that repeats it.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from itertools import count, islice

import pytest

from archiver.bounds import Bounds
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.errors import FatalError
from tests.sim.plants import PLANTS, Plant
from tests.sim.process import Outside, Process, draw_policy
from tests.sim.schedule import run_schedule
from tests.sim.world import CROWDS, Violation, World

FIXED_SEEDS = 300
CROWDED_SEEDS = {"heirs": 1_000, "ends": 300, "group": 300, "requests": 300, "stops": 200, "topics": 300}
PLANT_SEEDS_MAX = 2_000
FRESH_SECS = 4.0
FRESH_SECS_WITH_SERVERS = 45.0
RATE_PER_MINUTE_MIN = 2_000


def _run(seed: int, crowd: str | None = None) -> None:
    try:
        run_schedule(seed, crowd=crowd)
    except Violation as violation:
        more = "" if crowd is None else f" ARGS='--crowd {crowd}'"
        pytest.fail(f"seed {seed}: {violation}\n  to repeat it: make sim SEED={seed}{more}", pytrace=False)


def test_no_schedule_of_the_fixed_seeds_breaks_an_invariant() -> None:
    """[D1] to [D11], [G1], [B1], [B2], [K4]: c01 to c13, c26, c34, c35, as far as the loop decides them."""
    for seed in range(FIXED_SEEDS):
        _run(seed)


@pytest.mark.parametrize("crowd", CROWDS)
def test_no_schedule_that_crowds_faults_in_one_place_breaks_an_invariant(crowd: str) -> None:
    """[B2], [D5], [D6], [D9], [R2]: three or more that must meet are rare in a draw from all of them."""
    for seed in range(CROWDED_SEEDS[crowd]):
        _run(seed, crowd)


def test_no_schedule_of_fresh_seeds_breaks_an_invariant(request: pytest.FixtureRequest) -> None:
    """The same for seeds nobody has seen; also that they are quick enough to be many."""
    first = int(os.environ.get("SIM_FIRST_SEED", random.SystemRandom().randrange(10**9)))
    fast = "not servers" in request.config.getoption("markexpr")
    secs = float(os.environ.get("SIM_SECS", FRESH_SECS if fast else FRESH_SECS_WITH_SERVERS))
    wanted = int(os.environ.get("SIM_SEEDS", 0))
    print(f"fresh seeds from {first}")
    started, cpu = time.monotonic(), time.process_time()
    done = 0
    for seed in islice(count(first), wanted or None):
        _run(seed)
        done += 1
        if not wanted and time.monotonic() - started > secs:
            break
    used = time.process_time() - cpu  # not the wall's: others may be using the machine, too
    rate = done / used * 60
    print(f"{done} schedules from {first}: {rate:.0f} a minute of one processor")
    assert rate >= RATE_PER_MINUTE_MIN


def test_a_schedule_repeats_itself_exactly() -> None:
    """A seed that was told must tell the same story again, or it is of no use."""
    for seed in (1, 5, 77):
        stories: list[list[str]] = [[], []]
        for story in stories:
            run_schedule(seed, story)
        assert stories[0] == stories[1]
        assert len(stories[0]) > 10


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2,000 schedules: what the simulation cannot find it does not prove absent."""
    plant(monkeypatch)
    for seed in range(PLANT_SEEDS_MAX):
        try:
            run_schedule(seed)
        except Violation as found:
            print(f"{plant.__name__}: seed {seed}: {found}")
            return
    pytest.fail(f"{PLANT_SEEDS_MAX} schedules pass with {plant.__name__}: {plant.__doc__}")


def test_a_stop_archives_what_a_failed_write_has_moved_on() -> None:
    """[D6], [B2]: the heir of a file whose last frame did not fit is sealed within the same drain."""
    for seed in range(5):
        world = World(seed)
        world.mode, world.disk_bytes = "held", None
        world.calm_down()
        outside = Outside(world)
        assert outside.broker is not None
        never = 10**9
        policy = replace(
            draw_policy(world.rng, small_disk=False),
            roll=RollPolicy(never, never),
            flush=FlushPolicy(never, never, never),
            bounds=Bounds(never, never, 0),
            commit_interval_secs=never,
            shutdown_timeout_secs=20.0,
        )
        process = Process(outside, policy)
        process.archiver.start()
        outside.broker.produce(60)
        for _ in range(80):
            process.archiver.turn()
        assert process.archiver.files
        failures = iter((True,))
        world.chance = lambda fault, failures=failures: (  # type: ignore[method-assign, misc]
            fault == "write_no_space" and next(failures, False)
        )
        process.archiver.stop("request")
        assert process.archiver.finish() == 0
        assert next(failures, None) is None, "no write failed"
        assert outside.broker.committed == {p: end for p, end in outside.broker.ends.items() if end}


def test_a_disk_that_stays_broken_ends_the_process_soon() -> None:
    """[D10]: a few attempts, not for ever; what the restart reads again is not committed."""
    world = World(3)
    world.mode, world.disk_bytes = "held", None
    world.calm_down()
    outside = Outside(world)
    assert outside.broker is not None
    process = Process(outside, draw_policy(world.rng, small_disk=False))
    process.archiver.start()
    outside.broker.produce(60)
    world.chance = lambda fault: fault == "write_error"  # type: ignore[method-assign]
    with pytest.raises(FatalError, match="the spool cannot be written"):
        for _ in range(200):
            process.archiver.turn()
    process.archiver.fail("broken")
    assert process.archiver.finish() == 1
    assert all(stored.nonce == "foreign" for stored in outside.store.objects.values())
