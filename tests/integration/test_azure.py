"""`az://` on Azurite, with faults in front of it ([S3]–[S7], [K4])."""

from __future__ import annotations

import random
import re
import secrets
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from archiver.domain.sealed import Checksums, SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, TransientStoreError
from archiver.stores.azure import AzureStore
from archiver.stores.metadata import object_metadata
from tests.contract.store_case import make_sealed
from tests.harness.azurite import Azurite
from tests.harness.fault_proxy import Answer, Drop, FaultProxy, LoseAnswer, Request, puts

pytestmark = pytest.mark.servers

MIB = 1 << 20
CHUNK_BYTES = 5 * MIB
PREFIX = "archives"
PAGE = Path(__file__).parents[2] / "docs" / "stores" / "azure.md"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    folder = tmp_path_factory.mktemp("azurite")
    with Azurite(folder, folder / "data") as server:
        yield server


@pytest.fixture
def container(azurite: Azurite) -> str:
    return azurite.create_container(f"c-{secrets.token_hex(6)}")


@pytest.fixture
def proxy(azurite: Azurite) -> Iterator[FaultProxy]:
    with FaultProxy(azurite.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(azurite: Azurite, proxy: FaultProxy, container: str) -> Iterator[AzureStore]:
    store = through(proxy, azurite, container, account_key=azurite.key)
    yield store
    store.close()


def through(proxy: FaultProxy, azurite: Azurite, container: str, **credential: str) -> AzureStore:
    endpoint = f"{proxy.endpoint}/{azurite.account}"
    return AzureStore(container, PREFIX, endpoint=endpoint, chunk_size=CHUNK_BYTES, **credential)  # type: ignore[arg-type]


def put(store: AzureStore, sealed: SealedFile) -> str:
    store.put(sealed, str(sealed.key), object_metadata(sealed, "0.1.0"))
    return f"{PREFIX}/{sealed.key}"


def small(folder: Path, key: str = "events/acme/0001") -> SealedFile:
    return make_sealed(folder, b"frames", key=key)


def large(folder: Path, key: str = "events/acme/0002") -> SealedFile:
    return make_sealed(folder, random.Random(7).randbytes(12 * MIB + 3), key=key)


Make = Callable[[Path], SealedFile]
BOTH = pytest.mark.parametrize("make", [small, large])


def lists_blocks(request: Request) -> bool:
    return request.query.get("comp") == "blocklist"


@BOTH
def test_an_upload_whose_answer_was_lost_is_found_to_be_ours(
    azurite: Azurite, container: str, proxy: FaultProxy, store: AzureStore, tmp_path: Path, make: Make
) -> None:
    """[K4]: the next attempt succeeds without a second object."""
    sealed = make(tmp_path)
    last = lists_blocks if make is large else puts
    proxy.fail(LoseAnswer(), when=last)
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    name = put(store, sealed)
    assert azurite.read(container, name) == sealed.path.read_bytes()
    assert azurite.names(container) == [name]


def test_a_cut_block_fails_the_attempt_and_leaves_nothing_to_be_seen(
    azurite: Azurite, container: str, proxy: FaultProxy, store: AzureStore, tmp_path: Path
) -> None:
    """[S2], [S5]"""
    sealed = large(tmp_path)
    proxy.fail(Drop(after_bytes=100_000), when=lambda r: r.query.get("comp") == "block")
    with pytest.raises(TransientStoreError) as raised:
        put(store, sealed)
    assert raised.value.kind == "network"
    assert azurite.names(container) == []
    name = put(store, sealed)
    assert azurite.read(container, name) == sealed.path.read_bytes()
    assert azurite.block_sizes(container, name) == [CHUNK_BYTES, CHUNK_BYTES, 2 * MIB + 3]


@BOTH
def test_half_of_all_puts_may_fail_and_all_arrives(
    azurite: Azurite, container: str, proxy: FaultProxy, store: AzureStore, tmp_path: Path, make: Make
) -> None:
    """Case c27: the store's own words; each put is a fresh attempt."""
    chance = random.Random(27)
    proxy.fail(Answer(503), when=lambda r: puts(r) and chance.random() < 0.5, times=None)
    sealed = make(tmp_path)
    for _ in range(400):
        try:
            name = put(store, sealed)
            break
        except TransientStoreError as error:
            assert error.kind == "throttled"
    assert azurite.read(container, name) == sealed.path.read_bytes()


def test_a_store_that_was_away_is_used_again_by_the_same_client(
    azurite: Azurite, container: str, proxy: FaultProxy, store: AzureStore, tmp_path: Path
) -> None:
    """[S6]"""
    put(store, small(tmp_path))
    proxy.go_away()
    sealed = large(tmp_path)
    with pytest.raises(TransientStoreError) as raised:
        put(store, sealed)
    assert (raised.value.kind, raised.value.whole_store) == ("network", True)
    proxy.come_back()
    assert azurite.read(container, put(store, sealed)) == sealed.path.read_bytes()


@BOTH
def test_a_missing_container_heals_when_it_is_made(
    azurite: Azurite, proxy: FaultProxy, tmp_path: Path, make: Make
) -> None:
    """[S6]"""
    name = f"late-{secrets.token_hex(6)}"
    store = through(proxy, azurite, name, account_key=azurite.key)
    sealed = make(tmp_path)
    for attempt in (store.probe, lambda: put(store, sealed)):
        with pytest.raises(TransientStoreError) as raised:
            attempt()
        assert raised.value.kind == "missing_bucket"
    azurite.create_container(name)
    assert azurite.read(name, put(store, sealed)) == sealed.path.read_bytes()


@BOTH
@pytest.mark.parametrize("way", ["connection_string", "account_key", "sas_token"])
def test_each_way_to_sign_in_works(
    azurite: Azurite, container: str, tmp_path: Path, way: str, make: Make
) -> None:
    """[S7]"""
    options = {
        "connection_string": {"connection_string": azurite.connection_string},
        "account_key": {"account_key": azurite.key, "endpoint": azurite.endpoint},
        "sas_token": {"sas_token": azurite.sas(container, "rcw"), "endpoint": azurite.endpoint},
    }
    store = AzureStore(container, PREFIX, chunk_size=CHUNK_BYTES, **options[way])  # type: ignore[arg-type]
    assert store.probe().create_only
    sealed = make(tmp_path)
    name = put(store, sealed)
    assert azurite.read(container, name) == sealed.path.read_bytes()
    with pytest.raises(KeyTakenError):
        put(store, replace(sealed, nonce="another"))


@pytest.mark.parametrize(("permissions", "lives_secs"), [("rl", 3600), ("rcw", -60)])
@BOTH
def test_a_sas_that_is_too_narrow_or_has_ended_says_so_and_heals(
    azurite: Azurite,
    container: str,
    proxy: FaultProxy,
    tmp_path: Path,
    make: Make,
    permissions: str,
    lives_secs: int,
) -> None:
    """[S6], case c28: a kind of its own, with the way out."""
    sas = azurite.sas(container, permissions, lives_secs)
    store = through(proxy, azurite, container, sas_token=sas)
    with pytest.raises(TransientStoreError) as raised:
        put(store, make(tmp_path))
    assert raised.value.kind == "access_denied"  # the service itself calls an ended one AuthenticationFailed
    assert "renew the signature" in str(raised.value)
    assert azurite.names(container) == []


def test_the_service_itself_refuses_bytes_of_another_checksum(
    azurite: Azurite, container: str, store: AzureStore, tmp_path: Path
) -> None:
    """[S4]: what is sent is the checksum that was sealed, not one of what was read for the upload."""
    sealed = small(tmp_path)
    wrong = replace(sealed, checksums=Checksums(crc32=sealed.checksums.crc32, md5=b"0" * 16))
    with pytest.raises(TransientStoreError) as raised:
        put(store, wrong)
    assert raised.value.kind == "integrity"
    assert azurite.names(container) == []


def test_a_damaged_large_file_is_noticed_before_its_blocks_are_listed(
    azurite: Azurite, container: str, proxy: FaultProxy, store: AzureStore, tmp_path: Path
) -> None:
    """[D10]"""
    sealed = large(tmp_path)
    data = bytearray(sealed.path.read_bytes())
    data[-1] ^= 1
    sealed.path.write_bytes(data)
    with pytest.raises(DamagedFileError):
        put(store, sealed)
    assert azurite.names(container) == []
    assert not [r for r in proxy.requests if lists_blocks(r)]


def test_an_upload_holds_little_of_the_file_in_memory(
    azurite: Azurite, container: str, tmp_path: Path
) -> None:
    """[B1]: blocks are read while they are sent."""
    store = AzureStore(container, PREFIX, endpoint=azurite.endpoint, account_key=azurite.key)
    data = random.Random(3).randbytes(64 * MIB)
    first, second = (make_sealed(tmp_path, data, key=f"events/acme/000{n}") for n in (1, 2))
    del data
    put(store, first)  # imports and buffers of the client
    tracemalloc.start()
    try:
        put(store, second)
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()


@BOTH
def test_the_blob_says_what_it_is(
    azurite: Azurite, container: str, store: AzureStore, tmp_path: Path, make: Make
) -> None:
    """[S4]: on both ways of uploading."""
    sealed = make(tmp_path)
    found = azurite.properties(container, put(store, sealed))
    assert found.content_settings.content_type == "application/x-ndjson"
    assert found.content_settings.content_encoding is None
    assert bytes(found.content_settings.content_md5) == sealed.checksums.md5
    assert found.metadata["nonce"] == sealed.nonce
    assert found.blob_type == "BlockBlob"


def test_a_dot_at_a_segments_end_keeps_two_tenants_apart(
    azurite: Azurite, container: str, store: AzureStore, tmp_path: Path
) -> None:
    """[K5]: no layer between us and the service may tidy the path."""
    names = [put(store, small(tmp_path, f"events/{tenant}/0001")) for tenant in ("acme", "acme.", "acme..")]
    assert len(set(names)) == 3
    assert azurite.names(container) == sorted(names)


def test_a_hanging_service_is_left_after_the_timeout(
    azurite: Azurite, container: str, tmp_path: Path
) -> None:
    """[S6]: a frozen server, not a closed port."""
    store = AzureStore(
        container, PREFIX, endpoint=azurite.endpoint, account_key=azurite.key, read_timeout_secs=0.5
    )
    sealed = small(tmp_path)
    azurite.server.freeze()
    try:
        started = time.monotonic()
        with pytest.raises(TransientStoreError) as raised:
            put(store, sealed)
        assert raised.value.kind == "timeout"
        assert time.monotonic() - started < 30
    finally:
        azurite.server.thaw()
    assert azurite.read(container, put(store, sealed)) == b"frames"


ACTION = {
    ("PUT", ""): "blobs/write",
    ("PUT", "block"): "blobs/write",
    ("PUT", "blocklist"): "blobs/write",
    ("HEAD", ""): "blobs/read",
}


def test_the_page_lists_the_actions_that_the_calls_need(
    proxy: FaultProxy, store: AzureStore, tmp_path: Path
) -> None:
    """Every call the store makes: probe, both ways of uploading, a taken key on both."""
    store.probe()
    for make in (small, large):
        sealed = make(tmp_path)
        put(store, sealed)
        with pytest.raises(KeyTakenError):
            put(store, replace(sealed, nonce="another"))
    needed = {ACTION[request.method, request.query.get("comp", "")] for request in proxy.requests}
    listed = set(re.findall(r"^\| `…/(blobs/[a-z/]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE))
    assert listed == needed
