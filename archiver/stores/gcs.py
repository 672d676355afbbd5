"""`gs://`: objects in Google Cloud Storage through its JSON API ([S3], [S4], [S5]).

    up to the chunk size   one upload with ifGenerationMatch=0 and the file's CRC32C
    above it               a resumable session with the same, chunk by chunk; a chunk that fails goes on
                           from what the store says it holds, a few times, within the same attempt

The store checks the CRC32C we send before an object becomes visible; what it reports afterwards is
compared with what was sealed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google.auth
import google_crc32c
import requests
from google.api_core import exceptions as api_errors
from google.auth import exceptions as auth_errors
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.oauth2 import service_account
from requests.adapters import HTTPAdapter

from archiver.domain.sealed import SealedFile
from archiver.errors import ConfigError, KeyTakenError, RefusedError, TransientStoreError
from archiver.ports import ProbeReport
from archiver.stores.answers import Answer, Heals, Refuses, Taken
from archiver.stores.redaction import detail_of, redact_sdk_logs
from archiver.stores.sealed_file import SealedBody, open_sealed, read_range, verify_open

PROBE_NAME = ".dfe-archiver-probe"
PROBE_BYTES = b"dfe-archiver: shows that nothing here is ever replaced; not an archive file\n"
CONTENT_TYPE = "application/x-ndjson"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

NAME_BYTES_MAX = 1024
"""Of an object's name in UTF-8 (Cloud Storage, object naming)."""

CHUNK_STEP_BYTES = 256 * 1024
"""Chunks of a resumable upload are whole multiples of this (JSON API, resumable uploads)."""

SINGLE_UPLOAD_BYTES_MAX = 8 << 20
"""Above this the SDK itself would open a session it never resumes."""

SEND_BLOCK_BYTES = 128 * 1024
CONNECT_TIMEOUT_SECS = 20.0
READ_TIMEOUT_SECS = 60.0
STUMBLES_MAX = 4
"""Failures in a row, with no byte stored in between, before an attempt gives its worker back."""
STUMBLE_PAUSE_SECS = 0.25

