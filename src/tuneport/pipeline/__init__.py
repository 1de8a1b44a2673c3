"""One transfer, from inputs to a Result. Public for authors of methods: run and problem_of."""

from .statistics import problem_of
from .transfer import run

__all__ = ["problem_of", "run"]
