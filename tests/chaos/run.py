"""Kills, freezes, stops and rebalances at random moments under load, and what the archives hold at the end.

Two archives of one topic: `alone` has one process, which is killed and nothing else, so that every
duplicate must be explained by what lay above the committed offset [D7]; `together` has one to three
in a group, which also join, leave and freeze, so that every duplicate must be explained by who had
its partition when (`periods`). Each start takes the next codec.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.archive import Bucket, Folder, Interruption, Place, Verdict, check
from tests.chaos.load import Load
from tests.chaos.periods import Watcher, periods
from tests.harness.daemon import Daemon, merged
from tests.harness.kafka import KafkaServer
from tests.harness.process import wait_until
from tests.harness.seaweed import SeaweedFS

CODECS = ("zstd", "lz4", "snappy", "gzip", "none")
PARTITIONS = 4
SESSION_MS = 3_000
FROZEN_SECS = 1.5 * SESSION_MS / 1000
TOGETHER_MAX = 3

SETTINGS: dict[str, Any] = {
    "kafka": {"commit_interval_secs": 0.5, "drain_timeout_secs": 4, "session_timeout_ms": SESSION_MS},
    "archive": {"roll_interval_secs": 1.5, "roll_size_bytes": "256KiB"},
    "buffer": {"flush_bytes": "32KiB", "flush_age_secs": 0.4, "max_spool_bytes": "64MiB"},
    "shutdown_timeout_secs": 8,
}


@dataclass
class Track:
    """One archive, the group that writes it, and what was done to that."""

    name: str
    place: Place
    settings: Mapping[str, Any]
    group: str
    root: Path
    log_dir: Path
    codecs: Iterator[str] = field(default_factory=lambda: itertools.cycle(CODECS))
    running: list[Daemon] = field(default_factory=list)
    spare: list[Daemon] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=dict)
    """By name, when each process was killed or had ended."""
    done: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def launch(self) -> None:
        """Start one more process, or again one that was killed, under the next codec; does not wait."""
        daemon = self.spare.pop() if self.spare else self._new()
        daemon.settings = merged(daemon.settings, {"compression": {"codec": next(self.codecs)}})
        self.running.append(daemon)
        daemon.launch()

    def _new(self) -> Daemon:
        self.number += 1
        name = f"{self.name}-{self.number}"
        own: dict[str, Any] = {}
        if self.name == "alone":  # comes back under its name without waiting for a session to end
            own = {"kafka": {"group_instance_id": name}}
        settings = merged(merged(SETTINGS, self.settings), own)
        return Daemon(self.root / name, self.log_dir, settings, name=f"chaos-{self.group}-{name}")

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def stop(self, daemon: Daemon) -> None:
        """Ask it to end: it must do so in time and with status 0 [D6], unless it was just starting."""
        ready = _ready(daemon)
        status = daemon.stop(timeout=30)
        self.note_end(daemon)
        if status != 0 and ready:
            raise AssertionError(f"{daemon.server.name} ended with {status}:\n{daemon.output()[-3000:]}")
        self.running.remove(daemon)
        self.spare.append(daemon)

    def note_end(self, daemon: Daemon) -> None:
        self.ends.setdefault(daemon.server.name, []).append(time.time())

    def members(self) -> list[tuple[str, list[float]]]:
        """Each process's whole log, and when its lives ended."""
        processes = [*self.running, *self.spare]
        return [(daemon.output(), self.ends.get(daemon.server.name, [])) for daemon in processes]

    def require_alive(self) -> None:
        """None has ended by itself."""
        for daemon in self.running:
            if not daemon.server.running:
                raise AssertionError(f"{daemon.server.name} has ended:\n{daemon.output()[-3000:]}")


def _ready(daemon: Daemon) -> bool:
    try:
        return daemon.get("/readyz")[0] == 200
    except OSError:
        return False


