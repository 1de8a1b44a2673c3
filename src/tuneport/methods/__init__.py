"""The registered methods, by name, and what authors of methods import.

A new method is a class in a module here, and a line of `types.METHODS`.
"""

from __future__ import annotations

from .. import types
from ..errors import MethodError, unknown_name
from ..pairing import Kept
from ..types import registered
from .base import Entries, LayerRecord, Method, Problem, Transfer, check_method
from .bilinear import BilinearAlignment
from .cross_lora import CrossLora
from .gradfix import GradFix
from .transfusion import TransFusion

METHODS: dict[str, Method] = {
    name: registered(known.method, __package__)(*known.arguments, summary=known.summary)
    for name, known in types.METHODS.items()
}


def get_method(name: str | Method) -> Method:
    """The registered method of that name; a Method is returned unchanged.

    >>> sorted(get_method("bico").signals)
    ['input', 'output_gradient']
    """
    if isinstance(name, Method):
        return name
    if name not in METHODS:
        raise MethodError(unknown_name("method", name, METHODS))
    return METHODS[name]


def name_of(method: Method) -> str:
    """The name of a registered method; the class name of any other."""
    return next((name for name, known in METHODS.items() if known == method), type(method).__name__)


__all__ = [
    "METHODS",
    "BilinearAlignment",
    "CrossLora",
    "Entries",
    "GradFix",
    "Kept",
    "LayerRecord",
    "Method",
    "Problem",
    "TransFusion",
    "Transfer",
    "check_method",
    "get_method",
    "name_of",
]
