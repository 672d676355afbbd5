"""`gs://`, on fake-gcs-server."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from archiver.ports import Store
from archiver.stores.gcs import GcsStore
from tests.contract.store_case import OpenStore, Servers, StoreCase
from tests.harness.fakegcs import FakeGcs
from tests.harness.process import free_port

CHUNK_BYTES = 5 << 20
PREFIX = "archives/2026"


def fake_gcs(servers: Servers) -> FakeGcs:
    """The session's server."""
    return servers.get("fake-gcs", lambda: FakeGcs(Path(tempfile.mkdtemp(prefix="fake-gcs-"))))


def look_into(store: Store, server: FakeGcs, bucket: str) -> OpenStore:
    """A GCS store seen through the server's own API."""

    def read(key: str) -> bytes | None:
        name = f"{PREFIX}/{key}"
        return server.read(bucket, name) if name in server.names(bucket) else None

    def keys() -> list[str]:
        return [name.removeprefix(f"{PREFIX}/") for name in server.names(bucket)]

    def metadata(key: str) -> Mapping[str, str]:
        kept = server.describe(bucket, f"{PREFIX}/{key}")["metadata"]
        assert isinstance(kept, dict)
        return kept

    return OpenStore(store, read, keys, metadata)


@contextmanager
def _open(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    server = fake_gcs(servers)
    bucket = server.create_bucket(f"b-{secrets.token_hex(6)}")
    yield look_into(
        GcsStore(bucket, PREFIX, endpoint=server.endpoint, chunk_size=CHUNK_BYTES), server, bucket
    )


@contextmanager
def _away(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    yield GcsStore("bucket", endpoint=f"http://127.0.0.1:{free_port()}")


CASES = [
    StoreCase(
        "gcs",
        _open,
        _away,
        sizes=(1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 16 << 20),
        honours_create_only=False,  # not on resumable uploads
        needs_server=True,
    )
]
