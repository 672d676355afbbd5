"""`az://`: block blobs in Azure Blob Storage ([S3], [S4], [S5]).

    up to the chunk size   one Put Blob with If-None-Match: * and the file's MD5
    above it               Put Block for each part with its MD5, several at once, then Put Block List with
                           If-None-Match: *; the list is only sent if all that was read is what was sealed

Blocks that are never listed become no blob and expire after a week; there is no way to abort them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from azure.core import MatchConditions
from azure.core import exceptions as azure_errors
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobBlock, BlobClient, BlobServiceClient, ContentSettings
from isal import isal_zlib
from requests.adapters import HTTPAdapter

from archiver.domain.sealed import SealedFile
from archiver.errors import ConfigError, KeyTakenError, RefusedError, TransientStoreError
from archiver.ports import ProbeReport
from archiver.stores.answers import Answer, Heals, Refuses, Taken
from archiver.stores.redaction import detail_of, redact_sdk_logs
from archiver.stores.sealed_file import Part, SealedBody, open_sealed, plan_parts, read_range, verify_open

PROBE_NAME = ".dfe-archiver-probe"
PROBE_BYTES = b"dfe-archiver: shows that nothing here is ever replaced; not an archive file\n"
CONTENT_TYPE = "application/x-ndjson"

NAME_CHARS_MAX = 1024
"""Of a blob's name (Azure Storage, naming of blobs)."""
BLOCKS_MAX = 50_000
"""Of one blob (Put Block List)."""
BLOCKS_AT_ONCE = 4
"""Per file; times `buffer.writer_parallelism` is what is in flight at most."""

SEND_BLOCK_BYTES = 128 * 1024
CONNECT_TIMEOUT_SECS = 20.0
READ_TIMEOUT_SECS = 60.0

_CONTAINER = re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]\Z|\$root\Z")

_NOT_FOR_DAEMONS = (
    "exclude_interactive_browser_credential",
    "exclude_shared_token_cache_credential",
    "exclude_visual_studio_code_credential",
    "exclude_cli_credential",
    "exclude_powershell_credential",
    "exclude_developer_cli_credential",
    "exclude_broker_credential",
)
"""Links of azure-identity's chain that start programs of a signed-in person or ask one."""

