"""`s3://` on a real server behind a proxy that fails as told ([S2]-[S6])."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, StoreError, TransientStoreError
from archiver.stores.metadata import object_metadata
from archiver.stores.s3 import S3Store
from tests.contract.store_case import make_sealed
from tests.contract.store_cases.s3 import MIB, PREFIX, s3_options, seaweed
from tests.harness.fault_proxy import CutAnswer, Delay, Drop, FaultProxy, LoseAnswer, Request, puts, s3_error
from tests.harness.process import SLACK_SECS
from tests.harness.seaweed import SeaweedFS

pytestmark = pytest.mark.servers

KEY = f"{PREFIX}/events/acme/0001-3f9a.jsonl.zst"
BIG = 16 * MIB
"""Four parts of 5 MiB, the last one shorter."""


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    with seaweed() as server:
        yield server


@pytest.fixture
def proxy(server: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def bucket(server: SeaweedFS) -> str:
    return server.create_bucket(f"faults-{secrets.token_hex(6)}")


@pytest.fixture
def store(server: SeaweedFS, proxy: FaultProxy, bucket: str) -> Iterator[S3Store]:
    store = S3Store(s3_options(server, bucket, endpoint=proxy.endpoint, read_timeout_secs=10))
    store.probe()
    yield store
    store.close()


def put(store: S3Store, sealed: SealedFile, **changes: Any) -> None:
    store.put(sealed, changes.get("key", str(sealed.key)), object_metadata(sealed, "0.1.0"))


def archive(store: S3Store, sealed: SealedFile, attempts_max: int = 200) -> int:
    """Try until it is durable, as the upload pool does; returns how many attempts it took."""
    for attempt in range(1, attempts_max + 1):
        try:
            put(store, sealed)
        except TransientStoreError:
            continue
        return attempt
    raise AssertionError(f"not durable after {attempts_max} attempts")


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def parts(request: Request) -> bool:
    return "partNumber" in request.query


def completions(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


def test_an_upload_cut_in_the_middle_leaves_nothing_and_starts_again_from_the_first_byte(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path
) -> None:
    """[S2], [S5]: whole and in parts; no object, no parts, and the next attempt sends all of it."""
    for size, when in ((MIB, puts), (BIG, parts)):
        sealed = make_sealed(tmp_path, random_bytes(size), f"events/acme/{size}")
        proxy.fail(Drop(after_bytes=size // 10), when)
        with pytest.raises(TransientStoreError) as failed:
            put(store, sealed)
        assert failed.value.kind == "network"
        assert server.read(bucket, f"{PREFIX}/{sealed.key}") is None
        assert server.uploads(bucket) == []
        put(store, sealed)
        assert server.read(bucket, f"{PREFIX}/{sealed.key}") == random_bytes(size)


def test_a_lost_answer_is_found_without_sending_the_bytes_again(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path
) -> None:
    """[K4]: the upload succeeded, its answer did not arrive."""
    sealed = make_sealed(tmp_path, b"frames")
    proxy.fail(LoseAnswer(), puts)
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    before = len(proxy.seen("PUT"))
    put(store, sealed)
    assert len(proxy.seen("PUT")) == before
    assert server.read(bucket, KEY) == b"frames"


@pytest.mark.parametrize("fault", [LoseAnswer(), CutAnswer(after_bytes=20)], ids=["lost", "cut"])
def test_a_completion_whose_answer_is_lost_is_looked_up_at_once(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path, fault: Any
) -> None:
    """[K4]: a gigabyte is not sent twice for one lost answer."""
    sealed = make_sealed(tmp_path, random_bytes(BIG))
    proxy.fail(fault, completions)
    put(store, sealed)
    assert len(proxy.seen("PUT", "partNumber")) == 4
    assert server.read(bucket, KEY) == random_bytes(BIG)
    assert server.uploads(bucket) == []


def test_a_throttled_completion_brings_the_same_file_later(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path
) -> None:
    """Case c03: durable only once the store says so, and nothing is left of the first attempt."""
    sealed = make_sealed(tmp_path, random_bytes(BIG))
    proxy.fail(s3_error(503, "SlowDown"), completions)
    with pytest.raises(TransientStoreError) as failed:
        put(store, sealed)
    assert failed.value.kind == "throttled"
    assert server.uploads(bucket) == []
    assert archive(store, sealed) == 1
    assert server.read(bucket, KEY) == random_bytes(BIG)


def test_with_half_of_all_puts_refused_every_file_arrives_once(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path
) -> None:
    """Case c27: several uploads at once, small ones and ones in parts."""
    rng = random.Random(27)
    proxy.fail(s3_error(503, "SlowDown"), lambda r: puts(r) and rng.random() < 0.5, times=None)
    sizes = [100, 2 * MIB, 7 * MIB, 300, 5 * MIB + 1, 1]
    files = [make_sealed(tmp_path, random_bytes(size), f"events/c27/{n}") for n, size in enumerate(sizes)]
    with ThreadPoolExecutor(3) as pool:
        attempts = list(pool.map(lambda sealed: archive(store, sealed), files))
    assert max(attempts) > 1
    for sealed, size in zip(files, sizes, strict=True):
        assert server.read(bucket, f"{PREFIX}/{sealed.key}") == random_bytes(size)
    assert len(server.keys(bucket, f"{PREFIX}/events/")) == len(files)
    assert server.uploads(bucket) == []


def test_a_store_that_goes_away_in_the_middle_is_cleaned_up_when_it_is_back(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path
) -> None:
    """[S5], [S6]: the abort fails with it; the parts are removed after the next success."""
    sealed = make_sealed(tmp_path, random_bytes(BIG))
    proxy.fail(Delay(1.0), parts, times=None)
    leaving = threading.Timer(0.5, proxy.go_away)
    leaving.start()
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    leaving.join()
    for _ in range(3):
        with pytest.raises(TransientStoreError) as failed:
            put(store, sealed)
        assert failed.value.kind == "network"
    proxy.heal()
    proxy.come_back()
    put(store, sealed)
    assert server.read(bucket, KEY) == random_bytes(BIG)
    assert server.uploads(bucket) == []


@pytest.mark.parametrize("step", ["first", "last"])
def test_a_file_that_changes_while_it_is_sent_in_parts_becomes_no_object(
    server: SeaweedFS, proxy: FaultProxy, bucket: str, store: S3Store, tmp_path: Path, step: str
) -> None:
    """[D10], [S4]: each part is sound by itself, the whole is not what was sealed."""
    sealed = make_sealed(tmp_path, random_bytes(BIG))
    at = 10 if step == "first" else BIG - 10
    with sealed.path.open("r+b") as handle:
        handle.seek(at)
        handle.write(b"changed")
    with pytest.raises(DamagedFileError):
        put(store, sealed)
    assert server.keys(bucket, f"{PREFIX}/events/") == []
    assert server.uploads(bucket) == []


def test_a_missing_bucket_heals_once_it_is_created(
    server: SeaweedFS, proxy: FaultProxy, tmp_path: Path
) -> None:
    """[S6]: whole and in parts."""
    name = f"later-{secrets.token_hex(6)}"
    store = S3Store(s3_options(server, name, endpoint=proxy.endpoint))
    files = [make_sealed(tmp_path, random_bytes(size), f"events/{size}") for size in (10, BIG)]
    for sealed in files:
        with pytest.raises(TransientStoreError) as failed:
            put(store, sealed)
        assert failed.value.kind == "missing_bucket"
    server.create_bucket(name)
    for sealed in files:
        put(store, sealed)
        assert server.read(name, f"{PREFIX}/{sealed.key}") == sealed.path.read_bytes()


@pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
def test_wrong_credentials_are_retried_and_never_shown(
    server: SeaweedFS, bucket: str, tmp_path: Path, wrong: str
) -> None:
    """[S6], [S7], case c32: a process of its own at level debug, against a server that checks signatures."""
    secret = "wrong-secret-" + secrets.token_hex(12)
    credentials = {"access_key_id": server.access_key_id, "secret_access_key": secret, "session_token": None}
    if wrong == "access_key_id":
        credentials["access_key_id"] = "nobody" + secrets.token_hex(8)
    script = textwrap.dedent(f"""
        import logging, sys
        from pathlib import Path
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
        from archiver.errors import StoreError
        from archiver.stores.s3 import S3Store
        from archiver.stores.s3_client import S3Options
        from tests.contract.store_case import make_sealed
        options = S3Options({bucket!r}, endpoint={server.endpoint!r}, **{credentials!r})
        store = S3Store(options, emit=print)
        for size in (10, 9 * 1024 * 1024):
            for _ in range(2):
                try:
                    store.put(make_sealed(Path({str(tmp_path)!r}), bytes(size)), "k", {{}})
                except StoreError as error:
                    print(type(error).__name__, error, repr(error), options, store, vars(store))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    output = done.stdout + done.stderr
    assert output.count("TransientStoreError credentials") == 4
    assert "DEBUG:urllib3" in output, "the log is at level debug"
    assert secret not in output


