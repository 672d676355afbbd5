"""Runs one schedule: faults for a while, then calm until everything is archived, then the checks."""

from __future__ import annotations

from collections.abc import Callable

from archiver.domain.archive_file import FILE_BYTES
from archiver.errors import FatalError
from archiver.pipeline import Policy
from tests.sim.group import SimSource
from tests.sim.process import Outside, Process, draw_policy
from tests.sim.pushes import SimPushSource
from tests.sim.world import Killed, Record, Violation, World

CRASHES = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, OSError)
"""What a mistake in the loop raises: to a daemon that is an end without a drain."""

FAULTY_TURNS = 120
TROUBLE_TURNS_MAX = 40
CALM_TURNS_MAX = 1200
"""Progress: once faults stop, everything is durable and committed within this many turns."""

STOP_SECS_MORE = 3.0
"""The turn that a stop finds under way, and the least that a commit and a wait get."""

TAKE_BYTES_MAX = 4 * 16 * 160
"""What one more take can bring before a bound is looked at."""

TAKE_FILES_MAX = 32
"""How many files that can open, heirs of failed ones included."""


def run_schedule(seed: int, story: list[str] | None = None, crowd: str | None = None) -> World:
    """Run the schedule of a seed; raises Violation. `story` collects what happens, a line each.

    `crowd` names one of `CROWDS` in place of a draw from all faults.
    """
    world = World(seed, story, crowd)
    outside = Outside(world)
    policy = draw_policy(world.rng, small_disk=world.disk_bytes is not None, endless=world.endless)
    try:
        turns, alive = 0, False
        while turns < FAULTY_TURNS:
            process = Process(outside, policy)
            lasted, alive = _live(process, FAULTY_TURNS - turns)
            turns += lasted
        world.calm_down()
        if not alive:
            process = _new_life(outside, policy)
        elif world.rng.random() < 0.5:  # the other half must recover without a restart
            process = _restarted(process)
        _recover(process)
        _check_end(outside)
    except CRASHES as crash:
        raise Violation(f"the loop crashes: {crash!r}; trace: make sim SEED={seed}") from crash
    except Violation as violation:
        crowded = "" if crowd is None else f" ARGS='--crowd {crowd}'"
        violation.add_note(f"seed {seed}; trace: make sim SEED={seed}{crowded}")
        raise
    return world


# --- lives ------------------------------------------------------------------------------------


def _live(process: Process, most: int) -> tuple[int, bool]:
    """One life under faults: the turns it lasted, and whether it goes on.

    It ends by kill, fatal error or a request to stop.
    """
    world, archiver = process.world, process.archiver
    turn = 0
    try:
        archiver.start()
        while turn < most:
            turn += 1
            archiver.turn()
            _check_turn(process)
            if world.chance("stop"):
                process.ask_to_stop()
            if process.stop_asked_at is not None:
                break
            if not archiver.files and _settled(process):
                return most, True  # nothing is left that a fault could strike
        else:
            if world.endless:
                _ask_in_trouble(process)
            if process.stop_asked_at is None:
                return turn, True
        _finish(process, 0)
    except Killed:
        process.die()
    except FatalError as error:
        world.note(f"fatal: {error}")
        _finish_after(process, error)
    _end(process)
    return max(turn, 1), False


def _ask_in_trouble(process: Process) -> None:
    """Ask to close all files while some cannot be closed, if there are any soon; then the faults stop."""
    waiting = process.world.rng.random() < 0.5
    for _ in range(TROUBLE_TURNS_MAX):
        if process.has_waiting_files() if waiting else process.waits_for_disk():
            break
        process.archiver.turn()
        _check_turn(process)
        if process.stop_asked_at is not None:  # in a drain: `Archiver.run` ends after that turn
            return
    process.request_roll()
    for _ in range(process.world.rng.choice((1, 1, 8))):
        process.archiver.turn()
        if process.stop_asked_at is not None:
            return


def _finish_after(process: Process, error: FatalError) -> None:
    """As `Archiver.run` does after a fatal error: what can be drained is drained, exit status 1 [D10]."""
    process.archiver.fail(str(error))
    try:
        _finish(process, 1)
    except Killed:
        process.die()


