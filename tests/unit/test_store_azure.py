"""`az://` with the real client against a server that answers as told ([S3]–[S7], [S9], [K4], [D10])."""

from __future__ import annotations

import base64
import builtins
import hashlib
import io
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from archiver.domain.sealed import Checksums, SealedFile
from archiver.errors import (
    ConfigError,
    DamagedFileError,
    KeyTakenError,
    RefusedError,
    StoreError,
    TransientStoreError,
)
from archiver.settings.models import Settings
from archiver.stores.answers import Answer as Meaning
from archiver.stores.answers import Heals, Refuses, Taken
from archiver.stores.azure import BLOCKS_AT_ONCE, ERRORS, EXCEPTIONS, STATUSES, AzureStore
from tests.contract.store_case import make_sealed
from tests.harness.answering import DROP, Answer, Answering, Request
from tests.harness.process import free_port

MIB = 1 << 20
KEY = "events/acme/0001-3f9a.jsonl.zst"
ACCOUNT_KEY = base64.b64encode(b"an account key that must appear nowhere at all").decode()
SAS = "sv=2026-02-06&sr=c&sp=rcw&se=2099-01-01&sig=c2lnbmF0dXJlIG9mIHRoZSBTQVM%3D"


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def md5(data: bytes) -> str:
    return b64(hashlib.md5(data).digest())


def refusal(status: int, code: str, message: str = "told so", detail: str = "") -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{detail}</Error>"
    headers = {"x-ms-error-code": code, "Content-Type": "application/xml"} if code else {}
    return Answer(status, body.encode() if code else b"", headers)


def stored(data: bytes = b"frames", **headers: str) -> Answer:
    """How Put Blob is answered."""
    return Answer(201, b"", {"Content-MD5": md5(data), "ETag": '"1"', **headers})


def blob(data: bytes = b"frames", nonce: str = "theirs", **headers: str) -> Answer:
    """How a look at a blob is answered."""
    described = {
        "Content-Length": str(len(data)),
        "Content-MD5": md5(data),
        "x-ms-meta-Nonce": nonce,
        "x-ms-blob-type": "BlockBlob",
        "ETag": '"1"',
    }
    return Answer(200, b"", {**described, **headers})


NO_BLOB = refusal(404, "BlobNotFound")


def store(server: Answering, **options: object) -> AzureStore:
    if not {"sas_token", "account_key"} & set(options):
        options["account_key"] = ACCOUNT_KEY
    return AzureStore("container", endpoint=f"{server.url}/account", **options)  # type: ignore[arg-type]


def put(to: AzureStore, sealed: SealedFile) -> None:
    to.put(sealed, KEY, {"nonce": sealed.nonce})


@pytest.fixture
def sealed(tmp_path: Path) -> SealedFile:
    return make_sealed(tmp_path, b"frames", key="events/acme/0001", nonce="mine")


@pytest.fixture
def large(tmp_path: Path) -> SealedFile:
    return make_sealed(tmp_path, random.Random(1).randbytes(5 * MIB + 17), nonce="mine")


# --- the error table --------------------------------------------------------------------------

