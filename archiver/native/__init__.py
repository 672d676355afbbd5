"""The compiled part of the hot path, where it has been built.

It does nothing that the archiver cannot do without it, only faster:
`docs/decisions/0011-compiled-hot-path.md` says what it is and why. Where there is no compiler it is left
out when the archiver is installed, and `ARCHIVER_WITHOUT_NATIVE=1` leaves it out of a run.
"""

from __future__ import annotations

import os
from types import ModuleType

native: ModuleType | None
"""The compiled module (`_native.pyi` says what it offers), or None."""

if os.environ.get("ARCHIVER_WITHOUT_NATIVE"):
    native = None
else:
    try:
        from archiver.native import _native as native
    except ImportError:  # not built
        native = None
