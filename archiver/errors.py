"""Every error of ours, split by what the caller does about it.

ArchiverError
├── ConfigError            tell the operator, exit 2, before anything connects
├── StartError             tell the operator, exit 1: a port is taken, the spool is locked
├── FatalError             drain what can be drained, exit 1: a restart reads again
│   ├── SourceFatalError     the client cannot go on (fenced, fatal librdkafka error)
│   └── SpoolError           local writes keep failing, a worker thread died
└── StoreError             one attempt to store one file went wrong
    ├── TransientStoreError  heals by waiting: try again for as long as it takes
    ├── KeyTakenError        the key holds somebody else's object: take another key
    ├── RefusedError         this object will never be taken: dead letters
    └── DamagedFileError     the sealed file is gone or no longer matches its checksum
"""

from __future__ import annotations


class ArchiverError(Exception):
    """The root. Its text is for the operator: what happened, where, and the way out."""


class ConfigError(ArchiverError):
    """The settings are wrong. `problems` holds one line each: path, value, reason, way out."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class StartError(ArchiverError):
    """Something the process needs from its machine is not to be had (exit status 1)."""


class FatalError(ArchiverError):
    """The process cannot keep its promise any longer; it drains and ends with status 1."""


class SourceFatalError(FatalError):
    """The Kafka client reported an error it cannot recover from (for example fenced)."""


class SpoolError(FatalError):
    """The spool cannot be written any more, or a thread that serves it has died."""


class DeadLetterError(ArchiverError):
    """Not every record of a refused file is confirmed in the DLQ [Q1]. Its text carries the way out."""


class StoreError(ArchiverError):
    """One attempt to make one file durable failed."""


class TransientStoreError(StoreError):
    """Heals by waiting. `kind` is a short closed name for the metric, e.g. `throttled`.

    `whole_store` is true where the answer says nothing about this one file (network, credentials,
    missing bucket): the breaker counts those.
    """

    def __init__(self, kind: str, detail: str, *, whole_store: bool = True) -> None:
        self.kind = kind
        self.whole_store = whole_store
        super().__init__(f"{kind}: {detail}")


class KeyTakenError(StoreError):
    """An object that is not ours lives under the key; it is left alone."""


class RefusedError(StoreError):
    """The store will never take this object. `reason` is `key_invalid` or `too_large`."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}")


class DamagedFileError(StoreError):
    """The sealed file has vanished from the spool or differs from what was sealed ([D10])."""
