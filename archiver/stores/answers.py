"""What a store's foreign error means to us: the values of each store's ERRORS table ([S6])."""

from __future__ import annotations

from dataclasses import dataclass

from archiver.errors import KeyTakenError, RefusedError, StoreError, TransientStoreError


@dataclass(frozen=True, slots=True)
class Heals:
    """Try again for as long as it takes. `way_out` is for the operator; `renew` asks for new credentials."""

    kind: str
    whole_store: bool = True
    way_out: str = ""
    renew: bool = False

    def error(self, detail: str) -> StoreError:
        text = f"{detail} ({self.way_out})" if self.way_out else detail
        return TransientStoreError(self.kind, text, whole_store=self.whole_store)


@dataclass(frozen=True, slots=True)
class Refuses:
    """This object will never be taken. `reason` as in `RefusedError`."""

    reason: str

    def error(self, detail: str) -> StoreError:
        return RefusedError(self.reason, detail)


@dataclass(frozen=True, slots=True)
class Taken:
    """An object lives under the key: ours or somebody else's, which a look at it tells."""

    def error(self, detail: str) -> StoreError:
        return KeyTakenError(detail)


Answer = Heals | Refuses | Taken
