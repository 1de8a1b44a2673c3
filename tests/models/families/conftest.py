"""Tests with the real open_clip and timm, in a separate environment: make test-families."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Without the libraries the files cannot be imported; pytest then fails with "no tests" where they are asked for.
collect_ignore_glob = [] if find_spec("open_clip") and find_spec("timm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.families)
