"""The options that several commands share, each declared once with its help and limits.

A command declares the defaults, and the options that no other command has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import CheckpointError, TuneportError
from ..types import Completion, Norms, OutputKind

if TYPE_CHECKING:
    from ..pipeline.options import Options

Source = Annotated[
    str, typer.Option(help="The old base model: a folder, open_clip's NAME:TAG or NAME:FILE, timm:NAME.")
]
Finetuned = Annotated[
    list[str],
    typer.Option(
        help="The fine-tuned old base, in the same ways, an adapter of it, or a task-vector file; of several, the "
        "changes are added."
    ),
]
Target = Annotated[str, typer.Option(help="The new base model.")]
Data = Annotated[
    str | None, typer.Option(help="Calibration data: image folder, .npz, table, HF dataset folder, or TASK:PATH.")
]
MethodName = Annotated[str, typer.Option(help="Transfer method; see 'tuneport methods'.")]
Samples = Annotated[int | None, typer.Option(help="Number of calibration samples (100 unless --shots is given).")]
Shots = Annotated[int | None, typer.Option(help="Calibration samples per class, instead of --samples.")]
SamplerName = Annotated[str, typer.Option(help="How samples are drawn; see 'tuneport samplers'.")]
Seed = Annotated[int, typer.Option(help="Seed of the draw.", min=0, max=2**63 - 1)]
HeadName = Annotated[str | None, typer.Option(help="Zero-shot head: a name in the models' heads/ folder, or a file.")]
HeadFit = Annotated[
    str,
    typer.Option(
        help='Classification head of the fine-tune: "auto" fits one on the target, "none" keeps the target\'s. '
        '"projection" also fits the last layer of a zero-shot tower.'
    ),
]
LossName = Annotated[
    str | None,
    typer.Option(help="classification, contrastive, causal, seq2seq or MODULE:FUNCTION; else by the data."),
]
CompletionName = Annotated[Completion, typer.Option(help='How to complete a rank-deficient map: "svd" or "none".')]
NormsName = Annotated[Norms, typer.Option(help='Norms before layers: "keep" the target\'s or "rotate" their changes.')]
Exclude = Annotated[list[str] | None, typer.Option(help="Name pattern of tensors to leave alone; may be repeated.")]
Roles = Annotated[
    list[str] | None, typer.Option(help="SOURCE=TARGET of layer roles whose names differ, or SOURCE=none; repeatable.")
]
BatchSize = Annotated[
    int, typer.Option(help="Samples per pass; always 32 for the contrastive loss, which compares them.", min=1)
]
Columns = Annotated[
    str | None, typer.Option(help="Columns of a table that have other names, such as text=sentence,label=y.")
]
MaxLength = Annotated[int | None, typer.Option(help="Most tokens of a text; longer ones are cut (512).", min=2)]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of all samples together that maps are made from.", min=1)
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="Memory of the device that models, statistics and result may take, such as 8GiB.")
]
LabelsName = Annotated[
    str | None,
    typer.Option(
        help='"data": use the labels of the data; "source": let the fine-tuned source label the samples. Unless given, '
        "labels of the data are used where there are any, and a classification head is fitted to the source's scores."
    ),
]
DtypeName = Annotated[
    str,
    typer.Option(help="What models run in: float32, float64, bfloat16 or float16; what is written does not change."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a checkpoint's own code run. Off unless you ask for it.")
]
Out = Annotated[str, typer.Option(help="Where the new model goes; must not exist.")]
Scale = Annotated[
    str | None,
    typer.Option(
        help="Strength of the transfer: a number (the paper's is 1), auto (chosen on calibration samples) or safe (the "
        "same, with caution). Unless given: safe for images, auto for texts; 1 where no sample can be scored."
    ),
]
As = Annotated[OutputKind, typer.Option("--as", help="What to write.")]
Rank = Annotated[int | None, typer.Option(help="With --as adapter: cut each update to this rank.", min=1)]
Energy = Annotated[
    float | None, typer.Option(help="With --as adapter: cut to the least rank that keeps this share of |tau|².")
]
Distill = Annotated[
    int | None,
    typer.Option(
        help="Then let the fine-tuned source teach the target on the same samples, in this many steps.", min=1
    ),
]
UniformRank = Annotated[
    bool, typer.Option("--uniform-rank", help="With --as adapter: one rank for all layers, filled up with zeros.")
]
AdapterDtype = Annotated[
    str, typer.Option(help="With --as adapter: what its tensors are stored in: float32, bfloat16 or float16.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what a killed run of the same command has measured.")]
SaveEvery = Annotated[float, typer.Option(help="Seconds between two saves of what is measured, for --resume.", min=0)]
Evaluate = Annotated[
    bool | None,
    typer.Option(
        "--evaluate/--no-evaluate",
        help="Score the old and the new model on the data's test split. Unless given, 500 samples of it are scored "
        "where there is one with labels.",
    ),
]
FailOnHarm = Annotated[
    bool, typer.Option("--fail-on-harm", help="Exit with code 3 where the test split shows harm; the output stays.")
]


Layers = Annotated[bool, typer.Option("--layers", help="Show every layer.")]
AcceptUnlikely = Annotated[
    bool,
    typer.Option(
        "--accept-unlikely", help="Go on where --finetuned looks like a fine-tune of another base or for other labels."
    ),
]


def prepare_options(given: Mapping[str, Any]) -> Options:
    """The options of `prepare` among the parameters of a command."""
    from ..io.sizes import parse_bytes
    from ..pipeline.options import DEFAULTS

    found = {name: given[name] for name in DEFAULTS if given.get(name) is not None}
    if "memory_budget" in found:
        found["memory_budget"] = parse_bytes(found["memory_budget"])
    if "columns" in found:
        found["columns"] = parse_columns(found["columns"])
    if "roles" in found:
        pairs = [text.partition("=") for text in found["roles"]]
        if wrong := [role for role, mark, _ in pairs if not mark]:
            raise TuneportError(f"--roles takes SOURCE=TARGET, such as up=fc1, got {wrong[0]!r}.")
        found["roles"] = {role: None if other == "none" else other for role, _, other in pairs}
    return cast("Options", found)


def parse_columns(given: str | None) -> dict[str, str] | None:
    """The columns of a table by tuneport's names.

    >>> parse_columns("text=sentence,label=y")
    {'text': 'sentence', 'label': 'y'}
    """
    if given is None:
        return None
    pairs = [part.partition("=") for part in given.split(",")]
    if not all(name and own for name, _, own in pairs):
        raise TuneportError(f"--columns is {given!r}; expected NAME=COLUMN, such as text=sentence,label=y.")
    return {name.strip(): own.strip() for name, _, own in pairs}


def check_usage(given: Mapping[str, Any]) -> None:
    """Refuse options that do not fit each other, and an output that exists, before any library is loaded."""
    shape = tuple(given.get(name) for name in ("rank", "energy", "uniform_rank", "adapter_dtype"))
    if given["as_"] != "adapter" and shape != (None, None, False, "float32"):
        raise TuneportError(
            "--rank, --energy, --uniform-rank and --adapter-dtype shape an adapter; they go with --as adapter."
        )
    if os.path.lexists(given["out"]) and not given["overwrite"] and not given.get("resume"):
        raise CheckpointError(f"{given['out']} exists already. Choose another name or pass `overwrite=True`.")


def parse_numbers(option: str, text: str) -> list[float]:
    """Numbers separated by commas."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise TuneportError(f"--{option} takes numbers separated by commas, got {text!r}.") from None