DETAILS = {
    "AuthenticationFailed": "<AuthenticationErrorDetail>Request date header too old"
    "</AuthenticationErrorDetail>",
    "InvalidOperation": "<Detail>Provided contentMD5 doesn't match.</Detail>",
}
CODE_STATUS = {
    "ContainerNotFound": 404,
    "ResourceNotFound": 404,
    "AuthenticationFailed": 403,
    "AccountIsDisabled": 403,
    "UnauthorizedBlobOverwrite": 403,
    "NoAuthenticationInformation": 401,
    "ConditionNotMet": 412,
    "TargetConditionNotMet": 412,
    "LeaseIdMissing": 412,
    "RequestBodyTooLarge": 413,
    "ServerBusy": 503,
    "OperationTimedOut": 500,
    "InternalError": 500,
    "Md5Mismatch": 400,
    "InvalidMd5": 400,
    "InvalidOperation": 400,
    "InvalidBlockList": 400,
    "InvalidResourceName": 400,
    "InvalidAuthenticationInfo": 400,
    "BlockListTooLong": 400,
}
WALK: list[tuple[int, str, str, Meaning]] = [
    (CODE_STATUS.get(row.code, 409), row.code, DETAILS[row.code] if row.holds else "", row.answer)
    for row in ERRORS
]
WALK += [(status, "", "", meaning) for status, meaning in STATUSES.items()]
WALK += [
    (403, "AuthorizationPermissionMismatch", "", STATUSES[403]),
    (403, "AuthorizationFailure", "", STATUSES[403]),
    (409, "SomethingNew", "", Taken()),
    (400, "InvalidHeaderValue", "", Heals("other")),
    (418, "", "", Heals("other")),
    (505, "", "", Heals("other")),
]


def outcome(to: AzureStore, sealed: SealedFile) -> StoreError:
    with pytest.raises(StoreError) as raised:
        put(to, sealed)
    return raised.value


def assert_means(error: StoreError, meaning: Meaning) -> None:
    match meaning:
        case Heals():
            assert isinstance(error, TransientStoreError)
            assert (error.kind, error.whole_store) == (meaning.kind, meaning.whole_store)
            assert meaning.way_out in str(error)
        case Refuses():
            assert isinstance(error, RefusedError)
            assert error.reason == meaning.reason
        case Taken():
            assert isinstance(error, KeyTakenError)


@pytest.mark.parametrize("row", WALK, ids=lambda row: f"{row[0]}-{row[1]}{'-detail' if row[2] else ''}")
def test_each_answer_of_the_service_means_what_the_table_says(
    row: tuple[int, str, str, Meaning], sealed: SealedFile
) -> None:
    """[S6]: with the real client; one request an attempt, since the SDK's own retries are off."""
    status, code, detail, meaning = row

    def handler(request: Request) -> Answer:
        return blob() if request.method == "HEAD" else refusal(status, code, detail=detail)

    with Answering(handler) as server:
        assert_means(outcome(store(server), sealed), meaning)
        assert [request.method for request in server.requests].count("PUT") == 1


def test_an_answer_that_never_comes_is_a_timeout(sealed: SealedFile) -> None:
    ended = threading.Event()

    def hang(request: Request) -> Answer:
        ended.wait(60)
        return stored()

    started = time.monotonic()
    with Answering(hang) as server:
        assert_means(outcome(store(server, read_timeout_secs=0.3), sealed), Heals("timeout"))
        assert time.monotonic() - started < 60 / 2
        ended.set()
        assert len(server.requests) == 1


def test_a_cut_connection_and_a_closed_port_are_the_network(sealed: SealedFile) -> None:
    with Answering(lambda request: DROP) as server:
        assert_means(outcome(store(server), sealed), Heals("network"))
    away = AzureStore("container", endpoint=f"http://127.0.0.1:{free_port()}/a", account_key=ACCOUNT_KEY)
    assert_means(outcome(away, sealed), Heals("network"))


# --- one piece --------------------------------------------------------------------------------


def test_the_checksum_the_condition_and_the_type_are_sent(sealed: SealedFile) -> None:
    """[S3], [S4]"""
    with Answering(lambda request: stored()) as server:
        put(store(server), sealed)
        (request,) = server.requests
    assert request.body == b"frames"
    assert request.headers["if-none-match"] == "*"
    assert request.headers["content-md5"] == md5(b"frames")
    assert request.headers["x-ms-blob-content-md5"] == md5(b"frames")
    assert request.headers["x-ms-blob-content-type"] == "application/x-ndjson"
    assert request.headers["x-ms-meta-nonce"] == "mine"
    assert "x-ms-blob-content-encoding" not in request.headers


