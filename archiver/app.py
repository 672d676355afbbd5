"""The composition root: settings become a wired `Archiver`. The only module that knows every adapter."""

from __future__ import annotations

import gc
import os
import random
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from archiver import __version__
from archiver.bounds import Bounds
from archiver.codecs import CODECS
from archiver.deadletters.setup import dead_letters
from archiver.domain.keys import WRITER_ID_DIGITS_LONG, KeyMaker, KeyTemplate
from archiver.domain.ledger import NoOffsetsLedger, OffsetLedger, ReceiptLedger
from archiver.domain.rolling import FlushPolicy, RollPolicy
from archiver.domain.routing import Router
from archiver.events import LeftoversFound, Started
from archiver.inbox import QueueInbox
from archiver.pipeline import Archiver, Parts, Policy
from archiver.ports import Clock, DeadLetters, Emit, Inbox, Ledger, RollRequested, Source, WorkerDied
from archiver.retention import RetentionWatch
from archiver.settings.models import Settings
from archiver.settings.secrets import secret_values
from archiver.snapshot import Snapshot
from archiver.spool import Leftovers, SpoolDirectory, SpoolWriters
from archiver.store_probe import StartProbe
from archiver.stores import open_store, store_checksums
from archiver.stores.metadata import object_metadata
from archiver.telemetry import HttpServer, Telemetry
from archiver.uploads import UploadPool, UploadSchedule

PREFETCH_SHARE = 4
"""The client's queue gets this part of `buffer.max_bytes`, records in buffers the rest [B1]."""

HEALTHY_MARGIN_SECS = 10.0
"""How much longer than its longest step the loop may stand still before `/healthz` turns red."""


GC_THRESHOLDS = (20_000, 50, 1000)
"""The loop makes and frees a few thousand containers a batch and no cycles. With the interpreter's own
thresholds looking for some costs 10 % at 20 routes and a third at 20,000, whose files are all looked at."""


PUBLISH_SECS = 1.0
JOINING_PUBLISH_SECS = 0.05
JOINING_SECS_MAX = 10.0
"""A start is ready within a second, and whoever waits for it should not wait for another one. With many
partitions a snapshot costs milliseconds, so one that does not get ready is looked at less often."""


