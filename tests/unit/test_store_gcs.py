"""`gs://` with the real client against a server that answers as told ([S3]–[S7], [S9], [K4], [D10])."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs

import google_crc32c
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from archiver.domain.sealed import SealedFile
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
from archiver.stores.gcs import ERRORS, EXCEPTIONS, STUMBLES_MAX, GcsStore
from tests.contract.store_case import make_sealed
from tests.harness.answering import DROP, Answer, Answering, Request
from tests.harness.process import free_port

MIB = 1 << 20
KEY = "events/acme/0001-3f9a.jsonl.zst"


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def answer(status: int, body: object, **headers: str) -> Answer:
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})


def refusal(status: int, message: str, reason: str = "invalid") -> Answer:
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return answer(status, {"error": {"code": status, "message": message, "errors": errors}})


def described(data: bytes, **changes: object) -> Answer:
    fields: dict[str, object] = {"name": KEY, "size": str(len(data)), "crc32c": crc32c(data)}
    return answer(200, {**fields, **changes})


def store(server: Answering, **options: object) -> GcsStore:
    options.setdefault("endpoint", server.url)
    return GcsStore("bucket", pause=lambda secs: None, **options)  # type: ignore[arg-type]


def put(to: GcsStore, sealed: SealedFile) -> None:
    to.put(sealed, KEY, {"nonce": sealed.nonce})


@pytest.fixture
def sealed(tmp_path: Path) -> SealedFile:
    return make_sealed(tmp_path, b"frames", key="events/acme/0001")


# --- the error table --------------------------------------------------------------------------

DENIED = (
    "archiver@p.iam.gserviceaccount.com does not have storage.objects.{} access to the Google Cloud Storage"
    " object. Permission 'storage.objects.{}' denied on resource (or it may not exist)."
)
WALK: list[tuple[int, str, str, Meaning]] = [
    (
        400,
        'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "BBBBBB==".',
        "invalid",
        ERRORS[0].answer,
    ),
    (400, "Object name is too long.", "invalid", Refuses("key_invalid")),
    (400, "Invalid request", "authError", ERRORS[2].answer),
    (400, "Invalid bucket name: 'B_'", "invalid", Heals("other")),
    (401, "Invalid Credentials", "authError", ERRORS[3].answer),
    (403, DENIED.format("delete", "delete"), "forbidden", Taken()),
    (403, "Object is subject to bucket's retention policy", "retentionPolicyNotMet", Taken()),
    (403, "Too many requests", "userRateLimitExceeded", Heals("throttled")),
    (403, "Quota exceeded", "quotaExceeded", ERRORS[6].answer),
    (403, DENIED.format("create", "create"), "forbidden", ERRORS[7].answer),
    (404, "The specified bucket does not exist.", "notFound", ERRORS[9].answer),
    (408, "Request timed out", "requestTimeout", Heals("timeout")),
    (409, "Conflict", "conflict", Heals("server")),
    (410, "Gone", "uploadBrokenConnection", ERRORS[12].answer),
    (412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet", Taken()),
    (413, "Request entity too large", "uploadTooLarge", Refuses("too_large")),
    (416, "Requested range not satisfiable", "requestedRangeNotSatisfiable", ERRORS[15].answer),
    (418, "A teapot", "teapot", Heals("other")),
    (429, "Slow down", "rateLimitExceeded", Heals("throttled")),
    (500, "Backend Error", "backendError", Heals("server")),
    (502, "Bad gateway", "backendError", Heals("server")),
    (503, "Service unavailable", "backendError", Heals("throttled")),
    (504, "Gateway timeout", "backendError", Heals("timeout")),
]
SESSION_LOST = (404, "Not Found", "notFound", ERRORS[8].answer)


def outcome(to: GcsStore, sealed: SealedFile) -> StoreError:
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


def theirs(request: Request) -> Answer | None:
    """A look at the key finds another writer's object."""
    return described(b"frames", metadata={"nonce": "theirs"}) if request.method == "GET" else None


