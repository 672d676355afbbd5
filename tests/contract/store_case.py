"""What the contract suite needs to know of a store: how to open one, and how to look into it from outside."""

from __future__ import annotations

import itertools
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from hashlib import md5
from pathlib import Path
from typing import TypeVar, cast

import google_crc32c

from archiver.domain.batch import Span, TopicPartition
from archiver.domain.sealed import Checksums, ObjectKey, SealedFile
from archiver.ports import Store

T = TypeVar("T")
_ids = itertools.count(1)


class Servers:
    """Servers of a test session, each started when first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[str, object] = {}

    def get(self, name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
        """The server of that name, started by `start()` unless it runs already."""
        if name not in self._running:
            self._running[name] = self._stack.enter_context(start())
        return cast(T, self._running[name])


@dataclass
class OpenStore:
    """A store under test, empty, and eyes that do not go through it.

    `read(key)` gives an object's bytes, None where there is none; `keys()` every key there is, the probe's
    too, without the destination's prefix; `metadata(key)` what the object carries.
    """

    store: Store
    read: Callable[[str], bytes | None]
    keys: Callable[[], list[str]]
    metadata: Callable[[str], Mapping[str, str]]


@dataclass(frozen=True)
class StoreCase:
    """One implementation in one set-up.

    `open` gives an empty store. `unreachable` gives one whose server or folder is away. `sizes` are sizes
    around which its way of uploading changes, in bytes. `races` false: its server is known to let two
    creators of one key both win. `honours_create_only` false: its server is known to replace objects on
    one of its ways of uploading, which the probe must notice.
    """

    name: str
    open: Callable[[Path, Servers], AbstractContextManager[OpenStore]]
    unreachable: Callable[[Path, Servers], AbstractContextManager[Store]]
    keeps_metadata: bool = True
    sizes: tuple[int, ...] = (1, 65_535, 65_536, 65_537)
    races: bool = True
    honours_create_only: bool = True
    key_too_long: str = "x" * 1025
    probe_key: str = ".dfe-archiver-probe"
    needs_server: bool = False
    spans: Mapping[TopicPartition, Span] = field(
        default_factory=lambda: {TopicPartition("events", 3): Span(100, 250, 151)}
    )


def make_sealed(folder: Path, data: bytes, key: str = "events/acme/0001", **changes: object) -> SealedFile:
    """A sealed file on disk holding `data`, with every checksum a store may want."""
    file_id = next(_ids)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_id}.sealed"
    path.write_bytes(data)
    values: dict[str, object] = {
        "file_id": file_id,
        "path": path,
        "key": ObjectKey(key, "3f9a", "jsonl.zst"),
        "size": len(data),
        "checksums": Checksums(
            crc32=zlib.crc32(data), crc32c=google_crc32c.value(data), md5=md5(data).digest()
        ),
        "records": 151,
        "raw_bytes": 5 * len(data),
        "codec": "zstd",
        "nonce": secrets.token_hex(16),
        "spans": {TopicPartition("events", 3): Span(100, 250, 151)},
    }
    return SealedFile(**{**values, **changes})  # type: ignore[arg-type]
