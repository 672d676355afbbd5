"""Cases from the field: memory, disk and handles are bounded, on a real broker (c23 to c26)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import assert_stored, blocked_route, caught_up, consumed, settings_for, value
from tests.integration.conftest import MakeDaemon
from tests.unit.small_disk import small_disk

MIB = 1 << 20


class PeakMemory:
    """The highest resident memory of a daemon, sampled."""

    def __init__(self, daemon: Daemon) -> None:
        self.bytes = 0
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.bytes = max(self.bytes, self._daemon.rss_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_c23_five_thousand_organisations_finish_in_little_memory_with_few_handles(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[B1], [B3]: 50,000 records over 5,000 organisations, 512 MB of memory, `ulimit -n 256`."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 5000}", value(f"org-{n % 5000}", n)) for n in range(50_000)]
    kafka.produce(topic, [record for _, record in records])
    more = {
        "archive": {"roll_interval_secs": 3600, "path_template": "x"},
        "buffer": {"flush_age_secs": 1},
    }
    daemon = make_daemon(settings_for(kafka, topic, more), prefix=["prlimit", "--nofile=256"]).start()
    with PeakMemory(daemon) as peak:
        consumed(daemon, 50_000, 60)
        wait_until(lambda: daemon.metrics().total("open_files") == 5_000, 20, "an open file for each")
        assert daemon.metrics().total("process_open_fds") <= 256
        daemon.roll()
        caught_up(kafka, topic, 90)
    print(f"c23: peak resident memory {peak.bytes / MIB:.0f} MiB")
    assert peak.bytes < 512 * MIB
    assert daemon.stop() == 0
    assert_stored(topic, records, few_tools(daemon))


def few_tools(daemon: Daemon):  # type: ignore[no-untyped-def]
    """The archive, decoded without a process for each of thousands of files."""
    import zstandard

    from tests.harness.archive import read_archive

    def decode(paths):  # type: ignore[no-untyped-def]
        return {
            path: zstandard.ZstdDecompressor()
            .stream_reader(path.read_bytes(), read_across_frames=True)
            .read()
            for path in paths
        }

    root = Path(str(daemon.settings["archive"]["destination"]).removeprefix("file://"))
    return read_archive(root, template_segments=1, decode=decode)


def test_c24_odd_values_of_two_organisations_in_one_batch_never_change_places(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[F1], [F6]: empty values, pretty-printed ones, two documents in one value: the tenant boundary."""
    kafka.create_topic(topic)
    records: list[tuple[str, bytes | None]] = []
    for n in range(3_000):
        org = "ab"[n % 2]
        other = "ba"[n % 2]
        odd: list[tuple[str, bytes | None]] = [
            (org, value(org, n)),
            (org, msgspec.json.format(value(org, n), indent=2)),
            ("default", b""),
            ("default", value(org, n) + b"\n" + value(other, n)),
            (org, b" " + value(org, n) + b"\r\n"),
            ("default", b"\n"),
            (org, value(org, n)),
            ("default", None),
        ]
        records += odd[n % 8 :] + odd[: n % 8]
    kafka.produce(topic, [record for _, record in records])
    daemon = make_daemon(settings_for(kafka, topic)).start()
    caught_up(kafka, topic)
    assert daemon.metrics().total("tombstones_total") == 3_000
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def says_full(daemon: Daemon) -> bool:
    """Whether readiness says that the disk is full."""
    code, body = daemon.get("/readyz")
    return code == 503 and "full" in body


def test_c25_a_spool_that_fills_up_in_a_frame_pauses_and_resumes(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[B2]: a small tmpfs; no crash, no half frame uploaded; and it resumes once files could leave."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 2}", value(f"org-{n % 2}", n, padding=2_000)) for n in range(16_000)]
    with small_disk(tmp_path / "disk", 8 * MIB) as disk:
        more = {
            "compression": {"codec": "none"},
            "archive": {"roll_interval_secs": 1, "roll_size_bytes": "6MiB"},
            "buffer": {
                "spool_dir": f"{disk}/spool",
                "min_free_disk_bytes": 0,
                "flush_bytes": "700KiB",
                "max_spool_bytes": "1GiB",
            },
        }
        daemon = make_daemon(settings_for(kafka, topic, more))
        with blocked_route(daemon, topic, "org-0") as heal:
            daemon.start()
            kafka.produce(topic, [record for _, record in records])
            wait_until(lambda: daemon.metrics().total("paused", reason="no_space") == 1, 30, "the pause")
            wait_until(lambda: says_full(daemon), 20, "the reason in /readyz")
            wait_until(lambda: daemon.metrics().total("spool_write_failures_total") >= 1, 20, "failed writes")
            time.sleep(1)
            assert daemon.get("/healthz")[0] == 200
            heal()
        caught_up(kafka, topic, 90)
        wait_until(lambda: daemon.get("/readyz")[0] == 200, 10, "ready again")
        assert daemon.stop() == 0, daemon.server.tail()
        assert_stored(topic, records, daemon.archive())


