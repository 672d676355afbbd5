"""A store that is away under full input: some seconds in `make test`, `OUTAGE_SECS=600` on request."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.archive import Bucket, check
from tests.chaos.load import Load
from tests.harness.daemon import Daemon
from tests.harness.fault_proxy import FaultProxy
from tests.harness.kafka import KafkaServer
from tests.harness.process import wait_until
from tests.harness.seaweed import SeaweedFS

MIB = 1024 * 1024
SPOOL_MAX = 16 * MIB
MEMORY_MAX = 32 * MIB
TOPIC = "outage"
OUTAGE_SECS = float(os.environ.get("OUTAGE_SECS", 10))
FILLED_SECS_MAX = 120
"""How long it may take until the bounds are full, on however slow a machine."""


@dataclass
class Peaks:
    """The most that was seen while the store was away."""

    rss: int = 0
    spool: int = 0
    paused: bool = False
    not_ready: str = ""

    def look(self, daemon: Daemon) -> None:
        """Once more; `/healthz` must be green all the time: waiting is no illness."""
        self.rss = max(self.rss, daemon.rss_bytes())
        self.spool = max(self.spool, _spooled(daemon))
        assert daemon.get("/healthz")[0] == 200
        self.paused = self.paused or "spool" in daemon.status()["paused"]
        code, body = daemon.get("/readyz")
        if code != 200:
            self.not_ready = body


def _spooled(daemon: Daemon) -> int:
    sizes = []
    for path in (daemon.root / "spool").rglob("*.jsonl*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # uploaded meanwhile
            continue
    return sum(sizes)


def _settings(kafka: KafkaServer, server: SeaweedFS, endpoint: str, bucket: str) -> dict[str, Any]:
    return {
        "kafka": {"brokers": kafka.bootstrap, "topics": [TOPIC], "group_id": TOPIC},
        "archive": {
            "destination": f"s3://{bucket}/archives",
            "roll_size_bytes": "2MiB",
            "roll_interval_secs": 2,
        },
        "compression": {"codec": "none"},
        "buffer": {"flush_age_secs": 0.5, "max_spool_bytes": SPOOL_MAX, "max_bytes": MEMORY_MAX},
        "s3": {
            "endpoint": endpoint,
            "region": "us-east-1",
            "path_style": True,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
        },
    }


@pytest.mark.timeout(900 + 2 * OUTAGE_SECS)
def test_a_store_that_is_away_pauses_consumption_and_nothing_grows(
    kafka: KafkaServer, tmp_path: Path, log_dir: Path
) -> None:
    """[B4], [B2], [B1], [S6], [O2]; c26: refused connections first, then a store that hangs."""
    kafka.create_topic(TOPIC, 4)
    per_sec = 20_000 if OUTAGE_SECS < 60 else 4_000
    with (
        SeaweedFS(log_dir, tmp_path / "seaweed") as server,
        FaultProxy(server.endpoint) as proxy,
        Load(kafka, TOPIC, partitions=4, orgs=6, per_sec=per_sec) as load,
    ):
        bucket = server.create_bucket(TOPIC)
        settings = _settings(kafka, server, proxy.endpoint, bucket)
        with Daemon(tmp_path / "daemon", log_dir, settings, name="outage") as daemon:
            load.go()
            wait_until(lambda: server.keys(bucket, "archives/outage"), 30, "a first archive file")
            pid, before, logged = daemon.pid, daemon.rss_bytes(), len(daemon.output().splitlines())
            peaks = Peaks()
            proxy.go_away()
            away = time.monotonic()
            while not peaks.paused and time.monotonic() < away + FILLED_SECS_MAX:
                _watch(daemon, peaks, 0.5)
            _watch(daemon, peaks, OUTAGE_SECS / 2)
            server.server.freeze()
            proxy.come_back()
            _watch(daemon, peaks, OUTAGE_SECS / 2)
            lines, away_secs = len(daemon.output().splitlines()) - logged, time.monotonic() - away
            server.server.thaw()
            produced = load.end()
            wait_until(lambda: not kafka.lag(TOPIC, TOPIC), 60, "lag 0")
            assert daemon.pid == pid
            assert daemon.stop() == 0
        verdict = check(load, produced, Bucket(server, bucket, "archives"), [])
    print(f"outage of {OUTAGE_SECS:.0f} s: {peaks}, {lines} log lines, RSS before {before}: {verdict}")
    assert peaks.paused, "consumption did not pause"
    assert "paused" in peaks.not_ready, peaks.not_ready
    assert peaks.spool <= SPOOL_MAX + MEMORY_MAX
    assert peaks.rss <= before + MEMORY_MAX + 64 * MIB
    assert lines <= 80 + away_secs, f"{lines} log lines"
    assert verdict.records == produced
    assert not (verdict.missing or verdict.foreign or verdict.disordered or verdict.duplicates), verdict


def _watch(daemon: Daemon, peaks: Peaks, secs: float) -> None:
    end = time.monotonic() + secs
    while time.monotonic() < end:
        peaks.look(daemon)
        time.sleep(0.5)
