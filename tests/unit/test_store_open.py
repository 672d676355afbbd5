"""Every destination opens its own store, with its own SDK alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import SecretStr

from archiver.settings.models import S3, Archive, Buffer, Minio, Settings
from archiver.stores import minio_options, open_store, s3_options, store_checksums
from archiver.stores.file import FileStore
from tests.harness.process import wait_until

SDKS = {"s3": "botocore", "minio": "botocore", "gs": "google.cloud.storage", "az": "azure.storage.blob"}
SECTIONS = {
    "file": {},
    "s3": {},
    "minio": {"minio": {"endpoint": "http://127.0.0.1:9000"}},
    "gs": {"gcs": {"endpoint": "http://127.0.0.1:9000"}},
    "az": {"azure": {"account_name": "acme", "account_key": "YWNtZQ=="}},
}


@pytest.mark.parametrize("scheme", SECTIONS)
def test_a_destination_imports_no_other_sdk(scheme: str, tmp_path: Path) -> None:
    """Start-up time is mostly imports; `file://` needs none of them."""
    destination = f"file://{tmp_path}/archive" if scheme == "file" else f"{scheme}://archive/night"
    values = {"archive": {"destination": destination}, **SECTIONS[scheme]}
    script = textwrap.dedent(f"""
        import sys
        from archiver.settings.models import Settings
        from archiver.stores import open_store, store_checksums
        assert store_checksums({scheme!r}) >= {{"crc32"}}
        assert not set({sorted(set(SDKS.values()))!r}) & set(sys.modules)
        open_store(Settings.model_validate({values!r}), print).close()
        print(*sorted(set({sorted(set(SDKS.values()))!r}) & set(sys.modules)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ([SDKS[scheme]] if scheme in SDKS else [])


def test_each_store_asks_for_the_checksums_it_can_have_verified() -> None:
    """[S4]"""
    assert store_checksums("file") == store_checksums("s3") == {"crc32"}
    assert store_checksums("gs") == {"crc32", "crc32c"}
    assert store_checksums("az") == {"crc32", "md5"}


def test_options_of_s3_arrive_and_secrets_stay_out_of_sight() -> None:
    """[S7], [S8]"""
    settings = Settings(
        archive=Archive(destination="s3://archive/night/shift", multipart_chunk_size=16 << 20),
        buffer=Buffer(writer_parallelism=3),
        s3=S3(
            endpoint="https://s3.example.com",
            region="eu-central-1",
            access_key_id="AKIA",
            secret_access_key=SecretStr("the-secret"),
            session_token=SecretStr("the-token"),
            path_style=False,
            storage_class="GLACIER_IR",
            sse="aws:kms",
            kms_key_id="key-1",
            checksum="none",
            ca_bundle=Path("/etc/ssl/acme.pem"),
        ),
    )
    options = s3_options(settings, settings.destination)
    assert (options.bucket, options.prefix) == ("archive", "night/shift")
    assert (options.endpoint, options.region) == ("https://s3.example.com", "eu-central-1")
    assert (options.secret_access_key, options.session_token) == ("the-secret", "the-token")
    assert (options.path_style, options.checksum, options.storage_class) == (False, "none", "GLACIER_IR")
    assert options.ca_bundle == "/etc/ssl/acme.pem"
    assert (options.sse, options.kms_key_id) == ("aws:kms", "key-1")
    assert (options.multipart_chunk_bytes, options.uploads_in_flight_max) == (16 << 20, 3)
    assert "the-secret" not in repr(options)
    assert "the-token" not in repr(options)


def test_minio_is_s3_with_its_own_names() -> None:
    """[S8]"""
    settings = Settings(
        archive=Archive(destination="minio://archive"),
        minio=Minio(endpoint="http://127.0.0.1:9000", access_key="minio", secret_key=SecretStr("the-secret")),
    )
    options = minio_options(settings, settings.destination)
    assert (options.access_key_id, options.secret_access_key) == ("minio", "the-secret")
    assert (options.bucket, options.prefix, options.path_style) == ("archive", "", True)


def test_opening_file_removes_what_a_crash_left_behind(tmp_path: Path) -> None:
    """[S2]: at start, in the background."""
    archive = tmp_path / "archive"
    archive.mkdir()
    leftover = archive / "1-3f9a.jsonl.zst.3f9a00000001.tmp"
    leftover.write_bytes(b"half")

    os.utime(leftover, (0, 0))
    store = open_store(Settings(archive=Archive(destination=f"file://{archive}")), lambda event: None)
    assert isinstance(store, FileStore)
    wait_until(lambda: not leftover.exists(), 10, "the removal")
