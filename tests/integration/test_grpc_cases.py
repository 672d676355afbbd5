"""The daemon with pushes instead of Kafka: cases from the field, kills, stops and bounds [G1] [G2] [Q1]."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
import zstandard
from google.protobuf import json_format

from archiver.sources.grpc import SERVICE
from archiver.sources.wire import transport_pb2 as wire
from tests.harness.archive import Archive, compare, segment
from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.fault_proxy import s3_error
from tests.harness.kafka import KafkaServer
from tests.harness.process import SLACK_SECS, free_port
from tests.integration.cases import blocked_route, value
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import MIB, MakeSide, uploads, with_store
from tests.integration.test_cases_routing import (
    AMBIGUOUS,
    HOSTILE_ORGS,
    ODD,
    ODD_ORGS,
    PLACED,
    decoded,
    org_value,
)

ROOT = Path(__file__).parents[2]
METHODS = ("Push", "RouteBatch")
Records = list[tuple[str, bytes]]


class Sender:
    """Unary calls on a channel of its own, as other people's senders make them."""

    def __init__(self, port: int, method: str = "Push") -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._call = self.channel.unary_unary(f"/{SERVICE}/{method}", None, wire.PushResponse.FromString)
        self._method = method

    def send(self, values: Iterable[bytes], timeout: float = 60) -> int:
        """Push some records; the number that was accepted. Raises `grpc.RpcError`."""
        if self._method == "Push":
            payload = b"".join(one + b"\n" for one in values)
            message = wire.PushRequest(payload=payload, format=wire.JSON).SerializeToString()
        else:
            message = wire.Batch(records=[wire.Record(payload=one) for one in values]).SerializeToString()
        return int(self._call(message, timeout=timeout).accepted)

    def refused(self, values: Iterable[bytes]) -> Any:
        """The error of a push that must be refused."""
        with pytest.raises(grpc.RpcError) as caught:
            self.send(values)
        return caught.value

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def pushed(more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A daemon that listens for pushes, flushes soon and rolls by request or at its end."""
    base = {
        "transport": "grpc",
        "grpc": {"listen": f"127.0.0.1:{free_port()}"},
        "archive": {"roll_interval_secs": 3600},
        "buffer": {"flush_age_secs": 0.2},
    }
    return merged(base, more or {})


def port_of(daemon: Daemon) -> int:
    return int(str(daemon.settings["grpc"]["listen"]).rpartition(":")[2])


def by_org(records: Iterable[tuple[str, bytes | None]]) -> dict[str, list[bytes | None]]:
    """Values by route; there is no topic in it."""
    routes: dict[str, list[bytes | None]] = {}
    for org, record in records:
        routes.setdefault(segment(org), []).append(record)
    return routes


def lines_of(archive: Archive) -> Counter[bytes]:
    return Counter(line for files in archive.values() for file in files for line in file.lines)


# --- routing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_odd_organisations_and_values_go_where_they_go_on_kafka(method: str, make_daemon: MakeDaemon) -> None:
    """c31, c36, c37, c38 over gRPC [K5] [K6] [F1]: one push of all of them, with good records in between."""
    records = [(org, org_value(org)) for org in {*ODD_ORGS, *HOSTILE_ORGS}]
    for n, (org, odd) in enumerate((*PLACED, *ODD)):
        records += [("good", value("good", n)), (org, odd or b"")]
    daemon = make_daemon(pushed()).start()
    with Sender(port_of(daemon), method) as sender:
        assert sender.send([record for _, record in records]) == len(records)
        assert sender.send([record or b"" for record in AMBIGUOUS]) == len(AMBIGUOUS)
        wait_until(
            lambda: daemon.metrics().total("records_consumed_total") == len(records) + len(AMBIGUOUS),
            20,
            "all taken",
        )
    counted = daemon.metrics()
    assert counted.total("default_routed_total", reason="missing") == 1
    assert counted.total("default_routed_total", reason="empty") == 1
    assert counted.total("default_routed_total", reason="not_scalar") == 3
    assert daemon.stop() == 0
    archive = daemon.archive()
    expected = Counter(record for _, record in records) + Counter(record or b"" for record in AMBIGUOUS)
    assert lines_of(archive) == expected
    comparison = compare(by_org(records), archive)
    foreign = Counter(line for lines in comparison.foreign.values() for line in lines.elements())
    assert not comparison.missing
    assert foreign <= Counter(record or b"" for record in AMBIGUOUS)
    odd_routes = {segment(org) for org in ODD_ORGS}
    assert odd_routes <= archive.keys()
    assert {decoded(route) for route in odd_routes} == set(ODD_ORGS)
    outside = [p for p in daemon.root.rglob("*.jsonl*") if not p.is_relative_to(daemon.root / "archive")]
    assert outside == []


@pytest.mark.parametrize("method", METHODS)
def test_nested_and_several_fields_make_the_route_and_each_default_has_its_reason(
    method: str, make_daemon: MakeDaemon
) -> None:
    """[K6] [K8]: two fields, one of them nested; no topic in front."""
    placed = [
        ("acme/web", b'{"_org_id":"acme","tags":{"category":"web","x":1}}', ""),
        ("acme/1.50", b'{"tags":{"category":1.50},"_org_id":"acme"}', ""),
        ("acme/true", b'{"_org_id":"acme","tags":{"category":true}}', ""),
        ("a=2Fb/=2E.", b'{"_org_id":"a/b","tags":{"category":".."}}', ""),
        ("acme/default", b'{"_org_id":"acme","tags":{}}', "missing"),
        ("acme/default", b'{"_org_id":"acme","tags":7}', "missing"),
        ("acme/default", b'{"_org_id":"acme","tags":{"category":null}}', "null"),
        ("acme/default", b'{"_org_id":"acme","tags":{"category":[]}}', "not_scalar"),
        ("default/web", b'{"tags":{"category":"web"}}', "missing"),
        ("default/web", b'{"_org_id":"","tags":{"category":"web"}}', "empty"),
        ("default/default", b"not json", "invalid_json"),
        ("default/default", b"[]", "not_object"),
    ]
    settings = pushed({"routing": {"expression_fields": ["_org_id", "tags.category"]}})
    daemon = make_daemon(settings).start()
    with Sender(port_of(daemon), method) as sender:
        assert sender.send([record for _, record, _ in placed]) == len(placed)
    wait_until(
        lambda: daemon.metrics().total("records_consumed_total") == len(placed), 20, "all of them taken"
    )
    counted = daemon.metrics()
    reasons = Counter(reason for *_, reason in placed if reason)
    assert {reason: counted.total("default_routed_total", reason=reason) for reason in reasons} == reasons
    assert counted.total("default_routed_total") == reasons.total()
    assert daemon.stop() == 0
    routes: dict[str, list[bytes | None]] = {}
    for route, record, _ in placed:
        routes.setdefault(route, []).append(record)
    comparison = compare(routes, daemon.archive())
    assert comparison.exact, comparison


@pytest.mark.parametrize("method", METHODS)
def test_c39_a_record_of_20_mb_and_a_small_one_behind_it_are_archived(
    method: str, make_daemon: MakeDaemon
) -> None:
    """c39 over gRPC: the listener's bound is 32 MiB."""
    records = [
        ("a", value("a", 0)),
        ("a", value("a", 1, padding=20_000_000)),
        ("a", value("a", 2)),
        ("b", value("b", 3, padding=31_000_000)),
        ("b", value("b", 4)),
    ]
    daemon = make_daemon(pushed({"grpc": {"max_message_bytes": "32MiB"}})).start()
    with Sender(port_of(daemon), method) as sender:
        assert sender.send([record for _, record in records[:3]]) == 3
        assert sender.send([record for _, record in records[3:4]]) == 1
        assert sender.send([record for _, record in records[4:]]) == 1
        error = sender.refused([value("c", 5, padding=33 * MIB)])
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until(
        lambda: daemon.metrics().total("pushes_refused_total", reason="incomplete") == 1, 20, "counted"
    )
    assert daemon.stop() == 0
    comparison = compare(by_org(records), daemon.archive())
    assert comparison.exact, comparison


# --- kills and stops --------------------------------------------------------------------------


def whole_frames(path: Path) -> bytes:
    """What a file's whole zstd frames hold; a half-written one at its end is left out."""
    found, rest = [], path.read_bytes()
    while rest:
        reader = zstandard.ZstdDecompressor().decompressobj()
        try:
            frame = reader.decompress(rest)
        except zstandard.ZstdError:
            break
        if not reader.eof:
            break
        found.append(frame)
        rest = reader.unused_data
    return b"".join(found)


def push_until_refused(port: int, org: str, answered: list[bytes], unanswered: list[bytes]) -> None:
    """Pushes of five records, one after another, until the process has gone."""
    with Sender(port) as sender:
        for number in range(0, 5_000_000, 5):
            values = [value(org, number + index, padding=200) for index in range(5)]
            while True:
                try:
                    sender.send(values)
                    answered += values
                    break
                except grpc.RpcError as error:
                    if "queue is full" not in (error.details() or ""):
                        unanswered += values
                        return
                    time.sleep(0.01)


def test_a_kill_loses_at_most_what_queue_and_buffers_held_and_each_senders_newest(
    make_daemon: MakeDaemon,
) -> None:
    """[G1] [D7]: measured. Whole frames of the killed process are archived under the keys they had; what
    is lost is the end of what each sender had answered, and no more than the documented bounds."""
    queue_bytes, buffer_bytes, flush_bytes = MIB, 4 * MIB, 32 * 1024
    settings = pushed(
        {
            "grpc": {"max_queue_bytes": queue_bytes, "max_message_bytes": queue_bytes},
            "buffer": {"max_bytes": buffer_bytes, "flush_bytes": flush_bytes, "flush_age_secs": 3600},
            "archive": {"roll_interval_secs": 3600},
        }
    )
    daemon = make_daemon(settings).start()
    orgs = [f"org-{n}" for n in range(4)]
    answered: dict[str, list[bytes]] = {org: [] for org in orgs}
    unanswered: dict[str, list[bytes]] = {org: [] for org in orgs}
    threads = [
        threading.Thread(
            target=push_until_refused, args=(port_of(daemon), org, answered[org], unanswered[org])
        )
        for org in orgs
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(mine) > 2_000 for mine in answered.values()), 60, "pushes of every sender")
    daemon.kill()
    for thread in threads:
        thread.join(60)
    spool, archive = daemon.root / "spool", daemon.root / "archive"
    assert not list(archive.rglob("*.jsonl.zst"))
    framed = b"".join(map(whole_frames, spool.rglob("*.jsonl.zst"))).split(b"\n")[:-1]
    assert framed
    labels = [json.loads(path.read_text()) for path in spool.rglob("*.key")]
    daemon.start()
    assert daemon.stop() == 0

    kept = daemon.archive()
    assert lines_of(kept) == Counter(framed), "not exactly what was in whole frames"
    names = {file.key for files in kept.values() for file in files}
    assert names <= {f"{one['stem']}-{one['writer_id']}.{one['extension']}" for one in labels}
    lost = 0
    for org in orgs:
        mine = [line for file in kept[org] for line in file.lines]
        sent = answered[org] + unanswered[org]
        assert mine == sent[: len(mine)], "a hole in the middle, or another order"
        lost += sum(len(line) + 1 for line in answered[org][len(mine) :])
    assert lost > 0, "the kill came when nothing was under way"
    assert lost <= queue_bytes + buffer_bytes
    print(f"{sum(map(len, answered.values()))} records answered, {lost} bytes of them lost")


