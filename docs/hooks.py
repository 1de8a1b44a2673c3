"""Fill the tables of options into the reference page."""

from __future__ import annotations

import re
from typing import Any

from tuneport.cli import COMMANDS
from tuneport.config import reference


def option_tables() -> dict[str, str]:
    """The table of every command, by its name."""
    return {
        run.__name__: reference(*(cls for cls in (inputs, config) if cls is not None))
        for run, (inputs, config, _) in COMMANDS.items()
    }


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- options: NAME -->` by the table of a command."""
    tables = option_tables()
    return re.sub(r"<!-- options: (\w+) -->", lambda found: tables[found[1]], markdown)
