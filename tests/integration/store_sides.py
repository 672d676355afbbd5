"""Every object store as these tests see it: a bucket of a test's own behind a proxy that fails as told.

One `StoreSide` per scheme. What it reads goes through the store's own listing, never through the archiver.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tests.harness.archive import Archive, read_objects
from tests.harness.azurite import Azurite
from tests.harness.daemon import Daemon, merged
from tests.harness.fakegcs import FakeGcs
from tests.harness.fault_proxy import Answer, FaultProxy, Request, s3_error
from tests.harness.seaweed import SeaweedFS

PREFIX = "archives"
SCHEMES = ("s3", "minio", "gs", "az")
MIB = 1 << 20


class StoreSide(ABC):
    """A bucket or container. `endpoint` None in `settings` is the proxy's."""

    scheme: str
    section: str

    def __init__(self, proxy: FaultProxy, *, create: bool = True) -> None:
        self.proxy = proxy
        self.bucket = f"stores-{secrets.token_hex(6)}"
        if create:
            self.create()

    def settings(self, **options: Any) -> dict[str, Any]:
        """Destination and store section, with `options` over the section's."""
        section = {**self.options(), **options}
        return {
            "archive": {
                "destination": f"{self.scheme}://{self.bucket}/{PREFIX}",
                "multipart_chunk_size": "5MiB",
            },
            self.section: {name: value for name, value in section.items() if value is not None},
        }

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The store section, through the proxy."""

    @abstractmethod
    def direct(self) -> str:
        """The endpoint without the proxy."""

    @abstractmethod
    def create(self) -> None:
        """Make the bucket."""

    @abstractmethod
    def names(self) -> list[str]:
        """The store's whole listing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """An object's bytes."""

    @abstractmethod
    def metadata(self, name: str) -> Mapping[str, str]:
        """An object's own metadata."""

    @abstractmethod
    def brings_bytes(self, request: Request) -> bool:
        """Whether a request makes an object or a part of one."""

    @abstractmethod
    def denied(self) -> Answer:
        """What the store answers to one who may not write."""

    @abstractmethod
    def busy(self) -> Answer:
        """What the store answers when it has too much to do."""

    @abstractmethod
    def changed_checksum(self, answer: Answer) -> Answer:
        """The answer to an upload with another checksum in it."""

    def leftovers(self) -> list[str]:
        """Names of uploads that were begun and neither finished nor aborted, where a store lists them."""
        return []

    def archive_keys(self) -> list[str]:
        """Names of archive files below the prefix, without it."""
        names = (name for name in self.names() if name.startswith(f"{PREFIX}/"))
        return [name.removeprefix(f"{PREFIX}/") for name in names if ".jsonl" in name]

    def objects(self) -> dict[str, bytes]:
        """Every archive file, downloaded, by its key below the prefix."""
        return {key: self.read(f"{PREFIX}/{key}") for key in self.archive_keys()}

    def archive(self, template_segments: int = 4) -> Archive:
        """Every archive file, downloaded and decoded by the codecs' own tools."""
        return read_objects(self.objects(), template_segments=template_segments)


class SeaweedSide(StoreSide):
    """SeaweedFS under `s3://`."""

    scheme = section = "s3"

    def __init__(self, server: SeaweedFS, proxy: FaultProxy, *, create: bool = True) -> None:
        self.server = server
        super().__init__(proxy, create=create)

    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.proxy.endpoint,
            "region": "us-east-1",
            "access_key_id": self.server.access_key_id,
            "secret_access_key": self.server.secret_access_key,
        }

    def direct(self) -> str:
        return self.server.endpoint

    def create(self) -> None:
        self.server.create_bucket(self.bucket)

    def names(self) -> list[str]:
        return self.server.keys(self.bucket)

    def read(self, name: str) -> bytes:
        content = self.server.read(self.bucket, name)
        assert content is not None, name
        return content

    def metadata(self, name: str) -> Mapping[str, str]:
        return self.server.metadata(self.bucket, name)

    def brings_bytes(self, request: Request) -> bool:
        return request.method == "PUT"

    def denied(self) -> Answer:
        return s3_error(403, "AccessDenied", "Access Denied")

    def busy(self) -> Answer:
        return s3_error(503, "SlowDown", "Please reduce your request rate.")

    def changed_checksum(self, answer: Answer) -> Answer:
        names = {name.lower(): name for name in answer.headers}
        name = names.get("x-amz-checksum-crc32")
        if name is None:
            return answer
        return Answer(answer.status, answer.body, {**answer.headers, name: "AAAAAA=="})

    def leftovers(self) -> list[str]:
        return self.server.uploads(self.bucket)


