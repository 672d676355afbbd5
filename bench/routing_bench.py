"""What a record costs on the hot path, step by step, in nanoseconds of one thread and in allocations.

    python -m bench.routing_bench [--records 200000] [--fields _org_id,tags.region]

Steps run one after another over the same batches of a thousand records, as the loop does it; time is the
thread's own CPU time, so that neighbours disturb little. Each step that the archiver has as a function
of its own is that function. `blocks` are allocations of Python objects that the step leaves alive.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message

from archiver.codecs import CODECS
from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.routing import Router, _multiline
from archiver.pipeline import TAKE_RECORDS_MIN
from archiver.settings.models import Kafka
from archiver.sources.kafka_client import consumer_properties
from archiver.sources.kafka_feed import ConsumedFeed, make_feed
from archiver.sources.kafka_offsets import client_partition
from bench.compare import Case, Figures
from bench.context import Context, say
from bench.offline import feed, offline_archiver, record_batches
from bench.sides import Topic
from bench.workload import Workload

STAGES = (
    *("take", "route", "register"),
    *("Python: take", "Python: decode", "Python: group"),
    *("frame zstd", "frame lz4", "frame gzip", "frame snappy"),
)
"""The first three follow each other on the loop's thread; without the compiled part the next three do what
the first two do. The last four run on writer threads, beside the loop."""

FRAME_RECORDS = 2_500
"""About a mebibyte of records of 400 bytes, as `buffer.flush_bytes` makes them."""


@dataclass(frozen=True)
class Cost:
    """Per record."""

    nanoseconds: float
    blocks: float

    def figures(self) -> dict[str, float]:
        """For the result file."""
        return {"nanoseconds": self.nanoseconds, "blocks": self.blocks}


def cost(step: Callable[[Any], Any], inputs: Sequence[Any], records: int) -> Cost:
    """`step` over all inputs, twice to warm up; what it returns stays alive until the input is done."""
    for item in inputs[: max(1, len(inputs) // 4)]:
        step(item)
    gc.collect()
    gc.disable()
    try:
        spent = blocks = 0
        for item in inputs:
            held = sys.getallocatedblocks()
            began = time.thread_time_ns()
            result = step(item)
            spent += time.thread_time_ns() - began
            blocks += sys.getallocatedblocks() - held
            del result
    finally:
        gc.enable()
    return Cost(spent / records, blocks / records)


# --- stages ------------------------------------------------------------------------------------------


def stages(work: Workload, fields: Sequence[str] = ("_org_id",)) -> dict[str, Callable[[], Figures]]:
    """Every stage but `take`, without a broker."""
    batches = record_batches(work)
    router = Router(fields, "default", with_topic=True)
    plain = Router(fields, "default", with_topic=True, compiled=False)
    decoder = plain._columns
    assert decoder is not None
    values = [_values(batch) for batch in batches]
    frames = _frames(batches)

    def group() -> Figures:
        whole = cost(plain.route_batch, batches, work.records)
        return _less(whole, cost(decoder.keys, values, work.records))

    def register() -> Figures:
        archiver = offline_archiver(work.partitions, fields=fields)
        feed(archiver, batches)  # files are open from here on
        whole = cost(lambda batch: feed(archiver, (batch,)), batches, work.records)
        return _less(whole, cost(router.route_batch, batches, work.records))

    def frame(codec: str) -> Callable[[], Figures]:
        compressor = CODECS[codec].compressor()
        return lambda: cost(compressor.frame, frames, sum(map(len, frames))).figures()

    measured: dict[str, Callable[[], Figures]] = {
        "route": lambda: cost(router.route_batch, batches, work.records).figures(),
        "register": register,
        "Python: decode": lambda: cost(decoder.keys, values, work.records).figures(),
        "Python: group": group,
    }
    return measured | {f"frame {codec}": frame(codec) for codec in ("zstd", "lz4", "gzip", "snappy")}


def _less(whole: Cost, part: Cost) -> dict[str, float]:
    nanoseconds, blocks = whole.nanoseconds - part.nanoseconds, whole.blocks - part.blocks
    return Cost(max(0.0, nanoseconds), max(0.0, blocks)).figures()


def _messages(batch: RecordBatch) -> list[Message]:
    topic, partition = batch.partition
    return [
        Message(topic=topic, partition=partition, offset=offset, value=value)
        for value, offset in zip(batch.values, batch.offsets, strict=True)
    ]


def _values(batch: RecordBatch) -> list[bytes]:
    return [value for value in batch.values if value is not None]


def _frames(batches: Sequence[RecordBatch]) -> list[list[bytes]]:
    everything = [value for batch in batches for value in _values(batch)]
    size = max(1, min(FRAME_RECORDS, (1 << 20) // (len(everything[0]) + 1)))
    return [everything[at : at + size] for at in range(0, len(everything), size)]


def _failed(error: KafkaError) -> None:
    raise RuntimeError(f"the client fails: {error}")


def take(topic: Topic, partitions: int, *, compiled: bool) -> Figures:
    """From a real broker, with the archiver's own settings, freeing the messages included."""
    kafka = Kafka(brokers=(topic.bootstrap,), topics=(topic.name,), group_id=f"bench-{uuid.uuid4().hex[:8]}")
    properties = consumer_properties(kafka, 64 << 20)
    source = make_feed(properties, _failed) if compiled else ConsumedFeed(_failed)
    consumer = Consumer(properties | dict(source.properties()))
    source.open(consumer)
    wanted = [TopicPartition(topic.name, partition) for partition in range(partitions)]
    source.attach(wanted)
    consumer.assign([client_partition(partition, OFFSET_BEGINNING) for partition in wanted])
    spent = blocks = records = 0
    deadline = time.monotonic() + 120
    while records < topic.records and time.monotonic() < deadline:
        held, began = sys.getallocatedblocks(), time.thread_time_ns()
        batches, _ = source.take(wanted, 0.05, TAKE_RECORDS_MIN)
        spent += time.thread_time_ns() - began
        blocks += sys.getallocatedblocks() - held
        records += sum(len(batch.values) for batch in batches)
        began = time.thread_time_ns()
        del batches, _
        spent += time.thread_time_ns() - began
    source.close()
    consumer.close()
    return Cost(spent / max(records, 1), blocks / max(records, 1)).figures()