def test_a_file_sealed_without_md5_is_sent_with_one(sealed: SealedFile) -> None:
    """[S4]: leftovers of an earlier run may have been sealed for another store."""
    bare = replace(sealed, checksums=Checksums(crc32=sealed.checksums.crc32))
    with Answering(lambda request: stored()) as server:
        put(store(server), bare)
        assert server.requests[0].headers["content-md5"] == md5(b"frames")


def test_another_checksum_reported_back_is_no_success_and_nothing_is_deleted(sealed: SealedFile) -> None:
    """[S4], [S9]"""
    with Answering(lambda request: stored(b"fRames")) as server:
        assert_means(outcome(store(server), sealed), Heals("integrity", whole_store=False))
        assert [request.method for request in server.requests] == ["PUT"]


def test_a_store_that_reports_no_checksum_is_asked_for_the_size(sealed: SealedFile) -> None:
    """[S4]: a look takes the place of the missing answer."""

    def handler(request: Request) -> Answer:
        return blob(b"frame") if request.method == "HEAD" else Answer(201)

    with Answering(handler) as server:
        assert_means(outcome(store(server), sealed), Heals("integrity", whole_store=False))


def test_a_checksum_refused_because_the_file_changed_is_damage(sealed: SealedFile) -> None:
    """[D10]: the file changes after it was looked at; the store notices."""

    def damage(request: Request) -> Answer:
        sealed.path.write_bytes(b"fRames")
        return refusal(400, "Md5Mismatch")

    with Answering(damage) as server:
        assert isinstance(outcome(store(server), sealed), DamagedFileError)


@pytest.mark.parametrize(
    ("nonce", "data", "ours"),
    [
        ("mine", b"frames", True),
        ("theirs", b"frames", False),
        ("mine", b"frame", False),
        ("mine", b"FRAMES", False),
    ],
)
@pytest.mark.parametrize(
    "code", ["BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite", "BlobImmutableDueToPolicy"]
)
def test_a_taken_key_is_ours_by_nonce_size_and_checksum(
    sealed: SealedFile, nonce: str, data: bytes, ours: bool, code: str
) -> None:
    """[K4]: whatever the refusal is called, and however the service writes the metadata's name."""

    def handler(request: Request) -> Answer:
        taken = refusal(CODE_STATUS.get(code, 409), code)
        return blob(data, nonce) if request.method == "HEAD" else taken

    with Answering(handler) as server:
        if ours:
            put(store(server), sealed)
        else:
            assert isinstance(outcome(store(server), sealed), KeyTakenError)


def test_a_key_refused_as_taken_where_nothing_is_heals(sealed: SealedFile) -> None:
    def handler(request: Request) -> Answer:
        return NO_BLOB if request.method == "HEAD" else refusal(409, "BlobAlreadyExists")

    with Answering(handler) as server:
        assert_means(outcome(store(server), sealed), Heals("other", whole_store=False))


# --- blocks -----------------------------------------------------------------------------------


class Blocks:
    """Put Block, Put Block List and a look, as the service keeps them; `meddle` may answer in its place."""

    def __init__(self, meddle: Callable[[Request], Answer | bool | None] = lambda r: False) -> None:
        self.meddle = meddle
        self.staged: dict[str, bytes] = {}
        self.made: bytes | None = None
        self.nonce = ""
        self.lists = 0
        self.at_once = self.at_once_max = 0
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Answer | None:
        with self._lock:
            self.at_once += 1
            self.at_once_max = max(self.at_once, self.at_once_max)
        try:
            time.sleep(0.01)
            meddled = self.meddle(request)
            return self.take(request) if isinstance(meddled, bool) else meddled
        finally:
            with self._lock:
                self.at_once -= 1

    def take(self, request: Request) -> Answer:
        if request.method == "HEAD":
            return NO_BLOB if self.made is None else blob(self.made, self.nonce)
        if request.query.get("comp") == "block":
            if request.headers["content-md5"] != md5(request.body):
                return refusal(400, "Md5Mismatch")
            self.staged[request.query["blockid"]] = request.body
            return Answer(201)
        assert request.query["comp"] == "blocklist"
        self.lists += 1
        if request.headers.get("if-none-match") == "*" and self.made is not None:
            return refusal(409, "BlobAlreadyExists")
        names = re.findall(r"<Latest>([^<]+)</Latest>", request.body.decode())
        self.made = b"".join(self.staged[name] for name in names)
        self.nonce = request.headers["x-ms-meta-nonce"]
        assert request.headers["x-ms-blob-content-md5"] == md5(self.made)
        assert request.headers["x-ms-blob-content-type"] == "application/x-ndjson"
        return Answer(201)