@pytest.mark.parametrize("row", WALK, ids=lambda row: f"{row[0]}-{row[2]}")
def test_each_answer_of_the_service_means_what_the_table_says(
    row: tuple[int, str, str, Meaning], sealed: SealedFile
) -> None:
    """[S6]: with the real client; one request an attempt, since the SDK's own retries are off."""
    status, message, reason, meaning = row
    with Answering(lambda request: theirs(request) or refusal(status, message, reason)) as server:
        assert_means(outcome(store(server), sealed), meaning)
        assert [request.method for request in server.requests].count("POST") == 1


def test_the_walk_leaves_no_row_of_the_table_out() -> None:
    walked = {
        next((row for row in ERRORS if row.matches(status, f"{message} {reason}")), None)
        for status, message, reason, _ in WALK
    }
    in_session = {row for row in ERRORS if row.matches(SESSION_LOST[0], "?upload_id=1 Not Found")}
    assert walked | in_session >= set(ERRORS)


def test_words_in_a_key_do_not_look_like_the_services_answer(tmp_path: Path) -> None:
    """A route may be called anything: only the answer's own words count."""
    sealed = make_sealed(tmp_path, b"frames")
    with Answering(lambda request: refusal(400, "Bad Request", "badRequest")) as server:
        with pytest.raises(TransientStoreError) as raised:
            store(server).put(sealed, "events/crc32c/key-too-long/storage.objects.delete", {})
        assert raised.value.kind == "other"


def test_an_answer_that_never_comes_is_a_timeout(sealed: SealedFile) -> None:
    ended = threading.Event()

    def hang(request: Request) -> Answer:
        ended.wait(60)
        return described(b"frames")

    started = time.monotonic()
    with Answering(hang) as server:
        error = outcome(store(server, read_timeout_secs=0.3), sealed)
        assert_means(error, Heals("timeout"))
        assert time.monotonic() - started < 60 / 2
        ended.set()


def test_a_cut_connection_and_a_closed_port_are_the_network(sealed: SealedFile) -> None:
    with Answering(lambda request: DROP) as server:
        assert_means(outcome(store(server), sealed), Heals("network"))
    away = GcsStore("bucket", endpoint=f"http://127.0.0.1:{free_port()}")
    assert_means(outcome(away, sealed), Heals("network"))


def test_an_answer_that_is_not_json_heals(sealed: SealedFile) -> None:
    """A proxy's page in front of the store."""
    with Answering(lambda request: Answer(200, b"<html>sign in</html>")) as server:
        assert isinstance(outcome(store(server), sealed), TransientStoreError)


# --- integrity --------------------------------------------------------------------------------


def test_the_checksum_the_condition_and_the_type_are_sent(sealed: SealedFile) -> None:
    """[S3], [S4]"""
    with Answering(lambda request: described(b"frames")) as server:
        put(store(server), sealed)
        (request,) = server.requests
    assert request.query["ifGenerationMatch"] == "0"
    metadata, content = request.body.split(b"\r\n\r\n")[1:3]
    sent = json.loads(metadata.split(b"\r\n--")[0])
    assert sent["crc32c"] == crc32c(b"frames")
    assert sent["metadata"] == {"nonce": sealed.nonce}
    assert b"content-type: application/x-ndjson" in metadata
    assert b"content-encoding" not in request.body.lower()
    assert "contentEncoding" not in sent
    assert content.startswith(b"frames\r\n--")


@pytest.mark.parametrize("changes", [{"size": "5"}, {"crc32c": "AAAAAA=="}])
def test_what_the_store_reports_must_agree_and_nothing_is_deleted(
    sealed: SealedFile, changes: dict[str, object]
) -> None:
    """[S4], [S9]: a wrong object is left alone, the file is stored again under another key."""
    with Answering(lambda request: described(b"frames", **changes)) as server:
        assert_means(outcome(store(server), sealed), Heals("integrity", whole_store=False))
        assert {request.method for request in server.requests} == {"POST"}