class MinioSide(SeaweedSide):
    """The same server under `minio://`."""

    scheme = section = "minio"

    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.proxy.endpoint,
            "access_key": self.server.access_key_id,
            "secret_key": self.server.secret_access_key,
        }


class GcsSide(StoreSide):
    """fake-gcs-server. Chunks of uploads above the chunk size go past the proxy, to the server itself."""

    scheme, section = "gs", "gcs"

    def __init__(self, server: FakeGcs, proxy: FaultProxy, *, create: bool = True) -> None:
        self.server = server
        super().__init__(proxy, create=create)

    def options(self) -> dict[str, Any]:
        return {"endpoint": self.proxy.endpoint}

    def direct(self) -> str:
        return self.server.endpoint

    def create(self) -> None:
        self.server.create_bucket(self.bucket)

    def names(self) -> list[str]:
        return self.server.names(self.bucket)

    def read(self, name: str) -> bytes:
        return self.server.read(self.bucket, name)

    def metadata(self, name: str) -> Mapping[str, str]:
        kept = self.server.describe(self.bucket, name)["metadata"]
        assert isinstance(kept, dict)
        return kept

    def brings_bytes(self, request: Request) -> bool:
        return request.path.startswith("/upload/")

    def denied(self) -> Answer:
        return _google(403, "the account does not have storage.objects.create access to the bucket.")

    def busy(self) -> Answer:
        return _google(503, "We encountered an internal error. Please try again.")

    def changed_checksum(self, answer: Answer) -> Answer:
        described = json.loads(answer.body)
        return Answer(answer.status, json.dumps({**described, "crc32c": "AAAAAA=="}).encode(), answer.headers)


class AzureSide(StoreSide):
    """Azurite."""

    scheme, section = "az", "azure"

    def __init__(self, server: Azurite, proxy: FaultProxy, *, create: bool = True) -> None:
        self.server = server
        super().__init__(proxy, create=create)

    def options(self) -> dict[str, Any]:
        return {
            "account_name": self.server.account,
            "account_key": self.server.key,
            "endpoint": f"{self.proxy.endpoint}/{self.server.account}",
        }

    def direct(self) -> str:
        return self.server.endpoint

    def create(self) -> None:
        self.server.create_container(self.bucket)

    def names(self) -> list[str]:
        return self.server.names(self.bucket)

    def read(self, name: str) -> bytes:
        return self.server.read(self.bucket, name)

    def metadata(self, name: str) -> Mapping[str, str]:
        return self.server.metadata(self.bucket, name)

    def brings_bytes(self, request: Request) -> bool:
        return request.method == "PUT"

    def denied(self) -> Answer:
        return _azure(403, "AuthorizationPermissionMismatch", "Not authorized with this permission.")

    def busy(self) -> Answer:
        return _azure(503, "ServerBusy", "The server is busy.")

    def changed_checksum(self, answer: Answer) -> Answer:
        names = {name.lower(): name for name in answer.headers}
        name = names.get("content-md5")
        if name is None:
            return answer
        return Answer(answer.status, answer.body, {**answer.headers, name: "AAAAAAAAAAAAAAAAAAAAAA=="})


def _google(status: int, message: str) -> Answer:
    body = {"error": {"code": status, "message": message, "errors": [{"message": message}]}}
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _azure(status: int, code: str, message: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml", "x-ms-error-code": code})


MakeSide = Callable[..., StoreSide]
"""`make_side("s3", create=True)`: a side with a proxy of its own."""


def uploads(side: StoreSide) -> Callable[[Request], bool]:
    """Requests that bring bytes of archive files; on `gs://`, whose paths do not tell, the probe's too."""

    def brings(request: Request) -> bool:
        return side.brings_bytes(request) and (side.scheme == "gs" or ".jsonl" in request.path)

    return brings


def everything_said(daemon: Daemon) -> str:
    """Every word a running daemon says over HTTP and has logged so far."""
    paths = ("/", "/status", "/metrics", "/readyz", "/healthz")
    return "\n".join([daemon.output(), *(daemon.get(path)[1] for path in paths)])


def with_store(settings: Mapping[str, Any], side: StoreSide, **options: Any) -> dict[str, Any]:
    """Settings of a daemon that archives into a side."""
    return merged(settings, side.settings(**options))