def test_what_is_only_buffered_goes_with_a_kill_and_is_archived_by_a_stop(make_daemon: MakeDaemon) -> None:
    """[G1]: both halves of the promise on the same ten records; at most once is no less than that."""
    daemon = make_daemon(pushed({"buffer": {"flush_age_secs": 3600}})).start()
    values = [value("a", n) for n in range(10)]
    for end, kept in ((daemon.kill, 0), (daemon.stop, 10)):
        with Sender(port_of(daemon)) as sender:
            assert sender.send(values) == 10
        wait_until(lambda: daemon.metrics().total("records_consumed_total") == 10, 20, "all taken")
        end()
        daemon.start()
        assert daemon.stop() == 0
        assert sum(lines_of(daemon.archive()).values()) == kept
        daemon.start()


@contextmanager
def stopping(daemon: Daemon) -> Iterator[threading.Thread]:
    """A stop that is under way."""
    ended = threading.Thread(target=daemon.stop, args=(90,))
    ended.start()
    wait_until(lambda: "stopping" in daemon.get("/readyz")[1], 20, "the stop has begun")
    yield ended
    ended.join(90)


def test_a_push_during_a_stop_is_refused_at_once_and_what_was_answered_is_archived(
    make_daemon: MakeDaemon,
) -> None:
    """[G1] [G2]: the drain waits for the store, and new pushes do not wait with it."""
    daemon = make_daemon(pushed({"shutdown_timeout_secs": 60}))
    values = [value("a", n) for n in range(10)]
    with blocked_route(daemon, "", "a") as heal:
        daemon.start()
        with Sender(port_of(daemon)) as sender:
            assert sender.send(values) == 10
            with stopping(daemon):
                for _ in range(5):
                    began = time.monotonic()
                    error = sender.refused([value("a", 99)])
                    assert time.monotonic() - began < SLACK_SECS
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    assert "shutting down" in error.details()
                    assert "retry-after-ms" in dict(error.trailing_metadata())
                assert daemon.metrics().total("pushes_refused_total", reason="stopping") == 5
                assert list((daemon.root / "archive").rglob("*.jsonl.zst")) == []
                heal()
    assert lines_of(daemon.archive()) == Counter(values)