def test_a_file_of_200_mib_is_sent_in_bounded_memory(server: SeaweedFS, bucket: str, tmp_path: Path) -> None:
    """Case c19, and the memory formula of `s3.py`: four parts in flight hold no part."""
    block = random_bytes(4 * MIB)
    sealed = make_sealed(tmp_path, b"".join(n.to_bytes(8, "big") + block[8:] for n in range(50)))
    del block
    store = S3Store(s3_options(server, bucket, multipart_chunk_bytes=8 * MIB))
    store.probe()
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    put(store, sealed)
    done.set()
    watcher.join()
    assert peak[0] - before < 24 * MIB
    described = server.client.head_object(Bucket=bucket, Key=KEY)
    assert described["ContentLength"] == 200 * MIB
    assert server.read(bucket, KEY) == sealed.path.read_bytes()


def test_a_hanging_store_gives_the_worker_back_in_time(
    server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    """[S6]: a frozen server keeps its connections and says nothing; thawed, everything goes on."""
    store = S3Store(s3_options(server, bucket, read_timeout_secs=1))
    store.probe()
    sealed = make_sealed(tmp_path, b"frames")
    server.server.freeze()
    try:
        began = time.monotonic()
        with pytest.raises(StoreError) as failed:
            put(store, sealed)
        assert time.monotonic() - began < 10 + SLACK_SECS
    finally:
        server.server.thaw()
    assert isinstance(failed.value, TransientStoreError)
    assert failed.value.kind == "timeout"
    archive(store, sealed)
    assert server.read(bucket, KEY) == b"frames"
