"""The deterministic world around the unchanged pipeline: one seed, one schedule.

Every choice comes from one random generator, so a seed repeats its schedule exactly. The invariants
are checked where they could break: when a commit reaches the broker (`group`), when a file leaves the
spool and when an object is put (`storage`); and after every turn and at the end (`schedule`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from archiver.domain.batch import TopicPartition
from archiver.domain.sealed import ObjectKey
from archiver.events import Event

Mode = Literal["held", "receipt", "pushes"]
"""Which promise is kept: offsets held [D1], committed at receipt [D8], or gRPC pushes [G1]."""


class Violation(AssertionError):
    """An invariant does not hold."""


class Killed(BaseException):
    """The process is gone, in the middle of whatever it did."""


@dataclass(frozen=True, slots=True)
class Record:
    """One produced record; its value names it, so that copies can be found anywhere."""

    partition: TopicPartition
    offset: int
    value: bytes | None
    route: str


FAULTS = {
    "kill": 6,
    "freeze": 8,
    "revoke": 60,
    "lose": 25,
    "evicted_in_drain": 400,
    "commit_refused": 500,
    "commit_answer_lost": 300,
    "commit_late": 500,
    "put_transient": 600,
    "put_lost_answer": 300,
    "put_lies": 150,
    "put_refused": 150,
    "put_hangs": 300,
    "outage": 20,
    "key_taken": 200,
    "same_writer_id": 900,
    "write_no_space": 150,
    "write_error": 60,
    "seal_fails": 200,
    "file_vanishes": 10,
    "delete_fails": 200,
    "clock_jumps": 30,
    "dead_letters_fail": 500,
    "dead_letters_off": 1000,
    "stop": 12,
    "disk_stalls": 60,
    "source_fatal": 20,
    "dies_in_drain": 500,
    "stop_in_drain": 100,
    "ops_roll": 60,
    "recreate": 15,
    "topic_deleted": 10,
    "topic_returns": 200,
    "disk_full": 15,
    "retention": 15,
    "small_disk": 1000,
    "few_inodes": 1000,
}
"""How likely each fault is at most at each chance for it, in thousandths."""

CROWDS = {
    "heirs": {
        "recreate": 60,
        "write_no_space": 400,
        "seal_fails": 200,
        "disk_stalls": 200,
        "revoke": 60,
        "put_hangs": 300,
    },
    "ends": {
        "stop": 40,
        "source_fatal": 40,
        "dies_in_drain": 500,
        "kill": 20,
        "freeze": 10,
        "put_transient": 500,
        "commit_answer_lost": 300,
    },
    "group": {
        "freeze": 20,
        "revoke": 150,
        "lose": 60,
        "evicted_in_drain": 500,
        "commit_late": 700,
        "commit_answer_lost": 400,
        "topic_deleted": 10,
        "recreate": 30,
    },
    "requests": {
        "ops_roll": 150,
        "write_no_space": 400,
        "disk_full": 40,
        "disk_stalls": 200,
        "seal_fails": 200,
        "revoke": 30,
        "put_hangs": 300,
    },
    "stops": {
        "stop_in_drain": 200,
        "revoke": 150,
        "put_hangs": 900,
        "outage": 60,
        "commit_late": 500,
        "disk_stalls": 100,
        "disk_full": 20,
    },
    "topics": {
        "topic_deleted": 40,
        "topic_returns": 300,
        "recreate": 40,
        "revoke": 60,
        "lose": 30,
        "stop_in_drain": 60,
        "ops_roll": 30,
        "put_transient": 500,
        "put_hangs": 300,
    },
}
"""Faults that meet in one place, all of them and often: what takes three at once is rare otherwise."""

CROWDED_SHARE = 0.2
"""In so many schedules the faults are one of those crowds."""

FAULTS_OF_TIME = ("clock_jumps", "outage", "disk_full")

ENDLESS_SHARE = 0.15
"""In so many schedules no file closes by age: what must be archived has to be asked for [R2]."""

KINDS_SHARE = 0.3
"""A few kinds in each schedule, some of them heavy: all of them, but rare, finds less."""


@dataclass(slots=True)
class SpoolFile:
    """A file in the simulated spool: whole frames of values, and the label that outlives a crash."""

    nonce: str
    frames: list[list[bytes]] = field(default_factory=list)
    size: int = 0
    broken: bool = False
    undeletable: bool = False
    """It was to be deleted and could not be: it stays for the next start."""
    key: ObjectKey | None = None

    def values(self) -> list[bytes]:
        return [value for frame in self.frames for value in frame]


def values_in(lines: list[bytes]) -> list[bytes]:
    """The single values in runs of lines; a newline inside a value has a space behind it."""
    return [value for run in lines for value in re.split(rb"\n(?! )", run)]


def frame_size(values: list[bytes]) -> int:
    """Bytes of a frame on the simulated disk: compressed by half, with a header."""
    return sum(map(len, values)) // 2 + 3


class World:
    """The clock, the disk, what is likely, and the accounts of what may be lost."""

    def __init__(self, seed: int, story: list[str] | None = None, crowd: str | None = None) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.story = story
        if crowd is None and self.rng.random() < CROWDED_SHARE:
            crowd = self.rng.choice(list(CROWDS))
        self.now = 1000.0
        self.wall_offset = 1_790_000_000.0
        faults, share = (FAULTS, KINDS_SHARE) if crowd is None else (CROWDS[crowd], 1.0)
        self.likely = {
            name: self.rng.uniform(0.001, most / 1000)
            for name, most in faults.items()
            if self.rng.random() < share
        }
        self.mode: Mode = self.rng.choices(("held", "receipt", "pushes"), (70, 12, 18))[0]
        self._active: dict[tuple[str, ...], list[tuple[str, float]]] = {}
        self.endless = crowd == "requests" or self.rng.random() < ENDLESS_SHARE
        if self.endless:
            self.likely["ops_roll"] = self.rng.uniform(0.001, 0.02)
            if self.rng.random() < 0.3:
                self.likely["few_inodes"] = 1.0
            for name in ("write_no_space", "disk_full", "disk_stalls"):  # where requests are forgotten
                if self.rng.random() < 0.5:
                    self.likely[name] = self.rng.uniform(0.001, 3 * FAULTS[name] / 1000)
        self.calm = False
        self.spool: dict[int, SpoolFile] = {}
        self.disk_bytes: int | None = self.rng.randint(4_000, 8_000) if self.chance("small_disk") else None
        self.inodes = self.rng.randint(4, 12) if self.chance("few_inodes") else 1 << 30
        self.local_faults = (
            self.disk_bytes is not None
            or self.inodes < 1 << 30
            or any(
                name in self.likely
                for name in ("write_no_space", "disk_full", "write_error", "seal_fails", "file_vanishes")
            )
        )
        self.outage_until = 0.0
        self.full_until = 0.0
        """Until then no write finds space, whatever `free_bytes` says: a quota, or no inode left."""
        self.frozen_at = 0.0
        self.dead: set[bytes] = set()
        self.forgiven: set[bytes] = set()
        """Values that a kill may cost where nothing holds offsets: what memory held [G1]."""
        self.owed: set[bytes] = set()
        """Values of a log that is gone: this life has the only copy, and nothing but its end excuses it."""
        self.read_once = True
        """Nothing has happened so far after which a record may be read, and so archived, twice."""
        self.lives = 0
        self.kills = 0

    def note(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:10.3f}  {text}")

    def chance(self, fault: str) -> bool:
        """Whether a fault strikes now. Never after the faults have stopped."""
        likely = self.likely.get(fault)
        return likely is not None and self.rng.random() < likely

    def struck(self, faults: tuple[str, ...]) -> Collection[str]:
        """Which of these strike now; most are not among those of a schedule, and are not looked at."""
        active = self._active.get(faults)
        if active is None:
            active = [(name, self.likely[name]) for name in faults if name in self.likely]
            self._active[faults] = active
        if not active:
            return ()
        draw = self.rng.random
        return [name for name, likely in active if draw() < likely]

    def below(self, limit: int) -> int:
        """A number from 0 to below `limit`: the generator's own way takes three times as long."""
        return int(self.rng.random() * limit)

    def calm_down(self) -> None:
        """The faults stop."""
        self.note("faults stop")
        self.calm = True
        self.likely.clear()
        self._active.clear()
        self.outage_until = self.full_until = 0.0

    def may_die(self) -> None:
        if self.chance("kill"):
            self.die()

    def die(self) -> None:
        """The process is gone."""
        self.note("KILL")
        raise Killed

    def sleep(self, secs: float) -> None:
        self.now += secs
        struck = self.struck(FAULTS_OF_TIME)
        if not struck:
            return
        if "clock_jumps" in struck:
            self.wall_offset += self.rng.choice([-7200.0, -30.0, 30.0, 7200.0])
            self.note("wall clock jumps")
        if "outage" in struck:
            self.outage_until = self.now + self.rng.uniform(1, 200)
            self.note(f"store is down until {self.outage_until:.0f}")
        if "disk_full" in struck:
            self.full_until = self.now + self.rng.uniform(0.1, 30)
            self.note(f"disk is full until {self.full_until:.1f}")

    def used_bytes(self) -> int:
        """Bytes of the disk in use."""
        return sum(file.size for file in self.spool.values())

    def inodes_used(self) -> int:
        """How many files the disk holds, but for those that could not be deleted."""
        return sum(1 for file in self.spool.values() if file.frames and not file.undeletable)

    # the Clock, Disk and Emit ports
    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_offset + self.now

    def free_bytes(self) -> int:
        return 1 << 40 if self.disk_bytes is None else self.disk_bytes - self.used_bytes()

    def emit(self, event: Event) -> None:
        if self.story is not None and event.message:
            self.note(f"event: {event}")
