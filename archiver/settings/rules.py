"""Rules over several settings, and over settings and files [C5]. Each looks only at parts in use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from archiver.domain.keys import (
    KEY_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    KeyTemplate,
    encode_segment,
    longest_key_bytes,
)
from archiver.settings.models import Settings
from archiver.settings.rule_text import Broken, broken
from archiver.settings.source_rules import grpc_rules, kafka_rules
from archiver.settings.store_rules import store_rules

LEVELS: dict[str, tuple[int, int] | None] = {
    "zstd": (1, 22),
    "lz4": (1, 12),
    "gzip": (1, 9),
    "snappy": None,
    "none": None,
}
"""What each codec takes, lowest and highest [F2]. The codecs' own table needs their libraries."""

EXTENSIONS = {
    "zstd": "jsonl.zst",
    "lz4": "jsonl.lz4",
    "snappy": "jsonl.sz",
    "gzip": "jsonl.gz",
    "none": "jsonl",
}

OBJECT_BYTES_MAX = 5 << 40
"""S3 and GCS take 5 TiB as an object, in 10,000 parts of up to 5 GiB; Azure takes more."""
FILE_NAME_BYTES_MAX = 255
"""NAME_MAX of the usual Linux file systems."""
FILE_PATH_BYTES_MAX = 4095
"""PATH_MAX of Linux, less the final NUL."""


def broken_rules(settings: Settings) -> list[Broken]:
    """Every rule that does not hold."""
    source = kafka_rules if settings.transport == "kafka" else grpc_rules
    texts = chain(
        source(settings), _level(settings), _bounds(settings), _keys(settings), store_rules(settings)
    )
    return [broken(settings, text) for text in texts]


def _level(settings: Settings) -> Iterator[str]:
    level, levels = settings.compression.level, LEVELS[settings.codec]
    if level is None or not settings.compression.enabled:
        return
    if levels is None:
        yield "{compression.level} does not go with {compression.codec}, which has no levels: remove it"
    elif not levels[0] <= level <= levels[1]:
        yield (
            "{compression.level} is out of the range of {compression.codec}: "
            f"choose {levels[0]} to {levels[1]}, or leave it out"
        )


def _bounds(settings: Settings) -> Iterator[str]:
    archive, buffer = settings.archive, settings.buffer
    if archive.roll_size_bytes >= buffer.max_spool_bytes:
        yield (
            "{archive.roll_size_bytes} must be below {buffer.max_spool_bytes}: a file grows in the "
            "spool, so lower "
            "the first or raise the second"
        )
    if buffer.flush_bytes >= buffer.max_bytes:
        yield "{buffer.flush_bytes} must be below {buffer.max_bytes}: lower the first or raise the second"
    if settings.destination.path is None and archive.roll_size_bytes + buffer.flush_bytes > OBJECT_BYTES_MAX:
        yield (
            "{archive.roll_size_bytes} and {buffer.flush_bytes} make objects above the 5TiB that "
            "stores take: "
            "lower the first"
        )


def _keys(settings: Settings) -> Iterator[str]:
    """The longest key that these settings can produce [K7], and a file system's own limits."""
    longest = _longest_key_bytes(settings)
    if longest > KEY_BYTES_MAX:
        yield (
            f"the longest key would have {longest} bytes, but stores take {KEY_BYTES_MAX}: shorten "
            f"the prefix of "
            "{archive.destination} or {archive.path_template}, or route by fewer fields than "
            "{routing.expression_fields} has"
        )
    folder = settings.destination.path
    if folder is None:
        return
    if _longest_name_bytes(settings) > FILE_NAME_BYTES_MAX:
        yield "{archive.path_template} makes file names above 255 bytes: shorten its parts"
    if len(str(folder).encode()) + 1 + longest > FILE_PATH_BYTES_MAX:
        yield "{archive.destination} makes paths above 4095 bytes: choose a folder with a shorter path"


def _longest_key_bytes(settings: Settings) -> int:
    kafka = settings.kafka
    has_topic = settings.transport == "kafka"
    longest = longest_key_bytes(
        settings.destination.prefix,
        len(settings.routing.expression_fields),
        settings.archive.path_template,
        EXTENSIONS[settings.codec],
        has_topic=has_topic,
        topic_only=settings.routing.mode == "topic",
    )
    if has_topic and kafka.topics and not kafka.topic_include:
        longest += max(len(encode_segment(topic)) for topic in kafka.topics) - SEGMENT_BYTES_MAX
    return longest


def _longest_name_bytes(settings: Settings) -> int:
    """Bytes of the longest folder or file name that the template makes."""
    *folders, last = settings.archive.path_template.split("/")
    route = SEGMENT_BYTES_MAX + 1
    name = longest_key_bytes("", 1, last, EXTENSIONS[settings.codec], has_topic=False) - route
    return max(name, *(KeyTemplate(folder).longest_bytes() for folder in folders), 0)
