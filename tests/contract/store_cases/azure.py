"""`az://`, on Azurite."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archiver.ports import Store
from archiver.stores.azure import AzureStore
from tests.contract.store_case import OpenStore, Servers, StoreCase
from tests.harness.azurite import Azurite
from tests.harness.process import free_port

CHUNK_BYTES = 5 << 20
PREFIX = "archives/2026"


def azurite(servers: Servers) -> Azurite:
    """The session's server."""

    def start() -> Azurite:
        folder = Path(tempfile.mkdtemp(prefix="azurite-"))
        return Azurite(folder, folder / "data")

    return servers.get("azurite", start)


def look_into(store: Store, server: Azurite, container: str) -> OpenStore:
    """An Azure store seen through the account's own key."""

    def read(key: str) -> bytes | None:
        name = f"{PREFIX}/{key}"
        return server.read(container, name) if name in server.names(container) else None

    return OpenStore(
        store,
        read,
        keys=lambda: [name.removeprefix(f"{PREFIX}/") for name in server.names(container)],
        metadata=lambda key: server.metadata(container, f"{PREFIX}/{key}"),
    )


@contextmanager
def _open(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    server = azurite(servers)
    container = server.create_container(f"c-{secrets.token_hex(6)}")
    store = AzureStore(
        container, PREFIX, endpoint=server.endpoint, account_key=server.key, chunk_size=CHUNK_BYTES
    )
    yield look_into(store, server, container)


@contextmanager
def _away(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    yield AzureStore(
        "container", endpoint=f"http://127.0.0.1:{free_port()}/away", account_key="YSBrZXkgb2Ygbm9ib2R5"
    )


CASES = [
    StoreCase(
        "azure",
        _open,
        _away,
        sizes=(1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 16 << 20),
        needs_server=True,
    )
]
