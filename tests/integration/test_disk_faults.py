"""A spool whose disk is full, out of inodes, read-only or broken under the running daemon ([B2], [D10])."""

from __future__ import annotations

import errno
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.harness.archive import compare
from tests.harness.broken_disk import BrokenDisk
from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.conftest import MakeDaemon
from tests.unit.small_disk import fill, small_disk

MIB = 1024 * 1024


class Job:
    """One topic, what was produced to it, and the daemon that archives it."""

    def __init__(self, kafka: KafkaServer, topic: str) -> None:
        self.kafka = kafka
        self.topic = topic
        self.produced: dict[str, list[bytes]] = defaultdict(list)
        kafka.create_topic(topic, 2)

    def settings(self, **more: Any) -> dict[str, Any]:
        base = {
            "kafka": {"brokers": self.kafka.bootstrap, "topics": [self.topic], "group_id": self.topic},
            "archive": {"roll_interval_secs": 1.5, "roll_size_bytes": "1MiB"},
            "compression": {"codec": "none"},
            "buffer": {
                "flush_bytes": "64KiB",
                "flush_age_secs": 0.3,
                "min_free_disk_bytes": 0,
                "max_spool_bytes": "64MiB",
            },
        }
        return merged(base, more)

    def produce(self, records: int, *, orgs: int = 3, size: int = 600) -> None:
        """Records that do not compress, each organisation in each partition."""
        batch = []
        for n in range(records):
            org = f"org-{n // 2 % orgs}"
            value = f'{{"_org_id":"{org}","noise":"{secrets.token_hex(size // 2)}"}}'.encode()
            self.produced[f"{self.topic}/{org}"].append(value)
            batch.append((self.topic, n % 2, value))
        self.kafka.produce_all(batch)

    def archived(self, daemon: Daemon, timeout_secs: float = 40) -> None:
        """All of it is committed, and in the archive."""
        wait_until(lambda: not self.kafka.lag(self.topic, self.topic), timeout_secs, "lag 0")
        comparison = compare(self.produced, daemon.archive())
        assert comparison.complete, comparison

    def exactly(self, daemon: Daemon) -> None:
        """And each of it once."""
        comparison = compare(self.produced, daemon.archive())
        assert comparison.exact, comparison


@pytest.fixture
def job(kafka: KafkaServer, topic: str) -> Job:
    return Job(kafka, topic)


@pytest.fixture
def broken_disk(tmp_path: Path) -> BrokenDisk:
    return BrokenDisk(tmp_path)


def paused(daemon: Daemon) -> bool:
    """Whether consumption stands still because the disk is full, and readiness says so."""
    code, reason = daemon.get("/readyz")
    return code == 503 and "the spool's disk is full" in reason and "no_space" in daemon.status()["paused"]


