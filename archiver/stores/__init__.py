"""Where archive files go: one `ports.Store` per scheme, opened without importing another scheme's SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import SecretStr

from archiver.ports import Emit, Store
from archiver.settings.destination import Destination
from archiver.settings.models import Settings

if TYPE_CHECKING:
    from archiver.stores.s3_client import S3Options


_CHECKSUMS = {
    "file": frozenset({"crc32"}),
    "s3": frozenset({"crc32"}),
    "minio": frozenset({"crc32"}),
    "gs": frozenset({"crc32", "crc32c"}),
    "az": frozenset({"crc32", "md5"}),
}


def store_checksums(scheme: str) -> frozenset[str]:
    """Which of `crc32`, `crc32c` and `md5` a destination's scheme asks for ([S4]); imports no SDK."""
    return _CHECKSUMS[scheme]


def open_store(settings: Settings, emit: Emit) -> Store:
    """The store of `archive.destination`. Connects to nothing; may raise `ConfigError`.

    Imports the SDK of its own scheme alone, which is most of what opening costs.
    """
    openers = {"file": _file, "s3": _s3, "minio": _s3, "gs": _gcs, "az": _azure}
    return openers[settings.destination.scheme](settings, emit)


def _file(settings: Settings, emit: Emit) -> Store:
    from archiver.stores.file import FileStore

    path = settings.destination.path
    assert path is not None, "a file destination has a path"
    store = FileStore(path, emit=emit, spool=settings.buffer.spool_dir)
    store.remove_leftovers_in_background()
    return store


def _s3(settings: Settings, emit: Emit) -> Store:
    from archiver.stores.s3 import S3Store

    destination = settings.destination
    options = s3_options if destination.scheme == "s3" else minio_options
    return S3Store(options(settings, destination), emit=emit)


def s3_options(settings: Settings, destination: Destination) -> S3Options:
    """Section `s3` and what it shares with the rest."""
    from archiver.stores.s3_client import S3Options

    s3 = settings.s3
    return S3Options(
        bucket=destination.bucket,
        prefix=destination.prefix,
        endpoint=s3.endpoint,
        region=s3.region,
        access_key_id=s3.access_key_id,
        secret_access_key=_shown(s3.secret_access_key),
        session_token=_shown(s3.session_token),
        path_style=s3.path_style,
        storage_class=s3.storage_class,
        sse=s3.sse,
        kms_key_id=s3.kms_key_id,
        checksum=s3.checksum,
        ca_bundle=str(s3.ca_bundle) if s3.ca_bundle else None,
        multipart_chunk_bytes=settings.archive.multipart_chunk_size,
        uploads_in_flight_max=settings.buffer.writer_parallelism,
    )


def minio_options(settings: Settings, destination: Destination) -> S3Options:
    """Section `minio`: always path style, and a region that every MinIO takes."""
    from archiver.stores.s3_client import S3Options

    minio = settings.minio
    return S3Options(
        bucket=destination.bucket,
        prefix=destination.prefix,
        endpoint=minio.endpoint,
        region="us-east-1",
        access_key_id=minio.access_key,
        secret_access_key=_shown(minio.secret_key),
        path_style=True,
        multipart_chunk_bytes=settings.archive.multipart_chunk_size,
        uploads_in_flight_max=settings.buffer.writer_parallelism,
    )


def _gcs(settings: Settings, emit: Emit) -> Store:
    from archiver.stores.gcs import GcsStore

    gcs = settings.gcs
    return GcsStore(
        settings.destination.bucket,
        settings.destination.prefix,
        project_id=gcs.project_id,
        credentials_path=gcs.credentials_path,
        service_account_key=_shown(gcs.service_account_key),
        endpoint=gcs.endpoint,
        chunk_size=settings.archive.multipart_chunk_size,
        parallelism=settings.buffer.writer_parallelism,
    )


def _azure(settings: Settings, emit: Emit) -> Store:
    from archiver.stores.azure import AzureStore

    azure = settings.azure
    return AzureStore(
        settings.destination.bucket,
        settings.destination.prefix,
        account_name=azure.account_name,
        account_key=_shown(azure.account_key),
        sas_token=_shown(azure.sas_token),
        connection_string=_shown(azure.connection_string),
        endpoint=azure.endpoint,
        chunk_size=settings.archive.multipart_chunk_size,
        parallelism=settings.buffer.writer_parallelism,
    )


def _shown(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