def test_a_checksum_refused_because_the_file_changed_is_damage(sealed: SealedFile) -> None:
    """[D10]: the file changes after it was looked at; the store notices."""

    def damage(request: Request) -> Answer:
        sealed.path.write_bytes(b"fRames")
        return refusal(400, "Provided CRC32C doesn't match calculated CRC32C")

    with Answering(damage) as server:
        assert isinstance(outcome(store(server), sealed), DamagedFileError)


def test_a_file_sealed_without_crc32c_is_sent_with_one(tmp_path: Path) -> None:
    """[S4]: leftovers of an earlier run may have been sealed for another store."""
    from archiver.domain.sealed import Checksums

    whole = make_sealed(tmp_path, b"frames")
    bare = make_sealed(tmp_path, b"frames", checksums=Checksums(crc32=whole.checksums.crc32))
    with Answering(lambda request: described(b"frames")) as server:
        put(store(server), bare)
        assert crc32c(b"frames").encode() in server.requests[0].body


@pytest.mark.parametrize(
    ("nonce", "size", "ours"), [("mine", 6, True), ("theirs", 6, False), ("mine", 5, False)]
)
def test_a_taken_key_is_ours_by_nonce_and_size(tmp_path: Path, nonce: str, size: int, ours: bool) -> None:
    """[K4], also where a missing delete permission hides the failed precondition."""
    sealed = make_sealed(tmp_path, b"frames", nonce="mine")
    found = {"metadata": {"nonce": nonce}, "size": str(size)}
    for refused in (refusal(412, "no", "conditionNotMet"), refusal(403, DENIED.format("delete", "delete"))):

        def handler(request: Request, refused: Answer = refused) -> Answer:
            return described(b"frames", **found) if request.method == "GET" else refused

        with Answering(handler) as server:
            if ours:
                put(store(server), sealed)
            else:
                assert isinstance(outcome(store(server), sealed), KeyTakenError)


# --- resumable uploads ------------------------------------------------------------------------


class Session:
    """A resumable session as the service keeps it; `meddle` may answer in its place."""

    def __init__(
        self, meddle: Callable[[Request, Session], Answer | bool | None] = lambda r, s: False
    ) -> None:
        self.meddle = meddle
        self.host = ""
        self.held = b""
        self.started: list[dict[str, object]] = []
        self.ranges: list[str] = []

    def __call__(self, request: Request) -> Answer | None:
        if request.method == "POST":
            self.held = b""
            self.started.append({**json.loads(request.body), **request.query})
            host = self.host or request.headers["host"]
            return answer(200, {}, Location=f"http://{host}/upload/s?upload_id=secret-session")
        self.ranges.append(request.headers["content-range"])
        meddled = self.meddle(request, self)
        return self.take(request) if isinstance(meddled, bool) else meddled

    def take(self, request: Request, keep: int | None = None) -> Answer:
        """Store what came (only its first `keep` bytes) and answer as the service does."""
        span, _, total = request.headers["content-range"].removeprefix("bytes ").partition("/")
        if span != "*":
            assert int(span.split("-")[0]) == len(self.held), "a chunk that does not follow"
            self.held += request.body[:keep]
        if len(self.held) == int(total):
            return described(self.held)
        held = {"Range": f"bytes=0-{len(self.held) - 1}"} if self.held else {}
        return Answer(308, b"", held)


@pytest.fixture
def large(tmp_path: Path) -> SealedFile:
    import random

    return make_sealed(tmp_path, random.Random(1).randbytes(5 * MIB + 17))


def resumable(server: Answering) -> GcsStore:
    return store(server, chunk_size=MIB)


