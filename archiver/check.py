"""`dfe-archiver check`: asks broker, topics, group and store, and says what it found [O1]."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from archiver.codecs import CODECS
from archiver.domain.keys import longest_key_bytes
from archiver.errors import StartError, StoreError
from archiver.settings.models import Settings
from archiver.settings.secrets import secret_values, without_secrets
from archiver.spool import SpoolDirectory
from archiver.stores import open_store
from archiver.telemetry.http import bind

BROKER_SECS = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the screen."""

    ok: bool
    what: str
    detail: str


def check(settings: Settings, show: Callable[[str], None] = print) -> int:
    """Print one line per finding; 0 where all are fine, else 1."""
    secrets = secret_values(settings)
    failed = False
    for finding in _findings(settings):
        failed = failed or not finding.ok
        mark = "ok    " if finding.ok else "FAILED"
        show(without_secrets(f"{mark}  {finding.what}: {finding.detail}", secrets))
    return 1 if failed else 0


def _findings(settings: Settings) -> Iterator[Finding]:
    yield Finding(True, "configuration", _summary(settings))
    spool, held = _spool(settings)
    yield spool
    yield _port("metrics.listen", settings.metrics.listen, held=held)
    if settings.transport == "grpc":
        yield _port("grpc.listen", settings.grpc.listen, held=held)
    yield _store(settings)
    if settings.transport == "kafka":
        from archiver.sources.kafka_check import look

        excluded = (settings.dlq.topic,)
        for ok, what, detail in look(settings.kafka, excluded, BROKER_SECS, settings.roll_interval_secs):
            yield Finding(ok, what, detail)


def _summary(settings: Settings) -> str:
    routing, archive = settings.routing, settings.archive
    longest = longest_key_bytes(
        settings.destination.prefix,
        len(routing.expression_fields),
        archive.path_template,
        CODECS[settings.codec].extension,
        has_topic=settings.transport == "kafka",
        topic_only=routing.mode == "topic",
    )
    held = "offsets held until durable" if settings.offsets_held else "offsets not held: at most once"
    return (
        f"{settings.transport} to {archive.destination} as {settings.codec}, files roll every "
        f"{settings.roll_interval_secs:g} s, {held}, longest key {longest} bytes"
    )


def _spool(settings: Settings) -> tuple[Finding, bool]:
    """And whether a running archiver holds the lock, which is no fault of the spool's."""
    try:
        spool = SpoolDirectory.acquire(settings.buffer.spool_dir)
    except StartError as error:
        if "in use by" in str(error):
            return Finding(True, "spool", f"a running archiver holds it, another cannot start. {error}"), True
        return Finding(False, "spool", str(error)), False
    try:
        spool.require_writable()
        free = spool.free_bytes()
    except StartError as error:
        return Finding(False, "spool", str(error)), False
    finally:
        spool.release()
    enough = free >= settings.buffer.min_free_disk_bytes
    detail = f"{settings.buffer.spool_dir} is writable, {free >> 20} MiB free"
    if not enough:
        detail += ", which is below buffer.min_free_disk_bytes: consumption would pause"
    return Finding(enough, "spool", detail), False


def _port(key: str, listen: str, *, held: bool) -> Finding:
    """`held`: an archiver runs with this spool, and may be who has the port."""
    try:
        bind(listen, key).close()
    except StartError as error:
        if held and isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return Finding(True, "port", f"{listen} is taken, as it is while an archiver runs here ({key})")
        return Finding(False, "port", str(error))
    return Finding(True, "port", f"{listen} can be listened on ({key})")


def _store(settings: Settings) -> Finding:
    where = settings.archive.destination
    store = open_store(settings, lambda _: None)
    try:
        report = store.probe()
    except StoreError as error:
        return Finding(False, "store", f"{where}: {error}")
    finally:
        store.close()
    honours = (
        "refuses to replace objects"
        if report.create_only
        else "would replace objects, so a look-up before each upload stands in"
    )
    return Finding(True, "store", f"{where} can be written and {honours} ({report.detail})")
