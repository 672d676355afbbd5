"""Which topics are archived: a list, or what patterns find among the broker's topics [C6]."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

INTERNAL_PREFIX = "__"
MISSES_BEFORE_GONE = 2
"""A broker that has just started may not list everything yet: one listing alone drops no topic."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A topic is archived if it is listed, or if a pattern matches its whole name and none excludes it.

    Internal topics and `excluded` ones (the DLQ) are left out of what the patterns find.
    """

    listed: tuple[str, ...]
    include: tuple[re.Pattern[str], ...]
    exclude: tuple[re.Pattern[str], ...]
    excluded: frozenset[str]

    @classmethod
    def of(
        cls, listed: Iterable[str], include: Iterable[str], exclude: Iterable[str], excluded: Iterable[str]
    ) -> Selection:
        """From texts; the patterns have been checked with the settings."""
        return cls(
            tuple(listed),
            tuple(map(re.compile, include)),
            tuple(map(re.compile, exclude)),
            frozenset(excluded),
        )

    def among(self, existing: Collection[str]) -> frozenset[str]:
        """Topics to archive, of those that exist."""
        return frozenset(self.listed).intersection(existing) | {n for n in existing if self._found(n)}

    def missing(self, existing: Collection[str]) -> tuple[str, ...]:
        """Listed topics that do not exist, in the order of the list."""
        return tuple(name for name in self.listed if name not in existing)

    def _found(self, name: str) -> bool:
        return (
            not name.startswith(INTERNAL_PREFIX)
            and name not in self.excluded
            and any(pattern.fullmatch(name) for pattern in self.include)
            and not any(pattern.fullmatch(name) for pattern in self.exclude)
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at the cluster found: partitions and id per selected topic, and what is missing.

    `number` rises with every look. `ids` lacks topics that did not answer, and has None for a broker
    that knows no ids.
    """

    number: int
    partitions: Mapping[str, int]
    ids: Mapping[str, str | None]
    missing: tuple[str, ...]


@dataclass(slots=True)
class Subscription:
    """The topics we are subscribed to, and how often in a row each was not listed."""

    topics: frozenset[str] = frozenset()
    misses: dict[str, int] = field(default_factory=dict)

    def update(self, listed: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Take a listing in; returns what was added and what was removed."""
        for topic in self.topics:
            self.misses[topic] = 0 if topic in listed else self.misses.get(topic, 0) + 1
        removed = frozenset(t for t in self.topics if self.misses[t] >= MISSES_BEFORE_GONE)
        added = frozenset(listed) - self.topics
        self.topics = (self.topics | added) - removed
        for topic in removed:
            del self.misses[topic]
        return added, removed
