"""Where reading of a partition starts: every case in which that is not simply the committed offset [D9]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reset = Literal["earliest", "latest"]

StartReason = Literal[
    "committed",  # the ordinary case: go on where the group is
    "no_committed_offset",  # nothing known: the beginning, or the end for `latest` at the group's first start
    "committed_offset_vanished",  # this process has seen the group's commit, the broker has it no longer
    "below_log_start",  # retention or DeleteRecords removed what came next
    "beyond_end",  # the log is shorter than what was read: truncated, or another topic of the same name
    "log_truncated",  # the client saw another leader epoch: an unclean election rewrote offsets
    "topic_recreated",  # the topic id is another one
]


@dataclass(frozen=True, slots=True)
class LogRange:
    """What a partition holds: first offset, and the offset after the last one (high watermark)."""

    log_start: int
    end: int


@dataclass(frozen=True, slots=True)
class Start:
    """`offset` is the next to be read. `expected` is the offset the group would have gone on at."""

    offset: int
    reason: StartReason
    expected: int | None

    @property
    def anew(self) -> bool:
        """The offsets of this log mean something else than those read before."""
        return self.reason in ("beyond_end", "log_truncated", "topic_recreated")

    @property
    def skips(self) -> bool:
        """The group cannot go on where it was: to be said aloud, with both offsets."""
        return self.expected is not None and self.reason != "committed"


def start_offset(
    expected: int | None,
    log: LogRange,
    *,
    reset: Reset = "earliest",
    at_first_start: bool = False,
    rewritten: Literal["log_truncated", "topic_recreated"] | None = None,
    vanished: int | None = None,
) -> Start:
    """Decide where to read on.

    `expected` is the committed offset or, for a partition that is being read, its position; None if
    the group has none. `at_first_start` is true for a partition that existed when the group started
    for the first time: `latest` applies to those alone. `rewritten` says that `expected` belongs to
    records that are gone, whatever the log holds now. `vanished` is what this process knows the group had
    committed on this very topic although the broker says it has nothing.

    A log that is shorter than expected restarts at its beginning: where it was cut is not known, and
    reading twice loses nothing.
    """
    if rewritten is not None:
        return Start(log.log_start, rewritten, expected)
    if expected is None and vanished is not None:
        if vanished > log.end:
            return Start(log.log_start, "beyond_end", vanished)
        return Start(max(vanished, log.log_start), "committed_offset_vanished", vanished)
    if expected is None:
        first = log.end if reset == "latest" and at_first_start else log.log_start
        return Start(first, "no_committed_offset", None)
    if expected < log.log_start:
        return Start(log.log_start, "below_log_start", expected)
    if expected > log.end:
        return Start(log.log_start, "beyond_end", expected)
    return Start(expected, "committed", expected)
