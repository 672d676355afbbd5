"""One request to a store that speaks S3: the client, its credentials, and what its errors mean."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from archiver import __version__
from archiver.errors import StoreError
from archiver.stores.answers import Answer, Heals, Refuses, Taken
from archiver.stores.redaction import detail_of, redact_sdk_logs

PARTS_IN_FLIGHT_MAX = 4
"""Parts of one upload sent at once."""
RENEW_SECS_MIN = 5.0
"""A client is built anew at most this often, however many uploads are denied at once."""

_NO_CHECKSUMS = "if this store does not know S3's checksum headers, set s3.checksum: none"
_CREDENTIALS = (
    "check access key and secret in the settings or, where there are none, in the environment, the profile "
    "or the role; they are read again before the next attempt"
)
_REGION = "set s3.region to the bucket's region"
_CLOCK = "set this machine's clock: the store refuses requests that are minutes off"
_DENIED = "allow s3:PutObject, s3:GetObject, s3:AbortMultipartUpload and s3:ListBucket"

_THROTTLED = Heals("throttled")
_SERVER = Heals("server")
_TIMEOUT = Heals("timeout")
_NETWORK = Heals("network")
_LOGIN = Heals("credentials", way_out=_CREDENTIALS, renew=True)
_FORBIDDEN = Heals("access_denied", way_out=_DENIED, renew=True)
_WRONG_REGION = Heals("wrong_region", way_out=_REGION)
_FULL = Heals("quota", way_out="free space or raise the quota of the bucket")
_INTEGRITY = Heals("integrity", whole_store=False)
_UNKNOWN_HEADER = Heals("not_supported", way_out=_NO_CHECKSUMS)
_NO_BUCKET = Heals("missing_bucket", way_out="create the bucket or correct the destination")
_VANISHED = Heals("upload_vanished", whole_store=False)

ERRORS: dict[str, Answer] = {
    # create-only, and another request for the same key under way
    "PreconditionFailed": Taken(),
    "ConditionalRequestConflict": Taken(),
    "OperationAborted": Taken(),
    "409": Taken(),
    "412": Taken(),
    # the object itself
    "KeyTooLongError": Refuses("key_invalid"),
    "InvalidURI": Refuses("key_invalid"),
    "InvalidObjectName": Refuses("key_invalid"),
    "XMinioInvalidObjectName": Refuses("key_invalid"),
    "414": Refuses("key_invalid"),
    "EntityTooLarge": Refuses("too_large"),
    "413": Refuses("too_large"),
    # load
    "SlowDown": _THROTTLED,
    "SlowDownRead": _THROTTLED,
    "SlowDownWrite": _THROTTLED,
    "Throttling": _THROTTLED,
    "ThrottlingException": _THROTTLED,
    "RequestLimitExceeded": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "429": _THROTTLED,
    "ServiceUnavailable": _THROTTLED,
    "503": _THROTTLED,
    "InternalError": _SERVER,
    "500": _SERVER,
    "502": _SERVER,
    "504": _SERVER,
    "RequestTimeout": _TIMEOUT,
    "408": _TIMEOUT,
    "IncompleteBody": _NETWORK,
    # who we are, and when
    "RequestTimeTooSkewed": Heals("clock_skew", way_out=_CLOCK),
    "ExpiredToken": _LOGIN,
    "ExpiredTokenException": _LOGIN,
    "TokenRefreshRequired": _LOGIN,
    "InvalidToken": _LOGIN,
    "InvalidAccessKeyId": _LOGIN,
    "InvalidClientTokenId": _LOGIN,
    "UnrecognizedClientException": _LOGIN,
    "SignatureDoesNotMatch": _LOGIN,
    "401": _LOGIN,
    "400": Heals("bad_request", way_out=f"{_CREDENTIALS}; {_NO_CHECKSUMS}", renew=True),
    "AccessDenied": _FORBIDDEN,
    "AllAccessDisabled": _FORBIDDEN,
    "AccountProblem": _FORBIDDEN,
    "403": _FORBIDDEN,
    # where to
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": _NO_BUCKET,
    "404": _NO_BUCKET,
    "PermanentRedirect": _WRONG_REGION,
    "TemporaryRedirect": _WRONG_REGION,
    "AuthorizationHeaderMalformed": _WRONG_REGION,
    "IllegalLocationConstraintException": _WRONG_REGION,
    "301": _WRONG_REGION,
    "QuotaExceeded": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
    "507": _FULL,
    # what was sent
    "BadDigest": _INTEGRITY,
    "InvalidDigest": _INTEGRITY,
    "XAmzContentChecksumMismatch": _INTEGRITY,
    "XAmzContentSHA256Mismatch": Heals("integrity", whole_store=False, way_out=_NO_CHECKSUMS),
    "NotImplemented": _UNKNOWN_HEADER,
    "501": _UNKNOWN_HEADER,
    "InvalidArgument": _UNKNOWN_HEADER,
    "InvalidRequest": _UNKNOWN_HEADER,
    "MissingContentLength": _UNKNOWN_HEADER,
    "411": _UNKNOWN_HEADER,
    "NoSuchUpload": _VANISHED,
    "InvalidPart": _VANISHED,
    "InvalidPartOrder": _VANISHED,
    "MetadataTooLarge": Heals("metadata_too_large", whole_store=False),
    # exceptions of the SDK, by class, the nearest base class deciding
    "ConnectionError": _NETWORK,
    "ConnectTimeoutError": _TIMEOUT,
    "ReadTimeoutError": _TIMEOUT,
    "SSLError": Heals("tls", way_out="check the certificate, and set s3.ca_bundle for a CA of your own"),
    "HTTPClientError": _NETWORK,
    "ResponseParserError": Heals("bad_answer", way_out="check that the endpoint speaks S3"),
    "NoCredentialsError": _LOGIN,
    "PartialCredentialsError": _LOGIN,
    "CredentialRetrievalError": _LOGIN,
    "MetadataRetrievalError": _LOGIN,
    "TokenRetrievalError": _LOGIN,
    "UnauthorizedSSOTokenError": _LOGIN,
    "SSOError": _LOGIN,
    "ProfileNotFound": _LOGIN,
    "RefreshWithMFAUnsupportedError": _LOGIN,
}
"""Codes of S3 and its relatives, HTTP statuses, and the SDK's exception classes, to what they mean."""

