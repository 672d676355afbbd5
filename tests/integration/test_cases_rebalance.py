"""Cases from the field: rebalances and processes that wake up too late, on a real broker (c10 to c13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.fault_proxy import Delay, puts
from tests.harness.kafka import KafkaServer
from tests.harness.process import port_open
from tests.integration.cases import (
    CommitWatch,
    S3Side,
    archive_files,
    assert_stored,
    blocked_route,
    caught_up,
    commits,
    consumed,
    settings_for,
    value,
)
from tests.integration.conftest import MakeDaemon

PROTOCOLS = ("classic", "consumer")


def members(
    make_daemon: MakeDaemon,
    kafka: KafkaServer,
    topic: str,
    root: Path,
    more: Mapping[str, Any],
    protocol: str = "classic",
    names: str = "ab",
) -> list[Daemon]:
    """Daemons of one group and one destination, each with a spool of its own, not started."""
    shared = {
        "kafka": {"group_protocol": protocol},
        "archive": {"destination": f"file://{root}/shared"},
    }
    settings = settings_for(kafka, topic, merged(shared, more))
    return [make_daemon(settings, name=name) for name in names]


def owned(daemon: Daemon) -> set[int]:
    """Partitions that a daemon says are its own."""
    return {partition["partition"] for partition in daemon.status().get("partitions", ())}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c10_a_process_that_wakes_up_replaces_nothing_and_commits_nothing_backwards(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[K4], [D4], [D5]: A freezes with an open file of 0-20, B takes over and commits 31, A thaws."""
    kafka.create_topic(topic)
    by_hand = {"archive": {"roll_interval_secs": 3600}}
    sleeper, heir = members(make_daemon, kafka, topic, tmp_path, by_hand, protocol)
    records = [("a", value("a", n)) for n in range(31)]
    sleeper.start()
    kafka.produce(topic, [record for _, record in records[:21]])
    consumed(sleeper, 21, 10)
    sleeper.freeze()
    kafka.produce(topic, [record for _, record in records[21:]])
    heir.start()
    with CommitWatch(kafka, topic, 1) as watch:
        consumed(heir, 31, 30)
        heir.roll()
        wait_until(lambda: kafka.committed(topic, topic) == {0: 31}, 10, "B's commit")
        before = {path: path.read_bytes() for path in archive_files(heir)}
        sleeper.thaw()
        wait_until(lambda: sleeper.metrics().total("rebalances_total", kind="lost") == 1, 20, "A's loss")
        sleeper.roll()
        wait_until(lambda: sleeper.get("/readyz")[0] == 200, 20, "A back in the group")
        assert sleeper.stop() == 0
        assert heir.stop() == 0
        watch.assert_never_back()
    assert kafka.committed(topic, topic) == {0: 31}
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was replaced"
    assert_stored(topic, records, heir.archive(), exact=False)


