"""summary.html: the table of a fleet as one page that opens offline, from `fleet.html.jinja` and `page.css`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .page import render


def fleet_page(summary: Mapping[str, Any]) -> str:
    """The page about the upgrades of many fine-tunes; `summary` is the content of summary.json."""
    return render("fleet.html.jinja", summary=summary)