_CREDENTIALS = Heals(
    "credentials",
    way_out="check azure.account_key, azure.sas_token, azure.connection_string or the managed identity",
)
_DENIED = Heals("access_denied", way_out="allow blobs/read and blobs/write, or renew the signature")
_CONTAINER_AWAY = Heals("missing_bucket", way_out="create the container or correct archive.destination")
_INTEGRITY = Heals("integrity", whole_store=False)
_THROTTLED = Heals("throttled")
_SERVER = Heals("server")


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of the service: its error code, a pattern its message must hold, our answer."""

    code: str
    answer: Answer
    holds: str = ""


ERRORS: tuple[Row, ...] = (
    Row("BlobAlreadyExists", Taken()),
    Row("ConditionNotMet", Taken()),
    Row("TargetConditionNotMet", Taken()),
    Row("BlobOverwritten", Taken()),
    Row("BlobImmutableDueToPolicy", Taken()),
    Row("BlobArchived", Taken()),
    Row("InvalidBlobType", Taken()),
    Row("LeaseIdMissing", Taken()),
    Row("UnauthorizedBlobOverwrite", Taken()),
    Row("Md5Mismatch", _INTEGRITY),
    Row("InvalidMd5", _INTEGRITY),
    Row("InvalidOperation", _INTEGRITY, r"md5"),  # Azurite's name for it
    Row("InvalidBlockList", Heals("blocks_lost", whole_store=False)),
    Row("InvalidResourceName", Refuses("key_invalid")),
    Row("RequestBodyTooLarge", Refuses("too_large")),
    Row("BlockListTooLong", Refuses("too_large")),
    Row("BlockCountExceedsLimit", Refuses("too_large")),
    Row("ContainerNotFound", _CONTAINER_AWAY),
    Row("ResourceNotFound", _CONTAINER_AWAY),
    Row("ContainerBeingDeleted", _CONTAINER_AWAY),
    Row("ContainerDisabled", _CONTAINER_AWAY),
    Row(
        "AuthenticationFailed",
        Heals("clock_skew", way_out="set this machine's clock"),
        r"request date header|not yet valid",
    ),
    Row("AuthenticationFailed", _CREDENTIALS),
    Row("InvalidAuthenticationInfo", _CREDENTIALS),
    Row("NoAuthenticationInformation", _CREDENTIALS),
    Row("AccountIsDisabled", Heals("access_denied", way_out="enable the storage account")),
    Row("ServerBusy", _THROTTLED),
    Row("OperationTimedOut", Heals("timeout")),
    Row("InternalError", _SERVER),
)
"""First match wins; a code that is not here is taken by its status ([S6])."""

STATUSES: Mapping[int, Answer] = {
    401: _CREDENTIALS,
    403: _DENIED,
    404: _CONTAINER_AWAY,
    408: Heals("timeout"),
    409: Taken(),
    412: Taken(),
    413: Refuses("too_large"),
    429: _THROTTLED,
    500: _SERVER,
    502: _SERVER,
    503: _THROTTLED,
    504: Heals("timeout"),
    507: Heals("quota", way_out="raise the account's capacity"),
}
"""A status that is not here heals by waiting."""

EXCEPTIONS: tuple[tuple[type[Exception], Answer], ...] = (
    (azure_errors.ServiceRequestTimeoutError, Heals("timeout")),
    (azure_errors.ServiceResponseTimeoutError, Heals("timeout")),
    (azure_errors.ServiceRequestError, Heals("network")),
    (azure_errors.ServiceResponseError, Heals("network")),
    (azure_errors.ClientAuthenticationError, _CREDENTIALS),
)
_OTHER = Heals("other")


class AzureStore:
    """`ports.Store` on one container, everything under `prefix` (no slashes around it; may be empty).

    Credentials, the first that is given: `connection_string`, `account_key`, `sas_token`, else the chain
    of azure-identity (managed identity, workload identity, environment), where that is installed.
    `endpoint` is the blob service's URL, with the account as its path on emulators. `chunk_size` in bytes;
    `parallelism` is how many threads call `put` at once. Raises `ConfigError`.
    """

    def __init__(
        self,
        container: str,
        prefix: str = "",
        *,
        account_name: str | None = None,
        account_key: str | None = None,
        sas_token: str | None = None,
        connection_string: str | None = None,
        endpoint: str | None = None,
        chunk_size: int = 8 << 20,
        parallelism: int = 8,
        read_timeout_secs: float = READ_TIMEOUT_SECS,
    ) -> None:
        if not _CONTAINER.match(container):
            raise ConfigError(
                f"archive.destination: {container!r} is no container name: 3 to 63 lower-case letters,"
                " digits and single hyphens"
            )
        self._container = container
        self._prefix = prefix.strip("/")
        self._chunk_bytes = chunk_size
        self._look_first = False
        redact_sdk_logs()
        options: dict[str, Any] = {
            "transport": _transport(parallelism * BLOCKS_AT_ONCE, read_timeout_secs),
            "retry_total": 0,
            "max_single_put_size": chunk_size,
        }
        self._service = _service(account_name, account_key, sas_token, connection_string, endpoint, options)

    def __repr__(self) -> str:
        return f"AzureStore(az://{self._container}/{self._prefix})"

    # --- Store --------------------------------------------------------------------------------

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """See `ports.Store.put`."""
        name = self._name(key)
        if len(name) > NAME_CHARS_MAX:
            raise RefusedError("key_invalid", f"{len(name)} characters, {NAME_CHARS_MAX} are allowed")
        in_blocks = sealed.size > self._chunk_bytes
        with open_sealed(sealed) as fd, _translated(name):
            blob = self._blob(name)
            # A look is little beside many blocks, which would all be sent before the refusal.
            if (self._look_first or in_blocks) and (there := _look(blob)) is not None:
                _settle(there, sealed, name)
                return
            try:
                problem = (self._put_blocks if in_blocks else _put_blob)(blob, fd, sealed, metadata)
            except azure_errors.AzureError as error:
                _after_refusal(blob, fd, sealed, name, error)
                return
            if problem:
                verify_open(fd, sealed)
                raise TransientStoreError("integrity", f"{name}: {problem}", whole_store=False)

    def probe(self) -> ProbeReport:
        """See `ports.Store.probe`. Tries both ways of uploading, since an emulator may honour only one."""
        name = self._name(PROBE_NAME)
        ways: Mapping[str, Callable[[BlobClient], object]] = {
            "Put Blob": _put_probe,
            "Put Block List": _put_probe_in_blocks,
        }
        with _translated(name):
            blob = self._blob(name)
            _refused(_put_probe, blob)
            ignored = [way for way, attempt in ways.items() if not _refused(attempt, blob)]
        self._look_first = bool(ignored)
        found = f"ignored by {' and '.join(ignored)}" if ignored else "honoured: a second put was refused"
        return ProbeReport(not ignored, f"az://{self._container}/{name}: If-None-Match is {found}")

    def close(self) -> None:
        """Close idle connections."""
        self._service.close()

    # --- uploads ------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _blob(self, name: str) -> BlobClient:
        return self._service.get_blob_client(self._container, name)

    def _put_blocks(
        self, blob: BlobClient, fd: int, sealed: SealedFile, metadata: Mapping[str, str]
    ) -> str | None:
        """Stage all blocks, list them, look at the blob; returns what is wrong with it."""
        md5 = sealed.checksums.md5 or _md5(read_range(fd, 0, sealed.size, sealed))
        staged, crc32 = _stage_all(blob, fd, sealed, plan_parts(sealed.size, self._chunk_bytes, BLOCKS_MAX))
        if crc32 != sealed.checksums.crc32:
            return f"CRC32 {crc32:08x} was read, {sealed.checksums.crc32:08x} was sealed"
        blob.commit_block_list(
            [BlobBlock(block_id) for block_id in staged],
            content_settings=_content(md5),
            metadata=dict(metadata),
            match_condition=MatchConditions.IfMissing,
        )
        there = _look(blob)
        return "it is not there after it was listed" if there is None else _difference(there, sealed)


@dataclass(frozen=True, slots=True)
class _There:
    """A blob as the service describes it; metadata names in lower case."""

    size: int
    md5: bytes | None
    metadata: Mapping[str, str]


def _put_blob(blob: BlobClient, fd: int, sealed: SealedFile, metadata: Mapping[str, str]) -> str | None:
    """One Put Blob; returns what is wrong with what the service says it stored."""
    verify_open(fd, sealed)
    md5 = sealed.checksums.md5 or _md5(read_range(fd, 0, sealed.size, sealed))
    stored = blob.upload_blob(
        SealedBody(fd, 0, sealed.size),
        length=sealed.size,
        overwrite=False,
        metadata=dict(metadata),
        content_settings=_content(md5),
        transactional_content_md5=bytearray(md5),
    )
    reported = stored.get("content_md5")
    if reported is None:
        there = _look(blob)
        return "it is not there after it was put" if there is None else _difference(there, sealed)
    return None if bytes(reported) == md5 else f"the store reports MD5 {bytes(reported).hex()}"


def _stage_all(blob: BlobClient, fd: int, sealed: SealedFile, parts: list[Part]) -> tuple[list[str], int]:
    """Send every part, `BLOCKS_AT_ONCE` at a time; returns the block ids and the CRC32 of all that was read.

    Ids are this attempt's own: blocks that another attempt, or another writer of the key, has left cannot
    get into the list.
    """
    attempt = secrets.token_hex(8)
    ids = [f"{attempt}{part.number:06d}" for part in parts]
    crc32 = 0
    with ThreadPoolExecutor(BLOCKS_AT_ONCE, thread_name_prefix="azure-block") as pool:
        running: deque[Future[None]] = deque()
        try:
            for part, block_id in zip(parts, ids, strict=True):
                md5, crc32 = _digest(fd, part, crc32, sealed)
                if len(running) == BLOCKS_AT_ONCE:
                    running.popleft().result()
                running.append(pool.submit(_stage, blob, fd, part, block_id, md5))
            while running:
                running.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return ids, crc32


def _stage(blob: BlobClient, fd: int, part: Part, block_id: str, md5: bytes) -> None:
    blob.stage_block(
        block_id,
        SealedBody(fd, part.offset, part.length),
        length=part.length,
        transactional_content_md5=bytearray(md5),
    )


def _digest(fd: int, part: Part, crc32: int, sealed: SealedFile) -> tuple[bytes, int]:
    """A part's MD5, which the service checks, and the file's CRC32 carried on, which we check."""
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in read_range(fd, part.offset, part.length, sealed):
        md5.update(piece)
        crc32 = isal_zlib.crc32(piece, crc32)
    return md5.digest(), crc32


def _md5(pieces: Iterator[bytes]) -> bytes:
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        md5.update(piece)
    return md5.digest()


def _content(md5: bytes) -> ContentSettings:
    return ContentSettings(content_type=CONTENT_TYPE, content_md5=bytearray(md5))


def _put_probe(blob: BlobClient) -> None:
    blob.upload_blob(
        PROBE_BYTES, overwrite=False, content_settings=ContentSettings(content_type="text/plain")
    )


def _put_probe_in_blocks(blob: BlobClient) -> None:
    block_id = secrets.token_hex(11)
    blob.stage_block(block_id, PROBE_BYTES)
    blob.commit_block_list([BlobBlock(block_id)], match_condition=MatchConditions.IfMissing)


# --- answers ----------------------------------------------------------------------------------


def answer_to(error: Exception) -> Answer:
    """What a foreign error means, by `ERRORS`, `STATUSES` and `EXCEPTIONS`."""
    status = getattr(error, "status_code", None)
    if status is None:
        return next((answer for kind, answer in EXCEPTIONS if isinstance(error, kind)), _OTHER)
    code = getattr(error, "error_code", None)
    code = str(getattr(code, "value", code))
    for row in ERRORS:
        if row.code == code and re.search(row.holds, str(error), re.IGNORECASE):
            return row.answer
    return STATUSES.get(int(status), _OTHER)


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Foreign errors become ours here and nowhere else."""
    try:
        yield
    except azure_errors.AzureError as error:
        raise answer_to(error).error(f"{name}: {detail_of(error)}") from None