def test_c10_a_process_that_wakes_up_with_a_due_file_replaces_nothing(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[K4], [D4]: as before, but A's file is due by age the moment it wakes, before it learns of its loss."""
    kafka.create_topic(topic)
    soon = {"archive": {"roll_interval_secs": 3, "path_template": "x"}}
    sleeper, heir = members(make_daemon, kafka, topic, tmp_path, soon)
    records = [("a", value("a", n)) for n in range(31)]
    sleeper.start()
    kafka.produce(topic, [record for _, record in records[:21]])
    consumed(sleeper, 21, 10)
    sleeper.freeze()
    kafka.produce(topic, [record for _, record in records[21:]])
    heir.start()
    with CommitWatch(kafka, topic, 1) as watch:
        wait_until(lambda: kafka.committed(topic, topic) == {0: 31}, 40, "B's commit")
        before = {path: path.read_bytes() for path in archive_files(heir)}
        sleeper.thaw()
        wait_until(lambda: sleeper.metrics().total("rebalances_total", kind="lost") == 1, 20, "A's loss")
        assert sleeper.stop() == 0
        assert heir.stop() == 0
        watch.assert_never_back()
    assert kafka.committed(topic, topic) == {0: 31}
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was replaced"
    assert_stored(topic, records, heir.archive(template_segments=1), exact=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c11_files_without_revoked_partitions_stay_open_when_members_come_and_go(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[D5]: eight partitions, one organisation each, open files; a member joins and leaves."""
    kafka.create_topic(topic, 8)
    by_hand = {"archive": {"roll_interval_secs": 3600}}
    stays, comes = members(make_daemon, kafka, topic, tmp_path, by_hand, protocol)
    records = [(f"org-{n % 8}", value(f"org-{n % 8}", n)) for n in range(80)]
    stays.start()
    kafka.produce(topic, [record for _, record in records])
    consumed(stays, 80, 15)
    with CommitWatch(kafka, topic, 8) as watch:
        comes.start()
        wait_until(lambda: len(owned(comes)) == 4 and len(owned(stays)) == 4, 30, "four partitions each")
        wait_until(lambda: stays.metrics().total("open_files") == 4, 10, "four files that stay open")
        assert stays.metrics().total("files_sealed_total", reason="revoked") == 4
        assert {path.parts[-5] for path in archive_files(stays)} == {f"org-{p}" for p in owned(comes)}
        assert commits(kafka, topic) == dict.fromkeys(owned(comes), 10)
        more = [(f"org-{n % 8}", value(f"org-{n % 8}", n)) for n in range(80, 160)]
        kafka.produce(topic, [record for _, record in more])
        consumed(comes, 40, 15)
        assert comes.stop() == 0
        wait_until(lambda: len(owned(stays)) == 8, 30, "all partitions back")
        stays.roll()
        caught_up(kafka, topic)
        watch.assert_never_back()
    assert stays.stop() == 0
    assert_stored(topic, records + more, stays.archive())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c12_an_upload_longer_than_the_poll_interval_evicts_nobody(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, s3_side: S3Side
) -> None:
    """A PUT of 400 s with default poll settings, to scale: 8 s, with 5 s of poll interval and session."""
    kafka.create_topic(topic)
    section = {"max_poll_interval_ms": 5_000, "session_timeout_ms": 5_000, "group_protocol": protocol}
    times = {"kafka": {**section, "drain_timeout_secs": 4}, "shutdown_timeout_secs": 4}
    more = merged(s3_side.settings(), {**times, "archive": {"roll_interval_secs": 1}})
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    s3_side.proxy.fail(Delay(8), when=lambda r: puts(r) and ".jsonl" in r.path)
    records = [("a", value("a", n)) for n in range(50)]
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: kafka.lag(topic, topic) == 0, 40, "lag 0")
    metrics = daemon.metrics()
    assert metrics.total("rebalances_total", kind="assigned") == 1
    assert metrics.total("rebalances_total") == 1
    assert len([r for r in s3_side.proxy.seen("PUT") if ".jsonl" in r.path]) == 1
    assert daemon.stop() == 0
    assert_stored(topic, records, s3_side.archive())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c13_partitions_paused_for_the_spool_flow_again_after_a_rebalance(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[B2]: paused at the spool bound, a member joins and leaves meanwhile, then the store heals."""
    kafka.create_topic(topic, 6)
    more = {
        "kafka": {"drain_timeout_secs": 1},
        "shutdown_timeout_secs": 1,
        "compression": {"codec": "none"},
        "archive": {"roll_interval_secs": 0.5, "roll_size_bytes": "256KiB"},
        "buffer": {"flush_bytes": "64KiB", "flush_age_secs": 0.2, "max_spool_bytes": "1MiB"},
    }
    first, second = members(make_daemon, kafka, topic, tmp_path, more, protocol)
    records = [("a", value("a", n, padding=1_000)) for n in range(6_000)]
    with blocked_route(first, topic, "a") as heal, CommitWatch(kafka, topic, 6) as watch:
        first.start()
        kafka.produce(topic, [record for _, record in records])
        wait_until(lambda: first.metrics().total("paused", reason="spool") == 1, 20, "the pause")
        second.launch()  # it pauses at once and so is never ready
        wait_until(lambda: port_open(second.port), 15, "the newcomer's page")
        wait_until(lambda: len(owned(second)) == 3 and len(owned(first)) == 3, 30, "three partitions each")
        wait_until(lambda: second.metrics().total("paused", reason="spool") == 1, 20, "its pause")
        assert second.stop() == 0
        wait_until(lambda: len(owned(first)) == 6, 40, "all partitions back")
        heal()
        caught_up(kafka, topic, 90)
        watch.assert_never_back()
    assert first.stop() == 0
    assert_stored(topic, records, first.archive(), exact=False)
