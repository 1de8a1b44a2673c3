"""The options of a transfer: one typed table for Python and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast, get_args

from ..errors import TuneportError, unknown_name
from ..measure.tokens import Match
from ..pairing import DepthRule, LayerPair, nearest_block
from ..types import Completion, Loss, Norms
from .labels import check_labels

HEAD_FITS = ("auto", "none", "projection")


class Options(TypedDict, total=False):
    """The options of a transfer, shared by Python and the command line."""

    samples: int | None  # number of calibration samples, drawn from the training split: 100 unless given
    shots: int | None  # or samples per class
    columns: Mapping[str, str] | None  # the columns of a table by tuneport's names: {"text": "sentence"}
    sampler: str  # how they are drawn: "random", or another name of `tuneport samplers`
    seed: int  # of the draw
    head: str | None  # the zero-shot head: a name in the models' heads/ folder, or a file
    head_fit: str  # "auto": fit the classification head of a fine-tune on the target; "none": the target keeps its own;
    # "projection": where there is no such head, fit the last layer of the target's features to the zero-shot scores
    labels: str | None  # "data": use the labels of the data; "source": let the fine-tuned source label the samples
    loss: str | Loss | tuple[Loss, Loss] | None  # an objective's name, MODULE:FUNCTION, or a function (for each model)
    match: Match | None  # pairs the tokens of own batches
    pairs: Sequence[LayerPair] | None  # the pairing, in place of roles and depth
    roles: Mapping[str, str | None] | None  # source roles to target roles where their names differ
    depth_rule: DepthRule  # which source block a target block takes
    exclude: Sequence[str]  # name patterns of tensors to leave alone
    completion: Completion  # how to complete a rank-deficient map
    norms: Norms  # "keep": the target keeps its norms; "rotate": move those before layers by the layers' input maps
    max_length: int | None  # most tokens of a text, which is cut there; 512 unless given
    max_tokens: int | None  # most tokens of all samples together that enter the maps
    memory_budget: int | None  # most bytes on the device; models that do not fit stay in RAM or in their files
    batch_size: int  # samples per pass through the models
    device: str  # "auto", "cpu", "cuda", "cuda:1", ...
    dtype: str  # in which the models run
    accept_unlikely: bool  # go on where the fine-tune looks like one of another base or for other labels
    trust_remote_code: bool  # let a checkpoint's own code run


DEFAULTS: Options = {
    "samples": None,
    "shots": None,
    "columns": None,
    "sampler": "random",
    "seed": 0,
    "head": None,
    "head_fit": "auto",
    "labels": None,
    "loss": None,
    "match": None,
    "pairs": None,
    "roles": None,
    "depth_rule": nearest_block,
    "exclude": (),
    "completion": "svd",
    "norms": "keep",
    "max_length": None,
    "max_tokens": None,
    "memory_budget": None,
    "batch_size": 32,
    "device": "auto",
    "dtype": "float32",
    "accept_unlikely": False,
    "trust_remote_code": False,
}


def check_options(options: Options) -> Options:
    """The options with their defaults; an unknown name or an impossible limit is an error."""
    for name in options:
        if name not in DEFAULTS:
            raise TuneportError(unknown_name("option", name, DEFAULTS))
    given = cast(Options, {**DEFAULTS, **options})
    check_labels(given["labels"], given["sampler"], given["shots"])
    if given["head_fit"] not in HEAD_FITS:
        raise TuneportError(unknown_name("head_fit", given["head_fit"], HEAD_FITS))
    if given["norms"] not in get_args(Norms):
        raise TuneportError(unknown_name("norms", given["norms"], get_args(Norms)))
    tokens, budget = given["max_tokens"], given["memory_budget"]
    if tokens is not None and tokens < 1:
        raise TuneportError(f"`max_tokens` must be at least 1, got {tokens}. Leave it out to use every token.")
    if budget is not None and budget < 1:
        raise TuneportError(f"`memory_budget` must be a number of bytes, got {budget}.")
    return given
