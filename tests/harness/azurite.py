"""Azurite as a test's Azure Blob Storage: signatures, SAS permissions, MD5 and conditions are checked.

Installed once by npm into the cache; needs Node 20.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas

from tests.harness.cache import cache_dir, cache_lock
from tests.harness.process import Server, free_port, port_open

VERSION = "3.35.0"
_INSTALL_TIMEOUT_SECS = 300


class Azurite:
    """The server with one account, and a look into it that does not go through the archiver's code."""

    def __init__(self, log_dir: Path, data_dir: Path) -> None:
        self.account = "archiveaccount"
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{self.account}"
        argv = [str(install()), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        argv += ["--location", str(data_dir), "--skipApiVersionCheck", "--disableTelemetry"]
        self.server = Server(
            "azurite",
            argv,
            log_dir,
            env={"AZURITE_ACCOUNTS": f"{self.account}:{self.key}"},
            ready=lambda: port_open(self.port),
        )
        self._service = BlobServiceClient(
            self.endpoint, credential={"account_name": self.account, "account_key": self.key}
        )

    @property
    def connection_string(self) -> str:
        """With account, key and endpoint in it."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.endpoint};"
        )

    def sas(self, container: str, permissions: str, lives_secs: int = 3600) -> str:
        """A shared access signature for one container; `permissions` in Azure's letters, e.g. `rcw`."""
        signature: str = generate_container_sas(
            self.account,
            container,
            account_key=self.key,
            permission=ContainerSasPermissions.from_string(permissions),
            expiry=datetime.now(UTC) + timedelta(seconds=lives_secs),
        )
        return signature

    def create_container(self, name: str) -> str:
        """Make a container; returns its name."""
        self._service.create_container(name)
        return name

    def delete_container(self, name: str) -> None:
        """Remove a container with all in it."""
        self._service.delete_container(name)

    def names(self, container: str) -> list[str]:
        """All blob names, in order."""
        return sorted(self._service.get_container_client(container).list_blob_names())

    def read(self, container: str, name: str) -> bytes:
        """A blob's bytes."""
        data: bytes = self._service.get_blob_client(container, name).download_blob().readall()
        return data

    def metadata(self, container: str, name: str) -> Mapping[str, str]:
        """A blob's metadata."""
        kept: Mapping[str, str] = self.properties(container, name).metadata
        return kept

    def properties(self, container: str, name: str):  # type: ignore[no-untyped-def]
        """A blob's properties, the SDK's own object."""
        return self._service.get_blob_client(container, name).get_blob_properties()

    def block_sizes(self, container: str, name: str) -> list[int]:
        """Sizes of a blob's committed blocks; empty where it was put in one piece."""
        committed, _ = self._service.get_blob_client(container, name).get_block_list("all")
        return [block.size for block in committed]

    def write(self, container: str, name: str, data: bytes) -> None:
        """Put another writer's blob."""
        self._service.get_blob_client(container, name).upload_blob(data, overwrite=True)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.close()
        self.server.stop()


def install() -> Path:
    """The `azurite-blob` program, installed into the cache by the first test that needs it."""
    with cache_lock("azurite"):
        folder = cache_dir("azurite", VERSION)
        program = folder / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            npm = shutil.which("npm")
            if npm is None:
                raise FileNotFoundError("npm is not installed: Azurite needs Node 20")
            argv = [npm, "install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund"]
            argv += ["--prefix", os.fspath(folder), f"azurite@{VERSION}"]
            subprocess.run(
                argv,
                check=True,
                cwd=folder,
                timeout=_INSTALL_TIMEOUT_SECS,
                stdout=subprocess.DEVNULL,
            )
    return program