# --- bounds -----------------------------------------------------------------------------------


def test_with_the_store_away_senders_are_served_up_to_the_bounds_then_refused_and_nothing_is_lost(
    make_daemon: MakeDaemon,
) -> None:
    """[G2] [B2] [O2]: ready while there is room, whatever the store does; at the bound UNAVAILABLE."""
    more = {
        "grpc": {"max_queue_bytes": MIB, "max_message_bytes": MIB},
        "compression": {"codec": "none"},
        "archive": {"roll_interval_secs": 1, "roll_size_bytes": "256KiB"},
        "buffer": {"max_bytes": "8MiB", "max_spool_bytes": "4MiB", "flush_bytes": "64KiB"},
    }
    daemon = make_daemon(pushed(more))
    accepted: list[bytes] = []
    with blocked_route(daemon, "", "a") as heal, Sender(port_of(daemon)) as sender:
        daemon.start()
        accepted += [value("a", -1)]
        sender.send(accepted)
        wait_until(lambda: daemon.metrics().total("uploads_failing") >= 1, 30, "an upload that fails")
        assert daemon.get("/readyz")[0] == 200
        for number in range(100_000):
            values = [value("a", number * 10 + index, padding=5_000) for index in range(10)]
            try:
                sender.send(values)
            except grpc.RpcError as error:
                refused: Any = error
                break
            accepted += values
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert "queue is full" in refused.details()
        wait_until(lambda: daemon.metrics().total("paused", reason="spool") == 1, 20, "the pause")
        code, body = daemon.get("/readyz")
        assert code == 503
        assert "pushes are refused" in body
        assert daemon.metrics().total("pushes_refused_total", reason="full") >= 1
        assert sum(map(len, accepted)) > 3 * MIB
        heal()
        wait_until(lambda: daemon.get("/readyz")[0] == 200, 60, "ready again")
        accepted.append(value("a", -2))
        assert sender.send(accepted[-1:]) == 1
    assert daemon.stop() == 0
    assert lines_of(daemon.archive()) == Counter(accepted)
    said = [line.get("event") for line in daemon.logs()]
    assert said.count("push_refused") == said.count("pushes_taken") == 1


