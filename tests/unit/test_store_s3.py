"""`s3://` against servers that answer as told: what each answer means, and what goes over the wire."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import ssl
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError

from archiver.domain.sealed import SealedFile
from archiver.errors import KeyTakenError, RefusedError, StoreError, TransientStoreError
from archiver.events import CreateOnlyMissing, Event, MultipartLeftBehind
from archiver.stores.answers import Heals, Refuses, Taken
from archiver.stores.s3 import S3Store
from archiver.stores.s3_client import ERRORS, KeyInUse, S3Client, S3Options, answer_for
from tests.contract.store_case import make_sealed
from tests.harness.fault_proxy import (
    Answer,
    Delay,
    Drop,
    Fault,
    FaultProxy,
    Hang,
    Request,
    Respond,
    puts,
    s3_error,
)
from tests.harness.process import free_port

SECRET = "c2VjcmV0LWFjY2Vzcy1rZXktb2YtdGhlLXRlc3Q"
TOKEN = "session-token-of-the-test-0123456789"
ACCESS_KEY = "AKIATESTTESTTEST"
CHUNK = 5 << 20

STATUSES = {
    "PreconditionFailed": 412,
    "ConditionalRequestConflict": 409,
    "OperationAborted": 409,
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "InternalError": 500,
    "NotImplemented": 501,
    "AccessDenied": 403,
    "SignatureDoesNotMatch": 403,
    "RequestTimeTooSkewed": 403,
    "NoSuchBucket": 404,
    "NoSuchUpload": 404,
}
"""HTTP statuses that S3 sends with a code, where it is not 400."""

EXCEPTIONS: dict[str, Exception] = {
    "ConnectionError": sdk.EndpointConnectionError(endpoint_url="http://x"),
    "ConnectTimeoutError": sdk.ConnectTimeoutError(endpoint_url="http://x"),
    "ReadTimeoutError": sdk.ReadTimeoutError(endpoint_url="http://x"),
    "SSLError": sdk.SSLError(endpoint_url="http://x", error=OSError("no")),
    "HTTPClientError": sdk.HTTPClientError(error=OSError("no")),
    "ResponseParserError": ResponseParserError("no"),
    "NoCredentialsError": sdk.NoCredentialsError(),
    "PartialCredentialsError": sdk.PartialCredentialsError(provider="env", cred_var="secret_key"),
    "CredentialRetrievalError": sdk.CredentialRetrievalError(provider="process", error_msg="no"),
    "MetadataRetrievalError": sdk.MetadataRetrievalError(error_msg="no"),
    "TokenRetrievalError": sdk.TokenRetrievalError(provider="sso", error_msg="no"),
    "UnauthorizedSSOTokenError": sdk.UnauthorizedSSOTokenError(),
    "SSOError": sdk.SSOError(),
    "ProfileNotFound": sdk.ProfileNotFound(profile="x"),
    "RefreshWithMFAUnsupportedError": sdk.RefreshWithMFAUnsupportedError(),
}


@pytest.fixture
def server() -> Iterator[FaultProxy]:
    with FaultProxy() as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FaultProxy, S3Client]]:
    """One client for many answers: building one is what a test of this file costs."""
    with FaultProxy() as server:
        yield server, S3Client(options(server))


def options(server: FaultProxy, **changes: Any) -> S3Options:
    values: dict[str, Any] = {
        "bucket": "archive",
        "prefix": "night",
        "endpoint": server.endpoint,
        "region": "eu-central-1",
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET,
        "session_token": TOKEN,
        "multipart_chunk_bytes": CHUNK,
    }
    return S3Options(**{**values, **changes})


class Objects:
    """A little S3 that keeps what it gets and checks what it is told to: for `Respond`."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}

    def __call__(self, request: Request, body: bytes) -> Answer:
        if request.method == "PUT":
            if request.path in self.bodies and request.headers.get("if-none-match") == "*":
                return s3_error(412, "PreconditionFailed")
            self.bodies[request.path] = body
            self.headers[request.path] = request.headers
            return Answer(200, headers={"ETag": '"etag"'})
        if request.path not in self.bodies:
            return Answer(404)
        kept = {n: v for n, v in self.headers[request.path].items() if n.startswith("x-amz-meta-")}
        return Answer(200, headers={"Content-Length": str(len(self.bodies[request.path])), **kept})