def _refused(attempt: Callable[[BlobClient], object], blob: BlobClient) -> bool:
    """Whether a create-only attempt was refused because the key is taken."""
    try:
        attempt(blob)
    except azure_errors.AzureError as error:
        if isinstance(answer_to(error), Taken):
            return True
        raise
    return False


def _after_refusal(blob: BlobClient, fd: int, sealed: SealedFile, name: str, error: Exception) -> None:
    """Returns where the blob under the key is our own; raises what the refusal means otherwise."""
    answer = answer_to(error)
    if answer == _INTEGRITY:
        verify_open(fd, sealed)
    if not isinstance(answer, Taken):
        raise error
    there = _look(blob)
    if there is None:
        raise TransientStoreError(
            "other", f"{name}: refused as taken, yet nothing is there", whole_store=False
        )
    _settle(there, sealed, name)


def _look(blob: BlobClient) -> _There | None:
    """The blob as it is stored; None where there is none."""
    try:
        found = blob.get_blob_properties()
    except azure_errors.ResourceNotFoundError as error:
        code = getattr(error, "error_code", None)
        if str(getattr(code, "value", code)) == "BlobNotFound":
            return None
        raise
    md5 = found.content_settings.content_md5
    names = {name.lower(): value for name, value in (found.metadata or {}).items()}
    return _There(found.size, bytes(md5) if md5 else None, names)


