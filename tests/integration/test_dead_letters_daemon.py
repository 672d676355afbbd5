"""The daemon, a real broker and a store that refuses files for good, from record to dead letter [Q1].

SeaweedFS, Azurite and fake-gcs-server refuse nothing of what the archiver sends, so the proxy in front
of them answers in the stores' own words.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from archiver.deadletters.file import FileSink
from archiver.deadletters.kafka import HEADER, KafkaSink
from archiver.deadletters.letters import DeadLetter
from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.fault_proxy import Answer, Request, s3_error
from tests.harness.kafka import KafkaServer
from tests.integration.cases import assert_stored, caught_up, commits, consumed, settings_for, value
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import MakeSide, StoreSide, uploads, with_store
from tests.unit.refused_files import FOREVER, refuse

ROOT = Path(__file__).parents[2]

SMALL = {"archive": {"roll_interval_secs": 0.5}, "buffer": {"flush_age_secs": 0.5}}
BY_HAND = {"archive": {"roll_interval_secs": 3600}, "buffer": {"flush_age_secs": 0.5}}
"""For records that must be in one file, however slowly they are taken."""
Stored = list[tuple[str, bytes | None]]

REFUSALS = {
    "s3": {
        "EntityTooLarge": "too_large",
        "KeyTooLongError": "key_invalid",
        "InvalidObjectName": "key_invalid",
    },
    "gs": {"The maximum object name length is 1024 characters": "key_invalid", "413": "too_large"},
    "az": {"InvalidResourceName": "key_invalid", "RequestBodyTooLarge": "too_large"},
}
"""What each store says, and the reason it is counted under."""


def refusal(scheme: str, code: str) -> Answer:
    """A refusal of one object for good, as the store writes it."""
    status = 413 if code in ("413", "RequestBodyTooLarge") else 400
    if scheme == "s3":
        return s3_error(status, code, "refused for good")
    if scheme == "gs":
        text = json.dumps({"error": {"code": status, "message": code, "errors": [{"message": code}]}})
        return Answer(status, text.encode(), {"Content-Type": "application/json"})
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused for good</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml", "x-ms-error-code": code})


def refusing(org: str) -> Callable[[Request], bool]:
    """Uploads of one organisation's files."""
    return lambda request: request.method == "PUT" and f"/{org}/" in request.path


def with_dlq(settings: dict[str, Any], mode: str, topic: str) -> dict[str, Any]:
    return merged(settings, {"dlq": {"enabled": True, "mode": mode, "topic": topic}})


def letters(kafka: KafkaServer, topic: str) -> list[Message]:
    """Everything in the topic's partition 0."""
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([KafkaPartition(topic, 0, 0)])
    found: list[Message] = []

    def all_read() -> bool:
        found.extend(one for one in consumer.consume(500, 0.2) if one.error() is None)
        return len(found) >= kafka.end_offsets(topic)[0]

    wait_until(all_read, 20, f"all of {topic}")
    consumer.close()
    return found


def dead(daemon: Daemon, outcome: str) -> float:
    return daemon.metrics().total("dead_letters_total", outcome=outcome)


def in_the_dlq(daemon: Daemon, records: int) -> bool:
    return dead(daemon, "kafka") == records


def not_ready(daemon: Daemon) -> str:
    code, body = daemon.get("/readyz")
    return body if code == 503 else ""