def test_a_large_file_goes_chunk_by_chunk_in_one_create_only_session(large: SealedFile) -> None:
    """[S3], [S5]"""
    session = Session()
    with Answering(session) as server:
        put(resumable(server), large)
    data = large.path.read_bytes()
    assert session.held == data
    assert session.started[0]["ifGenerationMatch"] == "0"
    assert session.started[0]["crc32c"] == crc32c(data)
    assert len(session.ranges) == 6
    assert session.ranges[-1] == f"bytes {5 * MIB}-{5 * MIB + 16}/{5 * MIB + 17}"


def once(number: int, then: Callable[[Request, Session], Answer | None]) -> Session:
    """Meddle with the `number`-th request of the session only."""
    return Session(lambda r, s: then(r, s) if len(s.ranges) == number else False)


@pytest.mark.parametrize(
    "then",
    [
        lambda r, s: DROP,
        lambda r, s: refusal(503, "busy", "backendError"),
        lambda r, s: (s.take(r, keep=256 * 1024), DROP)[1],
        lambda r, s: (s.take(r), DROP)[1],
        lambda r, s: s.take(r, keep=512 * 1024),
        lambda r, s: s.take(r, keep=0),
    ],
    ids=["dropped", "busy", "half kept, dropped", "all kept, dropped", "half kept", "none kept"],
)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_interrupted_upload_goes_on_from_what_the_store_holds(
    large: SealedFile, number: int, then: Callable[[Request, Session], Answer | None]
) -> None:
    """[S5]: within one attempt, from the first byte the store does not have; the last chunk too."""
    session = once(number, then)
    with Answering(session) as server:
        put(resumable(server), large)
    assert session.held == large.path.read_bytes()
    assert len(session.started) == 1


def test_an_upload_that_stands_still_gives_its_worker_back_and_starts_afresh(large: SealedFile) -> None:
    """[S5], [D1]: after a few failures without a byte of progress; the next attempt is a new session."""
    session = Session(lambda r, s: DROP if s.ranges and r.body and len(s.started) == 1 else False)
    with Answering(session) as server:
        to = resumable(server)
        assert_means(outcome(to, large), Heals("network"))
        assert len([r for r in session.ranges if not r.startswith("bytes */")]) == STUMBLES_MAX + 1
        put(to, large)
    assert len(session.started) == 2
    assert session.held == large.path.read_bytes()


def test_a_store_that_keeps_nothing_is_left_after_a_few_tries(large: SealedFile) -> None:
    session = Session(lambda r, s: s.take(r, keep=0))
    with Answering(session) as server:
        assert isinstance(outcome(resumable(server), large), TransientStoreError)
    assert len(session.ranges) == STUMBLES_MAX + 1


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_session_heals_by_starting_afresh(large: SealedFile, status: int) -> None:
    session = once(2, lambda r, s: refusal(status, "Not Found", "notFound"))
    with Answering(session) as server:
        to = resumable(server)
        assert_means(outcome(to, large), SESSION_LOST[3])
        put(to, large)
    assert session.held == large.path.read_bytes()


def test_a_key_taken_while_the_chunks_were_sent_is_left_alone(large: SealedFile) -> None:
    """[K4]"""
    session = once(6, lambda r, s: refusal(412, "no", "conditionNotMet"))
    with Answering(lambda request: theirs(request) or session(request)) as server:
        assert isinstance(outcome(resumable(server), large), KeyTakenError)


# --- probe ------------------------------------------------------------------------------------


def test_a_store_that_replaces_objects_is_found_out_and_looked_into_before_each_upload(
    sealed: SealedFile,
) -> None:
    """[S3]"""
    objects: dict[str, bytes] = {}

    def replacing(request: Request) -> Answer | None:
        if request.method == "GET":
            found = objects.get("there")
            return described(found, metadata={"nonce": "theirs"}) if found else refusal(404, "No such object")
        if request.query.get("uploadType") == "resumable":
            return answer(200, {}, Location=f"{server.url}/s?upload_id=1")
        return described(b"whatever")

    with Answering(replacing) as server:
        to = store(server)
        report = to.probe()
        assert not report.create_only
        assert "single" in report.detail
        assert "resumable" in report.detail
        objects["there"] = b"frames"
        sent = len(server.requests)
        assert isinstance(outcome(to, sealed), KeyTakenError)
        assert [request.method for request in server.requests[sent:]] == ["GET"]


