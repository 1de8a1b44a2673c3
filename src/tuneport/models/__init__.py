"""Everything that must be known of a model. Public for authors of families: Model, Family and Head."""

from .base import Family, Model, describe_any
from .heads import Head

__all__ = ["Family", "Head", "Model", "describe_any"]