def test_a_disk_that_fills_in_the_middle_of_a_frame_pauses_and_loses_nothing(
    job: Job, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[B2], c25: no crash, no half frame in the archive, and it goes on once there is room."""
    with small_disk(tmp_path / "disk", 8 * MIB) as disk:
        daemon = make_daemon(job.settings(buffer={"spool_dir": str(disk / "spool")})).start()
        job.produce(300)
        job.archived(daemon)
        ballast = fill(disk, leave_bytes=100_000)
        job.produce(3_000)
        wait_until(lambda: paused(daemon), 20, "a pause for the full disk")
        assert daemon.get("/healthz")[0] == 200
        ballast.unlink()
        job.archived(daemon)
        wait_until(lambda: daemon.get("/readyz")[0] == 200, 10, "readiness")
        assert daemon.stop() == 0
    job.exactly(daemon)


def test_more_routes_than_inodes_are_archived_all_the_same(
    job: Job, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[B2]: a file system without free inodes says "no space" when a file is made."""
    with small_disk(tmp_path / "disk", 16 * MIB, "nr_inodes=30") as disk:
        daemon = make_daemon(job.settings(buffer={"spool_dir": str(disk / "spool")})).start()
        job.produce(2_000, orgs=60, size=100)
        job.archived(daemon, 60)
        assert daemon.stop() == 0
    assert "No space left on device" in daemon.output()
    job.exactly(daemon)


def test_a_full_disk_at_any_step_is_waited_for(
    job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[B2]: when a file is made, when a frame is written, when a sealed file moves."""
    daemon = make_daemon(job.settings(), env=broken_disk.env).start()
    for call in ("open", "write", "rename"):
        broken_disk.fail(call, number=errno.ENOSPC)
        job.produce(500)
        wait_until(lambda: paused(daemon), 20, f"a pause for a full disk at {call}")
        broken_disk.mend()
        job.archived(daemon)
    assert daemon.stop() == 0
    job.exactly(daemon)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_error_that_stays_ends_the_process_and_a_restart_reads_again(
    call: str, job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[D10]: status 1 in time, nothing committed beyond what is archived, everything there afterwards."""
    daemon = make_daemon(job.settings(shutdown_timeout_secs=1), env=broken_disk.env).start()
    job.produce(300)
    job.archived(daemon)
    broken_disk.fail(call)
    job.produce(1_000)
    assert daemon.wait(40) == 1
    assert "Input/output error" in daemon.output()
    broken_disk.mend()
    daemon.start()
    job.archived(daemon)
    assert daemon.stop() == 0


def test_a_file_system_that_cannot_be_flushed_as_a_whole_is_flushed_file_by_file(
    job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[D10], [S2]: many small files that close together, and an error that need not be theirs."""
    daemon = make_daemon(job.settings(), env=broken_disk.env).start()
    job.produce(1_000, orgs=300, size=60)
    job.archived(daemon)
    assert "files are flushed one by one" not in daemon.output()
    broken_disk.fail("syncfs", path="/spool", times=1)
    job.produce(1_000, orgs=300, size=60)
    job.archived(daemon)
    assert "files are flushed one by one" in daemon.output()
    assert daemon.stop() == 0
    job.exactly(daemon)


def test_a_disk_error_that_passes_is_survived(
    job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[D10]: a few failed writes are tried again, without a restart and without a duplicate."""
    daemon = make_daemon(job.settings(), env=broken_disk.env).start()
    pid = daemon.pid
    broken_disk.fail("write", times=2)
    job.produce(1_000)
    job.archived(daemon)
    assert daemon.pid == pid
    assert daemon.stop() == 0
    assert "Input/output error" in daemon.output()
    job.exactly(daemon)


def test_a_disk_that_turns_read_only_ends_the_process(
    job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[D10]: as a kernel does that has found errors; the start tells it too, and then all is read again."""
    daemon = make_daemon(job.settings(shutdown_timeout_secs=1), env=broken_disk.env).start()
    job.produce(300)
    job.archived(daemon)
    broken_disk.fail("open", "write", "rename", "unlink", "ftruncate", number=errno.EROFS)
    job.produce(500)
    assert daemon.wait(40) == 1
    daemon.launch()
    assert daemon.wait(20) == 1
    assert "set buffer.spool_dir to a writable one" in daemon.output()
    broken_disk.mend()
    daemon.start()
    job.archived(daemon)
    assert daemon.stop() == 0


def test_a_sealed_file_that_cannot_be_deleted_loses_nothing(
    job: Job, make_daemon: MakeDaemon, broken_disk: BrokenDisk
) -> None:
    """[S2], [D10]: it is in the archive; that the spool cannot be tidied ends nothing."""
    daemon = make_daemon(job.settings(), env=broken_disk.env).start()
    broken_disk.fail("unlink", path="/spool/uploads/")
    job.produce(300)
    job.archived(daemon)
    broken_disk.mend()
    job.produce(300)
    job.archived(daemon)
    assert daemon.stop() == 0
    job.exactly(daemon)
