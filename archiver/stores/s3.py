"""`s3://` and `minio://`: any store that speaks S3, through boto3 ([S2]-[S8]).

The road of a put: look (where that is needed), send whole or in parts, compare what the store reports,
answer. One call to the store is one request: retrying is scheduling and belongs to the upload pool.

Memory: bodies are read from the file while they are sent, so `uploads_in_flight_max` uploads hold at most
`uploads_in_flight_max x PARTS_IN_FLIGHT_MAX x (READ_BYTES + one socket's buffers)`, however large they are.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isal import isal_zlib

from archiver.domain.sealed import SealedFile
from archiver.errors import KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.events import CreateOnlyMissing, Event, MultipartLeftBehind
from archiver.ports import Emit, ProbeReport
from archiver.stores.s3_client import PARTS_IN_FLIGHT_MAX, KeyInUse, NotThere, S3Client, S3Options
from archiver.stores.sealed_file import (
    Part,
    SealedBody,
    in_parallel,
    open_sealed,
    plan_parts,
    read_range,
    verify_sealed,
)

PROBE_NAME = ".dfe-archiver-probe"
PROBE_BYTES = b"dfe-archiver: shows that nothing here is ever replaced; not an archive file\n"
KEY_BYTES_MAX = 1024
PARTS_MAX = 10_000
ATTEMPTS_REMEMBERED_MAX = 10_000
LEFT_BEHIND_MAX = 1_000


@dataclass(frozen=True, slots=True)
class _Upload:
    """One attempt's constants. `key` is the whole key, prefix included."""

    sealed: SealedFile
    fd: int
    key: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _SentPart:
    part: Part
    etag: str
    crc32: int


def _no_emit(event: Event) -> None:
    del event


