"""The contract of `ports.Store`, run over every implementation ([S2]–[S4], [S6], [K4]).

To add a store, write `tests/contract/store_cases/<store>.py` with a list `CASES`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from archiver.domain.batch import Span, TopicPartition
from archiver.domain.keys import encode_segment
from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.stores.metadata import METADATA_BYTES_MAX, metadata_bytes, object_metadata
from tests.contract import store_cases
from tests.contract.store_case import OpenStore, Servers, StoreCase, make_sealed


def all_cases() -> list[StoreCase]:
    """The cases of every module in `store_cases`."""
    found: list[StoreCase] = []
    for module in pkgutil.iter_modules(store_cases.__path__):
        found += importlib.import_module(f"{store_cases.__name__}.{module.name}").CASES
    return found


def params() -> list[object]:
    """Cases as test parameters; those with a real server carry the mark that leaves them out."""
    marks = {True: [pytest.mark.servers], False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.needs_server]) for case in all_cases()]


@pytest.fixture(params=params())
def case(request: pytest.FixtureRequest) -> StoreCase:
    assert isinstance(request.param, StoreCase)
    return request.param


@pytest.fixture
def opened(case: StoreCase, tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    with case.open(tmp_path, servers) as opened:
        yield opened
        opened.store.close()


def put(opened: OpenStore, sealed: SealedFile, key: str | None = None) -> None:
    opened.store.put(sealed, key or str(sealed.key), object_metadata(sealed, "0.1.0"))


def archived(case: StoreCase, opened: OpenStore) -> list[str]:
    """Every key there is, without the probe's, which an upload may bring along."""
    every_key = opened.keys()
    return [key for key in every_key if key != case.probe_key]


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_a_put_file_is_there_whole_under_its_key(case: StoreCase, opened: OpenStore, tmp_path: Path) -> None:
    """[S2]"""
    sealed = make_sealed(tmp_path / "spool", random_bytes(100_000))
    put(opened, sealed)
    assert opened.read(str(sealed.key)) == random_bytes(100_000)
    assert archived(case, opened) == [str(sealed.key)]


