"""`s3://` and `minio://` on SeaweedFS and moto, with and without checksum headers, whole and in parts."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from archiver.ports import Store
from archiver.settings.models import Archive, Minio, Settings
from archiver.stores import open_store
from archiver.stores.s3 import S3Store
from archiver.stores.s3_client import S3Options
from tests.contract.store_case import OpenStore, Servers, StoreCase
from tests.harness.moto import Moto
from tests.harness.process import free_port
from tests.harness.seaweed import SeaweedFS

MIB = 1 << 20
PREFIX = "archives/night"


@contextmanager
def seaweed() -> Iterator[SeaweedFS]:
    """A server in a folder of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="seaweed-") as folder,
        SeaweedFS(Path(folder) / "log", Path(folder) / "data") as server,
    ):
        yield server


@contextmanager
def moto() -> Iterator[Moto]:
    """A server with its log in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="moto-") as folder, Moto(Path(folder)) as server:
        yield server


def s3_options(server: SeaweedFS, bucket: str, **changes: Any) -> S3Options:
    """Options for a bucket of the server."""
    values: dict[str, Any] = {
        "bucket": bucket,
        "prefix": PREFIX,
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
        "multipart_chunk_bytes": 5 * MIB,
    }
    return S3Options(**{**values, **changes})


def look_into(store: Store, server: SeaweedFS | Moto, bucket: str) -> OpenStore:
    """A store seen through a client of the tests' own."""
    return OpenStore(
        store,
        read=lambda key: server.read(bucket, f"{PREFIX}/{key}"),
        keys=lambda: [key.removeprefix(f"{PREFIX}/") for key in server.keys(bucket)],
        metadata=lambda key: server.metadata(bucket, f"{PREFIX}/{key}"),
    )


def _opener(**changes: Any) -> Callable[[Path, Servers], AbstractContextManager[OpenStore]]:
    @contextmanager
    def opened(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
        server = servers.get("seaweed", seaweed)
        bucket = server.create_bucket(f"contract-{secrets.token_hex(6)}")
        yield look_into(S3Store(s3_options(server, bucket, **changes)), server, bucket)
        assert server.uploads(bucket) == [], "a multipart upload was left behind"

    return opened


@contextmanager
def _minio(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    """As a user configures it."""
    server = servers.get("seaweed", seaweed)
    bucket = server.create_bucket(f"contract-{secrets.token_hex(6)}")
    archive = Archive(destination=f"minio://{bucket}/{PREFIX}", multipart_chunk_size=5 * MIB)
    minio = Minio(
        endpoint=server.endpoint,
        access_key=server.access_key_id,
        secret_key=SecretStr(server.secret_access_key),
    )
    store = open_store(Settings(archive=archive, minio=minio), lambda event: None)
    yield look_into(store, server, bucket)
    assert server.uploads(bucket) == [], "a multipart upload was left behind"


@contextmanager
def _on_moto(tmp_path: Path, servers: Servers) -> Iterator[OpenStore]:
    server = servers.get("moto", moto)
    bucket = server.create_bucket(f"contract-{secrets.token_hex(6)}")
    options = S3Options(
        bucket,
        PREFIX,
        endpoint=server.endpoint,
        access_key_id="id",
        secret_access_key="secret",
        multipart_chunk_bytes=5 * MIB,
    )
    yield look_into(S3Store(options), server, bucket)
    assert server.uploads(bucket) == [], "a multipart upload was left behind"


@contextmanager
def _away(tmp_path: Path, servers: Servers) -> Iterator[Store]:
    endpoint = f"http://127.0.0.1:{free_port()}"
    yield S3Store(S3Options("nowhere", endpoint=endpoint, access_key_id="id", secret_access_key="secret"))


SIZES = (1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 16 * MIB)

CASES = [
    StoreCase("s3", _opener(), _away, sizes=SIZES, needs_server=True),
    StoreCase("s3-no-checksum-headers", _opener(checksum="none"), _away, sizes=SIZES, needs_server=True),
    StoreCase("minio", _minio, _away, sizes=SIZES, needs_server=True),
    StoreCase("s3-moto", _on_moto, _away, sizes=SIZES, needs_server=True, races=False),
]