@pytest.mark.parametrize("scheme", REFUSALS)
def test_what_a_store_refuses_for_good_is_in_the_dlq_with_its_reason_and_all_else_in_the_archive(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1] [S6]: each answer that no later attempt would change, one file each; offsets are released."""
    side, dlq = make_side(scheme), f"{topic}-dlq"
    kafka.create_topic(topic)
    kafka.create_topic(dlq)
    settings = with_store(settings_for(kafka, topic, BY_HAND), side)
    daemon = make_daemon(with_dlq(settings, "kafka_only", dlq)).start()
    expected: list[tuple[bytes, str]] = []
    for code, reason in REFUSALS[scheme].items():
        before = len(expected)
        side.proxy.fail(refusal(scheme, code), when=uploads(side), times=1)
        mine = [value("bad", before + n) for n in range(3)]
        kafka.produce(topic, mine, key=b"a key", headers=[("trace", b"\xff"), ("none", None)])
        expected += [(one, reason) for one in mine]
        consumed(daemon, len(expected))
        daemon.roll()
        wait_until(partial(in_the_dlq, daemon, len(expected)), 30, f"{code} in the DLQ")
        caught_up(kafka, topic)
    good: Stored = [("good", value("good", n)) for n in range(3)]
    kafka.produce(topic, [record for _, record in good])
    consumed(daemon, len(expected) + len(good))
    daemon.roll()
    caught_up(kafka, topic)
    counted = daemon.metrics()
    for reason in set(REFUSALS[scheme].values()):
        wanted = sum(one == reason for _, one in expected)
        assert counted.total("dead_letters_total", outcome="kafka", reason=reason) == wanted
    assert counted.total("dead_letters_total") == len(expected)
    assert not_ready(daemon) == ""
    assert daemon.stop() == 0
    assert_stored(topic, good, side.archive())
    found = letters(kafka, dlq)
    assert [one.value() for one in found] == [one for one, _ in expected]
    for offset, (message, (_, reason)) in enumerate(zip(found, expected, strict=True)):
        headers: list[Any] = list(message.headers() or ())
        assert message.key() == b"a key"
        assert headers[:2] == [("trace", b"\xff"), ("none", None)]
        added = {name.removeprefix(HEADER): text.decode() for name, text in headers[2:]}
        assert {"timestamp", "detail"} <= added.keys()
        assert (added["reason"], added["topic"], added["partition"]) == (reason, topic, "0")
        assert added["offset"] == str(offset)
        assert added["object_key"].startswith(f"{topic}/bad/")


@contextmanager
def refused_route(side: StoreSide, org: str) -> Iterator[None]:
    """The store never takes this organisation's files."""
    side.proxy.fail(s3_error(400, "EntityTooLarge"), when=refusing(org), times=None)
    yield
    side.proxy.heal()


