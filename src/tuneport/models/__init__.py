"""Everything that must be known of a model. Public for authors of families: Model with its parts, Family and Head."""

from .base import Architecture, Classifier, Family, Generation, Inputs, Model, Outputs, Weights, describe_any
from .heads import Head

__all__ = [
    "Architecture",
    "Classifier",
    "Family",
    "Generation",
    "Head",
    "Inputs",
    "Model",
    "Outputs",
    "Weights",
    "describe_any",
]
