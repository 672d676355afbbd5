"""Runs one schedule: faults for a while, then calm until everything is archived, then the checks."""

from __future__ import annotations

from collections.abc import Callable

from archiver.errors import FatalError
from archiver.pipeline import Policy
from tests.sim.world import Killed, Process, Violation, World, draw_policy

FAULTY_TURNS = 120
CALM_TURNS_MAX = 3000
"""Progress: once faults stop, everything is durable and committed within this many turns."""

Plant = Callable[[Process], None]
"""Plants a bug in a fresh process, for the test of the simulation itself."""


def run_schedule(seed: int, plant: Plant | None = None, story: list[str] | None = None) -> World:
    """Run the schedule of a seed; raises Violation. `story` collects what happens, a line each."""
    world = World(seed, story)
    policy = draw_policy(world.rng)
    try:
        turns, alive = 0, False
        while turns < FAULTY_TURNS:
            process = Process(world, policy)
            lasted, alive = _live(world, process, plant, FAULTY_TURNS - turns)
            turns += lasted
        world.calm = True
        world.broker.produce(world.broker.to_produce)
        if not alive or world.rng.random() < 0.5:  # a life that goes on must recover without a restart
            process = _new_life(world, policy, plant)
        try:
            _settle(world, process)
        except FatalError as error:  # of a fault that struck before the calm
            world.note(f"fatal: {error}")
            process.archiver.finish()
            _settle(world, _new_life(world, policy, plant))
        _check_end(world)
    except Violation as violation:
        violation.add_note(f"seed {seed}; trace: make sim SEED={seed}")
        raise
    return world


def _live(world: World, process: Process, plant: Plant | None, most: int) -> tuple[int, bool]:
    """One life under faults: the turns it lasted, and whether it goes on.

    It ends by kill, fatal error or a request to stop.
    """
    archiver = process.archiver
    turn = 0
    try:
        if plant is not None:
            plant(process)
        archiver.start()
        for _ in range(most):
            turn += 1
            archiver.turn()
            _check_turn(process)
            if world.chance("stop"):
                archiver.stop("request")
                archiver.finish()
                break
        else:
            return max(turn, 1), True
    except Killed:
        _die(world, process)
    except FatalError as error:
        world.note(f"fatal: {error}")
        try:
            archiver.finish()
        except Killed:
            _die(world, process)
    _end_life(world)
    return max(turn, 1), False


def _end_life(world: World) -> None:
    world.restarts += 1
    world.broker.owned.clear()


def _new_life(world: World, policy: Policy, plant: Plant | None) -> Process:
    _end_life(world)
    process = Process(world, policy)
    if plant is not None:
        plant(process)
    process.archiver.start()
    return process


def _die(world: World, process: Process) -> None:
    """Requests that had left the process may still arrive."""
    for _, sealed, outcome in process.uploader.running:
        if world.rng.random() < 0.5:
            world.store.put(sealed, outcome)


def _settle(world: World, process: Process) -> None:
    for _ in range(CALM_TURNS_MAX):
        process.archiver.turn()
        _check_turn(process)
        if world.broker.owned and all(
            world.broker.committed.get(p, 0) == end for p, end in world.broker.ends.items()
        ):
            return
        if world.broker.owned and not process.archiver.files and _only_tombstones_left(world):
            return
    behind = {p: (world.broker.committed.get(p), end) for p, end in world.broker.ends.items()}
    raise Violation(f"no progress after faults have stopped: {behind}")


def _only_tombstones_left(world: World) -> bool:
    """A partition that has delivered nothing commits nothing [D3]; its end may be a marker."""
    return all(
        not [r for r in world.broker.logs[p] if r.offset >= world.broker.committed.get(p, 0)]
        for p in world.broker.partitions
    )


def _check_turn(process: Process) -> None:
    """Accounts that must agree after every turn, and the memory bound."""
    archiver = process.archiver
    held = sum(f.memory + sum(c.memory for c in f.chunks) for f in archiver.files.values())
    if held != archiver.memory:
        raise Violation(f"memory is counted as {archiver.memory} but buffers hold {held}")
    spool = sum(f.size + sum(c.raw_bytes for c in f.chunks) for f in archiver.files.values())
    if spool != archiver.spool_bytes:
        raise Violation(f"spool is counted as {archiver.spool_bytes} but files hold {spool}")
    slack = 4 * 16 * 160  # what one more take can bring before the bound is looked at
    if archiver.memory > archiver.policy.bounds.memory_bytes_max + slack:
        raise Violation(f"memory of {archiver.memory} is beyond the bound")


def _check_end(world: World) -> None:
    """[D7], [F1], [K5]: everything is somewhere, nothing is under another tenant, order is kept."""
    routes = {record.value: record for record in world.broker.deleted if record.value is not None}
    for log in world.broker.logs.values():
        for record in log:
            if record.value is None:
                continue
            routes[record.value] = record
            if not world.store.durable(record.value):
                raise Violation(f"lost: {record}")
    for key, (_, values) in world.store.objects.items():
        last: dict[object, int] = {}
        for value in values:
            record = routes[value]
            if not key.startswith(record.route + "/"):
                raise Violation(f"foreign: {record} in {key}")
            if record.offset <= last.get(record.partition, -1) and record not in world.broker.deleted:
                raise Violation(f"order: {record} behind {last[record.partition]} in {key}")
            last[record.partition] = record.offset
