"""Cases from the field: object stores that fail, refuse, lie, go away and come back (c27 to c30, c33)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.harness.daemon import Daemon, merged, wait_until
from tests.harness.fault_proxy import Answer, ChangeAnswer, Drop, Gate, Request, s3_error
from tests.harness.kafka import KafkaServer
from tests.integration.cases import Load, assert_stored, caught_up, settings_for, value
from tests.integration.conftest import MakeDaemon
from tests.integration.store_sides import (
    MakeSide,
    SeaweedSide,
    StoreSide,
    uploads,
    with_store,
)

STORES = ("s3", "gs", "az")
SMALL = {"archive": {"roll_interval_secs": 0.5}, "buffer": {"flush_age_secs": 0.5}}


def readiness(daemon: Daemon) -> str:
    """The body of `/readyz` while it is not ready, else nothing; also before anybody listens."""
    try:
        code, body = daemon.get("/readyz")
    except OSError:
        return ""
    return body if code == 503 else ""


def nothing_committed(kafka: KafkaServer, topic: str, group: str | None = None) -> bool:
    """Whether every record would be read again."""
    return not any(kafka.committed(group or topic, topic).values())


def wait_for_reason(daemon: Daemon, words: str) -> None:
    """Wait until `/readyz` says these words."""
    wait_until(lambda: words in readiness(daemon), 25, f"{words} in /readyz")


class OnEveryStore:
    """A daemon for each kind of store, each in a group of its own on the one topic, not started."""

    def __init__(
        self, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide, **options: bool
    ) -> None:
        self._kafka, self._topic = kafka, topic
        self.sides = {scheme: make_side(scheme, **options) for scheme in STORES}
        self.daemons = {}
        for scheme, side in self.sides.items():
            own_group = merged(SMALL, {"kafka": {"group_id": self.group(scheme)}})
            settings = with_store(settings_for(kafka, topic, own_group), side)
            self.daemons[scheme] = make_daemon(settings, name=scheme)

    def group(self, scheme: str) -> str:
        """The group of a store's daemon."""
        return f"{self._topic}-{scheme}"

    def start(self) -> None:
        """Start them all and wait until each is ready."""
        for daemon in self.daemons.values():
            daemon.launch()
        for daemon in self.daemons.values():
            daemon.wait_ready()

    def nothing_committed(self) -> bool:
        """Whether no group has committed anything."""
        return all(nothing_committed(self._kafka, self._topic, self.group(scheme)) for scheme in STORES)

    def finish(self, records: list[tuple[str, bytes]], caught_up_secs: float) -> None:
        """Wait until all is committed, stop, and compare each store with what was produced."""
        for scheme, side in self.sides.items():
            caught_up(self._kafka, self._topic, caught_up_secs, group=self.group(scheme))
            self.daemons[scheme].wait_ready(5)
            assert self.daemons[scheme].stop() == 0
            assert_stored(self._topic, records, side.archive())
            assert side.leftovers() == []