def in_blocks(server: Answering) -> AzureStore:
    return store(server, chunk_size=MIB)


def test_a_large_file_goes_in_blocks_several_at_once(large: SealedFile) -> None:
    """[S3], [S4], [S5]"""
    service = Blocks()
    with Answering(service) as server:
        put(in_blocks(server), large)
    assert service.made == large.path.read_bytes()
    assert 2 <= service.at_once_max <= BLOCKS_AT_ONCE
    assert len({len(name) for name in service.staged}) == 1, "ids of one blob have one length"


def test_a_failed_block_fails_the_attempt_and_the_next_starts_afresh(large: SealedFile) -> None:
    """[S5]: nothing is listed; what an attempt has left cannot get into the next one's list."""
    failed: list[str] = []

    def once(request: Request) -> Answer | bool:
        if request.query.get("comp") == "block" and len(request.body) == 17 and not failed:
            failed.append(request.query["blockid"])
            return refusal(503, "ServerBusy")
        return False

    service = Blocks(once)
    with Answering(service) as server:
        to = in_blocks(server)
        assert_means(outcome(to, large), Heals("throttled"))
        assert service.lists == 0
        put(to, large)
    assert service.made == large.path.read_bytes()
    assert len(service.staged) == 5 + 6


def test_a_lost_answer_to_the_list_is_found_without_sending_the_blocks_again(large: SealedFile) -> None:
    """[K4]"""
    service = Blocks()

    def lose(request: Request) -> Answer | bool | None:
        if request.query.get("comp") == "blocklist":
            service.take(request)
            return DROP
        return False

    service.meddle = lose
    with Answering(service) as server:
        to = in_blocks(server)
        assert_means(outcome(to, large), Heals("network"))
        sent = len(service.staged)
        put(to, large)
        assert len(service.staged) == sent


def test_a_key_taken_while_the_blocks_were_sent_is_left_alone(large: SealedFile) -> None:
    """[K4]"""
    service = Blocks()

    def overtaken(request: Request) -> bool:
        if request.query.get("comp") == "blocklist":
            service.made, service.nonce = b"x" * large.size, "theirs"
        return False

    service.meddle = overtaken
    with Answering(service) as server:
        assert isinstance(outcome(in_blocks(server), large), KeyTakenError)
    assert service.made == b"x" * large.size


def test_bytes_that_change_between_two_reads_never_become_a_blob(large: SealedFile) -> None:
    """[D10], [S4]: a block is read once for its MD5 and once to be sent."""
    changed = threading.Event()

    def change(request: Request) -> bool:
        if request.query.get("comp") == "block" and not changed.is_set():
            changed.set()
            with large.path.open("r+b") as handle:  # in place: another block is being read at the same time
                handle.seek(-1, os.SEEK_END)
                last = handle.read(1)[0]
                handle.seek(-1, os.SEEK_END)
                handle.write(bytes([last ^ 1]))
        return False

    service = Blocks(change)
    with Answering(service) as server:
        error = outcome(in_blocks(server), large)
    assert isinstance(error, DamagedFileError)
    assert service.made is None


def test_a_blob_that_is_short_after_it_was_listed_is_no_success(large: SealedFile) -> None:
    """[S4], [S9]"""
    service = Blocks()

    def short(request: Request) -> Answer | bool:
        return blob(b"short", "mine") if request.method == "HEAD" and service.lists else False

    service.meddle = short
    with Answering(service) as server:
        assert_means(outcome(in_blocks(server), large), Heals("integrity", whole_store=False))
        assert "DELETE" not in {request.method for request in server.requests}


