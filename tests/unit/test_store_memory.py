"""The store in memory fails as its script says, and behaves between failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from archiver.domain.sealed import SealedFile
from archiver.errors import KeyTakenError, RefusedError, TransientStoreError
from archiver.stores.memory import Fault, MemoryStore
from tests.contract.store_case import make_sealed


def test_a_script_is_one_put_after_the_other(tmp_path: Path) -> None:
    sealed = make_sealed(tmp_path, b"frames")
    store = MemoryStore(
        [TransientStoreError("throttled", "told so"), None, RefusedError("too_large", "told so")]
    )
    with pytest.raises(TransientStoreError):
        store.put(sealed, "a", {})
    assert store.objects == {}
    store.put(sealed, "a", {})
    with pytest.raises(RefusedError):
        store.put(sealed, "b", {})
    store.put(sealed, "c", {})
    assert sorted(store.objects) == ["a", "c"]
    assert store.puts == 4


def test_a_lost_answer_leaves_the_object_that_the_next_put_finds(tmp_path: Path) -> None:
    """[K4]"""
    sealed = make_sealed(tmp_path, b"frames")
    store = MemoryStore(["lost_answer"])
    with pytest.raises(TransientStoreError):
        store.put(sealed, "a", {})
    assert store.objects["a"].data == b"frames"
    store.put(sealed, "a", {})


def test_a_wrong_size_is_never_durable_and_costs_the_key(tmp_path: Path) -> None:
    """[S4], [S9]"""
    sealed = make_sealed(tmp_path, b"frames")
    store = MemoryStore(["wrong_size"])
    with pytest.raises(TransientStoreError, match="integrity"):
        store.put(sealed, "a", {})
    with pytest.raises(KeyTakenError):
        store.put(sealed, "a", {})
    store.put(sealed, "b", {})
    assert store.objects["a"].data == b"frame"
    assert store.objects["b"].data == b"frames"


def test_a_decision_sees_the_file_and_the_key(tmp_path: Path) -> None:
    """For schedules that fail one route and not another."""

    def decide(sealed: SealedFile, key: str) -> Fault:
        return TransientStoreError("network", "told so") if key.startswith("acme/") else None

    store = MemoryStore(decide=decide, read=lambda sealed: b"frames")
    sealed = make_sealed(tmp_path, b"frames")
    sealed.path.unlink()
    with pytest.raises(TransientStoreError):
        store.put(sealed, "acme/1", {})
    store.put(sealed, "initech/1", {})
    assert list(store.objects) == ["initech/1"]