@pytest.fixture
def on_every_store(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> Callable[..., OnEveryStore]:
    return lambda **options: OnEveryStore(kafka, topic, make_daemon, make_side, **options)


MakeAll = Callable[..., OnEveryStore]


def test_c27_with_half_of_all_puts_refused_everything_arrives_once(
    kafka: KafkaServer, topic: str, on_every_store: MakeAll
) -> None:
    """[S6]: 503 for every second upload, at random, while input goes on; retries are counted."""
    kafka.create_topic(topic, 2)
    every = on_every_store()
    every.start()
    rng = random.Random(27)
    for side in every.sides.values():
        brings = uploads(side)
        side.proxy.fail(side.busy(), when=lambda r, b=brings: b(r) and rng.random() < 0.5, times=None)  # type: ignore[misc]
    with Load(kafka, topic, 2, orgs=6, per_sec=500) as load:
        for daemon in every.daemons.values():
            wait_until(partial(retries_of_at_least, daemon, "throttled", 10), 30, "ten retries")
        load.stop()
    for side in every.sides.values():
        side.proxy.heal()  # an unlucky file waits up to a minute for its next turn
    every.finish(load.records, 70)


def retries_of_at_least(daemon: Daemon, kind: str, number: int) -> bool:
    """Whether so many attempts have failed for a reason."""
    return daemon.metrics().total("upload_retries_total", kind=kind) >= number


def test_c28_a_denied_store_is_told_by_readiness_and_gets_everything_when_allowed(
    kafka: KafkaServer, topic: str, on_every_store: MakeAll
) -> None:
    """[S6], [O2]: denied while one file waits: soon not ready, with the reason; allowed: all there."""
    kafka.create_topic(topic)
    every = on_every_store()
    every.start()
    for side in every.sides.values():
        side.proxy.fail(side.denied(), when=side.brings_bytes, times=None)
    records = [("a", value("a", n)) for n in range(100)]
    kafka.produce(topic, [record for _, record in records])
    for daemon in every.daemons.values():
        wait_for_reason(daemon, "access_denied")
        assert daemon.get("/healthz")[0] == 200
    assert every.nothing_committed()
    for side in every.sides.values():
        assert side.archive_keys() == []
        side.proxy.heal()
    every.finish(records, 25)


def test_a_bucket_that_is_missing_at_start_is_waited_for(
    kafka: KafkaServer, topic: str, on_every_store: MakeAll
) -> None:
    """[S6], [O2]: readiness says what is missing until somebody creates it."""
    kafka.create_topic(topic)
    every = on_every_store(create=False)
    records = [("a", value("a", n)) for n in range(100)]
    kafka.produce(topic, [record for _, record in records])
    for daemon in every.daemons.values():
        daemon.launch()
    for daemon in every.daemons.values():
        wait_for_reason(daemon, "missing_bucket")
    assert every.nothing_committed()
    for side in every.sides.values():
        side.create()
    for daemon in every.daemons.values():
        daemon.wait_ready(15)
    every.finish(records, 30)


def test_an_outage_with_input_going_on_loses_nothing(
    kafka: KafkaServer, topic: str, on_every_store: MakeAll
) -> None:
    """[S6], [B4]: the outage is told once, and so is its end."""
    kafka.create_topic(topic, 2)
    every = on_every_store()
    every.start()
    with Load(kafka, topic, 2, orgs=4, per_sec=200) as load:
        time.sleep(2)
        for side in every.sides.values():
            side.proxy.go_away()
        for daemon in every.daemons.values():
            wait_for_reason(daemon, "the store does not take files")
        time.sleep(5)
        for daemon in every.daemons.values():
            assert "the store does not take files" in readiness(daemon)
            assert daemon.get("/healthz")[0] == 200
        for side in every.sides.values():
            side.proxy.come_back()
        load.stop()
    for scheme, daemon in every.daemons.items():
        caught_up(kafka, topic, 40, group=every.group(scheme))
        assert daemon.metrics().total("store_outages_total") == 1
    every.finish(load.records, 40)
    for daemon in every.daemons.values():
        lines = [entry for entry in daemon.logs() if entry["level"] in ("warning", "error")]
        assert len(lines) < 40, "an outage fills the log"


@contextmanager
def watched_listing(side: StoreSide) -> Iterator[dict[str, set[bytes]]]:
    """Reads every archive file there is, again and again; yields all contents each key has ever had."""
    seen: dict[str, set[bytes]] = {}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            for key, content in side.objects().items():
                seen.setdefault(key, set()).add(content)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


@pytest.mark.parametrize("scheme", STORES)
def test_an_upload_that_is_cut_shows_no_partial_object_at_any_moment(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S2], [S5]: whole ones and ones in parts, cut in the middle of their bytes several times."""
    kafka.create_topic(topic)
    side = make_side(scheme)
    more = {"compression": {"codec": "none"}, "archive": {"roll_interval_secs": 1}}
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()
    brings = uploads(side)
    side.proxy.fail(Drop(after_bytes=100_000), when=brings, times=4)
    side.proxy.fail(Drop(after_bytes=1_000_000), when=lambda r: brings(r) and in_parts(r), times=3)
    records = [("small", value("small", n, 500)) for n in range(1_000)]
    records += [("large", value("large", n, 600_000)) for n in range(20)]
    with watched_listing(side) as seen:
        kafka.produce(topic, [record for _, record in records])
        caught_up(kafka, topic, 60)
    assert daemon.metrics().total("upload_retries_total", kind="network") >= 2
    assert daemon.stop() == 0
    final = side.objects()
    assert {key: {content} for key, content in final.items()} == {
        key: seen[key] | {final[key]} for key in final
    }
    assert set(seen) <= set(final)
    assert_stored(topic, records, side.archive())
    assert side.leftovers() == []


def in_parts(request: Request) -> bool:
    return "partNumber" in request.query or request.query.get("comp") == "block"


@pytest.mark.parametrize("scheme", STORES)
def test_a_store_that_reports_another_checksum_never_counts_as_durable(
    scheme: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S4]: nothing is committed while it lies; afterwards all is there, its own objects untouched."""
    kafka.create_topic(topic)
    side = make_side(scheme)
    daemon = make_daemon(with_store(settings_for(kafka, topic, SMALL), side)).start()
    side.proxy.fail(ChangeAnswer(side.changed_checksum), when=uploads(side), times=None)
    records = [("a", value("a", n)) for n in range(100)]
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: daemon.metrics().total("upload_retries_total", kind="integrity") >= 1, 15)
    before = side.objects()
    assert before, "the store keeps what it lies about"
    assert nothing_committed(kafka, topic)
    side.proxy.heal()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    after = side.objects()
    assert {key: after[key] for key in before} == before
    assert_stored(topic, records, side.archive(), exact=False)


