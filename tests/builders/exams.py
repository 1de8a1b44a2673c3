"""Short exams of students: judging them took most of the time of a tiny distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuneport.training import distill, exam, neutral


def shorten_exams(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Judge students rarely, in few passes and views, on few and short neutral passages."""
    begins = tuple(text[:40] for text in neutral.passages()[:4])
    put(neutral, "passages", lambda: begins)
    put(neutral, "WRITTEN", 2)
    put(neutral, "TOKENS", 8)
    put(distill, "MARKS", 4)
    put(exam, "GROUPS", 3)
    put(exam, "VIEWS", 1)
