"""The sides of a comparison, each as whole processes: records, seconds, CPU and peak memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from bench.machine import cpu_secs, resident_bytes, tree
from tests.harness.daemon import Daemon, merged
from tests.harness.process import ServerError, free_port

TUNED = (
    "-X queued.min.messages=10000000 -X queued.max.messages.kbytes=2000000 "
    "-X fetch.message.max.bytes=10000000"
)
"""What makes kcat's pipe fast: a prefetch queue without practical bound, and large fetches."""

RUN_TIMEOUT_SECS = 900.0


@dataclass(frozen=True)
class Run:
    """One side once. `secs` from process start to the last byte archived; sizes in bytes.

    `start_secs` is from process start until the first records are taken: imports, and joining the group;
    `cpu_start_secs` is the CPU it used in that time. `stop_secs` is from the last record on.
    """

    records: int
    raw_bytes: int
    secs: float
    cpu_secs: float
    peak_bytes: int
    archived_bytes: int
    cpu_start_secs: float = 0.0
    start_secs: float = 0.0
    stop_secs: float = 0.0

    @property
    def rate(self) -> float:
        """Records a second, start and stop included."""
        return self.records / self.secs

    def figures(self) -> dict[str, float]:
        """Flat, for tables: MB are 10^6 bytes of values, GB 10^9."""
        work_cpu = self.cpu_secs - self.cpu_start_secs
        work_secs = self.secs - self.start_secs - self.stop_secs
        figures = {
            "rate": self.rate,
            "work_rate": self.records / max(work_secs, 1e-3),
            "mb_per_sec": self.raw_bytes / self.secs / 1e6,
            "secs": self.secs,
            "cpu_secs": self.cpu_secs,
            "cpu_secs_per_gb": self.cpu_secs / (self.raw_bytes / 1e9),
            "rate_per_core": self.records / max(work_cpu, 1e-3),
            "cores": self.cpu_secs / self.secs,
            "peak_mb": self.peak_bytes / 1e6,
            "start_secs": self.start_secs,
            "stop_secs": self.stop_secs,
        }
        if self.archived_bytes:  # unknown on S3
            figures["ratio"] = self.raw_bytes / self.archived_bytes
        return figures


@dataclass(frozen=True)
class Topic:
    """A filled topic: `raw_bytes` counts every value and a newline behind it."""

    bootstrap: str
    name: str
    records: int
    raw_bytes: int


# --- kcat and a compressor ------------------------------------------------------------------------


def kcat_pipe(topic: Topic, root: Path, compress: str, *, tuned: bool) -> Run:
    """`kcat | <compress>` into one file; `cat` compresses nothing."""
    root.mkdir(parents=True, exist_ok=True)
    target = root / "all"
    options = TUNED if tuned else ""
    consume = f"kcat -C -b {topic.bootstrap} -t {topic.name} -o beginning -e -q {options}"
    with _measured() as measured:
        pipe = subprocess.Popen(["sh", "-c", f"{consume} | {compress} > {target}"])
        with _peak(lambda: tree(pipe.pid)) as peak:
            status = pipe.wait(RUN_TIMEOUT_SECS)
    if status != 0:
        raise RuntimeError(f"kcat | {compress} ended with {status}")
    size = target.stat().st_size
    shutil.rmtree(root)
    return Run(topic.records, topic.raw_bytes, measured.secs, measured.cpu_secs, peak(), size, start_secs=0.0)


# --- the archiver -----------------------------------------------------------------------------------


def archiver(
    topic: Topic,
    root: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    processes: int = 1,
    prefix: Sequence[str] = (),
) -> Run:
    """The daemon (or several in one group), from start until stopped with everything archived."""
    group = f"bench-{uuid.uuid4().hex[:8]}"
    daemons = [_daemon(topic, root / str(i), group, settings or {}, prefix) for i in range(processes)]
    try:
        with _measured() as measured, _peak(lambda: [daemon.pid for daemon in daemons]) as peak:
            for daemon in daemons:
                daemon.launch()
            start_secs, cpu_start = _started(daemons, measured)
            _consume_all(daemons, topic, measured)
            consumed_secs = measured.so_far()
            statuses = _stop(daemons)
    finally:
        for daemon in daemons:
            daemon.kill()
    if any(statuses):
        raise RuntimeError(f"the archiver ended with {statuses}: {daemons[0].server.tail()}")
    _require_committed(topic, group)
    size = sum(_tree_size(daemon.root / "archive") for daemon in daemons)
    shutil.rmtree(root)
    return Run(
        topic.records,
        topic.raw_bytes,
        measured.secs,
        measured.cpu_secs,
        peak(),
        size,
        cpu_start_secs=cpu_start,
        start_secs=start_secs,
        stop_secs=measured.secs - consumed_secs,
    )