# --- dead letters -----------------------------------------------------------------------------


def test_without_a_dlq_a_refused_file_is_kept_whole_with_its_reason_up_to_a_bound_and_then_held(
    make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1]: counted and visible, never dropped; senders are served all the while."""
    side = make_side("s3")
    daemon = make_daemon(with_store(pushed({"dlq": {"max_bytes": 300}}), side)).start()
    side.proxy.fail(s3_error(400, "EntityTooLarge"), when=uploads(side), times=2)
    with Sender(port_of(daemon)) as sender:
        first, second = ([value("a", n), value("a", n + 1)] for n in (0, 2))
        sender.send(first)
        wait_until(lambda: daemon.metrics().total("records_consumed_total") == 2, 20, "taken")
        daemon.roll()
        wait_until(lambda: daemon.metrics().total("dead_letters_total", outcome="kept") == 2, 20, "kept")
        assert daemon.get("/readyz")[0] == 200
        sender.send(second)
        wait_until(lambda: daemon.metrics().total("records_consumed_total") == 4, 20, "taken")
        daemon.roll()
        wait_until(lambda: "dlq.max_bytes" in daemon.get("/readyz")[1], 20, "the bound in /readyz")
        third = [value("a", 4)]
        assert sender.send(third) == 1
    kept = daemon.root / "spool" / "refused"
    (file,) = kept.glob("*.jsonl.zst")
    assert whole_frames(file).splitlines() == first
    (told,) = (json.loads(path.read_text()) for path in kept.glob("*.json"))
    assert (told["reason"], told["records"]) == ("too_large", 2)
    assert told["object_key"].startswith("a/")
    assert daemon.stop() == 0
    assert lines_of(side.archive()) == Counter(third)
    daemon.settings = merged(daemon.settings, {"dlq": {"max_bytes": "1MiB"}})
    daemon.start()
    assert daemon.stop() == 0
    assert lines_of(side.archive()) == Counter(second + third), "what was held is there after the restart"
    assert whole_frames(file).splitlines() == first


def test_with_a_dlq_the_values_of_a_refused_file_are_dead_letters(
    make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[Q1]: read back from the file, without key, headers, topic and offset."""
    side = make_side("s3")
    dlq = {"dlq": {"enabled": True, "mode": "file_only"}}
    daemon = make_daemon(with_store(pushed(dlq), side)).start()
    side.proxy.fail(s3_error(400, "InvalidObjectName"), when=uploads(side), times=1)
    values = [value("a", 0), b'{"_org_id":"a","x":"\xff"}', value("a", 2)]
    with Sender(port_of(daemon), "RouteBatch") as sender:
        sender.send(values[:1] + values[2:])
        wait_until(lambda: daemon.metrics().total("records_consumed_total") == 2, 20, "taken")
        daemon.roll()
        wait_until(lambda: daemon.metrics().total("dead_letters_total", outcome="file") == 2, 20, "written")
    assert daemon.stop() == 0
    (path,) = (daemon.root / "spool" / "dlq").glob("*.jsonl")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["value"].encode() for one in entries] == values[:1] + values[2:]
    for one in entries:
        assert one.keys() == {"reason", "detail", "object_key", "value", "topic", "partition", "offset"}
    assert side.archive() == {}


