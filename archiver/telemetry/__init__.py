"""What the archiver tells: logs, metrics, status, and the page that shows them.

Names are looked up when they are first used, so that the small parts (the terminal view) do not
pay for the large ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archiver.telemetry.http import HttpServer
    from archiver.telemetry.state import StatusHolder, StatusSource
    from archiver.telemetry.telemetry import Telemetry

__all__ = ["HttpServer", "StatusHolder", "StatusSource", "Telemetry"]

_HOME = {
    "HttpServer": "archiver.telemetry.http",
    "StatusHolder": "archiver.telemetry.state",
    "StatusSource": "archiver.telemetry.state",
    "Telemetry": "archiver.telemetry.telemetry",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
