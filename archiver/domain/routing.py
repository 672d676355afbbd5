"""Which file a record goes to, a batch at a time ([K5]-[K8]). This is the hot path.

A batch is decoded in one call where that is provably the same as decoding each record alone, and
otherwise in ever smaller parts. Alignment is a tenant boundary: `decode_lines` reads a run of JSON
values, not lines, so the number of results proves nothing by itself. It does once every record
starts with `{` and ends with `}`: each then begins a value of its own, a `}` cannot be followed by
`{` inside one JSON value, and a string cannot hold the newline between two records; so n results
from n records are one each.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter, contains, itemgetter
from typing import Any, Literal, NamedTuple

import msgspec

from archiver.domain.batch import RecordBatch
from archiver.domain.keys import encode_segment
from archiver.native import native

Reason = Literal["missing", "null", "empty", "not_scalar", "not_object", "invalid_json", "invalid_utf8"]
"""Why a record went to the default segment: the closed list behind `default_routed_total`."""

REASONS: tuple[Reason, ...] = (
    "missing",
    "null",
    "empty",
    "not_scalar",
    "not_object",
    "invalid_json",
    "invalid_utf8",
)

ONE_BY_ONE_MAX = 8
"""A part of a batch this small is not halved any further."""

SEARCHED_ROUTES_MAX = 40
"""With more routes than this in a batch a table of their ends is cheaper than looking for each."""

CACHE_ENTRIES_MAX = 200_000
CACHE_BYTES_MAX = 32 << 20
"""Bounds of the tables from field values to routes, over all topics: neither hostile values nor many
topics may grow them."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_@$#:-]+(\.[A-Za-z0-9_@$#:-]+)*")
"""A field's path whose names have nothing in them that JSON writes in more than one way."""

_NEWLINE = ord("\n")
_OPENING, _CLOSING = {ord("{")}, {ord("}")}
_first_byte, _last_byte = itemgetter(0), itemgetter(-1)
_first_field = attrgetter("f0")


class Slice(NamedTuple):
    """One route's part of a batch, in the batch's order.

    `lines` are its records with a newline between them and none behind the last: one run of bytes, not
    one object a record, so that what waits in buffers costs neither memory nor time by the record.
    `first` and `last` are offsets, inclusive.
    """

    route: str
    lines: bytes
    first: int
    last: int
    records: int


@dataclass(slots=True)
class Routed:
    """A batch, routed. `defaulted` counts records per reason; a record counts once."""

    slices: list[Slice] = field(default_factory=list)
    records: int = 0
    tombstones: int = 0
    multiline: int = 0
    defaulted: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class _Defaulted:
    """Stands for a field value that routes to the default segment. Equal to nothing but itself, so
    that no text in a record can be mistaken for it."""

    reason: Reason


_WHY: dict[Reason, _Defaulted] = {reason: _Defaulted(reason) for reason in REASONS}

Key = Any
"""What a record's routing fields decode to: `str | None | UNSET | Raw bytes | _Defaulted`, or a tuple."""


@dataclass(slots=True)
class _Cached:
    """What the tables of all topics hold together."""

    entries: int = 0
    size_bytes: int = 0

    @property
    def too_much(self) -> bool:
        return self.entries > CACHE_ENTRIES_MAX or self.size_bytes > CACHE_BYTES_MAX


class _Routes(dict[Key, str]):
    """Field values to route of one topic; a miss works the route out, and is counted."""

    def __init__(self, resolve: Callable[[Key], tuple[str, Reason | None]], cached: _Cached) -> None:
        super().__init__()
        self._resolve = resolve
        self._cached = cached
        self.reasons: dict[Key, Reason] = {}

    def __missing__(self, key: Key) -> str:
        route, reason = self._resolve(key)
        fields = key if isinstance(key, tuple) else (key,)
        self._cached.entries += 1
        self._cached.size_bytes += len(route) + sum(
            len(f) if isinstance(f, (str, bytes)) else 64 for f in fields
        )
        self[key] = route
        if reason is not None:
            self.reasons[key] = reason
        return route