def test_blocks_grow_so_that_fifty_thousand_suffice() -> None:
    """Put Block List takes no more; the size is worked out, no file of this size is made."""
    from archiver.stores.azure import BLOCKS_MAX
    from archiver.stores.sealed_file import plan_parts

    parts = plan_parts(1 << 40, 8 * MIB, BLOCKS_MAX)
    assert len(parts) <= 50_000
    assert sum(part.length for part in parts) == 1 << 40


# --- probe ------------------------------------------------------------------------------------


def test_a_store_that_replaces_blobs_is_found_out_and_looked_into_before_each_upload(
    sealed: SealedFile,
) -> None:
    """[S3]"""
    with Answering(lambda request: blob() if request.method == "HEAD" else stored()) as server:
        to = store(server)
        report = to.probe()
        assert not report.create_only
        assert "Put Blob and Put Block List" in report.detail
        sent = len(server.requests)
        assert isinstance(outcome(to, sealed), KeyTakenError)
        assert [request.method for request in server.requests[sent:]] == ["HEAD"]


# --- credentials and secrets ------------------------------------------------------------------

CONNECTION = (
    "DefaultEndpointsProtocol=https;AccountName=account;AccountKey={};EndpointSuffix=core.windows.net"
)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"connection_string": "AccountName=account;" + ACCOUNT_KEY}, "azure.connection_string"),
        ({"connection_string": ACCOUNT_KEY[:-1].replace("=", "")}, "azure.connection_string"),
        ({"connection_string": f"AccountKey={ACCOUNT_KEY}"}, "azure.connection_string"),
        ({"account_key": ACCOUNT_KEY}, "account_name"),
        ({"account_key": ACCOUNT_KEY[:-1] + "!", "account_name": "account"}, "azure.account_key"),
        ({"account_key": ACCOUNT_KEY, "endpoint": "https://blobs.example.org"}, "azure.account_name"),
        ({"endpoint": "http://blobs.example.org/account"}, "https"),
    ],
)
def test_options_that_cannot_work_are_config_errors_without_the_secret(
    options: dict[str, str], names: str
) -> None:
    """[S8]"""
    with pytest.raises(ConfigError) as raised:
        AzureStore("container", **options)  # type: ignore[arg-type]
    assert names in str(raised.value)
    assert ACCOUNT_KEY[:-1] not in str(raised.value)


@pytest.mark.parametrize("container", ["Upper", "ab", "a--b", "-ab", "ab-", "x" * 64, "under_score"])
def test_a_name_that_is_no_container_is_a_config_error(container: str) -> None:
    """Told at start, so that an answer about a name can only mean the blob's ([S6])."""
    with pytest.raises(ConfigError):
        AzureStore(container, account_name="account", account_key=ACCOUNT_KEY)


@pytest.mark.parametrize("container", ["abc", "a1-b2-c3", "$root", "x" * 63])
def test_container_names_of_the_service_are_taken(container: str) -> None:
    AzureStore(container, account_name="account", account_key=ACCOUNT_KEY)


