"""Members that join, leave, freeze and die under load, with both rebalance protocols ([D5], [K4], [D4])."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.integration.cases import CommitWatch, Load, assert_stored, caught_up, duplicates, settings_for
from tests.integration.conftest import MakeDaemon

PARTITIONS = 6
PROTOCOLS = ("classic", "consumer")


def members(
    make_daemon: MakeDaemon, kafka: KafkaServer, topic: str, root: Path, protocol: str, names: str
) -> list[Daemon]:
    """Daemons of one group and one destination, not started."""
    more = {
        # nobody waits for all of it in vain, and a drain that is given up doubles records
        "kafka": {"group_protocol": protocol, "drain_timeout_secs": 60},
        "archive": {"destination": f"file://{root}/shared", "roll_interval_secs": 0.7},
        "buffer": {"flush_records": 200, "flush_age_secs": 0.5},
    }
    return [make_daemon(settings_for(kafka, topic, merged(more, {})), name=name) for name in names]


def assigned(*daemons: Daemon) -> int:
    """Partitions that these daemons hold together."""
    return sum(len(daemon.status().get("partitions", ())) for daemon in daemons)


def shared_out(*daemons: Daemon, each: int) -> None:
    """Wait until every one of these daemons holds so many partitions."""
    wait_until(lambda: all(assigned(daemon) == each for daemon in daemons), 40, f"{each} partitions each")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_that_join_and_leave_under_load_archive_every_record_once(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[D5]: two and three instances; drains end in time, so an orderly change doubles nothing."""
    kafka.create_topic(topic, PARTITIONS)
    a, b, c = members(make_daemon, kafka, topic, tmp_path, protocol, "abc")
    with Load(kafka, topic, PARTITIONS) as load, CommitWatch(kafka, topic, PARTITIONS) as watch:
        a.start()
        b.start()
        shared_out(a, b, each=3)
        c.start()
        wait_until(lambda: assigned(a) == assigned(b) == assigned(c) == 2, 30, "two partitions each")
        assert a.stop() == 0
        wait_until(lambda: assigned(b, c) == PARTITIONS, 30, "all partitions with two")
        a.start()
        wait_until(lambda: assigned(a, b, c) == PARTITIONS and assigned(a) > 0, 30, "all with three again")
        assert b.stop() == 0
        assert c.stop() == 0
        wait_until(lambda: assigned(a) == PARTITIONS, 30, "all with one")
        load.stop()
        caught_up(kafka, topic, 60)
        assert a.stop() == 0
        watch.assert_never_back()
    comparison = assert_stored(topic, load.records, a.archive(), exact=False)
    print(f"{protocol}: {len(load.records)} records, {duplicates(comparison)} of them twice")
    assert comparison.exact, comparison


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_that_freeze_and_thaw_under_load_lose_nothing_and_commit_nothing_back(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[D4], [K4]: frozen for longer than the session, thawed while the others write the same routes."""
    kafka.create_topic(topic, PARTITIONS)
    a, b = members(make_daemon, kafka, topic, tmp_path, protocol, "ab")
    with Load(kafka, topic, PARTITIONS) as load, CommitWatch(kafka, topic, PARTITIONS) as watch:
        a.start()
        b.start()
        shared_out(a, b, each=3)
        for sleeper, heir in ((a, b), (b, a)):
            sleeper.freeze()
            shared_out(heir, each=PARTITIONS)
            time.sleep(1)
            sleeper.thaw()
            shared_out(sleeper, heir, each=3)
        a.freeze()  # shorter than the session: nobody notices
        time.sleep(1.5)
        a.thaw()
        load.stop()
        caught_up(kafka, topic, 60)
        assert a.stop() == 0
        assert b.stop() == 0
        watch.assert_never_back()
    comparison = assert_stored(topic, load.records, a.archive(), exact=False)
    print(f"{protocol}: {len(load.records)} records, {duplicates(comparison)} of them twice")
    assert duplicates(comparison) < len(load.records) / 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_that_is_killed_under_load_is_replaced_without_a_loss(
    protocol: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[D7]: kill -9 of one of two, its partitions go on at the commit."""
    kafka.create_topic(topic, PARTITIONS)
    a, b = members(make_daemon, kafka, topic, tmp_path, protocol, "ab")
    with Load(kafka, topic, PARTITIONS) as load, CommitWatch(kafka, topic, PARTITIONS) as watch:
        a.start()
        b.start()
        shared_out(a, b, each=3)
        b.kill()
        wait_until(lambda: assigned(a) == PARTITIONS, 40, "all partitions with the other")
        b.start()
        shared_out(a, b, each=3)
        load.stop()
        caught_up(kafka, topic, 60)
        assert a.stop() == 0
        assert b.stop() == 0
        watch.assert_never_back()
    comparison = assert_stored(topic, load.records, a.archive(), exact=False)
    print(f"{protocol}: {len(load.records)} records, {duplicates(comparison)} of them twice")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_broker_that_dies_and_comes_back_under_load_loses_nothing(
    protocol: str, weak_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """[D4]: kill -9 of the broker with commits under way; the commit never goes back."""
    weak_kafka.create_topic(topic, PARTITIONS)
    (daemon,) = members(make_daemon, weak_kafka, topic, tmp_path, protocol, "a")
    with Load(weak_kafka, topic, PARTITIONS) as load, CommitWatch(weak_kafka, topic, PARTITIONS) as watch:
        daemon.start()
        time.sleep(2)
        weak_kafka.kill()
        time.sleep(1)
        weak_kafka.start()
        time.sleep(2)
        load.stop()
        caught_up(weak_kafka, topic, 60)
        assert daemon.stop() == 0
        watch.assert_never_back()
    comparison = assert_stored(topic, load.records, daemon.archive(), exact=False)
    print(f"{protocol}: {len(load.records)} records, {duplicates(comparison)} of them twice")