def hot_path(context: Context) -> list[Case]:
    """Nanoseconds and allocations of a record by stage, for four sizes and for many organisations."""
    cases = []
    for name, work in {
        "100 B, 20 organisations": Workload(records=200_000, size=100),
        "400 B, 20 organisations": Workload(records=200_000),
        "2,000 B, 20 organisations": Workload(records=50_000, size=2_000),
        "20,000 B, 20 organisations": Workload(records=5_000, size=20_000),
        "400 B, 1,000 organisations": Workload(records=200_000, orgs=1_000),
        "400 B, 20,000 organisations": Workload(records=200_000, orgs=20_000),
    }.items():
        topic = context.topic(work)
        offline = stages(
            Workload(records=topic.records, size=work.size, orgs=work.orgs, partitions=work.partitions)
        )
        taken = {
            "take": partial(take, topic, work.partitions, compiled=True),
            "Python: take": partial(take, topic, work.partitions, compiled=False),
        }
        sides = taken | offline
        cases.append(context.compare(name, {stage: sides[stage] for stage in STAGES}))
    return cases


# --- single steps --------------------------------------------------------------------------------------


def steps(batch: RecordBatch) -> dict[str, Callable[[], object]]:
    """Each pass over the records of a batch that Python makes without the compiled part."""
    messages, values = _messages(batch), _values(batch)
    topic = batch.partition.topic
    router = Router(("_org_id",), "default", with_topic=True, compiled=False)
    decoder = router._columns
    assert decoder is not None
    keys = decoder.keys(values)
    joined = b"\n".join(values)
    documents = decoder._text.decode_lines(joined)
    routes = router._routes_of(topic)
    column = list(map(routes.__getitem__, keys))
    first, last, field, client = itemgetter(0), itemgetter(-1), attrgetter("f0"), Message
    partitions, topics, newline = [0] * len(values), [topic] * len(values), b"\n"

    def grouped() -> dict[str, list[bytes]]:
        groups: defaultdict[str, list[bytes]] = defaultdict(list)
        for route, value in zip(column, values, strict=True):
            groups[route].append(value)
        return groups

    groups = grouped()
    return {
        "errors: any(map(Message.error, …))": lambda: any(map(client.error, messages)),
        "values: list(map(Message.value, …))": lambda: list(map(client.value, messages)),
        "offsets: list(map(Message.offset, …))": lambda: list(map(client.offset, messages)),
        "topics: list(map(Message.topic, …))": lambda: list(map(client.topic, messages)),
        "partitions: list(map(Message.partition, …))": lambda: list(map(client.partition, messages)),
        "one partition: set(partitions), set(topics)": lambda: (set(partitions), set(topics)),
        "tombstones: None in values": lambda: None in values,
        "newlines: routing._multiline(values)": lambda: _multiline(values),
        "first bytes: set(map(itemgetter(0), …))": lambda: set(map(first, values)),
        "last bytes: set(map(itemgetter(-1), …))": lambda: set(map(last, values)),
        "joining: b'\\n'.join(values)": lambda: newline.join(values),
        "decoding: decode_lines(joined)": lambda: decoder._text.decode_lines(joined),
        "keys: list(map(attrgetter, documents))": lambda: list(map(field, documents)),
        "routes: list(map(routes.__getitem__, keys))": lambda: list(map(routes.__getitem__, keys)),
        "grouping: groups[route].append(value)": grouped,
        "lines: b'\\n'.join(group)": lambda: [newline.join(group) for group in groups.values()],
    }


def hot_steps(context: Context) -> list[Case]:
    """Every pass over the records that Python makes on the loop's thread, in nanoseconds a record."""
    batches = record_batches(Workload(records=50 * 1_000))
    tables = [steps(batch) for batch in batches]

    def side(name: str) -> Callable[[], Figures]:
        return lambda: cost(lambda table: table[name](), tables, 1_000 * len(tables)).figures()

    return [context.compare("400 B, 20 organisations", {name: side(name) for name in tables[0]})]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a record costs on the hot path, without a broker.")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=400)
    parser.add_argument("--orgs", type=int, default=20)
    parser.add_argument("--fields", default="_org_id", help="what to route by, a comma between them")
    options = parser.parse_args()
    work = Workload(records=options.records, size=options.size, orgs=options.orgs)
    for name, run in stages(work, options.fields.split(",")).items():
        figures = [run() for _ in range(3)]
        median = {key: statistics.median(figure[key] for figure in figures) for key in figures[0]}
        print(f"{name:<14} {median['nanoseconds']:>9,.0f} ns {median['blocks']:>7.2f} blocks")
    say("")
    for name, step in steps(record_batches(work)[0]).items():
        nanoseconds = min(cost(lambda call: call(), [step] * 20, 20_000).nanoseconds for _ in range(5))
        print(f"{name:<48} {nanoseconds:>7,.1f} ns")


if __name__ == "__main__":
    main()
