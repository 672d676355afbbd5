"""moto as a test's S3, for what SeaweedFS does not do: it enforces S3's 2 KB of metadata.

It believes every signature.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config

from tests.harness.process import Server, free_port, port_open


class Moto:
    """The server and a look into it that does not go through the archiver's code."""

    def __init__(self, log_dir: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.server = Server("moto", argv, log_dir, ready=lambda: port_open(self.port), ready_timeout_secs=60)
        self.client: Any = boto3.session.Session("id", "secret", region_name="us-east-1").client(
            "s3", endpoint_url=self.endpoint, config=Config(s3={"addressing_style": "path"})
        )

    def create_bucket(self, name: str) -> str:
        """Make a bucket; returns its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """All keys, in order."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
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
        return self.describe(bucket, key)["Metadata"]  # type: ignore[no-any-return]

    def describe(self, bucket: str, key: str) -> Mapping[str, Any]:
        """What a HEAD says of an object."""
        described: Mapping[str, Any] = self.client.head_object(Bucket=bucket, Key=key)
        return described

    def uploads(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        answer = self.client.list_multipart_uploads(Bucket=bucket)
        return sorted(upload["Key"] for upload in answer.get("Uploads", []))

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()
