"""`gs://` on fake-gcs-server, with faults in front of it ([S3]–[S7], [K4])."""

from __future__ import annotations

import random
import re
import secrets
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from archiver.domain.sealed import SealedFile
from archiver.errors import KeyTakenError, TransientStoreError
from archiver.stores.gcs import GcsStore
from archiver.stores.metadata import object_metadata
from tests.contract.store_case import make_sealed
from tests.harness.fakegcs import FakeGcs
from tests.harness.fault_proxy import FaultProxy, LoseAnswer, Request

pytestmark = pytest.mark.servers

MIB = 1 << 20
PREFIX = "archives"
PAGE = Path(__file__).parents[2] / "docs" / "stores" / "gcs.md"


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    with FakeGcs(tmp_path_factory.mktemp("fake-gcs")) as server:
        yield server


@pytest.fixture
def bucket(gcs: FakeGcs) -> str:
    return gcs.create_bucket(f"b-{secrets.token_hex(6)}")


@pytest.fixture
def proxy(gcs: FakeGcs) -> Iterator[FaultProxy]:
    with FaultProxy(gcs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, bucket: str) -> Iterator[GcsStore]:
    store = GcsStore(bucket, PREFIX, endpoint=proxy.endpoint, chunk_size=5 * MIB)
    yield store
    store.close()


def put(store: GcsStore, sealed: SealedFile) -> str:
    store.put(sealed, str(sealed.key), object_metadata(sealed, "0.1.0"))
    return f"{PREFIX}/{sealed.key}"


def small(folder: Path) -> SealedFile:
    return make_sealed(folder, b"frames")


def large(folder: Path) -> SealedFile:
    return make_sealed(folder, random.Random(7).randbytes(12 * MIB + 3))


def brings_bytes(request: Request) -> bool:
    return request.path.startswith("/upload/")


@pytest.mark.parametrize("make", [small, large])
def test_an_upload_whose_answer_was_lost_is_found_to_be_ours(
    gcs: FakeGcs, bucket: str, proxy: FaultProxy, store: GcsStore, tmp_path: Path, make: object
) -> None:
    """[K4]: the next attempt succeeds, on the single way by finding the object."""
    assert callable(make)
    sealed = make(tmp_path)
    store.probe()
    proxy.fail(LoseAnswer(), when=brings_bytes, times=None)
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    proxy.heal()
    name = put(store, sealed)
    assert gcs.read(bucket, name) == sealed.path.read_bytes()
    assert gcs.names(bucket) == [f"{PREFIX}/.dfe-archiver-probe", name]


def test_a_store_that_was_away_is_used_again_by_the_same_client(
    gcs: FakeGcs, bucket: str, proxy: FaultProxy, store: GcsStore, tmp_path: Path
) -> None:
    """[S6]"""
    put(store, make_sealed(tmp_path, b"before"))
    proxy.go_away()
    sealed = make_sealed(tmp_path, b"while away", key="events/acme/0002")
    with pytest.raises(TransientStoreError) as raised:
        put(store, sealed)
    assert (raised.value.kind, raised.value.whole_store) == ("network", True)
    proxy.come_back()
    assert gcs.read(bucket, put(store, sealed)) == b"while away"


@pytest.mark.parametrize("make", [small, large])
def test_a_missing_bucket_heals_when_it_is_made(gcs: FakeGcs, tmp_path: Path, make: object) -> None:
    """[S6]"""
    assert callable(make)
    name = f"late-{secrets.token_hex(6)}"
    store = GcsStore(name, PREFIX, endpoint=gcs.endpoint)
    sealed = make(tmp_path)
    with pytest.raises(TransientStoreError) as raised:
        store.probe()
    assert raised.value.kind == "missing_bucket"
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    gcs.create_bucket(name)
    assert gcs.read(name, put(store, sealed)) == sealed.path.read_bytes()


def test_an_upload_holds_little_of_the_file_in_memory(gcs: FakeGcs, bucket: str, tmp_path: Path) -> None:
    """[B1]: a chunk is read while it is sent."""
    store = GcsStore(bucket, PREFIX, endpoint=gcs.endpoint)
    data = random.Random(3).randbytes(64 * MIB)
    first, second = (make_sealed(tmp_path, data, key=f"events/acme/000{n}") for n in (1, 2))
    del data
    put(store, first)  # imports and buffers of the client
    tracemalloc.start()
    try:
        put(store, second)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_the_object_says_what_it_is(gcs: FakeGcs, bucket: str, store: GcsStore, tmp_path: Path) -> None:
    """[S4]: on both ways of uploading."""
    for sealed in (small(tmp_path), make_sealed(tmp_path, bytes(6 * MIB), key="events/acme/0002")):
        described = gcs.describe(bucket, put(store, sealed))
        assert described["contentType"] == "application/x-ndjson"
        assert "contentEncoding" not in described
        metadata = described["metadata"]
        assert isinstance(metadata, dict)
        assert (metadata["nonce"], metadata["records"]) == (sealed.nonce, "151")


PERMISSION = {
    ("POST", "/upload/storage/v1/b/BUCKET/o"): "storage.objects.create",
    ("PUT", "/upload/resumable/ID"): "storage.objects.create",
    ("GET", "/storage/v1/b/BUCKET/o/NAME"): "storage.objects.get",
}


def test_the_page_lists_the_permissions_that_the_calls_need(
    bucket: str, proxy: FaultProxy, store: GcsStore, tmp_path: Path
) -> None:
    """Every call the store makes: probe, both ways of uploading, a taken key on both."""
    store.probe()
    for sealed in (small(tmp_path), make_sealed(tmp_path, bytes(6 * MIB), key="events/acme/0002")):
        put(store, sealed)
        with pytest.raises(KeyTakenError):
            put(store, make_sealed(tmp_path, bytes(sealed.size), key=sealed.key.stem))
    calls = {(request.method, _kind(request, bucket)) for request in proxy.requests}
    needed = {PERMISSION[call] for call in calls}
    listed = set(re.findall(r"^\| `(storage\.[a-z]+\.[a-z]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE))
    assert listed == needed


def _kind(request: Request, bucket: str) -> str:
    path = request.path.replace(bucket, "BUCKET")
    if request.method == "PUT":
        return "/upload/resumable/ID"
    return re.sub(r"/o/.+", "/o/NAME", path)