def test_the_original_stays_until_the_caller_removes_it(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[S2]: only what is durable is removed, and not by the store."""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    put(opened, sealed)
    assert sealed.path.read_bytes() == b"frames"
    sealed.path.unlink()
    assert opened.read(str(sealed.key)) == b"frames"


def test_every_size_arrives_byte_for_byte(case: StoreCase, opened: OpenStore, tmp_path: Path) -> None:
    """Case c19: one byte, and one byte around every size at which the way of uploading changes."""
    for size in case.sizes:
        sealed = make_sealed(tmp_path / "spool", random_bytes(size), f"events/size/{size}")
        put(opened, sealed)
        assert opened.read(str(sealed.key)) == random_bytes(size), size


def test_a_second_put_of_the_same_file_finds_itself(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[K4]: our own upload whose answer was lost is a success; a copied file has no mark of ours."""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    put(opened, sealed)
    put(opened, sealed)
    assert archived(case, opened) == [str(sealed.key)]
    assert opened.read(str(sealed.key)) == b"frames"


@pytest.mark.parametrize("theirs", [b"theirs", b"our own", b"the same bytes, twice!"])
def test_another_writers_object_is_never_replaced(
    case: StoreCase, opened: OpenStore, tmp_path: Path, theirs: bytes
) -> None:
    """[K4], case c10: also where it is as long as ours, and where it holds the very same bytes."""
    first = make_sealed(tmp_path / "spool", theirs)
    put(opened, first)
    ours = b"the same bytes, twice!" if theirs.endswith(b"!") else b"our own"
    second = make_sealed(tmp_path / "spool", ours)
    for _ in range(2):  # nor does a second try take it for ours
        with pytest.raises(KeyTakenError):
            put(opened, second)
    assert opened.read(str(first.key)) == theirs
    assert second.path.read_bytes() == ours


def test_of_many_writers_of_one_key_exactly_one_wins(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[S3]: create-only is the store's own doing, so it holds between writers that race."""
    if not case.races:
        pytest.skip("its server lets racing creators both win")
    opened.store.probe()
    files = [make_sealed(tmp_path / "spool", b"writer %d" % n) for n in range(8)]

    def attempt(sealed: SealedFile) -> SealedFile | None:
        try:
            put(opened, sealed)
        except KeyTakenError:
            return None
        return sealed

    with ThreadPoolExecutor(8) as pool:
        winners = [won for won in pool.map(attempt, files) if won is not None]
    assert len(winners) == 1
    assert opened.read(str(files[0].key)) == winners[0].path.read_bytes()


def test_a_vanished_file_is_damaged_and_leaves_no_object(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[D10], case c35"""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    sealed.path.unlink()
    with pytest.raises(DamagedFileError):
        put(opened, sealed)
    assert archived(case, opened) == []


@pytest.mark.parametrize("damage", ["shorter", "longer", "other bytes"])
def test_a_changed_file_is_damaged_and_leaves_no_object(
    case: StoreCase, opened: OpenStore, tmp_path: Path, damage: str
) -> None:
    """[D10]: for one-piece uploads and for those in parts."""
    for size in (case.sizes[0] + 9, case.sizes[-1]):
        data = random_bytes(size)
        sealed = make_sealed(tmp_path / "spool", data)
        changed = {
            "shorter": data[:-1],
            "longer": data + b"x",
            "other bytes": bytes([data[0] ^ 1]) + data[1:],
        }
        sealed.path.write_bytes(changed[damage])
        with pytest.raises(DamagedFileError):
            put(opened, sealed)
        assert archived(case, opened) == []


def test_metadata_tells_what_the_object_holds(case: StoreCase, opened: OpenStore, tmp_path: Path) -> None:
    """[S4]"""
    if not case.keeps_metadata:
        pytest.skip("keeps no metadata")
    sealed = make_sealed(tmp_path / "spool", b"frames")
    put(opened, sealed)
    assert opened.metadata(str(sealed.key)) == {
        "records": "151",
        "raw_bytes": "30",
        "codec": "zstd",
        "archiver_version": "0.1.0",
        "nonce": sealed.nonce,
        "offsets": "events/3:100-250:151",
    }


def test_metadata_of_thousands_of_partitions_is_taken(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[S4]: what does not fit in 2 KB is left out and counted, and the store takes the rest."""
    if not case.keeps_metadata:
        pytest.skip("keeps no metadata")
    spans = {TopicPartition("events", n): Span(n, n + 5, 6) for n in range(3000)}
    sealed = make_sealed(tmp_path / "spool", b"frames", spans=spans)
    put(opened, sealed)
    kept = opened.metadata(str(sealed.key))
    assert metadata_bytes(kept) <= METADATA_BYTES_MAX
    assert len(kept["offsets"].split(",")) + int(kept["offsets_omitted"]) == 3000


STRANGE = [
    "a=b",
    "a+b",
    "a b",
    "a%b",
    "a%2Fb",
    "a#b",
    "a?b",
    "a:b",
    "a@b",
    "a&b",
    "a~b",
    "Zürich",
    "組織",
    "..",
    "a/b",
]


def test_strange_route_names_come_back_byte_for_byte(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[K5], cases c31 and c36: as the keys' listing shows them."""
    keys = []
    for value in STRANGE:
        sealed = make_sealed(
            tmp_path / "spool", value.encode(), f"events/{encode_segment(value)}/2026/10/29/03-0001"
        )
        put(opened, sealed)
        keys.append(str(sealed.key))
    assert archived(case, opened) == sorted(keys)
    for value, key in zip(STRANGE, keys, strict=True):
        assert opened.read(key) == value.encode()


def test_a_key_that_no_store_takes_is_refused_for_good(
    case: StoreCase, opened: OpenStore, tmp_path: Path
) -> None:
    """[S6], [Q1]: a refusal of the object itself is the only permanent answer."""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    with pytest.raises(RefusedError) as refused:
        put(opened, sealed, case.key_too_long)
    assert refused.value.reason == "key_invalid"
    assert archived(case, opened) == []


def test_a_store_that_is_away_heals_by_waiting(case: StoreCase, tmp_path: Path, servers: Servers) -> None:
    """[S6]: `put` and `probe` say so, as trouble of the whole store."""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    with case.unreachable(tmp_path, servers) as store:
        with pytest.raises(TransientStoreError):
            store.put(sealed, str(sealed.key), {})
        with pytest.raises(StoreError) as failed:
            store.probe()
        assert isinstance(failed.value, TransientStoreError)
        store.close()


def test_the_probe_shows_create_only_and_stays(case: StoreCase, opened: OpenStore) -> None:
    """[S3]: one reserved key, put create-only, which a second probe finds in place."""
    assert opened.store.probe().create_only is case.honours_create_only
    assert opened.store.probe().create_only is case.honours_create_only
    assert opened.keys() in ([case.probe_key], [])  # the store in memory needs none


def test_closing_twice_does_no_harm(opened: OpenStore) -> None:
    opened.store.close()
    opened.store.close()


def test_descriptors_are_given_back(case: StoreCase, opened: OpenStore, tmp_path: Path) -> None:
    """[B3]: neither a success nor a failure keeps a file open."""
    sealed = make_sealed(tmp_path / "spool", b"frames")
    put(opened, sealed)
    before = len(os.listdir("/proc/self/fd"))
    other = make_sealed(tmp_path / "spool", b"others")
    for n in range(20):
        with pytest.raises(KeyTakenError):
            put(opened, other)
        put(opened, make_sealed(tmp_path / "spool", b"more", f"events/fd/{n}"))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