class _Columns:
    """Decodes the routing fields of records into one key per record."""

    def __init__(self, paths: Sequence[tuple[str, ...]]) -> None:
        text_type = str | None | msgspec.UnsetType
        self._text = _decoder(paths, text_type, msgspec.UNSET)
        self._raw = _raw_decoder([path[0] for path in paths])
        names = [".".join(f"f{_index_of(paths, path[: i + 1])}" for i in range(len(path))) for path in paths]
        self._flat = all(len(path) == 1 for path in paths)
        self._text_keys = attrgetter(*names)
        self._single = len(paths) == 1
        self._places = [(top, [_raw_decoder([name]) for name in rest]) for top, rest in _tops(paths)]
        self._one_inside_another = any(len(a) < len(b) and b[: len(a)] == a for a in paths for b in paths)
        self._prefer_raw = False

    def keys(self, values: Sequence[bytes]) -> list[Key]:
        """One key per value; never raises for what a value holds."""
        if self._one_inside_another:  # `a` and `a.b`: no type of `a` fits both
            return [self.key(value) for value in values]
        keys = self._together(values)
        if keys is not None:
            return keys
        if len(values) <= ONE_BY_ONE_MAX:
            return [self.key(value) for value in values]
        half = len(values) // 2
        return self.keys(values[:half]) + self.keys(values[half:])

    def _together(self, values: Sequence[bytes]) -> list[Key] | None:
        """All in one call, or None where that is not provably right."""
        try:
            if set(map(_first_byte, values)) != _OPENING or set(map(_last_byte, values)) != _CLOSING:
                return None
        except IndexError:  # an empty value has no ends
            return None
        joined = b"\n".join(values)
        attempts = (self._text_column, self._raw_column)
        for attempt in reversed(attempts) if self._prefer_raw else attempts:
            keys = attempt(joined, len(values))
            if keys is not None:
                self._prefer_raw = attempt == self._raw_column
                return keys
        return None

    def _text_column(self, joined: bytes, count: int) -> list[Key] | None:
        """Fields that are all strings, null or missing: msgspec checks their UTF-8."""
        try:
            documents = self._text.decode_lines(joined)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return list(map(self._text_keys, documents)) if len(documents) == count else None

    def _raw_column(self, joined: bytes, count: int) -> list[Key] | None:
        """A single top-level field as its JSON text, so that `1.0` and `1.00` stay what they are."""
        if not (self._single and self._flat):
            return None
        try:
            documents = self._raw.decode_lines(joined)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if len(documents) != count:
            return None
        return list(map(bytes, map(_first_field, documents)))

    def key(self, value: bytes) -> Key:
        """The same for one record, whatever it is."""
        try:
            document = self._raw.decode(value)
        except msgspec.ValidationError:
            return self._all(_WHY["not_object"])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._all(_WHY["invalid_json"])
        fields = [_descend(document, top, rest) for top, rest in self._places]
        return fields[0] if self._single else tuple(fields)

    def _all(self, why: _Defaulted) -> Key:
        return why if self._single else (why,) * len(self._places)


