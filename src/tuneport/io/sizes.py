"""Amounts of memory: format them, and ask how much is free."""

from __future__ import annotations

import math


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit, as in 8.00 GiB."""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.2f} {'KMG'[power - 1]}iB" if power else f"{size:.0f} B"


def free_memory() -> float:
    """Bytes of available RAM; infinite where the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return math.inf
