"""A store in memory that behaves: create-only, checks what it gets, and fails as its script says."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from archiver.domain.sealed import SealedFile
from archiver.errors import DamagedFileError, KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.ports import ProbeReport
from archiver.stores.sealed_file import open_sealed, read_range

Fault = StoreError | Literal["lost_answer", "wrong_size"] | None
"""One put's fate: the error it raises with nothing stored, `lost_answer` (stored, yet reported as a
network error), `wrong_size` (stored short, reported as `integrity`), None (works)."""

KEY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class MemoryObject:
    """An object as it is stored."""

    data: bytes
    metadata: Mapping[str, str]


def read_from_disk(sealed: SealedFile) -> bytes:
    """The sealed file's bytes; raises as `open_sealed`."""
    with open_sealed(sealed) as fd:
        return b"".join(read_range(fd, 0, sealed.size, sealed))


class MemoryStore:
    """`ports.Store` for unit tests and the simulation.

    `failures` scripts one put after the other, then all work; `decide`, asked where the script has ended,
    sees the file and the key. `read` fetches the bytes, from the disk unless told otherwise, and raises
    `DamagedFileError`. `objects` holds what is stored, `puts` counts calls; change `objects` to play
    another writer.
    """

    def __init__(
        self,
        failures: Iterable[Fault] = (),
        *,
        decide: Callable[[SealedFile, str], Fault] | None = None,
        read: Callable[[SealedFile], bytes] = read_from_disk,
        create_only: bool = True,
    ) -> None:
        self.objects: dict[str, MemoryObject] = {}
        self.puts = 0
        self.closed = False
        self._failures = iter(failures)
        self._decide = decide
        self._read = read
        self._create_only = create_only
        self._lock = threading.Lock()

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """See `ports.Store.put`."""
        with self._lock:
            self.puts += 1
            fault = next(self._failures, None)
        if fault is None and self._decide is not None:
            fault = self._decide(sealed, key)
        if isinstance(fault, StoreError):
            raise fault
        if len(key) > KEY_BYTES_MAX:
            raise RefusedError("key_invalid", f"the key has {len(key)} bytes, {KEY_BYTES_MAX} are allowed")
        data = self._read(sealed)
        if len(data) != sealed.size or zlib.crc32(data) != sealed.checksums.crc32:
            raise DamagedFileError(f"{sealed.path} is not what was sealed")
        self._store(sealed, key, data[:-1] if fault == "wrong_size" else data, metadata)
        if fault == "lost_answer":
            raise TransientStoreError("network", "the answer was lost")
        if fault == "wrong_size":
            raise TransientStoreError("integrity", f"{key} is short", whole_store=False)

    def _store(self, sealed: SealedFile, key: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Create the object, or find that it is ours already."""
        with self._lock:
            there = self.objects.get(key)
            if there is None:
                self.objects[key] = MemoryObject(data, {**metadata, "nonce": sealed.nonce})
            elif there.metadata.get("nonce") != sealed.nonce or len(there.data) != sealed.size:
                raise KeyTakenError(f"{key} holds another writer's object")

    def probe(self) -> ProbeReport:
        """See `ports.Store.probe`; fails as the script says, like a put."""
        with self._lock:
            fault = next(self._failures, None)
        if isinstance(fault, StoreError):
            raise fault
        return ProbeReport(create_only=self._create_only, detail="in memory")

    def close(self) -> None:
        """Remembers that it was closed."""
        self.closed = True
