r"""Values of pushes that are handed out together, with the compiled part or without it.

With it (`native.Lines`) a payload stays one buffer, in which it is noted where each line lies: no value is an
object. Both ways know a line by its `\n` alone, which a payload's last one may leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from itertools import islice, repeat
from typing import Protocol

from archiver.native import native


class Column(Protocol):
    """What `RecordBatch.values` is of pushes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...

    def cut(self, buffer: bytes, start: int, stop: int, most: int, /) -> int:
        r"""Add the next lines of `buffer[start:stop]`, at most so many, without their `\n`.

        Returns where the one after them starts, `stop` if there is none.
        """
        ...

    def extend(self, values: list[bytes], /) -> None:
        """Add values as they are."""
        ...


class PlainColumn(list[bytes]):
    """A `Column` in Python."""

    def cut(self, buffer: bytes, start: int, stop: int, most: int, /) -> int:
        """As `Column.cut`."""
        # a file's lines are found with memchr, which `split` does not use: half of its time
        reader = BytesIO(buffer)  # no copy is made of it
        reader.seek(start)
        lines = list(islice(reader, most))
        end = reader.tell()
        while end > stop:
            last = lines.pop()
            end -= len(last)
            if end < stop:
                lines.append(last[: stop - end])
                end = stop
        self += map(bytes.removesuffix, lines, repeat(b"\n"))
        return end


def count_lines_plain(buffer: bytes, start: int, stop: int) -> int:
    """`count_lines` in Python."""
    part = buffer[start:stop]
    # leaving them out is done with memchr and counting them is not: a fifth of the time of `count`
    newlines = len(part) - len(part.replace(b"\n", b""))
    return newlines + (1 if part and not part.endswith(b"\n") else 0)


count_lines: Callable[[bytes, int, int], int] = count_lines_plain if native is None else native.count_lines
"""How many values `Column.cut` finds in `buffer[start:stop]`."""


def new_column(*, compiled: bool = True) -> Column:
    """An empty one; the compiled one where it has been built, unless it is not wanted."""
    column: Column = PlainColumn() if native is None or not compiled else native.Lines()
    return column
