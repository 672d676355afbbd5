"""How many archived bytes lie above the committed offsets: what a crash now would archive again [D7]."""

from __future__ import annotations

from collections.abc import Mapping

from archiver.domain.batch import Span, TopicPartition

RUNS_MAX = 512
"""Runs kept per partition; more are put together, which can only overstate, by a hundredth or so."""


class UncommittedBytes:
    """Per partition, runs of (last offset, bytes) of durable files that no commit has passed yet."""

    def __init__(self) -> None:
        self._runs: dict[TopicPartition, list[tuple[int, int]]] = {}

    def archived(self, spans: Mapping[TopicPartition, Span], size: int) -> None:
        """A file of `size` bytes is durable; its bytes are shared out by record count."""
        records = sum(span.count for span in spans.values())
        for partition, span in spans.items():
            runs = self._runs.setdefault(partition, [])
            runs.append((span.last, size * span.count // records))
            if len(runs) > RUNS_MAX:
                self._runs[partition] = _merged(runs)

    def committed(self, marks: Mapping[TopicPartition, int]) -> None:
        """Commits have reached `marks` (next offsets)."""
        for partition, mark in marks.items():
            runs = self._runs.get(partition)
            if runs:
                self._runs[partition] = [run for run in runs if run[0] >= mark]

    def drop(self, partitions: frozenset[TopicPartition]) -> None:
        """These partitions are somebody else's now."""
        for partition in partitions:
            self._runs.pop(partition, None)

    def total(self) -> int:
        """Bytes over all partitions."""
        return sum(size for runs in self._runs.values() for _, size in runs)


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most half as many runs, neighbours put together under the higher last offset, none of them large.

    Merging all of them pairwise, again and again, would put most of the bytes into the first.
    """
    share = sum(size for _, size in runs) / (RUNS_MAX // 4)
    merged: list[tuple[int, int]] = []
    for last, size in sorted(runs):
        if merged and merged[-1][1] + size <= share:
            merged[-1] = (last, merged[-1][1] + size)
        else:
            merged.append((last, size))
    return merged