def bench_settings(topic: Topic, group: str) -> dict[str, Any]:
    """The defaults, but for a stop that may take as long as it needs, and one file per route."""
    return {
        "kafka": {
            "brokers": topic.bootstrap,
            "topics": [topic.name],
            "group_id": group,
            "max_poll_interval_ms": 900_000,  # a stop must be shorter
        },
        "archive": {"roll_interval_secs": 3600},
        "shutdown_timeout_secs": 600,
        "log": {"level": "warning"},
    }


def _daemon(
    topic: Topic, root: Path, group: str, settings: Mapping[str, Any], prefix: Sequence[str]
) -> Daemon:
    return Daemon(root, root / "logs", merged(bench_settings(topic, group), settings), prefix=prefix)


def _started(daemons: Sequence[Daemon], measured: _Measured) -> tuple[float, float]:
    """When the first records have been taken, and the CPU all processes had used by then."""
    while not any(map(consumed, daemons)):
        _check(daemons, measured)
        time.sleep(0.02)
    return measured.so_far(), sum(cpu_secs(daemon.pid) for daemon in daemons)


def _consume_all(daemons: Sequence[Daemon], topic: Topic, measured: _Measured) -> None:
    """Asks seldom while much is left: each answer costs the process some milliseconds.

    Several processes may take a record twice, while they share out the partitions, so there it is their
    positions that tell, which are up to a second old.
    """
    while (done := sum(consumed(daemon) or 0.0 for daemon in daemons)) < topic.records:
        _check(daemons, measured)
        rate = max(done / max(measured.so_far(), 0.1), 1.0)
        time.sleep(min(max((topic.records - done) / rate / 2, 0.02), 0.5))
    while len(daemons) > 1 and _positions(daemons) < topic.records:
        _check(daemons, measured)
        time.sleep(0.1)


def _positions(daemons: Sequence[Daemon]) -> float:
    """How far the group has come: the furthest position of each partition, added up."""
    furthest: dict[str, float] = {}
    for daemon in daemons:
        for line in daemon.get("/metrics")[1].splitlines():
            if line.startswith("dfe_archiver_position{"):
                labels, _, value = line.rpartition(" ")
                furthest[labels] = max(furthest.get(labels, 0.0), float(value))
    return sum(furthest.values())


def _require_committed(topic: Topic, group: str) -> None:
    """Every record is archived only if every offset is committed: a run that left some is no run."""
    consumer = Consumer({"bootstrap.servers": topic.bootstrap, "group.id": group, "log_level": 0})
    try:
        listed = consumer.list_topics(topic.name, timeout=20).topics[topic.name].partitions
        answers = consumer.committed([TopicPartition(topic.name, number) for number in listed], timeout=20)
    finally:
        consumer.close()
    committed = sum(max(answer.offset, 0) for answer in answers)
    if committed != topic.records:
        raise RuntimeError(f"{topic.name}: {committed} of {topic.records} records are archived and committed")


def _check(daemons: Sequence[Daemon], measured: _Measured) -> None:
    for daemon in daemons:
        if not daemon.server.running:
            raise RuntimeError(f"the archiver ended by itself: {daemon.server.tail()}")
    if measured.so_far() > RUN_TIMEOUT_SECS:
        raise TimeoutError(f"not done after {RUN_TIMEOUT_SECS:.0f} s: {daemons[0].server.tail()}")


