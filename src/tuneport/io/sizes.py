"""Amounts of memory: parse them, format them, and ask how much is free.

Decimal units (5GB) and binary units (8GiB) are parsed; output has binary units.
"""

from __future__ import annotations

import math
import re

from ..errors import TuneportError

_UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}}
_UNITS |= {f"{k}IB": 1024**i for i, k in enumerate("KMGT", 1)}


def parse_bytes(size: int | str, what: str = "the memory budget") -> int:
    """Parse a number of bytes, in decimal (5GB) or binary (8GiB) units; an error names the size as `what`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    count = int(float(found[1]) * _UNITS.get(found[2].upper(), 0)) if found else 0
    if count < 1:
        raise TuneportError(f"{what} must be a size such as 8GiB or 500MB, got {size!r}.")
    return count


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
