"""Where downloads of the tests live: outside the repository, so that a fresh clone finds them again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`$XDG_CACHE_HOME/dfe-archiver` or `~/.cache/dfe-archiver`, with `parts` below it, made if missing."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base.joinpath("dfe-archiver", *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Hold a lock over processes, so that two test runs do not fill the same folder at once."""
    with (cache_dir() / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
