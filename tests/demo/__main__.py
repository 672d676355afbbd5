"""`python -m tests.demo [--keep]`: exit status 0 only if every record was found in the archive."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from tests.demo import report
from tests.demo.records import PARTITIONS, DemoRecord, demo_records
from tests.harness.archive import Archive, compare, read_archive
from tests.harness.daemon import Daemon, wait_until
from tests.harness.embedded import EmbeddedBroker
from tests.harness.process import ServerError

RECORDS = 6_000
WAVES = 8
WAVE_SECS = 0.8
TRICKLE_RECORDS = 20
LAG_TIMEOUT_SECS = 30
TOPICS = ("audit", "clicks", "orders")
GROUP = "demo"


def main() -> int:
    """Everything, in the order in which it is seen."""
    parser = argparse.ArgumentParser(prog="make demo", description="The archiver at work.")
    parser.add_argument("--keep", action="store_true", help="leave it running, with a trickle of records")
    keep = parser.parse_args().keep
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # as Ctrl-C: no daemon stays behind
    folder = Path(tempfile.mkdtemp(prefix="dfe-archiver-demo-"))
    with EmbeddedBroker() as broker:
        for topic in TOPICS:
            broker.create_topic(topic, PARTITIONS)
        daemon = Daemon(folder, folder, settings(broker))
        say(f"An embedded Kafka broker runs at {broker.bootstrap}.")
        say(f"Now starting: dfe-archiver run --config {daemon.config_path}")
        try:
            with daemon:
                complete = demonstrate(broker, daemon)
                if keep:
                    leave_running(broker, daemon)
                status = daemon.stop()
        except (ServerError, TimeoutError) as error:
            say(f"FAILED: {error}")
            return 1
        except KeyboardInterrupt:
            say("", "Interrupted.")
            return 130
    say(f"The archiver stopped with status {status}; its archive, log and configuration stay in {folder}")
    return 0 if complete and status == 0 else 1


def settings(broker: EmbeddedBroker) -> dict[str, object]:
    """Files close after four seconds here, so that there is something to see; the default is minutes."""
    return {
        "kafka": {"brokers": broker.bootstrap, "topics": list(TOPICS), "group_id": GROUP},
        "archive": {"roll_interval_secs": 4},
        "buffer": {"flush_age_secs": 1},
    }


def demonstrate(broker: EmbeddedBroker, daemon: Daemon) -> bool:
    """Produce in waves, wait until everything is committed, show the archive. True if it is complete."""
    records = list(demo_records(RECORDS))
    heading("Records come in; files grow, close and are archived")
    produced = 0
    for wave in waves(records):
        produced += produce(broker, wave)
        time.sleep(WAVE_SECS)
        progress(daemon, produced)
    wait_for_commits(broker, daemon, produced)

    archive = read_archive(archive_root(daemon), decode=report.decode_zstd)
    show(archive, broker, daemon)
    comparison = compare(by_route(records), archive)
    heading("Is every record there?")
    if comparison.complete:
        say(f"Yes: {len(records):,} records were produced; each is in its organisation's files, unchanged.")
    else:
        say(f"NO: {comparison}")
    return comparison.complete


def waves(records: Sequence[DemoRecord]) -> Iterable[Sequence[DemoRecord]]:
    size = len(records) // WAVES
    return (records[start : start + size] for start in range(0, len(records), size))


def produce(broker: EmbeddedBroker, records: Iterable[DemoRecord]) -> int:
    return broker.produce_all((record.topic, record.partition, record.value) for record in records)


def by_route(records: Iterable[DemoRecord]) -> dict[str, list[bytes]]:
    routes: dict[str, list[bytes]] = defaultdict(list)
    for record in records:
        routes[record.route].append(record.value)
    return routes


def progress(daemon: Daemon, produced: int) -> None:
    metrics = daemon.metrics()
    say(
        f"  produced {produced:>6,}   consumed {metrics.total('records_consumed_total'):>6,.0f}"
        f"   archived {metrics.total('records_archived_total'):>6,.0f}"
        f"   open files {metrics.total('open_files'):>3.0f}"
        f"   files archived {metrics.total('uploads_total', outcome='archived'):>3.0f}"
    )


def wait_for_commits(broker: EmbeddedBroker, daemon: Daemon, produced: int) -> None:
    """Until the group's committed offsets are the end offsets, with a line of progress every second."""
    shown = [time.monotonic()]

    def done() -> bool:
        if time.monotonic() - shown[0] > 1:
            shown[0] = time.monotonic()
            progress(daemon, produced)
        return not any(broker.lag(GROUP, topic) for topic in TOPICS)

    wait_until(done, LAG_TIMEOUT_SECS, "commit of every record")
    progress(daemon, produced)


def archive_root(daemon: Daemon) -> Path:
    return daemon.root / "archive"


def show(archive: Archive, broker: EmbeddedBroker, daemon: Daemon) -> None:
    root = archive_root(daemon)
    heading(f"The archive: {root}")
    say(*report.tree(archive))
    file = archive["orders/acme"][0]
    heading(f"The first lines of {file.key}")
    say(*report.first_lines(file))
    heading("Committed offsets against end offsets: what is committed is in the archive")
    say(*report.offsets({topic: broker.offsets(GROUP, topic) for topic in TOPICS}))
    heading("To look further")
    tool = "" if shutil.which("zstd") else "      (needs the zstd program)"
    say(
        f"  zstd -dc {root / file.key} | head{tool}",
        f"  find {root / 'clicks'} -name '*.zst' | sort | xargs zstd -dc | wc -l",
        f"  less {daemon.server.log_path}",
        f"  cat {daemon.config_path}",
    )


def leave_running(broker: EmbeddedBroker, daemon: Daemon) -> None:
    """Until Ctrl-C, with a few records a second."""
    heading("It goes on running, with a few records a second. Ctrl-C stops it.")
    address = f"http://127.0.0.1:{daemon.port}"
    say(f"  {address}/      a page for people, which reloads itself")
    say(f"  {address}/status", f"  {address}/metrics", f"  {address}/readyz", f"  Kafka: {broker.bootstrap}")
    try:
        for seed in count(1):
            produce(broker, demo_records(TRICKLE_RECORDS, seed))
            time.sleep(1)
            if not daemon.server.running:
                raise daemon.server.error("ended by itself")
    except KeyboardInterrupt:
        say("")


def heading(text: str) -> None:
    say("", text, "-" * min(len(text), 110))


def say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
