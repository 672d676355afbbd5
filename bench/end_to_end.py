"""End to end on a real broker: the archiver beside `kcat | zstd`, one thing varied at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench import sides
from bench.compare import Case, Figures
from bench.connect import connect_libs
from bench.context import Context
from bench.sides import Topic
from bench.workload import Workload

HEADLINE = Workload()
BASE = Workload(records=1_000_000)

PIPES = {"zstd": "zstd -3 -q", "lz4": "lz4 -q", "gzip": "gzip"}
"""What each codec's own tool does by default, and for zstd the archiver's level."""

Side = Callable[[], Figures]


def _archiver(context: Context, topic: Topic, settings: Mapping[str, Any] | None = None, **more: Any) -> Side:
    return lambda: sides.archiver(topic, context.fresh(), settings, **more).figures()


def _to_s3(context: Context, topic: Topic, settings: Mapping[str, Any]) -> Side:
    return lambda: sides.archiver(topic, context.fresh(), {**settings, **context.s3_settings()}).figures()


def _kcat(context: Context, topic: Topic, codec: str, *, tuned: bool = True) -> Side:
    return lambda: sides.kcat_pipe(topic, context.fresh(), PIPES[codec], tuned=tuned).figures()


def _codec(name: str) -> dict[str, Any]:
    return {"compression": {"codec": name}}


def headline(context: Context) -> list[Case]:
    """2,000,000 records of 400 bytes, 4 partitions, 20 organisations, zstd at level 3, to file://."""
    topic = context.topic(HEADLINE)
    return [
        context.compare(
            "400 B, 20 organisations, zstd-3",
            {
                "archiver": _archiver(context, topic),
                "kcat tuned": _kcat(context, topic, "zstd"),
                "kcat default": _kcat(context, topic, "zstd", tuned=False),
            },
            records=topic.records,
            size=HEADLINE.size,
        )
    ]


def codecs(context: Context) -> list[Case]:
    """Each codec to file:// and to an S3 server, beside kcat and the codec's own tool."""
    topic = context.topic(BASE)
    cases = []
    for codec in ("zstd", "lz4", "gzip", "snappy", "none"):
        settings = _codec(codec)
        compared: dict[str, Side] = {
            "archiver file://": _archiver(context, topic, settings),
            "archiver s3://": _to_s3(context, topic, settings),
        }
        if codec in PIPES:
            compared["kcat tuned"] = _kcat(context, topic, codec)
            compared["kcat default"] = _kcat(context, topic, codec, tuned=False)
        cases.append(context.compare(codec, compared, codec=codec))
    return cases


def connect(context: Context) -> list[Case]:
    """Kafka Connect standalone, FileStreamSink with StringConverter; it writes plain text, so `none` too."""
    topic, libs = context.topic(BASE), connect_libs()

    def file_sink() -> Figures:
        return sides.connect_file_sink(topic, context.fresh(), libs).figures()

    compared: dict[str, Side] = {
        "archiver none": _archiver(context, topic, _codec("none")),
        "archiver zstd": _archiver(context, topic),
        "connect file sink": file_sink,
    }
    return [context.compare("400 B, 20 organisations", compared)]


def sizes(context: Context) -> list[Case]:
    """Records of 100 bytes to 20 KB with the codecs; a topic holds about 400 MB of them at most."""
    cases = []
    for size, records in ((100, 2_000_000), (400, 1_000_000), (2_000, 200_000), (20_000, 20_000)):
        topic = context.topic(Workload(records=records, size=size))
        compared = {f"archiver {codec}": _archiver(context, topic, _codec(codec)) for codec in SIZED_CODECS}
        compared["kcat tuned"] = _kcat(context, topic, "zstd")
        cases.append(context.compare(f"{size:,} B", compared, size=size))
    return cases


SIZED_CODECS = ("zstd", "lz4", "snappy", "gzip", "none")


def organisations(context: Context) -> list[Case]:
    """1 to 20,000 organisations, uniform and Zipf."""
    cases = []
    for orgs in (1, 20, 1_000, 20_000):
        for zipf in (False, True) if orgs > 1 else (False,):
            topic = context.topic(Workload(records=BASE.records, orgs=orgs, zipf=zipf))
            law = "Zipf" if zipf else "uniform"
            compared = {"archiver": _archiver(context, topic), "kcat tuned": _kcat(context, topic, "zstd")}
            cases.append(context.compare(f"{orgs:,} {law}", compared, orgs=orgs, zipf=zipf))
    return cases


def routing(context: Context) -> list[Case]:
    """How the route is found: one field, a nested one, two, none."""
    topic = context.topic(BASE)
    ways: dict[str, dict[str, Any]] = {
        "_org_id": {},
        "tags.region (nested)": {"expression_fields": ["tags.region"]},
        "_org_id, level (two)": {"expression_fields": ["_org_id", "level"]},
        "status (a number)": {"expression_fields": ["status"]},
        "mode: topic": {"mode": "topic"},
    }
    return [
        context.compare(
            way,
            {
                "archiver": _archiver(context, topic, {"routing": settings}),
                "kcat tuned": _kcat(context, topic, "zstd"),
            },
        )
        for way, settings in ways.items()
    ]


def partitions(context: Context) -> list[Case]:
    """1, 4 and 32 partitions."""
    return [
        _beside_kcat(context, f"{count} partitions", Workload(records=BASE.records, partitions=count))
        for count in (1, 4, 32)
    ]


def producers(context: Context) -> list[Case]:
    """What the producers compressed with: the client decompresses it again."""
    return [
        _beside_kcat(context, f"producers: {codec}", Workload(records=BASE.records, compression=codec))
        for codec in ("none", "lz4", "zstd")
    ]


def growth(context: Context) -> list[Case]:
    """The same work, more and more of it."""
    return [
        _beside_kcat(context, f"{records:,} records", Workload(records=records), records=records)
        for records in (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
    ]


def _beside_kcat(context: Context, name: str, work: Workload, **params: Any) -> Case:
    topic = context.topic(work)
    compared = {"archiver": _archiver(context, topic), "kcat tuned": _kcat(context, topic, "zstd")}
    return context.compare(name, compared, **params)


def group(context: Context) -> list[Case]:
    """One, two and three processes of one group on a topic of 12 partitions, started together."""
    topic = context.topic(Workload(records=2 * HEADLINE.records, partitions=12))
    compared = {f"{count} processes": _archiver(context, topic, processes=count) for count in (1, 2, 3)}
    return [context.compare("12 partitions", compared)]