def test_without_any_credential_the_identity_is_used_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[S7]: an identity that has no token heals by waiting; without the package it is a config error."""
    pytest.importorskip("azure.identity")
    for name in ("TENANT_ID", "CLIENT_ID", "FEDERATED_TOKEN_FILE"):
        monkeypatch.setenv(f"AZURE_{name}", "11111111-1111-1111-1111-111111111111")
    to = AzureStore("container", account_name="account")
    chain = [type(link).__name__ for link in to._service.credential.credentials]
    assert chain == ["EnvironmentCredential", "WorkloadIdentityCredential", "ManagedIdentityCredential"]
    to.close()
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("azure.identity"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "azure.identity", raising=False)
    with pytest.raises(ConfigError, match="azure-identity"):
        AzureStore("container", account_name="account")


@pytest.fixture
def everything_logged() -> Iterator[io.StringIO]:
    """Every log line at debug with every field of its record, as an unlucky formatter would show it."""

    class Whole(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"{record.getMessage()} {record.__dict__}"

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Whole())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def test_no_secret_is_shown_at_log_level_debug(
    sealed: SealedFile, large: SealedFile, everything_logged: io.StringIO
) -> None:
    """[S7], case c32: wrong credentials of each kind; answered, cut, out of reach; logs, errors, reprs."""
    detail = "<AuthenticationErrorDetail>Signature did not match</AuthenticationErrorDetail>"
    ways: list[dict[str, str]] = [{"account_key": ACCOUNT_KEY}, {"sas_token": SAS}, {"sas_token": f"?{SAS}"}]
    shown = []
    answers = [refusal(403, "AuthenticationFailed", detail=detail), DROP]
    away = f"http://127.0.0.1:{free_port()}/account"
    with Answering(lambda request: answers[0]) as server:
        for sent in answers:
            answers[0] = sent
            for options in ways:
                endpoint = f"{server.url}/account"
                for url in (endpoint, away):
                    to = AzureStore("container", endpoint=url, chunk_size=MIB, **options)  # type: ignore[arg-type]
                    for file in (sealed, large):
                        error = outcome(to, file)
                        shown.append(f"{error} {error!r} {to!r} {vars(error)}")
            for part in (f"AccountName=account;AccountKey={ACCOUNT_KEY}", f"SharedAccessSignature={SAS}"):
                to = AzureStore("container", connection_string=f"{part};BlobEndpoint={endpoint};")
                error = outcome(to, sealed)
                shown.append(f"{error} {error!r} {to!r} {vars(error)}")
        signatures = {
            request.headers.get("authorization", "SharedKey account:-").split(":", 1)[1]
            for request in server.requests
        } - {"-"}
        assert any("sig=" in request.target for request in server.requests)
    output = everything_logged.getvalue() + " ".join(shown)
    assert signatures
    assert "sig=***" in everything_logged.getvalue()
    assert "sig=***" in " ".join(shown)
    leaks = [ACCOUNT_KEY, "c2lnbmF0dXJl", *signatures]
    assert [leak for leak in leaks if leak in output] == []


def test_as_many_connections_are_kept_as_there_are_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A smaller pool would throw connections away and open them anew."""

    def slow(request: Request) -> Answer:
        time.sleep(0.05)
        return stored()

    files = [make_sealed(tmp_path, b"frames") for _ in range(24)]
    with Answering(slow) as server:
        to = store(server, parallelism=12)
        with caplog.at_level(logging.DEBUG, logger="urllib3.connectionpool"), ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda sealed: put(to, sealed), files))
    lines = [record.getMessage() for record in caplog.records]
    assert not any("pool is full" in line for line in lines)
    assert sum("Starting new HTTP connection" in line for line in lines) <= 12


PAGE = Path(__file__).parents[2] / "docs" / "stores" / "azure.md"


def test_the_page_explains_every_kind_of_the_table() -> None:
    """And none that does not exist; `local_limit` comes from reading the file."""
    answers = [*(row.answer for row in ERRORS), *STATUSES.values(), *(answer for _, answer in EXCEPTIONS)]
    kinds = {answer.kind for answer in answers if isinstance(answer, Heals)} | {"other", "local_limit"}
    table = PAGE.read_text("utf-8").split("## When it does not work")[1]
    named = {
        kind for row in re.findall(r"^\| (`.+?) \|", table, re.M) for kind in re.findall(r"`(\w+)`", row)
    }
    assert named == kinds


def test_the_pages_example_is_a_configuration() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert example is not None
    settings = Settings.model_validate(yaml.safe_load(example.group(1)))
    assert settings.azure.account_name == "myaccount"