def put(store: S3Store, sealed: SealedFile, key: str = "events/acme/1") -> None:
    store.put(sealed, key, {"records": "1"})


# --- what answers mean ------------------------------------------------------------------------


@pytest.mark.parametrize("code", ERRORS)
def test_every_row_of_the_table_is_what_the_sdk_makes_of_that_answer(
    shared: tuple[FaultProxy, S3Client], code: str
) -> None:
    """[S6]: codes come with a body, bare statuses as for a HEAD, exceptions from inside the SDK."""
    server, client = shared
    before = len(server.seen("PUT"))
    if code in EXCEPTIONS:
        assert answer_for(EXCEPTIONS[code]) is ERRORS[code]
        return
    server.fail(Answer(int(code)) if code.isdigit() else s3_error(STATUSES.get(code, 400), code))
    with pytest.raises((StoreError, KeyInUse)) as failed:
        client.call("put_object", {"Key": "k", "Body": b"x"})
    match ERRORS[code]:
        case Taken():
            assert isinstance(failed.value, KeyInUse)
        case Refuses(reason):
            assert isinstance(failed.value, RefusedError)
            assert failed.value.reason == reason
        case Heals(kind, whole_store, way_out):
            assert isinstance(failed.value, TransientStoreError)
            assert (failed.value.kind, failed.value.whole_store) == (kind, whole_store)
            assert way_out in str(failed.value)
    # The SDK may ask for the bucket's region after a redirect; it never sends the object again.
    assert len(server.seen("PUT")) == before + 1, "retrying belongs to the upload pool"


def test_every_exception_row_names_a_class_of_the_sdk() -> None:
    """So that a renamed class is noticed."""
    codes = {code for code in ERRORS if hasattr(sdk, code) or code == "ResponseParserError"}
    assert codes == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "NeverHeardOf", "server"),
        (418, "NeverHeardOf", "other"),
        (400, "KMS.DisabledException", "kms"),
    ],
)
def test_an_unknown_answer_heals_by_waiting(server: FaultProxy, status: int, code: str, kind: str) -> None:
    """[S6]: nothing is dropped for a code that we do not know."""
    server.fail(s3_error(status, code))
    with pytest.raises(TransientStoreError) as failed:
        S3Client(options(server)).call("put_object", {"Key": "k", "Body": b"x"})
    assert failed.value.kind == kind


def test_broken_connections_are_trouble_of_the_network(server: FaultProxy) -> None:
    """[S6]: refused, reset, reset in the middle of the body, never answered."""
    client = S3Client(options(server, read_timeout_secs=0.5))
    told: list[tuple[Fault, str]] = [
        (Drop(), "network"),
        (Drop(after_bytes=10), "network"),
        (Hang(), "timeout"),
    ]
    for fault, kind in told:
        server.fail(fault)
        with pytest.raises(TransientStoreError) as failed:
            client.call("put_object", {"Key": "k", "Body": bytes(1_000_000)})
        assert (failed.value.kind, failed.value.whole_store) == (kind, True)
    server.go_away()
    with pytest.raises(TransientStoreError) as failed:
        client.call("put_object", {"Key": "k", "Body": b"x"})
    assert failed.value.kind == "network"


def test_a_server_without_tls_behind_https_says_so(server: FaultProxy) -> None:
    """[S6]: and names the option for a CA."""
    assert ssl.HAS_TLSv1_3
    client = S3Client(options(server, endpoint=server.endpoint.replace("http:", "https:")))
    with pytest.raises(TransientStoreError, match="certificate") as failed:
        client.call("put_object", {"Key": "k", "Body": b"x"})
    assert failed.value.kind == "tls"


def test_a_ca_of_ones_own_is_trusted_where_it_is_named(tmp_path: Path) -> None:
    """[S8]: and only there."""
    certificate, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    sealed = make_sealed(tmp_path / "spool", b"frames")
    with FaultProxy(tls=context) as server:
        server.fail(Respond(Objects()), times=None)
        with pytest.raises(TransientStoreError, match=r"s3\.ca_bundle") as failed:
            put(S3Store(options(server)), sealed)
        assert failed.value.kind == "tls"
        put(S3Store(options(server, ca_bundle=str(certificate))), sealed)
        assert server.seen("PUT")[-1].headers["x-amz-checksum-crc32"]
        assert "x-amz-trailer" not in server.seen("PUT")[-1].headers


