"""Fill the tables of options into the reference page."""

from __future__ import annotations

import re
from dataclasses import MISSING
from typing import Any

from tuneport.cli import COMMANDS
from tuneport.cli.command import declared_by
from tuneport.config.options import Declared, flags_of


def reference(*classes: type[Declared]) -> str:
    """A Markdown table of all options of these classes, for the reference page."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for cls in classes:
        for item, about in cls.options():
            name = item.name if about.python else f"`{', '.join(flags_of(item, about))}`"
            name = f"`{item.name.upper()}`" if about.argument else name
            shown = "required" if item.default is MISSING else "" if item.default in (None, ()) else f"`{item.default}`"
            more = " (Python only)" if about.python else ""
            lines.append(f"| {name} | {shown} | {about.help}{more} |".replace("|tau|", "\\|tau\\|"))
    return "\n".join(lines)


def option_tables() -> dict[str, str]:
    """The table of every command, by its name."""
    return {run.__name__: reference(*filter(None, declared_by(run))) for run in COMMANDS}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- options: NAME -->` by the table of a command."""
    tables = option_tables()
    return re.sub(r"<!-- options: (\w+) -->", lambda found: tables[found[1]], markdown)
