"""Makes the parsers of the commands when it is imported, once for all processes that are forked after that.

typer imports pydantic for them, and makes them again for each call.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from typer import main

from tuneport.cli import app

typer: Any = main
typer.get_command = cache(main.get_command)
typer.get_command(app)