def test_a_store_that_reports_another_size_gets_the_file_again_under_another_key(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S4], [S9], [K4]: a look at the object disagrees too; it is neither believed nor replaced."""
    kafka.create_topic(topic, config={"max.message.bytes": str(32 << 20)})
    side = make_side("s3")
    more = {"compression": {"codec": "none"}, "archive": {"roll_interval_secs": 1}}
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()
    looked_at: list[str] = []

    def at_the_first(request: Request) -> bool:
        if request.method != "HEAD" or ".jsonl" not in request.path:
            return False
        looked_at.append(request.path)
        return request.path == looked_at[0]

    def of_another(request: Request) -> bool:
        return bool(looked_at) and ".jsonl" in request.path and request.path != looked_at[0]

    again = Gate()
    side.proxy.fail(ChangeAnswer(one_byte_less), when=at_the_first, times=None)
    side.proxy.fail(again, when=of_another, times=None)
    records = [("large", value("large", 0, 7_000_000))]  # in parts: looked at afterwards
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: daemon.metrics().total("upload_retries_total", kind="integrity") == 1, 20)
    assert nothing_committed(kafka, topic)
    again.open()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    first, second = side.objects().values()
    assert first == second
    assert_stored(topic, records, side.archive(), exact=False)
    assert side.leftovers() == []


def one_byte_less(answer: Answer) -> Answer:
    headers = {name.lower(): text for name, text in answer.headers.items()}
    if answer.status != 200:
        return answer
    return Answer(200, b"", {**headers, "content-length": str(int(headers["content-length"]) - 1)})


def test_c29_expired_credentials_heal_with_the_shared_file_without_a_restart(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide, tmp_path: Any
) -> None:
    """[S7]: the SDK's own chain; ExpiredToken after three uploads, until the file has other credentials."""
    kafka.create_topic(topic)
    side = make_side("s3")
    assert isinstance(side, SeaweedSide)
    shared = tmp_path / "credentials"
    first, second = side.server.credentials

    def write(credentials: tuple[str, str]) -> None:
        text = "[archive]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format(*credentials)
        shared.write_text(text)

    write(first)
    chain = {"AWS_SHARED_CREDENTIALS_FILE": str(shared), "AWS_PROFILE": "archive"}
    settings = with_store(settings_for(kafka, topic, SMALL), side, access_key_id=None, secret_access_key=None)
    daemon = make_daemon(settings, env=chain).start()
    done: list[str] = []

    def expired(request: Request) -> bool:
        if f"Credential={first[0]}/" not in request.headers.get("authorization", ""):
            return False
        if request.method == "PUT" and ".jsonl" in request.path:
            done.append(request.path)
        return len(done) > 3

    side.proxy.fail(s3_error(400, "ExpiredToken", "The provided token has expired."), expired, times=None)
    records = []
    for n in range(6):
        records.append((f"org-{n}", value(f"org-{n}", n)))
        kafka.produce(topic, [records[-1][1]])
        time.sleep(0.3)
    wait_until(lambda: len(side.archive_keys()) == 3, 10, "three uploads")
    wait_until(lambda: daemon.metrics().total("upload_retries_total", kind="credentials") >= 2, 20)
    pid = daemon.pid
    write(second)
    caught_up(kafka, topic, 60)
    assert daemon.pid == pid
    assert all(secret not in daemon.output() for _, secret in (first, second))
    assert daemon.stop() == 0
    assert_stored(topic, records, side.archive())


