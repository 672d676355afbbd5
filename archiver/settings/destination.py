"""`archive.destination`: where archive files go [S1], parsed once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Scheme = Literal["file", "s3", "minio", "gs", "az"]

FORMS = "file:///path, s3://bucket/prefix, minio://bucket/prefix, gs://bucket/prefix, az://container/prefix"
_SCHEMES: dict[str, Scheme] = {"file": "file", "s3": "s3", "minio": "minio", "gs": "gs", "az": "az"}
_NEARLY: dict[str, str] = {
    "gcs": "gs",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "wasb": "az",
    "wasbs": "az",
    "s3a": "s3",
    "s3n": "s3",
    "local": "file",
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|\$root")


@dataclass(frozen=True, slots=True)
class Destination:
    """A parsed destination.

    Object stores: `bucket` (Azure: the container; empty where the URL leaves it to the store
    section) and `prefix` without slashes at its ends, possibly empty. `file`: `path`, absolute.
    """

    scheme: Scheme
    bucket: str = ""
    prefix: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"file://{self.path}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_destination(url: str) -> Destination:
    """ValueError, in words that go behind `archive.destination=…`, for anything [S1] does not list."""
    name, separator, rest = url.strip().partition("://")
    scheme = _SCHEMES.get(name.lower())
    if not separator:
        hint = f", perhaps file://{url}" if url.startswith("/") else ""
        raise ValueError(f"is not a URL: write one of {FORMS}{hint}")
    if scheme is None:
        hint = f" (did you mean {_NEARLY[name.lower()]}://?)" if name.lower() in _NEARLY else ""
        raise ValueError(f"has a scheme we do not know: write one of {FORMS}{hint}")
    if any(not char.isprintable() for char in rest) or "\\" in rest:
        raise ValueError("holds a backslash or a character that cannot be printed: remove it")
    return _folder(rest) if scheme == "file" else _bucket(scheme, rest)


def _folder(rest: str) -> Destination:
    if not rest.startswith("/"):
        raise ValueError("has no absolute path: write three slashes, file:///path")
    parts = [part for part in rest.split("/") if part]
    if not parts:
        raise ValueError("names no folder: write file:///path")
    if ".." in parts or "." in parts:
        raise ValueError("goes through . or ..: write the folder's own path")
    return Destination("file", path=Path("/", *parts))


def _bucket(scheme: Scheme, rest: str) -> Destination:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise ValueError(f"holds credentials: put them into section {section_of(scheme)}, never into the URL")
    if "?" in rest or "#" in rest:
        raise ValueError(f"holds ? or #: options go into section {section_of(scheme)}, not into the URL")
    if bucket and not _BUCKET.fullmatch(bucket):
        raise ValueError("has a bucket name that no store takes: use letters, digits and . _ -")
    if prefix.startswith("/"):
        raise ValueError("has a prefix with a leading slash: remove it")
    segments = prefix.rstrip("/").split("/") if prefix else []
    if any(segment in ("", ".", "..") for segment in segments):
        raise ValueError("has a prefix with an empty segment, . or ..: write it without")
    return Destination(scheme, bucket, "/".join(segments))


def section_of(scheme: Scheme) -> str:
    """The settings section that holds the options of a scheme."""
    return {"gs": "gcs", "az": "azure"}.get(scheme, scheme)