def _tops(paths: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
    """For each path the index of its top-level field in the raw struct, and the rest of the path."""
    firsts = list(dict.fromkeys(path[0] for path in paths))
    return [(firsts.index(path[0]), path[1:]) for path in paths]


def _descend(document: Any, top: int, rest: Sequence[msgspec.json.Decoder[Any]]) -> Key:
    """The JSON text of a nested field as bytes, empty where it is missing. As in a batch nothing is
    looked at but the names asked for: another name that is not UTF-8 is nobody's business."""
    raw = bytes(getattr(document, f"f{top}"))
    for decoder in rest:
        if not raw:
            break
        try:
            raw = bytes(decoder.decode(raw).f0)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _WHY["missing"]
    return raw


def _index_of(paths: Sequence[tuple[str, ...]], path: tuple[str, ...]) -> int:
    """A stable number for a field of the struct at this level."""
    depth = len(path)
    family = [p for p in paths if len(p) >= depth and p[: depth - 1] == path[:-1]]
    return list(dict.fromkeys(p[depth - 1] for p in family)).index(path[-1])


def _decoder(paths: Sequence[tuple[str, ...]], leaf: Any, default: Any) -> msgspec.json.Decoder[Any]:
    """A decoder for a struct of only these fields: everything else in a record is skipped unread."""
    return msgspec.json.Decoder(_struct(paths, leaf, default))


def _raw_decoder(names: Sequence[str]) -> msgspec.json.Decoder[Any]:
    """The same for fields of one object as their JSON texts, empty where they are missing."""
    return _decoder([(name,) for name in names], msgspec.Raw, msgspec.Raw(b""))


def _struct(paths: Sequence[tuple[str, ...]], leaf: Any, default: Any) -> Any:
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for path in paths:
        by_name.setdefault(path[0], []).append(path[1:])
    fields: list[tuple[str, Any, Any]] = []
    for i, (name, rests) in enumerate(by_name.items()):
        deeper = [rest for rest in rests if rest]
        kind, empty = (leaf, default) if not deeper else (inner := _struct(deeper, leaf, default), inner())
        fields.append((f"f{i}", kind, msgspec.field(default=empty, name=name)))
    return msgspec.defstruct("Fields", fields, gc=False, frozen=True)


class Router:
    """Compiled `routing.*` settings.

    `fields` are dotted paths; empty means topic mode, which never looks into a record. Without a
    topic (gRPC) a route starts with the field values. Unless not `compiled`, where it has been built and
    the settings are ones it knows, the compiled grouper does the work and asks here what it is not sure of.
    """

    def __init__(
        self, fields: Sequence[str], default_segment: str, *, with_topic: bool, compiled: bool = True
    ) -> None:
        self._grouped = _Grouped.by(fields, self._resolve_for) if compiled else None
        self._columns = _Columns([tuple(name.split(".")) for name in fields]) if fields else None
        self._default = encode_segment(default_segment)
        self._with_topic = with_topic
        self._routes: dict[str, _Routes] = {}
        self._cached = _Cached()

    def route_batch(self, batch: RecordBatch) -> Routed:
        """The batch's records by route; within a route they stay in order."""
        if self._grouped is not None:
            return self._grouped.route_batch(batch)
        values = batch.values if isinstance(batch.values, list) else list(batch.values)
        offsets = batch.offsets
        routed = Routed(records=len(values))
        if None in values:
            kept = [pair for pair in zip(values, offsets, strict=True) if pair[0] is not None]
            routed.tombstones = len(values) - len(kept)
            values, offsets = [value for value, _ in kept], [offset for _, offset in kept]
        if values:
            self._route(batch.partition.topic, values, offsets, routed)  # type: ignore[arg-type]
        return routed

    def route_of(self, topic: str, value: bytes) -> str:
        """The route of a single record."""
        routes = self._routes_of(topic)
        return routes[self._columns.key(value) if self._columns else ()]

    def _resolve_for(
        self, topic: str, texts: tuple[bytes, ...] | None, value: bytes
    ) -> tuple[str, Reason | None]:
        """The route of one record, by its fields' JSON texts or, where there are none, by the whole value."""
        key: Key = texts
        if texts is None:
            assert self._columns is not None  # without fields nothing is looked for, and all is sure
            key = self._columns.key(value)
        return self._resolve(encode_segment(topic) if self._with_topic else None, key)

    def _route(self, topic: str, values: Sequence[bytes], offsets: Sequence[int], routed: Routed) -> None:
        routed.multiline = _multiline(values)
        routes = self._routes_of(topic)
        if self._columns is None:
            lines = b"\n".join(values)
            routed.slices.append(Slice(routes[()], lines, offsets[0], offsets[-1], len(values)))
            return
        keys = self._columns.keys(values)
        column = list(map(routes.__getitem__, keys))
        groups: defaultdict[str, list[bytes]] = defaultdict(list)
        for route, value in zip(column, values, strict=True):
            groups[route].append(value)
        ends = _ends_by_search if len(groups) <= SEARCHED_ROUTES_MAX else _ends_by_table
        routed.slices = [
            Slice(route, group[0] if len(group) == 1 else b"\n".join(group), first, last, len(group))
            for (route, group), (first, last) in zip(
                groups.items(), ends(groups, column, offsets), strict=True
            )
        ]
        if routes.reasons:
            routed.defaulted = _reasons(keys, routes.reasons)
        if self._cached.too_much:  # between batches: start over, and forget topics that are gone
            self._routes, self._cached = {}, _Cached()

    def _routes_of(self, topic: str) -> _Routes:
        routes = self._routes.get(topic)
        if routes is None:
            head = encode_segment(topic) if self._with_topic else None
            routes = self._routes[topic] = _Routes(lambda key: self._resolve(head, key), self._cached)
        return routes

    def _resolve(self, head: str | None, key: Key) -> tuple[str, Reason | None]:
        """The route for decoded field values, and why a default stands in it if one does."""
        fields = key if isinstance(key, tuple) else (key,)
        segments: list[str] = [] if head is None else [head]
        why: Reason | None = None
        for value in fields:
            segment, reason = self._segment(value)
            segments.append(segment)
            why = why or reason
        if not segments:
            segments = [self._default]
        return "/".join(segments), why

    def _segment(self, value: Key) -> tuple[str, Reason | None]:
        text = _text(value)
        if isinstance(text, _Defaulted):
            return self._default, text.reason
        return encode_segment(text), None


Resolve = Callable[[str, tuple[bytes, ...] | None, bytes], tuple[str, Reason | None]]
"""(topic, the fields' JSON texts or None, value) -> the route, and why a default stands in it."""


class _Grouped:
    """Routes with a compiled grouper for each topic.

    It knows fields whose names stand in JSON as they are, and no field at all.
    """

    def __init__(self, fields: tuple[bytes, ...], resolve: Resolve) -> None:
        self._native: Any = native
        self._fields = fields
        self._resolve = resolve
        self._groupers: dict[str, Any] = {}
        self._seed = hash("routes") % (1 << 64)
        """Python's own is random in each process: nobody can make values that collide in the tables."""
        self._cached = _Cached()

    @classmethod
    def by(cls, fields: Sequence[str], resolve: Resolve) -> _Grouped | None:
        """None where it cannot do what the fields ask for, or has not been built."""
        if native is None or len(fields) > native.FIELDS_MAX:
            return None
        if any(not _PLAIN_PATH.fullmatch(name) or name.count(".") >= native.NAMES_MAX for name in fields):
            return None
        return cls(tuple(name.encode() for name in fields), resolve)

    def route_batch(self, batch: RecordBatch) -> Routed:
        """As `Router.route_batch`."""
        topic = batch.partition.topic
        grouper = self._groupers.get(topic)
        if grouper is None:
            resolve = partial(self._resolve, topic)
            grouper = self._groupers[topic] = self._native.Grouper(self._fields, resolve, Slice, self._seed)
        kept, kept_bytes = grouper.kept, grouper.kept_bytes
        slices, tombstones, multiline, reasons = grouper.group(batch.values, batch.offsets)
        self._cached.entries += grouper.kept - kept
        self._cached.size_bytes += grouper.kept_bytes - kept_bytes
        if self._cached.too_much:  # as in `Router`
            self._groupers, self._cached = {}, _Cached()
        return Routed(slices, len(batch.values), tombstones, multiline, Counter(reasons))


def _text(value: Key) -> str | _Defaulted:
    """A field's text for its segment, or the marker that says why there is none [K6]."""
    if isinstance(value, bytes):
        return _text_of_json(value)
    if value is msgspec.UNSET:
        return _WHY["missing"]
    if value is None:
        return _WHY["null"]
    if isinstance(value, _Defaulted):
        return value
    return str(value) or _WHY["empty"]


def _text_of_json(raw: bytes) -> str | _Defaulted:
    """The text of a field given as JSON text; numbers and booleans stand as they are."""
    head = raw[:1]
    if head == b"":
        return _WHY["missing"]
    if head in b"{[":
        return _WHY["not_scalar"]
    if head == b'"':
        try:
            return msgspec.json.decode(raw, type=str) or _WHY["empty"]
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _WHY["invalid_utf8"]
    return _WHY["null"] if raw == b"null" else raw.decode("ascii")


def _ends_by_search(
    routes: Iterable[str], column: list[str], offsets: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """First and last offset of each route, searched from both sides: a few steps for a few routes."""
    backwards, end = column[::-1], len(column) - 1
    return [(offsets[column.index(route)], offsets[end - backwards.index(route)]) for route in routes]


def _ends_by_table(
    routes: Iterable[str], column: list[str], offsets: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """The same for many routes: two passes over the batch, whatever their number."""
    lasts = dict(zip(column, offsets, strict=True))
    firsts = dict(zip(reversed(column), reversed(offsets), strict=True))
    return [(firsts[route], lasts[route]) for route in routes]


def _multiline(values: Sequence[bytes]) -> int:
    """How many values hold a newline [F6]. Looking into each is faster than counting over all, since
    `in` uses memchr and `count` does not; asked for a number it is 7 times faster than for bytes."""
    return sum(map(contains, values, repeat(_NEWLINE)))


def _reasons(keys: Iterable[Key], reasons: dict[Key, Reason]) -> Counter[Reason]:
    """Records per reason; `map` and `Counter` keep the loop in C."""
    counts: Counter[Any] = Counter(map(reasons.get, keys))
    del counts[None]
    return counts