def _stop(daemons: Sequence[Daemon]) -> list[int | None]:
    statuses: list[int | None] = [None] * len(daemons)

    def stop(number: int) -> None:
        statuses[number] = daemons[number].stop(timeout=700)

    threads = [threading.Thread(target=stop, args=(number,)) for number in range(len(daemons))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def consumed(daemon: Daemon) -> float | None:
    """Records taken so far; None while its HTTP listener is not up."""
    try:
        text = daemon.get("/metrics")[1]
    except OSError:
        return None
    return sample(text, "records_consumed_total")


def sample(text: str, name: str) -> float:
    """A sample without labels out of a scrape; 0 where it is missing. Far cheaper than parsing it all."""
    for line in text.splitlines():
        if line.startswith(f"dfe_archiver_{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


# --- Kafka Connect -------------------------------------------------------------------------------


def connect_file_sink(topic: Topic, root: Path, libs: Path) -> Run:
    """Kafka Connect standalone with FileStreamSink and StringConverter, until its file is complete."""
    root.mkdir(parents=True, exist_ok=True)
    target = root / "all"
    log = (root / "connect.log").open("w")
    with log, _measured() as measured:
        process = subprocess.Popen(
            _connect_command(topic, root, target, libs), stdout=log, stderr=subprocess.STDOUT
        )
        with _peak(lambda: [process.pid]) as peak:
            start, cpu_start = 0.0, 0.0
            while (size := _size(target)) < topic.raw_bytes:
                if not start and size:
                    start, cpu_start = measured.so_far(), cpu_secs(process.pid)
                if process.poll() is not None or measured.so_far() > RUN_TIMEOUT_SECS:
                    process.kill()
                    raise RuntimeError(f"Connect stopped early: {(root / 'connect.log').read_text()[-2000:]}")
                time.sleep(0.05)
            drained = measured.so_far()
            cpu = cpu_secs(process.pid)  # its exit is not part of the work
        process.kill()
        process.wait()
    shutil.rmtree(root)
    return Run(
        topic.records,
        topic.raw_bytes,
        drained,
        cpu,
        peak(),
        topic.raw_bytes,
        cpu_start_secs=cpu_start,
        start_secs=start,
    )


def _connect_command(topic: Topic, root: Path, target: Path, libs: Path) -> list[str]:
    worker = {
        "bootstrap.servers": topic.bootstrap,
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.storage.StringConverter",
        "offset.storage.file.filename": root / "offsets",
        "offset.flush.interval.ms": 5000,
        "listeners": f"http://127.0.0.1:{free_port()}",
        "plugin.path": libs,
        "plugin.discovery": "service_load",
    }
    sink = {
        "name": f"bench-{uuid.uuid4().hex[:8]}",
        "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
        "tasks.max": 1,
        "topics": topic.name,
        "file": target,
    }
    for name, properties in (("worker", worker), ("sink", sink)):
        lines = "".join(f"{key}={value}\n" for key, value in properties.items())
        (root / f"{name}.properties").write_text(lines)
    (root / "log4j2.xml").write_text(_LOGGING)
    return [
        *("java", "-Xms256m", "-Xmx2g", f"-Dlog4j2.configurationFile={root}/log4j2.xml"),
        *("-cp", f"{libs}/*", "org.apache.kafka.connect.cli.ConnectStandalone"),
        *(str(root / "worker.properties"), str(root / "sink.properties")),
    ]


_LOGGING = """<Configuration status="ERROR">
  <Appenders><Console name="out"><PatternLayout pattern="%p %c{1} %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


# --- measuring ------------------------------------------------------------------------------------


class _Measured:
    """Seconds, and CPU of children that have ended within them."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), _children_cpu()
        self.secs = self.cpu_secs = 0.0

    def so_far(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def end(self) -> None:
        """Fix the figures."""
        self.secs, self.cpu_secs = self.so_far(), _children_cpu() - self._cpu


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


@contextmanager
def _measured() -> Iterator[_Measured]:
    measured = _Measured()
    yield measured
    measured.end()


@contextmanager
def _peak(pids: Callable[[], list[int]]) -> Iterator[Callable[[], int]]:
    """Peak of the resident memory of processes together, sampled ten times a second, in bytes."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            with suppress(ServerError):  # one of them is not started yet
                peak[0] = max(peak[0], sum(map(resident_bytes, pids())))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        stop.set()
        thread.join()


def _tree_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
