"""Cases from the field: stops, starts and what the endpoints say, on a real broker (c35, c40 to c44)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from confluent_kafka.admin import AdminClient

from archiver.domain.batch import TopicPartition
from archiver.domain.offsets import LogRange
from archiver.sources.kafka_offsets import log_ranges
from tests.harness.daemon import REPOSITORY, Daemon, merged, wait_until
from tests.harness.kafka import KafkaServer
from tests.harness.process import PATIENCE, SLACK_SECS
from tests.integration.cases import (
    archive_files,
    assert_stored,
    blocked_route,
    caught_up,
    committed_nothing,
    consumed,
    settings_for,
    spool_files,
    value,
)
from tests.integration.conftest import MakeDaemon


def start_errors(daemon: Daemon, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output of a start that must not succeed."""
    daemon.server.env.update(env or {})
    daemon.launch()
    status = daemon.wait(20)
    return status, daemon.output()


@pytest.mark.parametrize("harm", ["deleted", "changed", "shortened"])
def test_c35_a_sealed_file_that_is_lost_ends_the_process_and_is_read_again(
    harm: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D10]: exit status 1, no commit passes its records, the restart archives them."""
    kafka.create_topic(topic)
    records = [("ab"[n % 2], value("ab"[n % 2], n)) for n in range(100)]
    more = {"shutdown_timeout_secs": 5, "archive": {"roll_interval_secs": 3600}}
    daemon = make_daemon(settings_for(kafka, topic, more))
    with blocked_route(daemon, topic, "a") as heal:
        daemon.start()
        kafka.produce(topic, [record for _, record in records])
        consumed(daemon, 100)
        daemon.roll()
        wait_until(lambda: len(archive_files(daemon)) == 1, 15, "the other one's file")
        wait_until(lambda: len(spool_files(daemon)) == 1, 15, "only the failing route's in the spool")
        wait_until(lambda: daemon.metrics().total("upload_retries_total") >= 1, 15, "a failed upload")
        (sealed,) = (daemon.root / "spool" / "uploads").glob("*.jsonl*")
        if harm == "deleted":
            sealed.unlink()
        else:
            content = sealed.read_bytes()
            sealed.write_bytes(content[:-1] if harm == "shortened" else content[:-1] + b"?")
        assert daemon.wait(30) == 1
        heal()
    assert committed_nothing(kafka, topic)
    assert "sealed file" in daemon.output()
    daemon.settings["archive"]["roll_interval_secs"] = 1
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive(), exact=False)


def test_c40_sigterm_with_500_open_destinations_archives_and_commits_them_in_time(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: an interval of 3,600 s; exit within 30 s, committed equals uploaded."""
    kafka.create_topic(topic, 4)
    records = [(f"org-{n % 500}", value(f"org-{n % 500}", n)) for n in range(20_000)]
    more = {"archive": {"roll_interval_secs": 3600}, "buffer": {"flush_age_secs": 60}}
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    kafka.produce(topic, [record for _, record in records])
    consumed(daemon, 20_000, 20)
    assert committed_nothing(kafka, topic)
    assert archive_files(daemon) == []
    began = time.monotonic()
    assert daemon.stop(timeout=30) == 0
    print(f"c40: stopped in {time.monotonic() - began:.1f} s")
    assert kafka.committed(topic, topic) == kafka.end_offsets(topic)
    assert spool_files(daemon) == []
    assert_stored(topic, records, daemon.archive())