def test_credentials_come_from_the_environment_where_the_settings_have_none(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S7]: `AWS_ACCESS_KEY_ID` and the rest, with the region."""
    kafka.create_topic(topic)
    side = make_side("s3")
    assert isinstance(side, SeaweedSide)
    options: dict[str, Any] = dict.fromkeys(("access_key_id", "secret_access_key", "region"))
    chain = {
        "AWS_ACCESS_KEY_ID": side.server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": side.server.secret_access_key,
        "AWS_REGION": "eu-west-3",
    }
    daemon = make_daemon(with_store(settings_for(kafka, topic, SMALL), side, **options), env=chain).start()
    records = [("a", value("a", n)) for n in range(10)]
    kafka.produce(topic, [record for _, record in records])
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert "/eu-west-3/s3/aws4_request" in side.proxy.requests[-1].headers["authorization"]
    assert_stored(topic, records, side.archive())


CHECKSUM_HEADERS = ("x-amz-checksum-crc32", "x-amz-sdk-checksum-algorithm", "x-amz-trailer")


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "XAmzContentSHA256Mismatch")],
)
def test_c30_a_store_that_rejects_checksum_headers_is_told_which_option_makes_it_work(
    status: int, code: str, kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S8]: readiness names `s3.checksum`; with it set, files arrive whole and in parts."""
    kafka.create_topic(topic)
    side = make_side("s3")

    def has_checksum(request: Request) -> bool:
        return any(name in request.headers for name in CHECKSUM_HEADERS)

    side.proxy.fail(s3_error(status, code, "Unsupported header"), when=has_checksum, times=None)
    records = [("small", value("small", n)) for n in range(100)]
    records += [("large", value("large", n, 700_000)) for n in range(10)]
    kafka.produce(topic, [record for _, record in records])
    more = merged(SMALL, {"compression": {"codec": "none"}, "archive": {"roll_interval_secs": 2}})
    settings = with_store(settings_for(kafka, topic, more), side)
    daemon = make_daemon(merged(settings, {"shutdown_timeout_secs": 1})).launch()
    wait_for_reason(daemon, "s3.checksum")
    wait_until(lambda: "s3.checksum: none" in daemon.output(), 10, "the way out in the log")
    assert daemon.stop() == 0
    assert nothing_committed(kafka, topic)
    daemon.settings["s3"]["checksum"] = "none"
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert side.leftovers() == []
    assert_stored(topic, records, side.archive())


def test_c33_kills_at_random_moments_leave_only_whole_objects(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S2], [D7]: every object passes its codec's own test after each kill; at the end nothing is missing."""
    kafka.create_topic(topic, 2)
    side = make_side("s3")
    more = {
        "kafka": {"session_timeout_ms": 2_000, "group_instance_id": topic},
        "archive": {"roll_interval_secs": 0.2},
        "buffer": {"flush_age_secs": 0.1},
    }
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side))
    rng = random.Random(33)
    with Load(kafka, topic, 2, orgs=5, per_sec=1_000) as load:
        for _ in range(5):
            daemon.start()
            time.sleep(0.2 + rng.random())
            daemon.kill()
            side.archive()
        load.stop()
    daemon.start()
    caught_up(kafka, topic, 60)
    assert daemon.stop() == 0
    assert side.archive_keys()
    assert_stored(topic, load.records, side.archive(), exact=False)
    assert not list((daemon.root / "spool").rglob("*.jsonl*"))


def test_c02_an_object_that_a_store_denies_once_is_missing_after_no_restart(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[D1], [S6]: on az://, beside s3://: the second object is denied, a stop comes in the middle of it."""
    kafka.create_topic(topic)
    side = make_side("az")
    more = merged(SMALL, {"shutdown_timeout_secs": 3})
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()
    side.proxy.fail(side.denied(), when=lambda r: r.method == "PUT" and "/b/" in r.path, times=None)
    records = [(org, value(org, n)) for n, org in enumerate("abc")]
    for _, record in records:
        kafka.produce(topic, [record])
        time.sleep(0.3)
    wait_until(lambda: len(side.archive_keys()) == 2, 15, "a and c")
    wait_until(lambda: kafka.committed(topic, topic) == {0: 1}, 10, "a commit of the first")
    assert daemon.stop() == 0
    assert kafka.committed(topic, topic) == {0: 1}
    side.proxy.heal()
    daemon.start()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert_stored(topic, records, side.archive(), exact=False)


def test_c03_a_throttled_block_list_brings_the_same_blob_later_and_the_commit_then(
    kafka: KafkaServer, topic: str, make_daemon: MakeDaemon, make_side: MakeSide
) -> None:
    """[S5], [S6]: on az://, beside CompleteMultipartUpload on s3://, for a file closed by age."""
    kafka.create_topic(topic, config={"max.message.bytes": str(32 << 20)})
    side = make_side("az")
    more = {"compression": {"codec": "none"}, "archive": {"roll_interval_secs": 1}}
    daemon = make_daemon(with_store(settings_for(kafka, topic, more), side)).start()

    def lists_blocks(request: Request) -> bool:
        return request.query.get("comp") == "blocklist" and ".jsonl" in request.path

    side.proxy.fail(side.busy(), when=lists_blocks, times=None)
    records = [("a", value("a", 0, 7_000_000))]  # one record is one file, whenever the interval ends
    kafka.produce(topic, [record for _, record in records])
    wait_until(lambda: retries_of_at_least(daemon, "throttled", 2), 20, "two refused block lists")
    assert nothing_committed(kafka, topic)
    assert side.archive_keys() == []
    side.proxy.heal()
    caught_up(kafka, topic)
    assert daemon.stop() == 0
    assert len(side.archive_keys()) == 1
    assert_stored(topic, records, side.archive())
