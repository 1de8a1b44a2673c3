"""The options that several commands share, each declared once.

An option of one command alone is declared there. Defaults stand with the commands, help and limits here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..types import Completion

Source = Annotated[
    str, typer.Option(help="The old base model: a folder, open_clip's NAME:TAG or NAME:FILE, timm:NAME.")
]
Finetuned = Annotated[
    str, typer.Option(help="The fine-tuned old base, in the same ways, a LoRA adapter of it, or a task-vector file.")
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
LossName = Annotated[
    str | None,
    typer.Option(help="classification, contrastive, causal, seq2seq or MODULE:FUNCTION; else by the data."),
]
CompletionName = Annotated[Completion, typer.Option(help="What fills directions the data leave open.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Name pattern of tensors to leave alone; may be repeated.")]
BatchSize = Annotated[int, typer.Option(help="Samples per pass through the models.", min=1)]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of all samples together that maps are made from.", min=1)
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="Memory of the device that models, statistics and result may take, such as 8GiB.")
]
LabelsName = Annotated[
    str, typer.Option(help="Whose labels the samples have: those of the data, or of the fine-tuned source.")
]
DtypeName = Annotated[
    str, typer.Option(help="What models run in: float32, bfloat16 or float16; what is written does not change.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a checkpoint's own code run. Off unless you ask for it.")
]