def _finish(process: Process, status: int) -> None:
    """A graceful end: nothing that was answered or committed at receipt may be lost by it [G1]."""
    world, source = process.world, process.source
    if process.archiver.finish() < status:
        raise Violation("a fatal error ends with status 0")
    _check_stop_time(process)
    if isinstance(source, SimPushSource) and source.dead:
        world.forgiven.update(source.queue)
    process.uploader.die()
    if world.local_faults:
        process.forget()


def _check_stop_time(process: Process) -> None:
    """[D6]: from the request on, also where a drain was under way; a frozen process keeps no time."""
    asked_at, world = process.stop_asked_at, process.world
    if asked_at is None or world.frozen_at >= asked_at:
        return
    secs = world.now - asked_at
    if secs > process.archiver.policy.shutdown_timeout_secs + STOP_SECS_MORE:
        raise Violation(f"a stop takes {secs:.1f} s")


def _new_life(outside: Outside, policy: Policy) -> Process:
    process = Process(outside, policy)
    process.archiver.start()
    return process


def _restarted(process: Process) -> Process:
    """Killed, and started again."""
    process.die()
    _end(process)
    return _new_life(process.outside, process.archiver.policy)


def _end(process: Process) -> None:
    world, broker = process.world, process.outside.broker
    world.read_once = False
    if broker is not None:
        broker.take_away(list(broker.epochs))


# --- calm --------------------------------------------------------------------------------------


def _recover(process: Process) -> None:
    """Everything is archived and committed without another fault, and a stop leaves nothing behind."""
    try:
        process = _turn_dead_letters_on(process)
        _settle(process)
    except FatalError as error:  # of a fault that struck before the calm
        process.world.note(f"fatal: {error}")
        _finish_after(process, error)
        _end(process)
        process = _new_life(process.outside, process.archiver.policy)
        process = _turn_dead_letters_on(process)
        _settle(process)
    _stop_clean(process)


def _turn_dead_letters_on(process: Process) -> Process:
    """With the DLQ off refused files stay and say so [Q1]; then the operator turns it on and restarts."""
    outside = process.outside
    if not outside.dead_letters_off:
        return process
    for _ in range(60):
        process.archiver.turn()
        _check_turn(process)
    for file in process.archiver.files.values():
        if file.state == "refused" and file.file_id not in process.archiver.held_reasons:
            raise Violation(f"file {file.file_id} is refused and nothing says that its records are held")
    outside.dead_letters_off = False
    return _restarted(process)


def _settle(process: Process) -> None:
    outside = process.outside
    if outside.world.endless:
        with outside.nothing_new():
            _turn_until(
                process, _promises_kept, "asked to roll, and not all that was routed before is archived"
            )
    if outside.broker is not None:
        outside.broker.produce(outside.broker.to_come)
    if outside.world.endless:
        _turn_until(process, _all_routed, "no progress after faults have stopped")
        process.request_roll()
    _turn_until(process, _settled, "no progress after faults have stopped")


def _turn_until(process: Process, done: Callable[[Process], bool], what: str) -> None:
    outside = process.outside
    for _ in range(CALM_TURNS_MAX):
        process.archiver.turn()
        _check_turn(process)
        if done(process):
            return
    behind = None
    if outside.broker is not None:
        behind = {p: (outside.broker.committed.get(p), end) for p, end in outside.broker.ends.items()}
    files = [f"{file.file_id} {file.state}" for file in process.archiver.files.values()]
    raise Violation(f"{what}: {behind}, files {files}")


def _promises_kept(process: Process) -> bool:
    """[R2]: a request is not forgotten while the spool takes nothing."""
    store, promised = process.outside.store, process.promised
    promised -= {value for value in promised if store.durable(value)}
    return promised.isdisjoint(process.routed())


def _all_routed(process: Process) -> bool:
    outside, source = process.outside, process.source
    if outside.senders is not None:
        return not outside.senders.to_come and not source.queued_bytes()
    assert outside.broker is not None and isinstance(source, SimSource)
    return all(p in source.owned and not source.left(p) for p in outside.broker.partitions)


