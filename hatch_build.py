"""Put the JSON Schema of the run record into a wheel, as `tuneport/report/schema.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SchemaHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the schema; an editable install has none."""
        if version == "editable":
            return
        sys.path[:0] = [self.root, str(Path(self.root) / "src")]
        from tools.record_schema import record_schema

        self.made = tempfile.TemporaryDirectory()
        file = Path(self.made.name) / "schema.json"
        file.write_text(json.dumps(record_schema(), indent=2) + "\n", encoding="utf-8")
        build_data["force_include"][str(file)] = "tuneport/report/schema.json"
