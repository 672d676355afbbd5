"""What the compiled part offers. The C sources beside this file say how."""

from collections.abc import Callable, Sequence
from typing import Any, final

@final
class Values:
    """Values of a run of messages of one partition: `bytes`, or None for a tombstone."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> bytes | None: ...

@final
class Offsets:
    """Offsets of the same run."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> int: ...

class Lines:
    """Values that lie in buffers of others: a column without an object for each."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> bytes: ...
    def cut(self, buffer: bytes, start: int, stop: int, most: int) -> int:
        r"""Add the next lines of `buffer[start:stop]`, at most so many, without their `\n`.

        The last one may leave its `\n` out. Returns where the next one starts. Raises `ValueError` where
        the buffer has no such part.
        """

    def extend(self, values: list[bytes]) -> None:
        """Add values as they are."""

class Grouper:
    """Sorts batches of one topic's values by the route that their fields lead to.

    `fields` are paths: names as they stand in JSON without escapes, a dot between them, at most `FIELDS_MAX`
    of at most `NAMES_MAX` names; none puts everything on one route. `resolve(texts, value)` tells the route
    and, where a default stands in it, why: `texts` are the fields' JSON texts (`b""` where one is missing,
    one byte of an object or array), or None where the record is not plainly an object and the value has to be
    looked at. Texts are asked for once, unless those of several fields are longer than a kilobyte.
    """

    kept: int
    """Field values and routes it knows, and below the bytes of their texts: the caller's to bound."""
    kept_bytes: int

    def __init__(
        self,
        fields: tuple[bytes, ...],
        resolve: Callable[[tuple[bytes, ...] | None, bytes], tuple[str, str | None]],
        slice_type: type[tuple[Any, ...]],
        seed: int,
    ) -> None: ...
    def group(
        self, values: list[bytes | None] | Lines | Values, offsets: Sequence[int] | Offsets
    ) -> tuple[list[Any], int, int, dict[str, int]]:
        """`(slices, tombstones, values with a newline, {reason: records})`; a slice is
        `slice_type(route, lines, first offset, last offset, records)`."""

class Feed:
    """A queue of a client's from which runs of messages are taken.

    Make the feed, then, on the same thread, the client with this file as `plugin.library.paths`, then `open`
    it.
    """

    def __init__(self) -> None: ...
    def open(self, consumer: object) -> None: ...
    def attach(self, topic: str, partition: int) -> None:
        """What the client fetches of this partition comes here; to be called before it is assigned."""

    def take(
        self, most: int, bytes_max: int, timeout_ms: int
    ) -> tuple[
        list[tuple[str, int, Values, Offsets]],
        list[tuple[int, str, str | None, int, int]],
        list[tuple[int, str, bool]],
    ]:
        """Up to `most` messages; once those taken hold `bytes_max` bytes, no further thousand is begun.

        Runs of messages, each of one partition; events `(code, text, topic, partition, offset)`; errors of
        the whole client `(code, text, fatal)`, which come here and not to an `error_cb`."""

    def close(self) -> None:
        """Let go of the queue, before the client is closed."""

FIELDS_MAX: int
NAMES_MAX: int

def scan(value: bytes, fields: tuple[bytes, ...]) -> tuple[bytes, ...] | None:
    """The fields' JSON texts as `Grouper` sees them: `b""` where one is missing, None where not sure."""

def add_slices(
    open: dict[str, Any],
    partition: tuple[str, int],
    slices: list[Any],
    span_type: Callable[[int, int, int], Any],
    bytes_max: int,
    records_max: int,
) -> tuple[list[Any], int]:
    """Add slices of a partition to the buffers of `open` files (by route), as `ArchiveFile.add` does.

    Only where the buffer is not empty and stays below both bounds, and its file holds the partition back
    already; the others come back, in order, and beside them the bytes of the lines that were added.
    """

def append_frames(appends: tuple[tuple[bytes, bool, int, bytes], ...], mode: int) -> tuple[int, int, int]:
    """Open each file, which has `size` bytes (or is new), append a frame, close it; up to one that fails.

    Returns how many were tried, what the last of them came to (`APPENDED` and so on in `spool.file`), and its
    errno. The interpreter's lock is let go of once for all of them.
    """

def count_lines(buffer: bytes, start: int, stop: int) -> int:
    """How many values `Lines.cut` would find in that part."""

def load_client(path: str) -> None:
    """Look up librdkafka's functions in a library that is loaded (or one that it depends on).

    Raises `ImportError` where they are not there.
    """