def test_without_a_dlq_a_refused_file_holds_its_partition_alone_until_a_restart_with_one(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1] [D1] [O2]: nothing is lost, other routes and partitions go on, and readiness says what to do."""
    side, dlq = make_side("s3"), f"{topic}-dlq"
    kafka.create_topic(topic, 2)
    kafka.create_topic(dlq)
    first: Stored = [(org, value(org, n)) for n in range(5) for org in ("good", "bad")]
    other: Stored = [("other", value("other", n)) for n in range(5)]
    with refused_route(side, "bad"):
        kafka.produce(topic, [record for _, record in first], partition=0)
        kafka.produce(topic, [record for _, record in other], partition=1)
        daemon = make_daemon(with_store(settings_for(kafka, topic, SMALL), side))
        daemon.launch()
        wait_until(lambda: daemon.server.running and "are held" in quiet(daemon), 30, "held in /readyz")
        reason = not_ready(daemon)
        assert f"{topic}/bad/" in reason
        assert "too_large" in reason
        assert "dlq.enabled" in reason
        later: Stored = [("good", value("good", 100)), ("other", value("other", 100))]
        kafka.produce(topic, [later[0][1]], partition=0)
        kafka.produce(topic, [later[1][1]], partition=1)
        everything_else = [pair for pair in first + other + later if pair[0] != "bad"]
        archived = len(everything_else)
        wait_until(
            lambda: daemon.metrics().total("records_archived_total") == archived, 30, "other routes go on"
        )
        wait_until(lambda: commits(kafka, topic).get(1) == 6, 20, "the other partition is committed")
        assert commits(kafka, topic).get(0, 0) <= 1
        wait_until(lambda: dead(daemon, "held") == 5, 10, "all of them held")
        assert daemon.get("/healthz")[0] == 200
        assert daemon.stop() == 0
        assert commits(kafka, topic).get(0, 0) <= 1
        assert_stored(topic, everything_else, side.archive())

        daemon.settings = with_dlq(daemon.settings, "kafka_only", dlq)
        daemon.start()
        caught_up(kafka, topic)
        assert not_ready(daemon) == ""
        assert daemon.stop() == 0
    assert [one.value() for one in letters(kafka, dlq)] == [one for org, one in first if org == "bad"]
    assert_stored(topic, everything_else, side.archive(), exact=False)


def quiet(daemon: Daemon) -> str:
    """Why it is not ready, and nothing before anybody listens."""
    try:
        return not_ready(daemon)
    except OSError:
        return ""


def test_a_kill_with_half_of_a_file_in_the_dlq_loses_no_record_and_may_write_some_twice(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1] [D7]: the last record is too large for the topic, so the first attempts write all but that."""
    side, dlq = make_side("s3"), f"{topic}-dlq"
    kafka.create_topic(topic)
    kafka.create_topic(dlq, config={"max.message.bytes": "200000"})
    noise = base64.b64encode(os.urandom(300_000)).decode()
    bad = [value("bad", n) for n in range(500)] + [f'{{"_org_id":"bad","x":"{noise}"}}'.encode()]
    with refused_route(side, "bad"):
        kafka.produce(topic, bad)
        settings = with_store(settings_for(kafka, topic, BY_HAND), side)
        daemon = make_daemon(with_dlq(settings, "kafka_only", dlq)).start()
        consumed(daemon, len(bad))
        daemon.roll()
        wait_until(lambda: "max.message.bytes" in quiet(daemon), 30, "the reason in /readyz")
        assert kafka.end_offsets(dlq)[0] >= 1
        assert commits(kafka, topic) == {}
        daemon.kill()
        kafka.set_topic_config(dlq, "max.message.bytes", "1000000")
        daemon.settings["archive"]["roll_interval_secs"] = 0.5
        daemon.start()
        caught_up(kafka, topic)
        assert daemon.stop() == 0
    found = [one.value() for one in letters(kafka, dlq)]
    assert found[-len(bad) :] == bad
    assert set(found) == set(bad)
    assert len(found) > len(bad)


# --- a topic that is not there, or not for us --------------------------------------------------


class Denied:
    """Write access to a topic: denied to the archiver's user until it is allowed."""

    def __init__(self, kafka: KafkaServer, topic: str) -> None:
        assert kafka.secure_listener is not None
        self._kafka = kafka
        user = f"User:{kafka.secure_listener.user}"
        self._where = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL)
        self._who = (user, "*", AclOperation.WRITE)
        rules = [
            AclBinding(*self._where, user, "*", AclOperation.ALL, AclPermissionType.ALLOW),
            AclBinding(*self._where, *self._who, AclPermissionType.DENY),
        ]
        for done in kafka.admin.create_acls(rules).values():
            done.result(60)

    def end(self) -> None:
        rule = AclBindingFilter(*self._where, *self._who, AclPermissionType.DENY)
        for done in self._kafka.admin.delete_acls([rule]).values():
            done.result(60)


def as_the_user(kafka: KafkaServer, topic: str) -> dict[str, Any]:
    """A daemon that logs in, so that rules for its user hold."""
    access = kafka.secure_listener
    assert access is not None
    login = {
        "brokers": access.bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_user": access.user,
        "sasl_password": access.password,
        "ssl_ca_location": str(access.ca_location),
    }
    return merged(settings_for(kafka, topic, SMALL), {"kafka": login})