def _settled(process: Process) -> bool:
    broker, senders = process.outside.broker, process.outside.senders
    if process.archiver.files or _to_be_deleted(process.world):
        return False
    if senders is not None:
        return not senders.to_come and not process.source.queued_bytes()
    assert broker is not None
    if any(p not in broker.epochs for p in broker.partitions):
        return False
    source = process.source
    assert isinstance(source, SimSource)
    for partition in broker.partitions:
        if broker.committed.get(partition, 0) == broker.ends[partition]:
            continue
        # a partition that has delivered nothing commits nothing [D3]; its end may be a marker
        if partition in source.delivered or broker.behind(partition, broker.next_offset(partition), 1):
            return False
    return True


def _to_be_deleted(world: World) -> list[int]:
    """Files in the spool, but for those that were to be deleted and could not be."""
    return [file_id for file_id, file in world.spool.items() if not file.undeletable]


def _stop_clean(process: Process) -> None:
    """With everything archived a stop ends with status 0 and leaves nothing behind [D6]."""
    archiver, world = process.archiver, process.world
    process.ask_to_stop()
    if archiver.finish() != 0:
        raise Violation("a stop without faults does not end with status 0")
    _check_stop_time(process)
    if _to_be_deleted(world) or archiver.memory or archiver.spool_bytes or archiver.held_reasons:
        raise Violation(f"left behind: {list(world.spool)}, {archiver.memory}, {archiver.spool_bytes}")


# --- invariants ----------------------------------------------------------------------------------


def _check_turn(process: Process) -> None:
    """Accounts that must agree after every turn, and the bounds [B1], [B2]."""
    archiver = process.archiver
    held = writing = spool = 0
    for file in archiver.files.values():
        spool += file.size
        if file.lines:
            held += file.memory
        for chunk in file.chunks:
            held += chunk.memory
            writing += chunk.memory
            spool += chunk.raw_bytes
    if held != archiver.memory:
        raise Violation(f"memory is counted as {archiver.memory} but buffers hold {held}")
    if writing != archiver.writing:
        raise Violation(f"{archiver.writing} bytes are counted as with the writers, which have {writing}")
    if spool != archiver.spool_bytes:
        raise Violation(f"spool is counted as {archiver.spool_bytes} but files hold {spool}")
    bounds = archiver.policy.bounds
    memory_max = bounds.memory_bytes_max + TAKE_BYTES_MAX + FILE_BYTES * TAKE_FILES_MAX
    files = len(archiver.files)
    if held + FILE_BYTES * files > memory_max and _beyond(process, held, memory_max):
        raise Violation(f"memory of {held} and {files} files is beyond the bound")
    spool_max = max(bounds.spool_bytes_max, process.adopted_bytes) + bounds.memory_bytes_max + TAKE_BYTES_MAX
    if spool > spool_max:
        raise Violation(f"spool of {spool} is beyond the bound")


def _beyond(process: Process, held: int, memory_max: int) -> bool:
    """Without those that were there before any bound is looked at."""
    files = sum(1 for file_id in process.archiver.files if file_id > 0)
    return held + FILE_BYTES * files > memory_max


def _check_end(outside: Outside) -> None:
    """[D7], [F1], [K5]: everything is somewhere, nothing is under another tenant, order is kept."""
    world, store = outside.world, outside.store
    there, gone = _records(outside)
    for record in there:
        assert record.value is not None
        if not store.durable(record.value) and record.value not in world.forgiven:
            raise Violation(f"lost: {record}")
        if world.read_once and store.stored[record.value] > 1:
            raise Violation(f"archived twice although it was read once: {record}")
    for value in world.owed:
        if not store.durable(value):
            raise Violation(f"lost with its log: {value!r}")
    by_value = {record.value: record for record in (*gone, *there)}
    for key, stored in store.objects.items():
        last: dict[object, int] = {}
        for value in stored.values:
            record = by_value[value]
            if not key.startswith(record.route + "/"):
                raise Violation(f"foreign: {record} in {key}")
            log = (record.partition, value.rsplit(b":", 2)[-2:-1][0] if b":" in value else b"")
            if record.offset <= last.get(log, -1):
                raise Violation(f"order: {record} behind {last[log]} in {key}")
            last[log] = record.offset


def _records(outside: Outside) -> tuple[list[Record], list[Record]]:
    """Records that must be archived, and those that retention or deletion took; tombstones left out."""
    if outside.senders is not None:
        return outside.senders.answered, []
    broker = outside.broker
    assert broker is not None
    there = [r for p in broker.partitions for r in broker.logs[p] if r.value is not None]
    return there, [r for r in broker.gone if r.value is not None]