class S3Store:
    """`ports.Store` on S3. Safe for any number of threads; connections are reused between uploads."""

    def __init__(
        self,
        options: S3Options,
        *,
        emit: Emit = _no_emit,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._emit = emit
        self._client = S3Client(options, monotonic)
        self._lock = threading.Lock()
        self._probe_lock = threading.Lock()
        self._create_only: bool | None = None
        self._conditional = True
        self._attempted: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._left_behind: deque[tuple[str, str]] = deque(maxlen=LEFT_BEHIND_MAX)

    # --- Store --------------------------------------------------------------------------------

    def put(self, sealed: SealedFile, key: str, metadata: Mapping[str, str]) -> None:
        """See `ports.Store.put`."""
        full_key = self._full_key(key)
        with open_sealed(sealed) as fd:
            upload = _Upload(sealed, fd, full_key, {**metadata, "nonce": sealed.nonce})
            self._know_create_only()
            in_parts = sealed.size > self._options.multipart_chunk_bytes
            if self._worth_a_look(upload, in_parts) and self._is_there(upload):
                return
            try:
                if in_parts:
                    self._put_in_parts(upload)
                else:
                    self._put_whole(upload)
            except KeyInUse as taken:
                self._settle(upload, taken)
        self._remove_left_behind()

    def probe(self) -> ProbeReport:
        """See `ports.Store.probe`."""
        key = self._full_key(PROBE_NAME)
        with self._probe_lock:
            refused = [self._probe_refused(key) for _ in range(2)][-1]
            self._create_only = refused
        found = "honours" if refused else "does not honour"
        return ProbeReport(refused, f"bucket {self._options.bucket} {found} If-None-Match")

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()

    # --- create-only --------------------------------------------------------------------------

    def _probe_refused(self, key: str) -> bool:
        """Put the reserved key create-only; True where the store refuses because it is there."""
        arguments = {"Body": PROBE_BYTES, **self._object_arguments({}), **self._whole_checksum(PROBE_BYTES)}
        try:
            self._call("put_object", Key=key, IfNoneMatch="*", **arguments)
        except KeyInUse:
            return True
        except TransientStoreError as error:
            if error.kind != "not_supported":
                raise
            # It may be the condition that the store does not know: try without it.
            self._call("put_object", Key=key, **arguments)
            self._conditional = False
        return False

    def _know_create_only(self) -> None:
        """Probe before the first upload where nobody has, for example because the store was away."""
        if self._create_only is None and not self.probe().create_only:
            self._emit(CreateOnlyMissing(detail=f"bucket {self._options.bucket}"))

    def _worth_a_look(self, upload: _Upload, in_parts: bool) -> bool:
        """Whether to look at the key first: always where the store replaces objects ([S3]); before a
        large upload; and where an earlier attempt may have arrived without our hearing of it.
        """
        attempt = (upload.sealed.file_id, upload.key)
        with self._lock:
            before = attempt in self._attempted
            self._attempted[attempt] = None
            self._attempted.move_to_end(attempt)
            if len(self._attempted) > ATTEMPTS_REMEMBERED_MAX:
                self._attempted.popitem(last=False)
        return before or in_parts or not self._create_only

    def _is_there(self, upload: _Upload) -> bool:
        """True where the object is there and ours; `KeyTakenError` where it is another's."""
        try:
            found = self._head(upload.key)
        except TransientStoreError as error:
            # Without s3:ListBucket S3 answers 403 for a missing key: the condition protects us as well.
            if error.kind == "access_denied" and self._create_only:
                return False
            raise
        if found is None:
            return False
        self._check_ours(found, upload)
        return True

    def _settle(self, upload: _Upload, taken: KeyInUse) -> None:
        """The store says the key is in use: ours already, another's, or a request still under way."""
        found = self._head(upload.key)
        if found is None:
            raise TransientStoreError("conflict", str(taken), whole_store=False) from taken
        self._check_ours(found, upload)

    def _check_ours(self, found: Mapping[str, Any], upload: _Upload) -> None:
        """Return where a look shows our own whole object, else `KeyTakenError`.

        An object with our nonce that is damaged is no success, and it is never replaced ([S9]): the file
        goes under another key.
        """
        if found.get("Metadata", {}).get("nonce") != upload.sealed.nonce:
            raise KeyTakenError(f"{upload.key} holds another writer's object")
        if difference := _difference(found, upload.sealed):
            raise KeyTakenError(f"{upload.key} holds a damaged copy of this file: {difference}")

    # --- sending ------------------------------------------------------------------------------

    def _put_whole(self, upload: _Upload) -> None:
        whole = Part(1, 0, upload.sealed.size)
        crc32, checksum = self._checksum(upload, whole)
        _check_read(upload, crc32)
        answer = self._call(
            "put_object",
            upload.sealed,
            Key=upload.key,
            Body=SealedBody(upload.fd, 0, upload.sealed.size),
            ContentLength=upload.sealed.size,
            **self._condition(),
            **self._object_arguments(upload.metadata),
            **checksum,
        )
        if "ChecksumCRC32" not in answer:
            answer = self._head_after(upload)
        self._check_reported(answer, upload)

    def _put_in_parts(self, upload: _Upload) -> None:
        parts = plan_parts(upload.sealed.size, self._options.multipart_chunk_bytes, PARTS_MAX)
        checksum = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self._sends_crc32 else {}
        answer = self._call(
            "create_multipart_upload",
            upload.sealed,
            Key=upload.key,
            **self._object_arguments(upload.metadata),
            **checksum,
        )
        upload_id = str(answer.get("UploadId", ""))
        completed = False
        try:
            sent = in_parallel(
                parts, lambda part: self._send_part(upload, upload_id, part), PARTS_IN_FLIGHT_MAX
            )
            completed = self._complete(upload, upload_id, sent)
        finally:
            if not completed:
                self._abort(upload.key, upload_id)
        self._check_reported(self._head_after(upload), upload)

    def _send_part(self, upload: _Upload, upload_id: str, part: Part) -> _SentPart:
        crc32, checksum = self._checksum(upload, part)
        answer = self._call(
            "upload_part",
            upload.sealed,
            Key=upload.key,
            UploadId=upload_id,
            PartNumber=part.number,
            Body=SealedBody(upload.fd, part.offset, part.length),
            ContentLength=part.length,
            **checksum,
        )
        return _SentPart(part, str(answer.get("ETag", "")), crc32)

    def _complete(self, upload: _Upload, upload_id: str, sent: list[_SentPart]) -> bool:
        """Make the parts an object; True unless it was there already. Looks where the answer is lost."""
        crc32 = 0
        for one in sent:
            crc32 = isal_zlib.crc32_combine(crc32, one.crc32, one.part.length)
        _check_read(upload, crc32)
        checksum: dict[str, Any] = {}
        if self._sends_crc32:
            checksum = {
                "ChecksumCRC32": _crc32_text(crc32),
                "ChecksumType": "FULL_OBJECT",
                "MpuObjectSize": upload.sealed.size,
            }
        try:
            self._call(
                "complete_multipart_upload",
                upload.sealed,
                Key=upload.key,
                UploadId=upload_id,
                MultipartUpload={"Parts": [self._part_argument(one) for one in sent]},
                **self._condition(),
                **checksum,
            )
        except TransientStoreError as error:
            if not self._arrived_all_the_same(upload, error):
                raise
        return True

    def _arrived_all_the_same(self, upload: _Upload, error: TransientStoreError) -> bool:
        """After a completion whose answer says nothing for sure: whether the object is there and ours."""
        try:
            return self._is_there(upload)
        except TransientStoreError:
            raise error from None

    def _part_argument(self, sent: _SentPart) -> dict[str, Any]:
        argument: dict[str, Any] = {"PartNumber": sent.part.number, "ETag": sent.etag}
        if self._sends_crc32:
            argument["ChecksumCRC32"] = _crc32_text(sent.crc32)
        return argument

    def _abort(self, key: str, upload_id: str) -> None:
        """Remove the parts of a failed upload ([S5]); where that fails too, remember them."""
        try:
            self._call("abort_multipart_upload", Key=key, UploadId=upload_id)
        except StoreError as error:
            if isinstance(error, TransientStoreError) and error.kind == "upload_vanished":
                return
            self._left_behind.append((key, upload_id))
            self._emit(MultipartLeftBehind(key=key, detail=str(error)))

    def _remove_left_behind(self) -> None:
        """Once the store answers again: abort what could not be aborted, one per successful put."""
        try:
            key, upload_id = self._left_behind.popleft()
        except IndexError:
            return
        self._abort(key, upload_id)

    # --- comparing ----------------------------------------------------------------------------

    def _head(self, key: str) -> Mapping[str, Any] | None:
        """What the store says of an object; None where there is none."""
        checksum = {"ChecksumMode": "ENABLED"} if self._sends_crc32 else {}
        try:
            return self._call("head_object", None, Key=key, **checksum)
        except NotThere:
            return None

    def _head_after(self, upload: _Upload) -> Mapping[str, Any]:
        found = self._head(upload.key)
        if found is None:
            raise TransientStoreError(
                "integrity", f"{upload.key} is not there after its upload", whole_store=False
            )
        nonce = found.get("Metadata", {}).get("nonce", upload.sealed.nonce)
        if nonce != upload.sealed.nonce:
            raise KeyTakenError(f"{upload.key} holds another writer's object")
        return found

    def _check_reported(self, answer: Mapping[str, Any], upload: _Upload) -> None:
        """[S4]: a mismatch is never durable; the next attempt finds the damaged object and moves on."""
        if difference := _difference(answer, upload.sealed):
            raise TransientStoreError("integrity", f"{upload.key}: {difference}", whole_store=False)

    def _call(
        self, operation: str, sealed: SealedFile | None = None, /, **arguments: Any
    ) -> Mapping[str, Any]:
        """One request, see `S3Client.call`. Bytes that arrived wrong may be the file's own fault ([D10])."""
        try:
            return self._client.call(operation, arguments)
        except TransientStoreError as error:
            if error.kind == "integrity" and sealed is not None:
                verify_sealed(sealed)
            raise

    # --- arguments ----------------------------------------------------------------------------

    @property
    def _sends_crc32(self) -> bool:
        return self._options.checksum == "crc32"

    def _full_key(self, key: str) -> str:
        full_key = f"{self._options.prefix}/{key}" if self._options.prefix else key
        size = len(full_key.encode())
        if size > KEY_BYTES_MAX:
            raise RefusedError("key_invalid", f"the key has {size} bytes, S3 takes {KEY_BYTES_MAX}")
        return full_key

    def _condition(self) -> dict[str, Any]:
        return {"IfNoneMatch": "*"} if self._conditional else {}

    def _object_arguments(self, metadata: Mapping[str, str]) -> dict[str, Any]:
        """What every new object gets."""
        options = self._options
        wanted = {
            "ContentType": "application/x-ndjson",
            "Metadata": dict(metadata) or None,
            "StorageClass": options.storage_class,
            "ServerSideEncryption": options.sse,
            "SSEKMSKeyId": options.kms_key_id,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def _checksum(self, upload: _Upload, part: Part) -> tuple[int, dict[str, Any]]:
        """Read the range once: its CRC32, and the argument that lets the store check what arrives."""
        crc32 = 0
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in read_range(upload.fd, part.offset, part.length, upload.sealed):
            crc32 = isal_zlib.crc32(piece, crc32)
            if not self._sends_crc32:
                md5.update(piece)
        return crc32, self._checksum_argument(crc32, md5.digest())

    def _whole_checksum(self, data: bytes) -> dict[str, Any]:
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        return self._checksum_argument(isal_zlib.crc32(data), digest)

    def _checksum_argument(self, crc32: int, md5: bytes) -> dict[str, Any]:
        if self._sends_crc32:
            return {"ChecksumCRC32": _crc32_text(crc32)}
        return {"ContentMD5": base64.b64encode(md5).decode()}


def _check_read(upload: _Upload, crc32: int) -> None:
    """What was read for sending must be what was sealed ([D10])."""
    if crc32 != upload.sealed.checksums.crc32:
        verify_sealed(upload.sealed)
        raise TransientStoreError(
            "integrity", f"{upload.sealed.path} reads differently each time", whole_store=False
        )


def _crc32_text(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


def _difference(answer: Mapping[str, Any], sealed: SealedFile) -> str | None:
    """How what the store reports differs from what was sealed, in words; None where it agrees.

    The ETag says nothing: with KMS or in parts it is no checksum of the bytes. Neither does a checksum of
    checksums, which ends in `-<parts>`.
    """
    size = answer.get("ContentLength", sealed.size)
    if size != sealed.size:
        return f"the store has {size} bytes, {sealed.size} were sent"
    reported = answer.get("ChecksumCRC32", "")
    if reported and "-" not in reported and reported != _crc32_text(sealed.checksums.crc32):
        return f"the store has CRC32 {reported}, {_crc32_text(sealed.checksums.crc32)} was sent"
    return None