class Chaos:
    """Does things to tracks at random moments of a seed; which moment that is the machine decides too."""

    def __init__(self, kafka: KafkaServer, load: Load, tracks: list[Track], seed: int) -> None:
        self.kafka = kafka
        self.load = load
        self.tracks = tracks
        self.rng = random.Random(seed)
        self.frozen: list[tuple[float, Daemon]] = []

    @property
    def kills(self) -> int:
        """How many so far."""
        return sum(track.done.get("killed", 0) for track in self.tracks)

    def step(self, pause_secs_max: float) -> None:
        """Wait a while, then do one thing."""
        time.sleep(self.rng.uniform(0.2, pause_secs_max))
        self.thaw()
        track = self.rng.choice(self.tracks)
        for each in self.tracks:
            each.require_alive()
        self._choose(track)(track)

    def _choose(self, track: Track) -> Callable[[Track], None]:
        if track.name == "alone":
            return self.kill
        return self.rng.choices((self.kill, self.freeze, self.leave, self.join), (6, 1, 1, 2))[0]

    def kill(self, track: Track) -> None:
        """SIGKILL, and at once a new start over what it has left."""
        daemon = self.rng.choice(track.running)
        self.frozen = [(until, frozen) for until, frozen in self.frozen if frozen is not daemon]
        daemon.kill()
        track.note_end(daemon)
        track.count("killed")
        if track.name == "alone":
            time.sleep(0.3)  # what the store has taken already
            committed = self.kafka.committed(track.group, self.load.topic)
            track.interruptions.append(Interruption(frozenset(track.place.keys()), committed))
        track.running.remove(daemon)
        track.spare.append(daemon)
        track.launch()

    def freeze(self, track: Track) -> None:
        """SIGSTOP for longer than its session: the others take over, and then it wakes up."""
        if self.frozen:
            return
        daemon = self.rng.choice(track.running)
        daemon.freeze()
        track.count("frozen")
        self.frozen.append((time.monotonic() + FROZEN_SECS, daemon))

    def thaw(self, *, all_of_them: bool = False) -> None:
        for until, daemon in list(self.frozen):
            if all_of_them or time.monotonic() >= until:
                daemon.thaw()
                self.frozen.remove((until, daemon))

    def leave(self, track: Track) -> None:
        daemon = self.rng.choice(track.running)
        if any(frozen is daemon for _, frozen in self.frozen):
            return
        if len(track.running) == 1:
            track.launch()
        track.stop(daemon)
        track.count("left")

    def join(self, track: Track) -> None:
        if len(track.running) < TOGETHER_MAX:
            track.launch()
            track.count("joined")

    def settle(self, timeout_secs: float) -> None:
        """No more of it: everything is archived and committed, and all end well."""
        self.thaw(all_of_them=True)
        for track in self.tracks:
            wait_until(
                lambda track=track: not self.kafka.lag(track.group, self.load.topic),  # type: ignore[misc]
                timeout_secs,
                f"lag 0 of {track.name}",
            )
            track.require_alive()
            for daemon in list(track.running):
                daemon.wait_ready(30)
                track.stop(daemon)


def alone(root: Path, log_dir: Path, topic: str) -> Track:
    """One process and a `file://` archive."""
    archive = root / "archive"
    settings = {"archive": {"destination": f"file://{archive}"}}
    return Track("alone", Folder(archive), settings, f"{topic}-alone", root, log_dir)


def together(root: Path, log_dir: Path, topic: str, server: SeaweedFS) -> Track:
    """One to three processes and an `s3://` archive."""
    bucket = server.create_bucket(topic.lower())
    settings = {
        "archive": {"destination": f"s3://{bucket}/archives"},
        "s3": {
            "endpoint": server.endpoint,
            "region": "us-east-1",
            "path_style": True,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
        },
    }
    place = Bucket(server, bucket, "archives")
    return Track("together", place, settings, f"{topic}-together", root, log_dir)


def run(
    kafka: KafkaServer,
    server: SeaweedFS,
    root: Path,
    log_dir: Path,
    *,
    seed: int,
    kills: int,
    minutes: float | None = None,
    per_sec: int = 3_000,
    pause_secs_max: float = 2.0,
) -> dict[str, Verdict]:
    """The whole of it; the verdict by track. Ends after so many kills, or minutes where those are given."""
    topic = f"chaos-{seed}"
    kafka.create_topic(topic, PARTITIONS)
    tracks = [alone(root, log_dir, topic), together(root, log_dir, topic, server)]
    for track in tracks:
        access = {"brokers": kafka.bootstrap, "topics": [topic], "group_id": track.group}
        track.settings = merged(track.settings, {"kafka": access})
    started = time.monotonic()
    try:
        with (
            Load(kafka, topic, partitions=PARTITIONS, orgs=6, per_sec=per_sec) as load,
            Watcher(kafka.bootstrap, tracks[1].group, topic, load) as watcher,
        ):
            load.go()
            for track in tracks:
                track.launch()
            chaos = Chaos(kafka, load, tracks, seed)
            while time.monotonic() - started < minutes * 60 if minutes else chaos.kills < kills:
                chaos.step(pause_secs_max)
            produced = load.end()
            chaos.settle(180)
    finally:
        for track in tracks:
            for daemon in track.running:
                daemon.kill()
    having = {"together": periods(tracks[1].members(), watcher.looks, produced)}
    verdicts = {
        track.name: check(load, produced, track.place, track.interruptions, having.get(track.name, ()))
        for track in tracks
    }
    print(f"chaos, seed {seed}: {chaos.kills} kills in {time.monotonic() - started:.0f} s")
    for track in tracks:
        print(f"  {track.name}: {track.done}\n    {verdicts[track.name]}")
        left = [path for path in track.root.glob(f"{track.name}-*/spool/*/*") if ".jsonl" in path.name]
        if left and track.name == "alone":
            raise AssertionError(f"the spool still holds {left[:3]}")
    return verdicts


def require_complete(verdicts: Mapping[str, Verdict]) -> None:
    """[D7], c33: nothing is missing, foreign or out of order, and every duplicate is explained."""
    for name, verdict in verdicts.items():
        assert verdict.objects, f"{name}: nothing was archived"
        assert not (verdict.missing or verdict.foreign or verdict.disordered), f"{name}: {verdict}"
        assert not verdict.beyond, f"{name}: {verdict}"
