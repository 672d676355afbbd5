"""`file://`, on the spool's file system and on another one, and the store in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from archiver.domain.sealed import SealedFile
from archiver.errors import TransientStoreError
from archiver.ports import ProbeReport, Store
from archiver.stores.file import FileStore
from archiver.stores.memory import MemoryStore
from tests.contract.store_case import OpenStore, Servers, StoreCase

OTHER_FILE_SYSTEM = Path("/dev/shm")
"""A tmpfs on every Linux: another file system than a test's folder unless that is on a tmpfs too."""


def look_into(store: Store, root: Path) -> OpenStore:
    """A file store seen through the file system."""

    def read(key: str) -> bytes | None:
        path = root / key
        return path.read_bytes() if path.is_file() else None

    def keys() -> list[str]:
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def metadata(key: str) -> Mapping[str, str]:
        raise AssertionError(f"a file system keeps no metadata of {key}")

    return OpenStore(store, read, keys, metadata)


@contextmanager
def other_file_system() -> Iterator[Path]:
    """An empty folder on another file system than the tests' own."""
    folder = Path(tempfile.mkdtemp(prefix="dfe-archiver-test-", dir=OTHER_FILE_SYSTEM))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _same(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    root = tmp_path / "archive"
    yield look_into(FileStore(root), root)


@contextmanager
def _other(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    with other_file_system() as folder:
        yield look_into(FileStore(folder / "archive"), folder / "archive")


@contextmanager
def _other_named(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    with other_file_system() as folder:
        store = FileStore(folder / "archive", unnamed_copies=False)
        yield look_into(store, folder / "archive")


class InGroups:
    """A file store that is used as the uploads use it: in a group, and alone what did not get through."""

    def __init__(self, root: Path, spool: Path) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self._store = FileStore(root, spool=spool)

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        if self._store.put_group([(sealed, key)]) != [True]:
            self._store.put(sealed, key, metadata)

    def probe(self) -> ProbeReport:
        return self._store.probe()

    def close(self) -> None:
        self._store.close()


@contextmanager
def _grouped(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    root = tmp_path / "archive"
    yield look_into(InGroups(root, tmp_path / "spool"), root)


@contextmanager
def _grouped_no_folder(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    (tmp_path / "archive").write_bytes(b"")
    yield InGroups(tmp_path / "archive" / "below", tmp_path / "spool")


@contextmanager
def _no_folder(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    """A file where the archive's folder should be: also root cannot write there."""
    (tmp_path / "archive").write_bytes(b"")
    yield FileStore(tmp_path / "archive" / "below")


@contextmanager
def _memory(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    store = MemoryStore()
    yield OpenStore(
        store,
        read=lambda key: store.objects[key].data if key in store.objects else None,
        keys=lambda: sorted(store.objects),
        metadata=lambda key: store.objects[key].metadata,
    )


@contextmanager
def _memory_away(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    yield MemoryStore([TransientStoreError("network", "away")] * 10)


_NAME_TOO_LONG = "events/" + "x" * 300

CASES = [
    StoreCase("memory", _memory, _memory_away),
    StoreCase("file", _same, _no_folder, keeps_metadata=False, key_too_long=_NAME_TOO_LONG),
    StoreCase(
        "file-grouped", _grouped, _grouped_no_folder, keeps_metadata=False, key_too_long=_NAME_TOO_LONG
    ),
    StoreCase("file-copied", _other, _no_folder, keeps_metadata=False, key_too_long=_NAME_TOO_LONG),
    StoreCase(
        "file-copied-named", _other_named, _no_folder, keeps_metadata=False, key_too_long=_NAME_TOO_LONG
    ),
]