PUSH_SWITCH_SECS = 0.001
"""How long the loop may keep the interpreter while the push listener waits for it. An answer takes several
turns of the listener: with the interpreter's own 5 ms senders get a fifth less through."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()


def run(settings: Settings) -> int:
    """Archive until stopped; the exit status. Raises `StartError` and `ConfigError`."""
    on_signal = _Signals()  # before any thread: they inherit the mask
    raise_handle_limit()
    telemetry = Telemetry(
        level=settings.log.level, log_format=settings.log.format, secrets=secret_values(settings)
    )
    with ExitStack() as stack:
        stack.callback(telemetry.close)
        archiver = _build(settings, telemetry, stack)
        on_signal.stop_with(archiver.stop)
        gc.freeze()  # what start-up made stays; looking through it even once costs time
        gc.set_threshold(*GC_THRESHOLDS)
        gc.enable()
        if settings.transport == "grpc":
            sys.setswitchinterval(PUSH_SWITCH_SECS)
        return archiver.run()


def raise_handle_limit() -> None:
    """As many file handles as the process may have: the usual soft limit of 1,024 is there for programs
    that use `select`, and a thousand senders, or uploads, would take all of them from the spool [B3]."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # not everywhere may it be as high as it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _build(settings: Settings, telemetry: Telemetry, stack: ExitStack) -> Archiver:
    """Wire everything; what it starts ends with the stack."""
    emit, clock, inbox = telemetry.emit, SystemClock(), QueueInbox()
    checksums = store_checksums(settings.destination.scheme)
    spool = SpoolDirectory.acquire(settings.buffer.spool_dir)
    stack.callback(spool.release)
    leftovers = spool.leftovers(checksums)
    spool.require_writable()
    codec = CODECS[settings.codec]
    writers = SpoolWriters(
        spool,
        codec,
        settings.compression.level if settings.compression.enabled else None,
        inbox,
        emit,
        threads=max(2, min(4, os.cpu_count() or 1)),
        max_open_files=settings.archive.max_open_files,
        checksums=checksums,
        keep_labels=not settings.offsets_held,
    )
    store = open_store(settings, emit)
    stack.callback(store.close)
    probe = StartProbe(store, emit)
    stack.callback(probe.stop)
    parallelism = settings.buffer.writer_parallelism
    schedule = UploadSchedule(
        inbox, emit, spool.remove, lambda: _hex(WRITER_ID_DIGITS_LONG), random.Random(), parallelism
    )
    uploader = UploadPool(
        schedule, store, lambda sealed: object_metadata(sealed, __version__), clock, inbox, parallelism
    )
    keys = KeyMaker(KeyTemplate(settings.archive.path_template), codec.extension, _hex)
    snapshot = Snapshot(
        memory_bytes_max=settings.buffer.max_bytes,
        uploads_in_flight_max=parallelism,
        ready_needs_store=settings.transport == "kafka",
        store_problem=probe.problem,
        started_at_unix=time.time(),
    )
    parts = Parts(
        source=_source(settings, emit, clock),
        ledger=_ledger(settings),
        router=_router(settings),
        keys=keys,
        writers=writers,
        uploader=uploader,
        dead_letters=_dead_letters(settings, inbox, emit, spool),
        inbox=inbox,
        clock=clock,
        disk=spool,
        emit=emit,
        publish=_publisher(snapshot, telemetry, clock),
        beat=telemetry.status.turned,
    )
    archiver = Archiver(parts, _policy(settings))
    _serve_http(settings, telemetry, inbox, stack)
    _tell_start(settings, emit, keys, leftovers)
    archiver.adopt(leftovers.sealed)
    return archiver


def _publisher(snapshot: Snapshot, telemetry: Telemetry, clock: Clock) -> Callable[[Archiver], float]:
    """What the loop calls about once a second, and more often until it is ready."""
    retention = RetentionWatch(telemetry.emit)
    joining_until = clock.monotonic() + JOINING_SECS_MAX

    def publish(archiver: Archiver) -> float:
        nonlocal joining_until
        status = snapshot.of(archiver)
        telemetry.status.publish(status)
        now = clock.monotonic()
        retention.look(status.partitions, now)
        if not status.not_ready:
            joining_until = now
        return JOINING_PUBLISH_SECS if now < joining_until else PUBLISH_SECS

    return publish


def _policy(settings: Settings) -> Policy:
    buffer = settings.buffer
    return Policy(
        roll=RollPolicy(settings.archive.roll_size_bytes, settings.roll_interval_secs),
        flush=FlushPolicy(buffer.flush_bytes, buffer.flush_records, buffer.flush_age_secs),
        bounds=Bounds(
            memory_bytes_max=buffer.max_bytes - _queue_bytes(settings),
            spool_bytes_max=buffer.max_spool_bytes,
            free_bytes_min=buffer.min_free_disk_bytes,
        ),
        codec=settings.codec,
        commit_interval_secs=settings.kafka.commit_interval_secs,
        drain_timeout_secs=settings.kafka.drain_timeout_secs,
        shutdown_timeout_secs=settings.shutdown_timeout_secs,
    )


def _prefetch_bytes(settings: Settings) -> int:
    return settings.buffer.max_bytes // PREFETCH_SHARE


