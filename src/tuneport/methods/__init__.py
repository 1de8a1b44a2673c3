"""The registered methods, by name, and what authors of methods import."""

from __future__ import annotations

from ..errors import MethodError, unknown_name
from ..pairing import Kept
from .base import Entries, LayerRecord, Method, Problem, Transfer, check_method
from .bilinear import BilinearAlignment
from .cross_lora import CrossLora
from .gradfix import GradFix
from .transfusion import TransFusion

METHODS: dict[str, Method] = {
    "bico": BilinearAlignment(
        "input",
        "output_gradient",
        summary="the paper's method: layer inputs on one side, output gradients on the other",
    ),
    "bico+": BilinearAlignment(
        "input", "output_gradient", uses_augmented_inputs=True, summary="bico with changed views of the samples"
    ),
    "theseus": BilinearAlignment(
        "input", "output", summary="layer inputs and layer outputs; forward passes only, no labels"
    ),
    "input_only": BilinearAlignment(
        "input", None, summary="ablation: layer inputs; the output side is padded or cropped"
    ),
    "output_only": BilinearAlignment(
        None, "output_gradient", summary="ablation: output gradients; the input side is padded or cropped"
    ),
    "gradient_only": BilinearAlignment(
        "input_gradient", "output_gradient", summary="ablation: gradients with respect to the layer's input and output"
    ),
    "naive": BilinearAlignment(
        None, None, moves_loose=True, summary="add the task vector as it is, zero-padded or cropped; needs no data"
    ),
    "cross-lora": CrossLora(summary="match the singular vectors of the base weights; needs no data"),
    "transfusion": TransFusion(summary="permute the source's units to match the target's weights; same architecture"),
    "gradfix": GradFix(summary="keep the entries that agree with the target's gradient signs; same architecture"),
    "gradfix_mean": GradFix("mean", summary="gradfix with the sign of the mean gradient, not a majority of samples"),
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