@pytest.mark.parametrize("why", ["denied", "absent"])
@pytest.mark.parametrize("mode", ["cascade", "kafka_only"])
def test_a_dlq_topic_that_cannot_be_written_falls_back_to_files_or_holds_until_it_can(
    mode: str, why: str, secure_kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1]: `cascade` releases by the file, `kafka_only` holds and says why; the topic is never created."""
    kafka, side, dlq = secure_kafka, make_side("s3"), f"{topic}-dlq"
    kafka.create_topic(topic)
    denied = None
    if why == "denied":
        kafka.create_topic(dlq)
        denied = Denied(kafka, dlq)
    bad = [value("bad", n) for n in range(5)]
    good: Stored = [("good", value("good", n)) for n in range(5)]
    with refused_route(side, "bad"):
        kafka.produce(topic, [*bad, *(record for _, record in good)], key=b"k")
        settings = with_dlq(with_store(as_the_user(kafka, topic), side), mode, dlq)
        daemon = make_daemon(settings)
        daemon.launch()
        if mode == "kafka_only":
            wait_until(lambda: dlq in quiet(daemon), 40, "held in /readyz")
            assert ("allow the user WRITE" if denied else "create it") in quiet(daemon)
            assert commits(kafka, topic) == {}
            if denied is not None:
                denied.end()
            else:
                kafka.create_topic(dlq)
        caught_up(kafka, topic, 60)
        assert dead(daemon, "failed") >= 5
        assert dead(daemon, "kafka" if mode == "kafka_only" else "file") == 5
        wait_until(lambda: not_ready(daemon) == "", 10, "ready")
        assert daemon.stop() == 0
    assert_stored(topic, good, side.archive())
    folder = daemon.root / "spool" / "dlq"
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open("rb")]
    if mode == "kafka_only":
        assert [one.value() for one in letters(kafka, dlq)] == bad
        assert lines == []
    else:
        assert [(one["value"].encode(), one["key"], one["offset"]) for one in lines] == [
            (record, "k", offset) for offset, record in enumerate(bad)
        ]
        assert kafka.topic_names().isdisjoint({dlq}) == (why == "absent")


# --- the page ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["topic", "files"])
def test_the_program_of_the_page_brings_dead_letters_back_as_they_were(
    where: str, kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    """`docs/dead-letters.md`, how to replay: value, key and the record's own headers, nothing added."""
    page = (ROOT / "docs" / "dead-letters.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "replay.py").write_text(program)
    dlq = f"{topic}-dlq"
    kafka.create_topic(topic)
    kafka.create_topic(dlq)
    headers = (("trace", b"\xff"), ("none", None), ("text", b"t"))
    originals = [
        DeadLetter(b"\xff\x00", topic, 0, 1, 1234, b"\xfe", headers),
        DeadLetter(b"text\nof two lines", topic, 0, 2, 1234, b"key", ()),
        DeadLetter(b"", topic, 0, 3),
    ]
    refused = refuse(tmp_path / "uploads", [[b"x"]])
    in_kafka, in_files = re.findall(r"```sh\n(.*?)```", page, re.S)
    if where == "topic":
        KafkaSink({"bootstrap.servers": kafka.bootstrap}, dlq).write(refused, originals, FOREVER)
        look = in_kafka.replace("localhost:9092", kafka.bootstrap).replace("dfe-archiver-dlq", dlq)
    else:
        FileSink(tmp_path / "dlq", 1 << 20).write(refused, originals, FOREVER)
        look = in_files.replace("/var/spool/dfe-archiver/dlq", str(tmp_path / "dlq"))
    seen = subprocess.run(["sh", "-c", look], capture_output=True, timeout=60)
    assert (seen.returncode, b"key_invalid" in seen.stdout) == (0, True), seen.stderr
    done = subprocess.run(
        [sys.executable, "replay.py", *map(str, (tmp_path / "dlq").glob("*.jsonl"))],
        cwd=tmp_path,
        env={**os.environ, "BROKERS": kafka.bootstrap, "DLQ_TOPIC": dlq, "TARGET": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "3 of 3 produced\n"), done.stderr
    found = [(one.value(), one.key(), tuple(one.headers() or ())) for one in letters(kafka, topic)]
    assert found == [(one.value, one.key, one.headers) for one in originals]