# --- credentials ------------------------------------------------------------------------------


def service_account(token_uri: str) -> tuple[dict[str, str], str]:
    """A service account key, and a piece of its private key that must appear nowhere."""
    pem = (
        rsa.generate_private_key(public_exponent=65537, key_size=2048)
        .private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        .decode()
    )
    info = {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "0123456789abcdef",
        "private_key": pem,
        "client_email": "archiver@project.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }
    return info, pem.splitlines()[5]


class TokenServer:
    """Gives out a token for every signed assertion unless `deny`; the API takes tokens in `valid`."""

    def __init__(self) -> None:
        self.deny = False
        self.valid = {"Bearer token-1"}
        self.given = 0
        self.assertions: list[str] = []

    def __call__(self, request: Request) -> Answer:
        if request.target == "/token":
            self.assertions.append(parse_qs(request.body.decode())["assertion"][0])
            if self.deny:
                return answer(400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
            self.given += 1
            return answer(200, {"access_token": f"token-{self.given}", "expires_in": 3600})
        if request.headers.get("authorization") not in self.valid:
            return refusal(401, "Invalid Credentials", "authError")
        return described(b"frames")


@pytest.fixture
def tokens() -> TokenServer:
    return TokenServer()


def write_key(path: Path, server: Answering) -> str:
    info, secret = service_account(f"{server.url}/token")
    path.write_text(json.dumps(info))
    return secret


def test_a_refused_key_file_is_read_again_without_a_restart(
    tmp_path: Path, sealed: SealedFile, tokens: TokenServer
) -> None:
    """[S7], case c29"""
    tokens.deny = True
    with Answering(tokens) as server:
        write_key(tmp_path / "key.json", server)
        to = store(server, credentials_path=tmp_path / "key.json")
        error = outcome(to, sealed)
        assert_means(error, ERRORS[3].answer)
        tokens.deny = False
        write_key(tmp_path / "key.json", server)
        put(to, sealed)
        assert len(set(tokens.assertions)) >= 2


def test_a_token_that_the_service_revoked_is_fetched_anew(
    tmp_path: Path, sealed: SealedFile, tokens: TokenServer
) -> None:
    """[S7]"""
    with Answering(tokens) as server:
        write_key(tmp_path / "key.json", server)
        to = store(server, credentials_path=tmp_path / "key.json")
        put(to, sealed)
        tokens.valid = {"Bearer token-2"}
        assert_means(outcome(to, sealed), ERRORS[3].answer)
        put(to, sealed)
        assert tokens.given == 2


@pytest.mark.filterwarnings("ignore:The load_credentials_from_dict method:DeprecationWarning")
def test_a_key_file_that_is_missing_or_half_written_heals(tmp_path: Path, sealed: SealedFile) -> None:
    """[S6], [S7]: it is being rotated; nothing of it is shown."""
    path = tmp_path / "key.json"
    with Answering(lambda request: described(b"frames")) as server:
        to = store(server, credentials_path=path)
        assert_means(outcome(to, sealed), ERRORS[3].answer)
        secret = write_key(path, server)
        whole = path.read_text()
        for broken in (whole[: len(whole) // 2], whole.replace(secret, secret[:10]), "[]", '{"type": "x"}'):
            path.write_text(broken)
            error = outcome(to, sealed)
            assert_means(error, ERRORS[3].answer)
            assert str(path) in str(error)
            assert secret[:10] not in str(error)


def test_an_inline_key_works_and_a_broken_one_is_a_config_error(
    sealed: SealedFile, tokens: TokenServer
) -> None:
    """[S7], [S8]: told at start, without its content."""
    with Answering(tokens) as server:
        info, secret = service_account(f"{server.url}/token")
        put(store(server, service_account_key=json.dumps(info)), sealed)
        for broken in (json.dumps(info)[:-40], json.dumps({**info, "private_key": secret}), "{}"):
            with pytest.raises(ConfigError) as raised:
                store(server, service_account_key=broken)
            assert secret not in str(raised.value)
            assert "gcs.service_account_key" in str(raised.value)


@pytest.fixture
def everything_logged() -> Iterator[io.StringIO]:
    """Every log line at debug with every field of its record, as an unlucky formatter would show it."""

    class Whole(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return (
                f"{record.getMessage()} {record.__dict__} {self.formatException(record.exc_info)}"
                if (record.exc_info)
                else f"{record.getMessage()} {record.__dict__}"
            )

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Whole())
    root, google = logging.getLogger(), logging.getLogger("google")
    levels = root.level, google.level, google.propagate
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    google.setLevel(logging.DEBUG)
    google.propagate = True
    yield stream
    root.removeHandler(handler)
    root.setLevel(levels[0])
    google.setLevel(levels[1])
    google.propagate = levels[2]


def test_no_secret_is_shown_at_log_level_debug(
    tmp_path: Path, large: SealedFile, everything_logged: io.StringIO, tokens: TokenServer
) -> None:
    """[S7], case c32: wrong key, wrong token, sessions cut, refused and out of reach; logs, errors, reprs."""
    session = Session(lambda r, s: DROP if len(s.started) == 1 else refusal(403, "no", "forbidden"))

    def handler(request: Request) -> Answer | None:
        if request.target == "/token" or request.headers.get("authorization") not in tokens.valid:
            return tokens(request)
        return session(request)

    shown = []
    good = {"Bearer token-2"}
    away = f"127.0.0.1:{free_port()}"
    with Answering(handler) as server:
        secret = write_key(tmp_path / "key.json", server)
        to = store(server, credentials_path=tmp_path / "key.json", chunk_size=MIB)
        for deny, valid, host in (
            (True, set(), ""),
            (False, set(), ""),
            (False, good, ""),
            (False, good, ""),
            (False, good, away),
        ):
            tokens.deny, tokens.valid, session.host = deny, valid, host
            error = outcome(to, large)
            shown.append(f"{error} {error!r} {to!r} {vars(error)}")
    output = everything_logged.getvalue() + " ".join(shown)
    assert "/token" in output, "the test must see the token requests"
    assert output.count("upload_id=") >= 3, "and those of the sessions"
    assert "upload_id=***" in shown[-1]
    leaks = [secret, "secret-session", *tokens.assertions, *(f"token-{n}" for n in range(1, 4))]
    assert tokens.given == 2
    assert len(session.started) == 3
    assert [leak for leak in leaks if leak in output] == []


def test_as_many_connections_are_kept_as_there_are_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A smaller pool would throw connections away and open them anew."""

    def slow(request: Request) -> Answer:
        time.sleep(0.05)
        return described(b"frames")

    files = [make_sealed(tmp_path, b"frames") for _ in range(24)]
    with Answering(slow) as server:
        to = store(server, parallelism=12)
        with caplog.at_level(logging.DEBUG, logger="urllib3.connectionpool"), ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda sealed: put(to, sealed), files))
    lines = [record.getMessage() for record in caplog.records]
    assert not any("pool is full" in line for line in lines)
    assert sum("Starting new HTTP connection" in line for line in lines) <= 12


PAGE = Path(__file__).parents[2] / "docs" / "stores" / "gcs.md"


def test_the_page_explains_every_kind_of_the_table() -> None:
    """And none that does not exist; `local_limit` comes from reading the file."""
    answers = [*(row.answer for row in ERRORS), *(answer for _, answer in EXCEPTIONS)]
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
    assert settings.archive.destination == "gs://my-archive/kafka"