_CREDENTIALS = Heals(
    "credentials",
    way_out="check gcs.credentials_path, gcs.service_account_key or the application default credentials",
    renew=True,
)
_DENIED = Heals("access_denied", way_out="grant storage.objects.create and storage.objects.get on the bucket")
_BUCKET = Heals("missing_bucket", way_out="create the bucket or correct archive.destination")
_SESSION = Heals("session_lost", whole_store=False)
_INTEGRITY = Heals("integrity", whole_store=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of the service: its status, a pattern its message or reason must hold, our answer."""

    status: int
    holds: str
    answer: Answer

    def matches(self, status: int, text: str) -> bool:
        return status == self.status and re.search(self.holds, text, re.IGNORECASE) is not None


ERRORS: tuple[Row, ...] = (
    Row(400, r"crc32c|md5", _INTEGRITY),
    Row(400, r"object name|key.?too.?long", Refuses("key_invalid")),
    Row(400, r"invalid_grant|authError", _CREDENTIALS),
    Row(401, "", _CREDENTIALS),
    # An existing object that we may not delete: the permission is looked at before the precondition.
    Row(403, r"storage\.objects\.delete|retentionPolicyNotMet|object.*(retention|hold)", Taken()),
    Row(403, r"rateLimitExceeded", Heals("throttled")),
    Row(403, r"quotaExceeded", Heals("quota", way_out="raise the project's quota")),
    Row(403, "", _DENIED),
    Row(404, r"\bupload_id=", _SESSION),
    Row(404, "", _BUCKET),
    Row(408, "", Heals("timeout")),
    Row(409, "", Heals("server")),
    Row(410, "", _SESSION),
    Row(412, "", Taken()),
    Row(413, "", Refuses("too_large")),
    Row(416, "", _SESSION),
    Row(429, "", Heals("throttled")),
    Row(500, "", Heals("server")),
    Row(502, "", Heals("server")),
    Row(503, "", Heals("throttled")),
    Row(504, "", Heals("timeout")),
)
"""First match wins ([S6]); a status that is not here heals by waiting."""

EXCEPTIONS: tuple[tuple[type[Exception], Answer], ...] = (
    (auth_errors.TransportError, Heals("network")),
    (auth_errors.GoogleAuthError, _CREDENTIALS),
    (requests.Timeout, Heals("timeout")),
    (requests.RequestException, Heals("network")),
)
_OTHER = Heals("other")

_FOREIGN = (api_errors.GoogleAPICallError, auth_errors.GoogleAuthError, requests.RequestException)
_STUMBLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_URL_PATH = re.compile(r"https?://[^\s?]*(?P<query>(\?\S*?)?: )")
_RANGE = re.compile(r"bytes=0-(\d+)\Z")


class GcsStore:
    """`ports.Store` on one bucket, everything under `prefix` (no slashes around it; may be empty).

    `service_account_key` is a key's JSON text or a path to it; `credentials_path` a path to any
    credentials file the SDK knows, read again when the service refuses what was in it. With an `endpoint`
    and neither, requests are anonymous (emulators); with nothing, application default credentials.
    `chunk_size` in bytes; `parallelism` is how many threads call `put` at once. Raises `ConfigError`.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        project_id: str | None = None,
        credentials_path: str | Path | None = None,
        service_account_key: str | None = None,
        endpoint: str | None = None,
        chunk_size: int = 8 << 20,
        parallelism: int = 8,
        read_timeout_secs: float = READ_TIMEOUT_SECS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._project_id = project_id
        self._key_info, self._credentials_path = _key_or_path(service_account_key, credentials_path)
        self._endpoint = endpoint.rstrip("/") if endpoint else None
        self._chunk_bytes = max(CHUNK_STEP_BYTES, chunk_size // CHUNK_STEP_BYTES * CHUNK_STEP_BYTES)
        self._single_bytes_max = min(chunk_size, SINGLE_UPLOAD_BYTES_MAX)
        self._parallelism = parallelism
        self._timeouts = (CONNECT_TIMEOUT_SECS, read_timeout_secs)
        self._pause = pause
        self._look_first = False
        self._lock = threading.Lock()
        self._opened: _Connection | None = None
        redact_sdk_logs()
        # Otherwise the SDK asks for the bucket itself, behind our back and with a permission of its own.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

    def __repr__(self) -> str:
        return f"GcsStore(gs://{self._bucket}/{self._prefix})"

    # --- Store --------------------------------------------------------------------------------

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """See `ports.Store.put`."""
        name = self._name(key)
        if len(name.encode()) > NAME_BYTES_MAX:
            raise RefusedError("key_invalid", f"{len(name.encode())} bytes, {NAME_BYTES_MAX} are allowed")
        with open_sealed(sealed) as fd, self._connected(name) as connection:
            # Before anything is sent: an object that a store has made of damaged bytes stays ([S9]).
            verify_open(fd, sealed)
            if self._look_first and (there := self._look(connection, name)) is not None:
                _settle(there, sealed, name)
                return
            blob = self._blob(connection, name, metadata, _sent_crc32c(fd, sealed))
            try:
                created = self._upload(connection, blob, fd, sealed.size)
            except _FOREIGN as error:
                self._after_refusal(connection, name, fd, sealed, error)
                return
            if problem := _difference(created, sealed):
                verify_open(fd, sealed)
                raise TransientStoreError("integrity", f"{name}: {problem}", whole_store=False)

    def probe(self) -> ProbeReport:
        """See `ports.Store.probe`. Tries both ways of uploading, since emulators honour only one."""
        name = self._name(PROBE_NAME)
        crc32c = _base64(google_crc32c.value(PROBE_BYTES))
        with self._connected(name) as connection:
            ways: tuple[tuple[str, Callable[[Any], object]], ...] = (
                ("single", self._put_probe),
                ("resumable", lambda blob: self._put_probe_resumable(connection, blob)),
            )
            self._refused(ways[0][1], self._blob(connection, name, {}, crc32c))
            ignored = [
                way
                for way, attempt in ways
                if not self._refused(attempt, self._blob(connection, name, {}, crc32c))
            ]
        self._look_first = bool(ignored)
        found = (
            f"ignored on {' and '.join(ignored)} uploads" if ignored else "honoured: a second put was refused"
        )
        return ProbeReport(not ignored, f"gs://{self._bucket}/{name}: ifGenerationMatch=0 is {found}")

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.session.close()

    # --- uploads ------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _blob(
        self, connection: _Connection, name: str, metadata: Mapping[str, str], crc32c: str
    ) -> storage.Blob:
        blob = connection.bucket.blob(name)
        blob.metadata = dict(metadata)
        blob.crc32c = crc32c
        return blob

    def _upload(self, connection: _Connection, blob: storage.Blob, fd: int, size: int) -> Mapping[str, Any]:
        """Upload all of it; returns the store's description of the object."""
        if size > self._single_bytes_max:
            session_url = self._start_session(connection, blob, size)
            return self._send_chunks(connection.session, session_url, fd, size)
        # checksum=None: the SDK would compute one of its own and, where it differs, delete the object ([S9])
        blob.upload_from_file(
            SealedBody(fd, 0, size),
            size=size,
            content_type=CONTENT_TYPE,
            if_generation_match=0,
            checksum=None,
            retry=None,
            timeout=self._timeouts,
        )
        return {"size": blob.size, "crc32c": blob.crc32c}

    def _start_session(self, connection: _Connection, blob: storage.Blob, size: int) -> str:
        url: str = blob.create_resumable_upload_session(
            content_type=CONTENT_TYPE,
            size=size,
            if_generation_match=0,
            checksum=None,
            retry=None,
            timeout=self._timeouts,
        )
        return url

    def _send_chunks(self, session: requests.Session, url: str, fd: int, size: int) -> Mapping[str, Any]:
        """Send from the first byte the store does not hold, until it describes the object."""
        held, furthest, stumbles = 0, 0, 0
        while True:
            length = min(self._chunk_bytes, size - held)
            body = SealedBody(fd, held, length) if length else b""
            span = f"{held}-{held + length - 1}" if length else "*"
            try:
                answer = self._send(session, url, body, f"bytes {span}/{size}")
            except (requests.RequestException, api_errors.GoogleAPICallError) as error:
                if stumbles >= STUMBLES_MAX or not _stumbled(error):
                    raise
                self._pause(STUMBLE_PAUSE_SECS * 2**stumbles)
                answer = self._where(session, url, size, held)
            if not isinstance(answer, int):
                return answer
            stumbles = 0 if answer > furthest else stumbles + 1
            if stumbles > STUMBLES_MAX or answer > size:
                raise api_errors.ServiceUnavailable(  # type: ignore[no-untyped-call]
                    f"the upload stands still at byte {answer} of {size}"
                )
            held, furthest = answer, max(answer, furthest)

    def _where(self, session: requests.Session, url: str, size: int, held: int) -> int | Mapping[str, Any]:
        """What the store holds of the upload; `held` where it cannot say now."""
        try:
            return self._send(session, url, b"", f"bytes */{size}")
        except (requests.RequestException, api_errors.GoogleAPICallError) as error:
            if not _stumbled(error):
                raise
            return held

    def _send(
        self, session: requests.Session, url: str, body: SealedBody | bytes, content_range: str
    ) -> int | Mapping[str, Any]:
        """One request of a session: the bytes held so far, or the object's description once it is whole."""
        response = session.put(
            url,
            data=body,
            headers={"Content-Range": content_range, "Content-Type": CONTENT_TYPE},
            timeout=self._timeouts,
            allow_redirects=False,
        )
        if response.status_code in (200, 201):
            described: Mapping[str, Any] = response.json()
            return described
        if response.status_code != 308:
            raise api_errors.from_http_response(response)  # type: ignore[no-untyped-call]
        match = _RANGE.match(response.headers.get("Range", "").replace("bytes=0--1", ""))
        return int(match.group(1)) + 1 if match else 0

    def _put_probe(self, blob: storage.Blob) -> None:
        blob.upload_from_string(
            PROBE_BYTES,
            content_type="text/plain",
            if_generation_match=0,
            checksum=None,
            retry=None,
            timeout=self._timeouts,
        )

    def _put_probe_resumable(self, connection: _Connection, blob: storage.Blob) -> None:
        size = len(PROBE_BYTES)
        url = self._start_session(connection, blob, size)
        self._send(connection.session, url, PROBE_BYTES, f"bytes 0-{size - 1}/{size}")

    def _refused(self, attempt: Callable[[Any], object], blob: storage.Blob) -> bool:
        """Whether a create-only attempt was refused because the key is taken."""
        try:
            attempt(blob)
        except _FOREIGN as error:
            if isinstance(answer_to(error), Taken):
                return True
            raise
        return False

    # --- answers ------------------------------------------------------------------------------

    def _after_refusal(
        self, connection: _Connection, name: str, fd: int, sealed: SealedFile, error: Exception
    ) -> None:
        """Returns where the object under the key is our own; raises what the refusal means otherwise."""
        answer = answer_to(error)
        if answer == _INTEGRITY:
            verify_open(fd, sealed)
        if not isinstance(answer, Taken):
            raise error
        there = self._look(connection, name)
        if there is None:
            raise TransientStoreError(
                "other", f"{name}: refused as taken, yet nothing is there", whole_store=False
            )
        _settle(there, sealed, name)

    def _look(self, connection: _Connection, name: str) -> Mapping[str, Any] | None:
        blob = connection.bucket.get_blob(name, timeout=self._timeouts, retry=None)
        if blob is None:
            return None
        return {"size": blob.size, "crc32c": blob.crc32c, "metadata": blob.metadata or {}}

    @contextmanager
    def _connected(self, name: str) -> Iterator[_Connection]:
        """The connection to use; foreign errors become ours here and nowhere else."""
        with self._lock:
            connection = self._opened = self._opened or self._connect()
        try:
            yield connection
        except _FOREIGN as error:
            answer = answer_to(error)
            if isinstance(answer, Heals) and answer.renew:
                with self._lock:
                    if self._opened is connection:
                        self._opened = None
            raise answer.error(f"{name}: {detail_of(error)}") from None

    # --- connection ---------------------------------------------------------------------------

    def _connect(self) -> _Connection:
        """Read the credentials and build a client on them; nothing is sent yet."""
        try:
            credentials = self._credentials()
        except (auth_errors.GoogleAuthError, OSError, ValueError, KeyError, TypeError) as error:
            # A half-written or rotated file heals; its content must not get into a message.
            raise _CREDENTIALS.error(self._where_credentials(error)) from None
        session = AuthorizedSession(credentials, max_refresh_attempts=0)  # type: ignore[no-untyped-call]
        adapter = _Adapter(pool_maxsize=self._parallelism, max_retries=0)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        options = {"universe_domain": credentials.universe_domain}
        if self._endpoint:
            options["api_endpoint"] = self._endpoint
        client = storage.Client(
            project=self._project_id, credentials=credentials, _http=session, client_options=options
        )
        return _Connection(client.bucket(self._bucket), session)

    def _credentials(self) -> Any:
        if self._key_info is not None:
            return service_account.Credentials.from_service_account_info(self._key_info, scopes=[SCOPE])  # type: ignore[no-untyped-call]
        if self._credentials_path is not None:
            info = json.loads(self._credentials_path.read_text("utf-8"))
            if not isinstance(info, dict):
                raise ValueError("not a JSON object")
            if info.get("type") == "service_account":
                return service_account.Credentials.from_service_account_info(info, scopes=[SCOPE])  # type: ignore[no-untyped-call]
            return google.auth.load_credentials_from_dict(info, scopes=[SCOPE])[0]  # type: ignore[no-untyped-call]
        if self._endpoint is not None:
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        return google.auth.default(scopes=[SCOPE])[0]

    def _where_credentials(self, error: Exception) -> str:
        if self._credentials_path is not None:
            return f"{self._credentials_path} cannot be used: {type(error).__name__}"
        if self._key_info is not None:
            return f"gcs.service_account_key cannot be used: {type(error).__name__}"
        return detail_of(error)


@dataclass(frozen=True, slots=True)
class _Connection:
    bucket: Any
    session: requests.Session


class _Adapter(HTTPAdapter):
    """Streams bodies in blocks large enough not to be felt."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **{**kwargs, "blocksize": SEND_BLOCK_BYTES})


def answer_to(error: Exception) -> Answer:
    """What a foreign error means, by `ERRORS` and `EXCEPTIONS`."""
    if isinstance(error, api_errors.GoogleAPICallError):
        status = int(error.code or 0)
        text = _without_key(f"{error.message} {error.errors}")
        return next((row.answer for row in ERRORS if row.matches(status, text)), _OTHER)
    return next((answer for kind, answer in EXCEPTIONS if isinstance(error, kind)), _OTHER)


def _without_key(text: str) -> str:
    """An API error's text without the object's name in its URL, which may hold any word."""
    return _URL_PATH.sub(r"\g<query>", text)


def _stumbled(error: Exception) -> bool:
    """Whether a session may go on after this error from where it stands."""
    if isinstance(error, api_errors.GoogleAPICallError):
        return error.code in _STUMBLE_STATUSES
    return isinstance(error, requests.RequestException)


def _key_or_path(key: str | None, path: str | Path | None) -> tuple[Mapping[str, Any] | None, Path | None]:
    """A service account key given inline is checked at start, a file when it is first needed."""
    if key is None:
        return None, Path(path) if path else None
    if not key.lstrip().startswith("{"):
        return None, Path(key)
    try:
        info = json.loads(key)
        service_account.Credentials.from_service_account_info(info)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            "gcs.service_account_key is not the JSON of a service account key: paste the whole key file,"
            " or give its path in gcs.credentials_path"
        ) from None
    return info, None


def _sent_crc32c(fd: int, sealed: SealedFile) -> str:
    """The sealed file's CRC32C in base64; of a file sealed without one, of what was just verified."""
    if sealed.checksums.crc32c is not None:
        return _base64(sealed.checksums.crc32c)
    crc = 0
    for piece in read_range(fd, 0, sealed.size, sealed):
        crc = google_crc32c.extend(crc, piece)
    return _base64(crc)


def _base64(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def _difference(there: Mapping[str, Any], sealed: SealedFile) -> str | None:
    """In what the store's description of an object differs from the sealed file; None where it does not."""
    if int(there.get("size") or 0) != sealed.size:
        return f"the store reports {there.get('size')} bytes, {sealed.size} were sealed"
    ours = sealed.checksums.crc32c
    reported = there.get("crc32c")
    if ours is not None and reported is not None and reported != _base64(ours):
        return f"the store reports CRC32C {reported}, {_base64(ours)} was sealed"
    return None


def _settle(there: Mapping[str, Any], sealed: SealedFile, name: str) -> None:
    """Return where the object is our own upload whose answer was lost ([K4]); `KeyTakenError` otherwise."""
    if there["metadata"].get("nonce") != sealed.nonce or _difference(there, sealed):
        raise KeyTakenError(f"{name} holds an object that is not this file")