# --- the page ---------------------------------------------------------------------------------


def test_the_sender_of_the_page_gets_every_line_into_the_archive(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """`docs/grpc.md`: the program as it stands there, started before there is a listener."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "grpc.md").read_text(), re.S)
    wire_dir = ROOT / "archiver" / "sources" / "wire"
    (tmp_path / "transport_pb2.py").write_text((wire_dir / "transport_pb2.py").read_text())
    (tmp_path / "send.py").write_text(program)
    values = [value(f"org-{n % 3}", n) for n in range(2_500)]
    daemon = make_daemon(pushed({"grpc": {"max_queue_bytes": "128KiB", "max_message_bytes": "128KiB"}}))
    sender = subprocess.Popen(
        [sys.executable, "send.py"],
        cwd=tmp_path,
        env={**os.environ, "TARGET": f"127.0.0.1:{port_of(daemon)}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        daemon.start()
        said, _ = sender.communicate(b"\n".join(values), timeout=90)
    finally:
        sender.kill()
        sender.wait()
    assert said.decode().splitlines() == ["1000 accepted", "1000 accepted", "500 accepted"]
    assert sender.returncode == 0
    assert daemon.stop() == 0
    assert lines_of(daemon.archive()) == Counter(values)


def test_the_pages_call_by_hand_names_what_reflection_shows(make_daemon: MakeDaemon) -> None:
    """The `grpcurl` line: its method is the service's, and its body is a push of one record."""
    page = (ROOT / "docs" / "grpc.md").read_text()
    found = re.search(r"grpcurl -plaintext -d '([^']+)' \\\n +localhost:50051 (\S+)/(\w+)", page)
    assert found is not None
    body, service, method = found.groups()
    assert (service, method) == (SERVICE, "Push")
    request = json_format.Parse(body, wire.PushRequest())
    daemon = make_daemon(pushed()).start()
    with Sender(port_of(daemon)) as sender:
        call = sender.channel.unary_unary(f"/{service}/{method}", wire.PushRequest.SerializeToString, None)
        assert wire.PushResponse.FromString(call(request, timeout=60)).accepted == 1
    assert daemon.stop() == 0
    assert [file.lines for file in daemon.archive()["acme"]] == [[b'{"_org_id":"acme"}']]


# --- configurations ---------------------------------------------------------------------------


def config(name: str) -> dict[str, Any]:
    """One of the repository's configurations."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "config" / name).read_text())
    return loaded


def test_mesh_yaml_takes_pushes_into_its_store(make_daemon: MakeDaemon, make_side: MakeSide) -> None:
    """`config/mesh.yaml` as it is, but for addresses and the spool's place."""
    side = make_side("s3")
    here = {"grpc": {"listen": f"127.0.0.1:{free_port()}"}}
    settings = merged(with_store(config("mesh.yaml"), side), here)
    del settings["buffer"]["spool_dir"]
    daemon = make_daemon(settings).start()
    records = [(f"org-{n % 3}", value(f"org-{n % 3}", n)) for n in range(30)]
    with Sender(port_of(daemon)) as sender:
        assert sender.send([record for _, record in records]) == 30
    assert daemon.stop() == 0
    comparison = compare(by_org(records), side.archive())
    assert comparison.exact, comparison


def test_slim_yaml_archives_a_topic(kafka: KafkaServer, topic: str, make_daemon: MakeDaemon) -> None:
    """`config/slim.yaml` as it is, but for brokers, topic and places: one route, by topic alone."""
    kafka.create_topic(topic)
    values = [value(f"org-{n % 3}", n) for n in range(30)]
    kafka.produce(topic, values)
    settings = merged(
        config("slim.yaml"), {"kafka": {"brokers": kafka.bootstrap, "topics": [topic], "group_id": topic}}
    )
    del settings["buffer"]["spool_dir"], settings["archive"]["destination"]
    daemon = make_daemon(settings).start()
    wait_until(lambda: daemon.metrics().total("records_consumed_total") == 30, 20, "all taken")
    assert daemon.stop() == 0
    archive = daemon.archive()
    assert archive.keys() == {topic}
    assert lines_of(archive) == Counter(values)
    assert kafka.lag(topic, topic) == 0
