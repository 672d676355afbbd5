"""The page at `/`."""

from __future__ import annotations

from collections.abc import Sequence

from archiver.status import Status, Trouble

CONTENT_SECURITY_POLICY = "default-src 'none'"


def render(
    status: Status | None, troubles: Sequence[Trouble], not_ready: Sequence[str], turn_age_secs: float
) -> str:
    return ""