_OTHER: Answer = Heals("other")
_CONFLICT = Heals("conflict", whole_store=False)
_CREATES = frozenset({"put_object", "complete_multipart_upload"})
_FOREIGN = (BotoCoreError, ClientError, ResponseParserError, ValueError, OSError)
_LOGGERS = ("boto3", "botocore")


@dataclass(frozen=True, slots=True)
class S3Options:
    """What the store needs to know; sizes in bytes. `prefix` has no slash at its ends.

    Without `access_key_id` the SDK's own chain is asked. `path_style` None: with an endpoint of one's own.
    `checksum` `none` sends no checksum header; Content-MD5 then guards the way. The SDK also ends an
    upload over a new connection whose bytes nobody takes for `connect_timeout_secs`, so that is no less
    than what a busy store may need to catch its breath.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    path_style: bool | None = None
    storage_class: str | None = None
    sse: str | None = None
    kms_key_id: str | None = None
    checksum: Literal["crc32", "none"] = "crc32"
    ca_bundle: str | None = None
    multipart_chunk_bytes: int = 8 << 20
    uploads_in_flight_max: int = 8
    connect_timeout_secs: float = 30
    read_timeout_secs: float = 60


def answer_for(error: BaseException) -> Answer:
    """What an SDK error means: by its code, else its HTTP status, else its class."""
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        status = _status(error)
        fallback = _SERVER if status >= 500 else _OTHER
        if code.startswith("KMS."):
            return Heals("kms", way_out="check s3.kms_key_id and kms:GenerateDataKey, kms:Decrypt on it")
        return ERRORS.get(code) or ERRORS.get(str(status)) or fallback
    for kind in type(error).__mro__:
        if kind.__name__ in ERRORS:
            return ERRORS[kind.__name__]
    return _OTHER


class KeyInUse(Exception):
    """An answer to a create-only request: an object or another request holds the key."""


class NotThere(Exception):
    """An answer to a look: there is no such object."""


class S3Client:
    """Calls on one bucket, one request each. Safe for any number of threads; connections are reused."""

    def __init__(self, options: S3Options, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._client: Any = None
        self._renewed_at = float("-inf")
        quieten_sdk_logs()

    def call(self, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request. Foreign errors become ours here and nowhere else.

        Raises `StoreError`; `KeyInUse` for `put_object` and `complete_multipart_upload`, `NotThere` for
        `head_object`.
        """
        client = None
        try:
            client = self._current()
            answer: Mapping[str, Any] = getattr(client, operation)(Bucket=self._options.bucket, **arguments)
            return answer
        except _FOREIGN as error:
            raise self._translate(error, operation, client) from None

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _translate(self, error: Exception, operation: str, client: Any) -> StoreError | KeyInUse | NotThere:
        detail = f"{operation}: {self._without_secrets(detail_of(error))}"
        if operation == "head_object" and _status(error) == 404:
            return NotThere(detail)
        answer = answer_for(error)
        if isinstance(answer, Taken):
            return KeyInUse(detail) if operation in _CREATES else _CONFLICT.error(detail)
        if isinstance(answer, Heals) and answer.renew:
            self._renew(client)
        return answer.error(detail)

    def _current(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = build_client(self._options)
            return self._client

    def _renew(self, client: Any) -> None:
        """Forget a client whose credentials were refused, so that the next call reads them afresh ([S7]).

        The SDK reads a shared credentials file once per session, so only a new session sees a rotated one.
        """
        with self._lock:
            now = self._monotonic()
            if client is self._client and now - self._renewed_at >= RENEW_SECS_MIN:
                self._client = None
                self._renewed_at = now

    def _without_secrets(self, text: str) -> str:
        options = self._options
        for secret in (options.secret_access_key, options.session_token):
            if secret:
                text = text.replace(secret, "***")
        return text


def build_client(options: S3Options) -> Any:
    """A client with a session of its own, so that credentials are read anew. Costs about 0.2 s."""
    path_style = options.path_style if options.path_style is not None else options.endpoint is not None
    config = Config(
        connect_timeout=options.connect_timeout_secs,
        read_timeout=options.read_timeout_secs,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=options.uploads_in_flight_max * PARTS_IN_FLIGHT_MAX,
        tcp_keepalive=True,
        user_agent_extra=f"dfe-archiver/{__version__}",
        s3={"addressing_style": "path" if path_style else "auto"},
        # Checksums are computed and compared here; the SDK's own would come as trailers ([S8] checksum).
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        region_name=options.region or os.environ.get("AWS_REGION"),  # the SDK reads AWS_DEFAULT_REGION alone
    )
    return session.client("s3", endpoint_url=options.endpoint, verify=options.ca_bundle, config=config)


def quieten_sdk_logs() -> None:
    """Keep the SDK above debug: its debug lines hold signed headers and session tokens ([S7], c32)."""
    redact_sdk_logs()
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level < logging.INFO:
            logger.setLevel(logging.INFO)


def _status(error: Exception) -> int:
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