def _queue_bytes(settings: Settings) -> int:
    """What the source may hold of `buffer.max_bytes`; half at most, or nothing is left for buffers."""
    if settings.transport == "kafka":
        return _prefetch_bytes(settings)
    return min(settings.grpc.max_queue_bytes, settings.buffer.max_bytes // 2)


def _source(settings: Settings, emit: Emit, clock: Clock) -> Source:
    """Each client is imported only where it is used."""
    if settings.transport == "grpc":
        from archiver.sources.grpc import GrpcSource

        return GrpcSource(settings.grpc, emit)
    from archiver.sources.kafka import KafkaSource

    excluded = () if settings.dlq.allow_in_topics else (settings.dlq.topic,)
    source = KafkaSource(
        settings.kafka,
        emit,
        clock,
        excluded_topics=excluded,
        prefetch_bytes_max=_prefetch_bytes(settings),
    )
    source.connect()
    return source


def _ledger(settings: Settings) -> Ledger:
    """What may be committed when: the promise that the settings make."""
    if settings.transport == "grpc":
        return NoOffsetsLedger()
    return OffsetLedger() if settings.offsets_held else ReceiptLedger()


def _router(settings: Settings) -> Router:
    fields = settings.routing.expression_fields if settings.routing.mode == "expression" else ()
    return Router(fields, settings.routing.default_segment, with_topic=settings.transport == "kafka")


def _dead_letters(settings: Settings, inbox: Inbox, emit: Emit, spool: SpoolDirectory) -> DeadLetters:
    from archiver.sources.kafka_client import admin_properties

    route_of = None if settings.transport == "grpc" else lambda: _router(settings).route_of
    properties = admin_properties(settings.kafka)
    return dead_letters(
        settings.dlq, settings.buffer.spool_dir, properties, route_of, inbox, emit, spool.remove
    )


def _serve_http(settings: Settings, telemetry: Telemetry, inbox: Inbox, stack: ExitStack) -> None:
    token = settings.metrics.ops_token
    longest = max(settings.kafka.drain_timeout_secs, settings.shutdown_timeout_secs)
    server = HttpServer(
        settings.metrics.listen,
        telemetry.status,
        telemetry.registry,
        roll=lambda: inbox.put(RollRequested()),
        ops_token=token.get_secret_value() if token else None,
        healthy_within_secs=longest + HEALTHY_MARGIN_SECS,
        died=lambda reason: inbox.put(WorkerDied("http", reason)),
    )
    server.start()
    stack.callback(server.stop)


def _tell_start(settings: Settings, emit: Emit, keys: KeyMaker, leftovers: Leftovers) -> None:
    emit(
        Started(
            version=__version__,
            transport=settings.transport,
            destination=settings.archive.destination,
            writer_id=keys.writer_id,
            spool_dir=str(settings.buffer.spool_dir),
        )
    )
    if leftovers.removed or leftovers.sealed or leftovers.set_aside:
        emit(
            LeftoversFound(
                removed=leftovers.removed, uploaded=len(leftovers.sealed), cut_bytes=leftovers.cut_bytes
            )
        )


def _hex(digits: int) -> str:
    return secrets.token_hex((digits + 1) // 2)[:digits]


class _Signals:
    """SIGTERM and SIGINT on a thread of their own, so that none waits for a call into a C library.

    The first asks for a stop, the second ends the process at once with 128 + signal [D6].
    """

    def __init__(self) -> None:
        self._stop: Callable[[str], None] | None = None
        self._early: str | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def stop_with(self, stop: Callable[[str], None]) -> None:
        """Whom to tell, from now on; a signal that came earlier is told now."""
        self._stop = stop
        if self._early is not None:
            stop(self._early)

    def _wait(self) -> None:
        first = signal.sigwait({signal.SIGTERM, signal.SIGINT})
        self._early = signal.Signals(first).name
        if self._stop is not None:
            self._stop(self._early)
        second = signal.sigwait({signal.SIGTERM, signal.SIGINT})
        os._exit(128 + second)


def check(settings: Settings) -> int:
    """`dfe-archiver check`: 0 if broker, topics, group and store are as they should be, else 1."""
    from archiver.check import check as probe_everything

    return probe_everything(settings)