def _difference(there: _There, sealed: SealedFile) -> str | None:
    """In what a stored blob differs from the sealed file; None where it does not."""
    if there.size != sealed.size:
        return f"the store reports {there.size} bytes, {sealed.size} were sealed"
    if there.md5 is not None and sealed.checksums.md5 is not None and there.md5 != sealed.checksums.md5:
        return f"the store reports MD5 {there.md5.hex()}, {sealed.checksums.md5.hex()} was sealed"
    return None


def _settle(there: _There, sealed: SealedFile, name: str) -> None:
    """Return where the blob is our own upload whose answer was lost ([K4]); `KeyTakenError` otherwise."""
    if there.metadata.get("nonce") != sealed.nonce or _difference(there, sealed):
        raise KeyTakenError(f"{name} holds an object that is not this file")


# --- connection -------------------------------------------------------------------------------


class _Adapter(HTTPAdapter):
    """Streams bodies in blocks large enough not to be felt."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **{**kwargs, "blocksize": SEND_BLOCK_BYTES})


def _transport(connections: int, read_timeout_secs: float) -> RequestsTransport:
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, _Adapter(pool_maxsize=connections, max_retries=0))
    return RequestsTransport(
        session=session, connection_timeout=CONNECT_TIMEOUT_SECS, read_timeout=read_timeout_secs
    )


def _service(
    account_name: str | None,
    account_key: str | None,
    sas_token: str | None,
    connection_string: str | None,
    endpoint: str | None,
    options: Mapping[str, Any],
) -> BlobServiceClient:
    """The client for the first credential that is given. What it was given gets into no message."""
    if connection_string:
        try:
            service = BlobServiceClient.from_connection_string(connection_string, **options)
        except (ValueError, KeyError):
            service = None
        if service is None or (service.credential is None and "sig=" not in service.url):
            raise ConfigError(
                "azure.connection_string cannot be used: copy it whole from the account's access keys"
            )
        return service
    if not endpoint and not account_name:
        raise ConfigError("azure: set account_name, endpoint or connection_string")
    url = (endpoint or f"https://{account_name}.blob.core.windows.net").rstrip("/")
    if account_key:
        credential: Any = _shared_key(account_name or _account_in(url), account_key)
    elif sas_token:
        credential = AzureSasCredential(sas_token.strip().lstrip("?"))
    else:
        credential = _identity(url)
    try:
        return BlobServiceClient(url, credential=credential, **options)
    except ValueError as error:
        raise ConfigError(f"azure.endpoint cannot be used: {detail_of(error)}") from None


def _account_in(url: str) -> str:
    """The account that a blob service's URL names: in its host, or as its path on emulators."""
    parts = urlsplit(url)
    host, dot, _ = (parts.hostname or "").partition(".blob.")
    return host if dot else parts.path.strip("/").partition("/")[0]


def _shared_key(account: str, key: str) -> AzureNamedKeyCredential:
    if not account:
        raise ConfigError("azure.account_name is missing: azure.account_key needs it")
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("azure.account_key is not base64: copy it whole from the access keys") from None
    return AzureNamedKeyCredential(account, key)


def _identity(url: str) -> object:
    """The chain of azure-identity; see docs/decisions on why it is optional."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise ConfigError(
            "azure: no credentials are configured and azure-identity is not installed: set"
            " azure.account_key, azure.sas_token or azure.connection_string, or install"
            " dfe-archiver[azure-identity]"
        ) from None
    if not url.startswith("https://"):
        raise ConfigError("azure.endpoint: an identity is only used over https")
    return DefaultAzureCredential(**dict.fromkeys(_NOT_FOR_DAEMONS, True))