def test_c25_a_spool_below_its_free_bytes_pauses_and_resumes(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[B2]: the same small disk with a minimum of free bytes, which is reached before it is full."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 2}", value(f"org-{n % 2}", n, padding=2_000)) for n in range(16_000)]
    with small_disk(tmp_path / "disk", 16 * MIB) as disk:
        more = {
            "compression": {"codec": "none"},
            "archive": {"roll_interval_secs": 3600, "roll_size_bytes": "64MiB"},
            "buffer": {
                "spool_dir": f"{disk}/spool",
                "min_free_disk_bytes": "6MiB",
                "flush_bytes": "256KiB",
            },
        }
        daemon = make_daemon(settings_for(kafka, topic, more))
        with blocked_route(daemon, topic, "org-0") as heal:
            daemon.start()
            kafka.produce(topic, [record for _, record in records])
            wait_until(lambda: daemon.metrics().total("paused", reason="disk") == 1, 60, "the pause")
            heal()
        wait_until(lambda: daemon.metrics().total("records_archived_total") > 8_000, 60, "files that leave")
        daemon.roll()
        consumed(daemon, 16_000, 60)
        daemon.roll()
        caught_up(kafka, topic, 90)
        assert daemon.metrics().total("pauses_total", reason="disk") >= 1
        assert daemon.metrics().total("files_sealed_total", reason="space") >= 1
        assert daemon.stop() == 0
        assert_stored(topic, records, daemon.archive())


def test_c26_a_blocked_store_pauses_consumption_at_the_bound_and_the_log_stays_small(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[B2], [B4], [O4]: full input for many seconds; memory and spool keep their bounds; it resumes."""
    kafka.create_topic(topic, 4)
    records = [("a", value("a", n, padding=1_500)) for n in range(30_000)]
    more = {
        "compression": {"codec": "none"},
        "archive": {"roll_interval_secs": 1, "roll_size_bytes": "256KiB"},
        "buffer": {"max_bytes": "16MiB", "max_spool_bytes": "8MiB", "flush_bytes": "128KiB"},
    }
    daemon = make_daemon(settings_for(kafka, topic, more))
    with blocked_route(daemon, topic, "a") as heal:
        daemon.start()
        kafka.produce(topic, [record for _, record in records])
        wait_until(lambda: daemon.metrics().total("paused", reason="spool") == 1, 20, "the pause")
        highest = 0.0
        for _ in range(25):
            highest = max(highest, daemon.metrics().total("spool_bytes"))
            time.sleep(0.2)
        consumed = daemon.metrics().total("records_consumed_total")
        assert consumed < 20_000, "it went on taking"
        # what was taken when the bound was reached still goes there
        assert highest < 8 * MIB + 16 * MIB
        spool = daemon.root / "spool"
        on_disk = sum(path.stat().st_size for path in spool.rglob("*") if path.is_file())
        assert on_disk < 8 * MIB + 16 * MIB
        lines = len(daemon.output().splitlines())
        assert lines < 120, f"{lines} log lines"
        heal()
    caught_up(kafka, topic, 120)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_five_thousand_organisations_are_fewer_than_600_series(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[O3]: no label holds a route; `promtool check metrics` on the live endpoint."""
    import subprocess

    kafka.create_topic(topic, 4)
    kafka.produce(topic, [value(f"org-{n}", n) for n in range(5_000)])
    more = {"archive": {"roll_interval_secs": 3600}, "buffer": {"flush_age_secs": 3600}}
    daemon = make_daemon(merged(settings_for(kafka, topic, more), {})).start()
    wait_until(lambda: daemon.metrics().total("open_files") == 5_000, 30, "an open file per organisation")
    text = daemon.get("/metrics")[1]
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stderr.strip(), checked.stderr
    series = len([line for line in text.splitlines() if line and not line.startswith("#")])
    print(f"{series} series with 5,000 organisations")
    assert series < 600
    assert "org-" not in text