def test_c40_sigterm_with_a_failing_route_ends_in_time_and_commits_what_is_durable(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: the rest is read again after the restart."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 2}", value(f"org-{n % 2}", n)) for n in range(200)]
    more = {"archive": {"roll_interval_secs": 3600}, "shutdown_timeout_secs": 3}
    daemon = make_daemon(settings_for(kafka, topic, more))
    with blocked_route(daemon, topic, "org-0") as heal:
        daemon.start()
        kafka.produce(topic, [record for _, record in records])
        consumed(daemon, 200, 20)
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 3 + SLACK_SECS
        assert kafka.committed(topic, topic).get(1) == 100
        assert not kafka.committed(topic, topic).get(0)
        heal()
    daemon.start()
    consumed(daemon, 100, 20)
    daemon.roll()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_a_second_signal_ends_the_process_at_once(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: 128 + signal, while a shutdown waits for the store; nothing is lost."""
    kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(10)]
    # once it is back, the group needs not wait for its session to end
    more = {"shutdown_timeout_secs": 100, "kafka": {"group_instance_id": "one"}}
    daemon = make_daemon(settings_for(kafka, topic, more))
    with blocked_route(daemon, topic, "a") as heal:
        daemon.start()
        kafka.produce(topic, [record for _, record in records])
        wait_until(lambda: daemon.metrics().total("upload_retries_total") >= 1, 15, "a failed upload")
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: "stopping" in daemon.output(), 10)
        os.kill(daemon.pid, signal.SIGINT)
        assert daemon.wait(3) == 128 + signal.SIGINT
        heal()
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c41_one_worker_one_open_file_and_1_mb_of_buffer_still_move(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[B1], [B3], [B4]: 20 organisations through the smallest bounds."""
    kafka.create_topic(topic, 2)
    records = [(f"org-{n % 20}", value(f"org-{n % 20}", n, padding=500)) for n in range(20_000)]
    more = {
        "archive": {"max_open_files": 1, "roll_interval_secs": 1},
        "buffer": {"max_bytes": "1MiB", "flush_bytes": "64KiB", "writer_parallelism": 1},
    }
    daemon = make_daemon(settings_for(kafka, topic, more)).start()
    kafka.produce(topic, [record for _, record in records])
    caught_up(kafka, topic, 90)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c41_a_failing_route_does_not_take_the_only_worker(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D1]: however few upload workers there are, other routes go on."""
    kafka.create_topic(topic, 2)
    more = {
        "archive": {"max_open_files": 1, "roll_interval_secs": 0.5},
        "buffer": {"max_bytes": "1MiB", "flush_bytes": "64KiB", "writer_parallelism": 1},
    }
    daemon = make_daemon(settings_for(kafka, topic, more))
    with blocked_route(daemon, topic, "org-0") as heal:
        daemon.start()
        records = [(f"org-{n % 2}", value(f"org-{n % 2}", n)) for n in range(2_000)]
        for at in range(0, 2_000, 500):
            kafka.produce(topic, [record for _, record in records[at : at + 500]])
            time.sleep(0.7)
        wait_until(lambda: kafka.committed(topic, topic).get(1) == 1_000, 20, "org-1's commit")
        assert not kafka.committed(topic, topic).get(0)
        heal()
    caught_up(kafka, topic, 70)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive())


def test_c42_misspelt_keys_are_start_errors_that_name_the_right_one(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[C4]: `compresion:` in YAML and COMPRESION__CODEC in the environment, both told at once."""
    daemon = make_daemon(settings_for(kafka, topic, {"compresion": "zstd"}))
    status, output = start_errors(daemon, {"DFE_ARCHIVER_COMPRESION__CODEC": "zstd"})
    assert status == 2
    assert "compresion" in output and "did you mean compression" in output.lower(), output
    assert "DFE_ARCHIVER_COMPRESION__CODEC" in output
    assert "DFE_ARCHIVER_COMPRESSION__CODEC" in output
    assert "Traceback" not in output


def test_c43_a_spool_bound_below_the_roll_size_is_a_start_error(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[C5]: with both keys and their values."""
    more = {"archive": {"roll_size_bytes": "1GiB"}, "buffer": {"max_spool_bytes": "512MiB"}}
    status, output = start_errors(make_daemon(settings_for(kafka, topic, more)))
    assert status == 2
    assert "archive.roll_size_bytes" in output and "buffer.max_spool_bytes" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_c44_with_a_frozen_coordinator_the_endpoints_answer_and_tell_the_truth(
    protocol: str, weak_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[O2]: alive, not ready with the reason, each within its deadline; then ready again."""
    weak_kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(200)]
    weak_kafka.produce(topic, [record for _, record in records[:100]])
    more = {"kafka": {"group_protocol": protocol}}
    daemon = make_daemon(settings_for(weak_kafka, topic, more)).start()
    caught_up(weak_kafka, topic)
    weak_kafka.freeze()
    slowest, told = 0.0, ""
    deadline = time.monotonic() + 40 * PATIENCE
    while not told and time.monotonic() < deadline:
        began = time.monotonic()
        alive, _ = daemon.get("/healthz")
        code, body = daemon.get("/readyz")
        slowest = max(slowest, time.monotonic() - began)
        assert alive == 200, "the loop turns without a broker"
        told = body if code == 503 else ""
        time.sleep(0.2)
    assert "kafka cannot be used" in told or "not joined: waiting for group" in told, told
    wait_until(lambda: "kafka cannot be used" in daemon.get("/readyz")[1], 25, "the reason")
    assert slowest < SLACK_SECS, f"{slowest} s"
    weak_kafka.thaw()
    weak_kafka.produce(topic, [record for _, record in records[100:]])
    wait_until(lambda: daemon.get("/readyz")[0] == 200, 40, "ready again")
    caught_up(weak_kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive(), exact=False)


def test_c44_a_leader_that_keeps_silent_tells_no_offsets(weak_kafka: KafkaServer, topic: str) -> None:
    """[D9]: the client gives such an answer without an error, with offsets that mean nothing."""
    weak_kafka.create_topic(topic)
    weak_kafka.produce(topic, [b"{}"])
    partition = TopicPartition(topic, 0)
    admin = AdminClient({"bootstrap.servers": weak_kafka.bootstrap, "log_level": 0})
    assert log_ranges(admin, [partition], 60, committed_only=True) == {partition: LogRange(0, 1)}
    weak_kafka.freeze()
    assert log_ranges(admin, [partition], 1, committed_only=True) == {}
    assert log_ranges(admin, [partition], 1, committed_only=False) == {}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_c44_a_stop_with_a_frozen_coordinator_keeps_its_time(
    protocol: str, weak_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: files become durable all the same, the commit is given up, nothing is lost."""
    weak_kafka.create_topic(topic)
    records = [("a", value("a", n)) for n in range(100)]
    more = {
        "kafka": {"group_protocol": protocol},
        "archive": {"roll_interval_secs": 3600},
        "shutdown_timeout_secs": 5,
    }
    daemon = make_daemon(settings_for(weak_kafka, topic, more)).start()
    weak_kafka.produce(topic, [record for _, record in records])
    consumed(daemon, 100, 10)
    weak_kafka.freeze()
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 5 + SLACK_SECS
    assert len(archive_files(daemon)) == 1
    weak_kafka.thaw()
    daemon.settings["archive"]["roll_interval_secs"] = 1
    daemon.start()
    caught_up(weak_kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, daemon.archive(), exact=False)


def test_a_second_process_on_a_spool_refuses_to_start_and_harms_nothing(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[B5]: the first one's open files stay."""
    kafka.create_topic(topic)
    by_hand = {"archive": {"roll_interval_secs": 3600}, "buffer": {"flush_records": 5}}
    first = make_daemon(settings_for(kafka, topic, by_hand)).start()
    records = [("a", value("a", n)) for n in range(50)]
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: len(spool_files(first)) == 1, 10, "an open file")
    twin = make_daemon(merged(first.settings, {"metrics": {"listen": "127.0.0.1:0"}}), name="twin")
    status, output = start_errors(twin)
    assert status == 1
    assert "in use by" in output
    assert len(spool_files(first)) == 1
    first.roll()
    caught_up(kafka, topic)
    assert first.stop() == 0
    assert_stored(topic, records, first.archive())


def test_check_says_yes_and_then_why_not(kafka: KafkaServer, topic: str, make_daemon: MakeDaemon) -> None:
    """[O1]: 0 with everything there, 1 without the topic's broker; it archives nothing."""
    kafka.create_topic(topic)
    daemon = make_daemon(settings_for(kafka, topic))
    daemon.launch()
    daemon.kill()
    argv = [sys.executable, "-m", "archiver", "check", "--config", str(daemon.config_path)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert archive_files(daemon) == []
    daemon.settings["kafka"]["topics"] = [f"no-{topic}"]
    daemon.settings["archive"]["destination"] = f"file://{daemon.config_path}/archive"
    daemon.launch()
    daemon.kill()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED  topics: missing: no-{topic}" in done.stdout
    assert "FAILED  store: file://" in done.stdout


def test_the_memory_bound_that_is_told_is_the_one_that_was_set(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[O2]: what buffers and the client's queue hold together, against the bound of both together."""
    kafka.create_topic(topic)
    daemon = make_daemon(settings_for(kafka, topic, {"buffer": {"max_bytes": 64 << 20}}))
    daemon.start()
    wait_until(lambda: daemon.status()["state"] == "running", 20, "the first look at the loop")
    assert daemon.status()["buffered_bytes_max"] == 64 << 20
    assert daemon.metrics().total("buffered_bytes_max") == 64 << 20
    assert daemon.stop() == 0


def test_a_stop_in_the_middle_of_a_drain_keeps_the_time_of_a_stop(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon
) -> None:
    """[D6]: SIGTERM while a revoke waits for a failing route; the drain's own time does not come on top."""
    kafka.create_topic(topic, 2)
    more = {"kafka": {"drain_timeout_secs": 60}, "shutdown_timeout_secs": 4}
    first, second = (make_daemon(settings_for(kafka, topic, more), name=name) for name in "ab")
    second.settings["archive"]["destination"] = first.settings["archive"]["destination"]
    records = [(f"org-{n % 2}", value(f"org-{n % 2}", n)) for n in range(100)]
    with blocked_route(first, topic, "org-0") as heal, blocked_route(first, topic, "org-1") as heal_other:
        first.start()
        kafka.produce(topic, [record for _, record in records])
        consumed(first, 100)
        second.launch()
        wait_until(lambda: first.status()["state"] == "draining", 20, "the drain")
        began = time.monotonic()
        assert first.stop() == 0
        took = time.monotonic() - began
        heal()
        heal_other()
    print(f"stopped in {took:.1f} s")
    assert took < 4 + SLACK_SECS
    caught_up(kafka, topic)
    assert second.stop() == 0
    assert_stored(topic, records, second.archive())