def test_a_store_that_stalls_while_it_is_sent_to_is_given_time(server: FaultProxy, tmp_path: Path) -> None:
    """[S6], case c12: six seconds without taking a byte end no upload."""
    server.fail(Delay(6), lambda r: r.path.endswith("/events/acme/1") and r.method == "PUT")
    server.fail(Respond(Objects()), times=None)
    put(S3Store(options(server, multipart_chunk_bytes=64 << 20)), make_sealed(tmp_path, bytes(30 << 20)))
    assert len(server.seen("PUT")) == 3  # two of the probe


def test_without_any_credentials_the_error_says_so(
    server: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """[S7]"""
    hide_credentials(monkeypatch, tmp_path)
    nobody = options(server, access_key_id=None, secret_access_key=None, session_token=None)
    with pytest.raises(TransientStoreError) as failed:
        S3Client(nobody).call("put_object", {"Key": "k", "Body": b"x"})
    assert failed.value.kind == "credentials"


def hide_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave the SDK's chain only a credentials file, which this returns."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def test_credentials_rotated_in_place_are_picked_up(
    server: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """[S7], case c29: `ExpiredToken` until the shared credentials file has new ones; no restart."""
    path = hide_credentials(monkeypatch, tmp_path)
    path.write_text(
        "[default]\naws_access_key_id = OLDKEY\naws_secret_access_key = old\naws_session_token = t1\n"
    )
    objects = Objects()

    def answer(request: Request, body: bytes) -> Answer:
        if "Credential=OLDKEY/" in request.headers["authorization"]:
            return s3_error(400, "ExpiredToken", "The provided token has expired.")
        return objects(request, body)

    now = [0.0]
    chain = options(server, access_key_id=None, secret_access_key=None, session_token=None)
    store = S3Store(chain, monotonic=lambda: now[0])
    sealed = make_sealed(tmp_path / "spool", b"frames")
    server.fail(Respond(answer), times=None)
    for _ in range(3):
        now[0] += 10
        with pytest.raises(TransientStoreError) as failed:
            put(store, sealed)
        assert failed.value.kind == "credentials"
    path.write_text(
        "[default]\naws_access_key_id = NEWKEY\naws_secret_access_key = new\naws_session_token = t2\n"
    )
    put(store, sealed)
    assert "/archive/night/events/acme/1" in objects.bodies


# --- what goes over the wire ------------------------------------------------------------------


def test_what_an_upload_carries(server: FaultProxy, tmp_path: Path) -> None:
    """[S3], [S4], [S8]: the condition, the checksum, the metadata, the storage options, the address."""
    server.fail(Respond(Objects()), times=None)
    sealed = make_sealed(tmp_path, b"frames")
    store = S3Store(options(server, storage_class="STANDARD_IA", sse="aws:kms", kms_key_id="key-1"))
    put(store, sealed)
    request = server.seen("PUT")[-1]
    crc32 = base64.b64encode(zlib.crc32(b"frames").to_bytes(4, "big")).decode()
    expected = {
        "if-none-match": "*",
        "x-amz-checksum-crc32": crc32,
        "content-type": "application/x-ndjson",
        "content-length": "6",
        "x-amz-meta-records": "1",
        "x-amz-meta-nonce": sealed.nonce,
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
        "x-amz-security-token": TOKEN,
    }
    assert {name: request.headers.get(name) for name in expected} == expected
    assert "content-encoding" not in request.headers
    assert "x-amz-trailer" not in request.headers
    assert "transfer-encoding" not in request.headers
    assert request.path == "/archive/night/events/acme/1"
    assert "dfe-archiver/" in request.headers["user-agent"]
    assert "/eu-central-1/s3/" in request.headers["authorization"]


def refuses_checksums(objects: Objects) -> Respond:
    """A store from before S3's newer checksums: any such header is an error, Content-MD5 is checked."""

    def answer(request: Request, body: bytes) -> Answer:
        if any(re.match(r"x-amz-(checksum|sdk-checksum|trailer)", name) for name in request.headers):
            return s3_error(
                501, "NotImplemented", "A header you provided implies functionality not implemented"
            )
        if request.method == "PUT":
            digest = base64.b64encode(hashlib.md5(body).digest()).decode()
            if request.headers["content-md5"] != digest:
                return s3_error(400, "BadDigest")
        return objects(request, body)

    return Respond(answer)


def test_a_store_without_checksum_headers_works_with_the_option_that_the_error_names(
    server: FaultProxy, tmp_path: Path
) -> None:
    """[S8], case c30"""
    objects = Objects()
    server.fail(refuses_checksums(objects), times=None)
    sealed = make_sealed(tmp_path, b"frames")
    with pytest.raises(TransientStoreError, match=r"s3\.checksum: none"):
        put(S3Store(options(server)), sealed)
    put(S3Store(options(server, checksum="none")), sealed)
    assert objects.bodies["/archive/night/events/acme/1"] == b"frames"


def test_connections_are_reused_between_uploads(server: FaultProxy, tmp_path: Path) -> None:
    """An upload of a small file costs one request, not one handshake."""
    server.fail(Respond(Objects()), times=None)
    store = S3Store(options(server))
    for n in range(10):
        put(store, make_sealed(tmp_path, b"frames"), f"events/{n}")
    assert server.connections == 1


# --- create-only ------------------------------------------------------------------------------


def test_a_store_that_ignores_the_condition_is_looked_at_before_each_upload(
    server: FaultProxy, tmp_path: Path
) -> None:
    """[S3]: the probe tells, an event says so, and another writer's object stays."""
    objects = Objects()

    def answer(request: Request, body: bytes) -> Answer:
        return objects(Request(request.method, request.path, request.query, unconditional(request), 0), body)

    events: list[Event] = []
    server.fail(Respond(answer), times=None)
    store = S3Store(options(server), emit=events.append)
    theirs, ours = make_sealed(tmp_path, b"theirs"), make_sealed(tmp_path, b"ours")
    put(store, theirs)
    with pytest.raises(KeyTakenError):
        put(store, ours)
    assert objects.bodies["/archive/night/events/acme/1"] == b"theirs"
    assert [type(event) for event in events] == [CreateOnlyMissing]
    assert not store.probe().create_only


def unconditional(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name != "if-none-match"}


def test_a_store_that_does_not_know_the_condition_gets_none(server: FaultProxy, tmp_path: Path) -> None:
    """[S3]: 501 for the header itself."""
    objects = Objects()

    def answer(request: Request, body: bytes) -> Answer:
        if "if-none-match" in request.headers:
            return s3_error(501, "NotImplemented")
        return objects(request, body)

    server.fail(Respond(answer), times=None)
    store = S3Store(options(server))
    assert not store.probe().create_only
    put(store, make_sealed(tmp_path, b"frames"))
    with pytest.raises(KeyTakenError):
        put(store, make_sealed(tmp_path, b"others"))


def test_a_conflict_without_an_object_is_tried_again(server: FaultProxy, tmp_path: Path) -> None:
    """[K4]: 409 means another request is under way, which may come to nothing."""
    server.fail(Respond(Objects()), times=2)  # the probe
    server.fail(s3_error(409, "ConditionalRequestConflict"))
    server.fail(Respond(Objects()), times=None)
    sealed = make_sealed(tmp_path, b"frames")
    store = S3Store(options(server))
    with pytest.raises(TransientStoreError) as failed:
        put(store, sealed)
    assert (failed.value.kind, failed.value.whole_store) == ("conflict", False)
    put(store, sealed)


# --- stores that lie --------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["size", "checksum of the put", "checksum of the look"])
def test_what_the_store_reports_must_match(server: FaultProxy, tmp_path: Path, lie: str) -> None:
    """[S4], [S9]: a mismatch is never durable; the damaged object stays and the file takes another key."""
    objects = Objects()
    wrong = {"x-amz-checksum-crc32": "AAAAAA=="}

    def answer(request: Request, body: bytes) -> Answer:
        told = objects(request, body)
        if "probe" in request.path or told.status != 200:
            return told
        if request.method == "HEAD" and lie == "size":
            return Answer(200, headers={**told.headers, "Content-Length": "5"})
        if request.method == {"checksum of the put": "PUT", "checksum of the look": "HEAD"}.get(lie):
            return Answer(200, headers={**told.headers, **wrong})
        return told

    server.fail(Respond(answer), times=None)
    sealed = make_sealed(tmp_path, b"frames")
    store = S3Store(options(server))
    with pytest.raises(TransientStoreError) as failed:
        put(store, sealed)
    assert (failed.value.kind, failed.value.whole_store) == ("integrity", False)
    if lie != "checksum of the put":  # there the look shows a sound object: it is ours after all
        with pytest.raises(KeyTakenError, match="damaged"):
            put(store, sealed)
    put(S3Store(options(server)), make_sealed(tmp_path, b"frames"), "probe-exempt")


# --- secrets ----------------------------------------------------------------------------------


def test_no_secret_is_in_an_error_a_log_line_or_a_repr(
    server: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """[S7], case c32: at level debug, with a store that echoes what it was sent."""
    caplog.set_level(logging.DEBUG)

    def echo(request: Request, body: bytes) -> Answer:
        return s3_error(403, "SignatureDoesNotMatch", f"{SECRET} {request.headers} {ACCESS_KEY}")

    server.fail(Respond(echo), times=None)
    events: list[Event] = []
    store = S3Store(options(server), emit=events.append)
    texts = []
    for size in (10, CHUNK + 1):
        with pytest.raises(TransientStoreError) as failed:
            put(store, make_sealed(tmp_path, bytes(size)))
        texts += [str(failed.value), repr(failed.value)]
    shown = "\n".join([caplog.text, repr(options(server)), repr(store), repr(events), *texts])
    assert "SignatureDoesNotMatch" in shown
    for secret in (SECRET, TOKEN):
        assert secret not in shown


# --- parts ------------------------------------------------------------------------------------


def test_parts_that_cannot_be_removed_are_told_and_removed_later(server: FaultProxy, tmp_path: Path) -> None:
    """[S5]: the abort fails with the store; after the next success it is asked for again."""
    events: list[Event] = []
    objects = Objects()
    started = b"<InitiateMultipartUploadResult><UploadId>u-1</UploadId></InitiateMultipartUploadResult>"
    store = S3Store(options(server), emit=events.append)
    server.fail(Respond(objects), lambda r: "probe" in r.path, times=2)
    server.fail(Answer(200, started), lambda r: r.method == "POST")
    server.fail(s3_error(503, "SlowDown"), lambda r: "uploadId" in r.query, times=3)  # two parts, the abort
    server.fail(Answer(204), lambda r: r.method == "DELETE")
    server.fail(Respond(objects), times=None)
    with pytest.raises(TransientStoreError) as failed:
        put(store, make_sealed(tmp_path, bytes(CHUNK + 1)))
    assert failed.value.kind == "throttled"
    assert [type(event) for event in events] == [MultipartLeftBehind]
    aborts = len(server.seen("DELETE"))
    put(store, make_sealed(tmp_path, b"small"), "small")
    assert len(server.seen("DELETE")) == aborts + 1
    put(store, make_sealed(tmp_path, b"small"), "smaller")
    assert len(server.seen("DELETE")) == aborts + 1


def test_an_error_inside_a_successful_completion_is_an_error(server: FaultProxy, tmp_path: Path) -> None:
    """S3 may answer a completion with status 200 and an error in the body."""
    started = b"<InitiateMultipartUploadResult><UploadId>u-1</UploadId></InitiateMultipartUploadResult>"
    failed_late = Answer(200, s3_error(200, "InternalError").body)
    server.fail(Respond(Objects()), lambda r: "probe" in r.path, times=2)
    server.fail(Answer(200, started), lambda r: "uploads" in r.query)
    server.fail(Answer(200, headers={"ETag": '"part"'}), lambda r: "partNumber" in r.query, times=2)
    server.fail(failed_late, lambda r: r.method == "POST")
    server.fail(Answer(204), lambda r: r.method == "DELETE")
    with pytest.raises(TransientStoreError):
        put(S3Store(options(server)), make_sealed(tmp_path, bytes(CHUNK + 1)))
    assert len(server.seen("DELETE")) == 1


def test_an_unreachable_store_costs_no_second_client(server: FaultProxy) -> None:
    """[S7]: new credentials are asked for at most every few seconds, however many uploads are denied."""
    now = [0.0]
    client = S3Client(options(server), monotonic=lambda: now[0])
    server.fail(s3_error(403, "AccessDenied"), puts, times=None)
    seen = set()
    for _ in range(4):
        with pytest.raises(TransientStoreError):
            client.call("put_object", {"Key": "k", "Body": b"x"})
        seen.add(id(client._current()))
        now[0] += 1
    assert len(seen) == 1  # renewed once, after the first refusal, and kept since


def test_closing_leaves_no_connection(server: FaultProxy) -> None:
    server.fail(Answer(200), times=None)
    client = S3Client(options(server))
    client.call("put_object", {"Key": "k", "Body": b"x"})
    client.close()
    client.call("put_object", {"Key": "k", "Body": b"x"})
    assert server.connections == 2


def test_nobody_listening_is_trouble_of_the_network() -> None:
    """[S6]"""
    client = S3Client(
        S3Options("b", endpoint=f"http://127.0.0.1:{free_port()}", access_key_id="a", secret_access_key="b")
    )
    with pytest.raises(TransientStoreError) as failed:
        client.call("head_object", {"Key": "k"})
    assert failed.value.kind == "network"


# --- the documentation ------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/stores/s3.md"


def test_the_page_lists_every_kind_of_error() -> None:
    """So that an operator finds what the metric says."""
    kinds = {answer.kind for answer in ERRORS.values() if isinstance(answer, Heals)}
    kinds |= {"kms", "other", "conflict", "local_limit"}
    table = PAGE.read_text().partition("## When it does not work")[2]
    listed = set(
        re.findall(r"`([a-z_]+)`", "\n".join(row.split("|")[1] for row in table.split("\n") if "|" in row))
    )
    assert listed == kinds


def test_the_policy_on_the_page_allows_what_is_asked_for_and_nothing_else(
    server: FaultProxy, tmp_path: Path
) -> None:
    """[S9]: seen on the wire over uploads of both kinds, a taken key and a failed upload."""
    started = b"<InitiateMultipartUploadResult><UploadId>u-1</UploadId></InitiateMultipartUploadResult>"
    server.fail(Answer(200, started), lambda r: "uploads" in r.query)
    server.fail(s3_error(503, "SlowDown"), lambda r: "partNumber" in r.query, times=2)
    server.fail(Answer(204), lambda r: r.method == "DELETE")
    server.fail(Respond(Objects()), times=None)
    store = S3Store(options(server))
    put(store, make_sealed(tmp_path, b"small"), "a")
    with pytest.raises(KeyTakenError):
        put(store, make_sealed(tmp_path, b"small"), "a")
    with pytest.raises(TransientStoreError):
        put(store, make_sealed(tmp_path, bytes(CHUNK + 1)), "b")
    actions = {"PUT": "s3:PutObject", "POST": "s3:PutObject", "HEAD": "s3:GetObject"}
    used = {actions.get(r.method, "") for r in server.requests if r.method != "DELETE"}
    used |= {"s3:AbortMultipartUpload" for r in server.seen("DELETE") if "uploadId" in r.query}
    assert all("uploadId" in request.query for request in server.seen("DELETE")), "no object is deleted"
    policy = json.loads(PAGE.read_text().partition("```json\n")[2].partition("```")[0])
    objects, bucket = policy["Statement"]
    assert set(objects["Action"]) == used
    assert bucket["Action"] == "s3:ListBucket"


def test_without_the_right_to_list_uploads_work_too(server: FaultProxy, tmp_path: Path) -> None:
    """S3 then answers 403 to a look at a free key, also before a second attempt."""
    objects = Objects()

    def answer(request: Request, body: bytes) -> Answer:
        told = objects(request, body)
        return Answer(403) if request.method == "HEAD" and told.status == 404 else told

    server.fail(Respond(answer), times=2)  # the probe
    server.fail(s3_error(503, "SlowDown"), puts)
    server.fail(Respond(answer), times=None)
    store, sealed = S3Store(options(server)), make_sealed(tmp_path, b"frames")
    with pytest.raises(TransientStoreError):
        put(store, sealed)
    put(store, sealed)
    assert objects.bodies["/archive/night/events/acme/1"] == b"frames"
