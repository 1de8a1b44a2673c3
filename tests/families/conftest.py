"""Tests against the real open_clip and timm, in an environment of their own: make test-families."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tuneport.models.families import mend_torchvision

mend_torchvision()  # before anything imports torchvision
