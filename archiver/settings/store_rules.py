"""Rules about the store that `archive.destination` names [S1], [S8]: bucket, endpoint, credentials.

Only the section in use is looked at, so that variables meant for other programs do no harm. An S3
region is not asked for: without one the SDK looks into environment and profile and ends at us-east-1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from archiver.settings.destination import section_of
from archiver.settings.keys import shown
from archiver.settings.models import Settings
from archiver.settings.rule_text import both, readable, value_of


def store_rules(settings: Settings) -> Iterator[str]:
    """What the destination's store needs."""
    match settings.destination.scheme:
        case "file":
            yield from _apart(settings)
            return
        case "s3":
            yield from _named_bucket(settings, "s3")
            yield from _s3(settings)
        case "minio":
            yield from _named_bucket(settings, "minio")
            yield from _minio(settings)
        case "gs":
            yield from _gcs(settings)
        case "az":
            yield from _azure(settings)
    section = section_of(settings.destination.scheme)
    yield from _endpoint(settings, f"{section}.endpoint")
    if not settings.destination.bucket:
        kind = "container" if section == "azure" else "bucket"
        also = f", or set {section}.bucket" if section in ("s3", "minio") else ""
        yield f"{{archive.destination}} names no {kind}: write it into the URL{also}"


def _apart(settings: Settings) -> Iterator[str]:
    """The archive must not lie where the spool cleans up after a crash [D7]; dead letters not in it."""
    path = settings.destination.path
    if path is None:
        return
    if path.is_relative_to(settings.buffer.spool_dir):
        yield (
            "{archive.destination} lies inside {buffer.spool_dir}, which is cleaned at start: choose "
            "another folder"
        )
    elif settings.dlq.enabled and settings.dlq_dir.is_relative_to(path):
        where = "{dlq.dir}" if settings.dlq.dir else "the DLQ below {buffer.spool_dir}"
        yield f"{where} lies inside {{archive.destination}}: choose another folder"


def _named_bucket(settings: Settings, section: str) -> Iterator[str]:
    bucket = value_of(settings, f"{section}.bucket")
    if isinstance(bucket, str) and "/" in bucket:
        yield f"{{{section}.bucket}} is no bucket name: a prefix goes into archive.destination"
    elif isinstance(bucket, str) and settings.destination.bucket != bucket:
        yield f"{{{section}.bucket}} disagrees with {{archive.destination}}: name the bucket once"


def _s3(settings: Settings) -> Iterator[str]:
    s3 = settings.s3
    yield from both(settings, "s3.access_key_id", "s3.secret_access_key")
    if s3.session_token is not None and s3.access_key_id is None:
        yield "s3.session_token is set without s3.access_key_id: set all three credentials or none"
    if s3.kms_key_id is not None and not (s3.sse or "").startswith("aws:kms"):
        yield "{s3.kms_key_id} does not go with {s3.sse}: set s3.sse to aws:kms, or remove the key"
    yield from readable(settings, "s3.ca_bundle")
    if settings.minio.endpoint is not None and s3.endpoint is None:
        yield "{minio.endpoint} is not used with {archive.destination}: write minio://, or set s3.endpoint"


def _minio(settings: Settings) -> Iterator[str]:
    minio = settings.minio
    yield from both(settings, "minio.access_key", "minio.secret_key")
    if minio.endpoint is None:
        hint = " (section s3 is for s3:// alone)" if settings.s3.endpoint is not None else ""
        yield (
            "minio.endpoint is required with {archive.destination}: set it, for example to http://minio:9000"
            + hint
        )
        return
    scheme = minio.endpoint.partition("://")[0].lower()
    if minio.use_ssl is not None and scheme in ("http", "https") and minio.use_ssl != (scheme == "https"):
        yield "{minio.use_ssl} disagrees with {minio.endpoint}: change one of them, or leave use_ssl out"


def _gcs(settings: Settings) -> Iterator[str]:
    key, path = settings.gcs.service_account_key, settings.gcs.credentials_path
    if path is not None and key is not None:
        yield "gcs.credentials_path and gcs.service_account_key are both set: keep one of them"
    if key is not None and not _is_credentials(key.get_secret_value()):
        yield "gcs.service_account_key is not the JSON text of a key: write the whole content of the key file"
    if path is not None:
        unreadable = list(readable(settings, "gcs.credentials_path"))
        yield from unreadable
        if not unreadable and not _is_credentials(path.read_bytes()):
            yield "{gcs.credentials_path} is not a JSON file with credentials: name another file"


def _is_credentials(text: str | bytes) -> bool:
    """Every kind of Google credentials is a JSON object that names its type."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("type"), str)


def _azure(settings: Settings) -> Iterator[str]:
    azure = settings.azure
    ways = ("azure.account_key", "azure.sas_token", "azure.connection_string")
    used = [name for name in ways if value_of(settings, name) is not None]
    if len(used) > 1:
        yield f"{' and '.join(used)} are set, but one is enough: keep one of them"
    if azure.connection_string is not None:
        if azure.endpoint is not None:
            yield "azure.endpoint is set beside azure.connection_string, which has its own: keep one of them"
    elif azure.account_name is None and (azure.endpoint is None or azure.account_key is not None):
        yield (
            "azure.account_name is unset, but {archive.destination} needs it: set it, or "
            "azure.connection_string"
        )


def _endpoint(settings: Settings, name: str) -> Iterator[str]:
    value = value_of(settings, name)
    if not isinstance(value, str):
        return
    parts = _split(value)
    if parts is None:
        yield f"{{{name}}} is not a URL: write http://host:port or https://host:port"
    elif parts.scheme not in ("http", "https") or not parts.hostname:
        host = shown(tuple(name.split(".")), value.partition("://")[2] or value)
        yield f"{{{name}}} has no scheme http or https: write https://{host}, or http://{host}"
    elif parts.username is not None or parts.query or parts.fragment:
        yield (
            f"{{{name}}} holds credentials or options: write the address alone, the rest has keys of its own"
        )


def _split(url: str) -> SplitResult | None:
    """The parts of a URL, or None where host or port cannot be read."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts
