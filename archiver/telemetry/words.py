"""Numbers and states in words, the same on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNKNOWN = "–"

PAUSED_BY = {
    "memory": "the memory bound is reached",
    "spool": "the spool's bound is reached",
    "disk": "the spool's disk is short of free space",
    "no_space": "the spool's disk is full, or no file handle is left",
}


def count_text(number: int | float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.0f}"


def bytes_text(number: int | float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or abs(number) >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def secs_text(secs: float) -> str:
    secs = max(0.0, secs)
    if secs < 60:
        return f"{secs:.0f} s"
    minutes, hours, days = int(secs // 60), int(secs // 3600), int(secs // 86400)
    if minutes < 60:
        rest = int(secs) % 60
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{count_text(number)} {one if number == 1 else many or one + 's'}"


def sentence(
    state: str,
    *,
    not_ready: Sequence[str],
    paused: Mapping[str, float],
    partitions: int,
    uploads_failing: int,
    archive_delay_secs: float,
) -> str:
    """The state in one sentence, what matters most first."""
    if state == "starting":
        return "Starting."
    if state == "stopping":
        return "Stopping: open files are being sealed and uploaded."
    if state == "draining":
        return "Draining: files of partitions that are about to go are being uploaded."
    if paused:
        reason = max(paused, key=lambda name: paused[name])
        since = secs_text(paused[reason])
        return f"Consumption has been paused for {since}: {PAUSED_BY.get(reason, reason)}."
    if not_ready:
        more = f" (and {counted(len(not_ready) - 1, 'more reason')})" if len(not_ready) > 1 else ""
        return f"Not ready: {not_ready[0]}{more}."
    source = f" from {counted(partitions, 'partition')}" if partitions else ""
    if archive_delay_secs < 1:
        return f"Archiving{source}; everything that was taken is in the archive."
    failing = f", {counted(uploads_failing, 'upload')} being tried again" if uploads_failing else ""
    delay = secs_text(archive_delay_secs)
    return f"Archiving{source}; everything older than {delay} is in the archive{failing}."
