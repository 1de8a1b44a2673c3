"""Fill the tables of options into the reference page."""

from __future__ import annotations

import re
from typing import Any

from tuneport.cli import COMMANDS
from tuneport.cli.command import declared_by
from tuneport.config import reference


def option_tables() -> dict[str, str]:
    """The table of every command, by its name."""
    return {run.__name__: reference(*filter(None, declared_by(run))) for run in COMMANDS}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- options: NAME -->` by the table of a command."""
    tables = option_tables()
    return re.sub(r"<!-- options: (\w+) -->", lambda found: tables[found[1]], markdown)
