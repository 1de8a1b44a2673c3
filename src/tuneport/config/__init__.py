"""The options of every command, each declared once: default, help, group and bounds.

The command line, the checks, the run record, the command that repeats a run and the reference page are made from these
fields. `Inputs` of a command say what it works on; its `Config` says how. Nothing here needs a heavy library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ..errors import OptionError, unknown_name
from ..types import FORMATS, ScaleRule
from .options import (
    INPUTS,
    MACHINE,
    OUTPUT,
    SAMPLES,
    TASK,
    WRITTEN,
    Config,
    Declared,
    option,
    parse_bytes,
    parse_columns,
    parse_roles,
    parse_scale,
    parse_seconds,
    parse_weights,
    parse_words,
)

Function = Callable[..., Any]

# Options that several commands share, where they have other neighbours in each

DATA = partial(option, None, "Samples: folder, table, .npz, TASK:PATH.", INPUTS)
OUT = partial(option, help="Where the result goes.", group=INPUTS)
OLD, NEW, TUNED = "The old base model.", "The new base model.", "Fine-tuned source, or adapter."
COUNT = partial(option, None, "Number of samples (default: 100).", metavar="N", least=1)
SAMPLER = partial(option, "random", "random or class_balanced.", SAMPLES, metavar="NAME")
LIST = partial(option, parse=parse_words, metavar="LIST")
CLASSES = partial(LIST, None, "Names of the classes, in the head's order: red,green.", TASK)
EXCLUDE = partial(option, (), "Name pattern of tensors to leave alone; repeatable.", metavar="GLOB")
BATCH = partial(option, 32, "Samples per pass through the models.", MACHINE, least=1)
UNLIKELY = partial(option, False, "Continue if the fine-tune does not seem to match.", MACHINE, listed=False)
HOW = partial(option, control=True, recorded=False)  # the result is the same with any value
OVERWRITE = partial(HOW, False, "Replace an existing output.")
*_FIRST, _LAST = FORMATS
FORMAT = partial(option, help=f"{', '.join(_FIRST)} or {_LAST}.", metavar="FORMAT", choices=FORMATS)


ROLES: Any = {"repeated": True, "metavar": "A=B", "listed": False}


class ModelConfig(Config):
    """Options of commands that run models on samples."""

    seed: int = option(0, "Seed of the draw.", SAMPLES, least=0, most=2**63 - 1)
    columns: Mapping[str, str] | None = option(
        None, "Other column names: text=sentence,label=y.", SAMPLES, parse=parse_columns, metavar="LIST"
    )
    max_length: int | None = option(None, "Maximum tokens per text (default: 512).", SAMPLES, least=2)
    head: str | None = option(None, "Zero-shot head: a name in heads/, or a file.", TASK, metavar="NAME")
    device: str = option("auto", "cpu, cuda, cuda:1, ...", MACHINE, metavar="NAME")
    trust_remote_code: bool = option(False, "Allow custom code from the checkpoint.", MACHINE, control=True)


class RunConfig(ModelConfig):
    """Options of commands that also choose what models run in."""

    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option(
        "float32", "What models run in: bfloat16, ...", MACHINE, metavar="NAME"
    )


class ResumeConfig(Config):
    """Options of runs that can be continued."""

    resume: bool = HOW(False, "Continue a killed run of the same command.", MACHINE)
    save_every: float = HOW(60.0, "Seconds between two saves, for --resume.", MACHINE, least=0, listed=False)


class AdapterConfig(Config):
    """Options of the format of an output."""

    as_: str = FORMAT("model")
    rank: int | None = option(None, "Adapter: cut updates to this rank.", least=1)
    energy: float | None = option(
        None, "Adapter: keep this share of each |tau|².", OUTPUT, above=0, most=1, listed=False
    )
    uniform_rank: bool = option(False, "Adapter: pad all layers to one rank.", OUTPUT, listed=False)
    adapter_dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "Adapter: stored as float32, bfloat16 or float16.", OUTPUT, listed=False
    )

    def check(self) -> None:
        super().check()
        shape = (self.rank, self.energy, self.uniform_rank, self.adapter_dtype)
        if not FORMATS[self.as_].shaped and shape != (None, None, False, "float32"):
            raise OptionError(
                '`rank`, `energy`, `uniform_rank` and `adapter_dtype` shape an adapter; they go with `as_="adapter"`.'
            )
        if self.rank is not None and self.energy is not None:
            raise OptionError("pass either `rank` or `energy` for an adapter, not both.")


# The commands


class TransferInputs(Declared):
    source: str = option(help=OLD, group=INPUTS)
    finetuned: tuple[str, ...] = option(help=TUNED, group=INPUTS)
    target: str = option(help=NEW, group=INPUTS)
    data: str | None = DATA()
    out: str = OUT()


class PlanInputs(Declared):
    source: str = option(help=OLD, group=INPUTS)
    target: str = option(help=NEW, group=INPUTS)
    finetuned: tuple[str, ...] = option((), TUNED, INPUTS)
    data: str | None = DATA()


class MeasureConfig(RunConfig):
    """Options that decide what a transfer moves: those of `transfer` and `plan`."""

    method: str | Any = option("bico", "See 'tuneport methods'.", metavar="NAME")
    samples: int | None = COUNT()
    scale: float | ScaleRule | None = option(None, "Strength: a number, auto or safe.", parse=parse_scale, metavar="X")
    shots: int | None = option(None, "Per class, instead of --samples.", SAMPLES, least=1)
    sampler: str = SAMPLER()
    labels: Literal["data", "source"] | None = option(None, "Whose labels: data or source.", SAMPLES, metavar="NAME")
    max_tokens: int | None = option(None, "Maximum tokens that the maps are made from.", SAMPLES, least=1, listed=False)
    classes: tuple[str, ...] | None = CLASSES()
    head_fit: Literal["auto", "none"] = option("auto", "auto (fit a head on the target) or none.", TASK, metavar="NAME")
    loss: str | Function | tuple[Function, Function] | None = option(
        None, "classification, contrastive, causal, seq2seq, MODULE:FUNCTION.", TASK, metavar="NAME"
    )
    exclude: Sequence[str] = EXCLUDE(group=TASK)
    roles: Mapping[str, str | None] | None = option(
        None, "SOURCE=TARGET of roles whose names differ; repeatable.", TASK, parse=parse_roles, **ROLES
    )
    batch_size: int = BATCH()
    memory_budget: int | None = option(
        None, "Memory of the device to use, such as 8GiB.", MACHINE, parse=parse_bytes, least=1, metavar="SIZE"
    )
    accept_unlikely: bool = UNLIKELY()
    match: Any = option(None, "Pairs the tokens of own batches.", TASK, python=True)
    pairs: Any = option(None, "The pairing, in place of roles and depth.", TASK, python=True)
    depth_rule: Any = option(None, "Which source block a target block takes.", TASK, python=True)

    def check(self) -> None:
        super().check()
        if self.samples is not None and self.shots is not None:
            raise OptionError(
                f"asked for {self.samples} samples and for {self.shots} shots; pass `samples` or `shots`, not both."
            )
        if self.labels == "source" and (self.shots is not None or self.sampler == "class_balanced"):
            need = "`shots` needs" if self.shots is not None else f"sampler '{self.sampler}' needs"
            raise OptionError(f'with `labels="source"` the labels of the data are not used, but {need} them.')


class TransferConfig(ResumeConfig, AdapterConfig, MeasureConfig):
    evaluate: bool | None = option(
        None, "Score the test split (default: 500).", SAMPLES, flags=("--evaluate/--no-evaluate",), control=True
    )
    distill: int | None = option(
        None, "Then train this many steps: the source teaches.", least=1, listed=False, metavar="STEPS"
    )
    overwrite: bool = OVERWRITE()
    verbose: bool = HOW(False, "Also print how it was made.", OUTPUT)
    fail_on_harm: bool = option(
        False, "Exit with code 3 if the test split shows harm.", MACHINE, control=True, listed=False
    )

    def check(self) -> None:
        super().check()
        if self.distill is not None and FORMATS[self.as_].shaped and self.rank is None:
            raise OptionError("a distilled adapter is a LoRA of one rank: pass `rank=R`.")


class PlanConfig(MeasureConfig):
    layers: bool = option(False, "Show every layer.", control=True)
    shapes_only: bool = option(False, "Read config.json only; needs --memory-budget.", control=True)
    length: int = option(256, "With --shapes-only: tokens per text.", least=1, listed=False)

    def check(self) -> None:
        super().check()
        if self.shapes_only and self.memory_budget is None:
            raise OptionError("a plan for devices needs `memory_budget`, the memory of one device.")


class UpgradeInputs(Declared):
    """What an upgrade reads and writes: one fine-tune, or a list of them, for which the others are defaults."""

    source: str | None = option(None, OLD, INPUTS)
    finetuned: tuple[str, ...] = option((), TUNED, INPUTS)
    target: str | None = option(None, NEW, INPUTS)
    data: str | None = DATA()
    out: str = OUT()
    list_: str | None = option(None, "Many: a JSON line each, with options as keys.", INPUTS)
    workers: int | None = option(
        None, "With --list: processes (default: 1; Ray: one per GPU).", MACHINE, least=1, listed=False
    )
    ray: str | None = option(
        None, "With --list: address of a Ray cluster, or local.", MACHINE, metavar="ADDRESS", listed=False
    )

    def check(self) -> None:
        super().check()
        if self.list_ is None and (self.workers is not None or self.ray is not None):
            raise OptionError("`workers` and `ray` go with `list`.")

    def one(self) -> TransferInputs:
        """What the upgrade of one fine-tune reads and writes."""
        given = {name: getattr(self, name) for name in ("source", "finetuned", "target", "data", "out")}
        if missing := [f"`{name}`" for name in ("source", "finetuned", "target", "out") if not given[name]]:
            raise OptionError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")
        return TransferInputs(**given)


ROUTES = ("copy", "port", "distill", "synthetic")  # cheap to dear
NOTHING = (
    "there are no samples, and nothing says what to write. Pass `data` with ten samples or more (no labels), or one "
    "sentence about them, such as `describe='Questions that customers ask their bank'`, with `template` if the model "
    "reads them in a fixed form. For a model that writes passages of its own, pass `routes=('synthetic',)`."
)


class LessonsConfig(ResumeConfig, RunConfig):
    """Options of what an old model teaches: whose answers, and which samples beside the own ones."""

    synthetic: int | None = option(None, "Samples to write beside own ones.", WRITTEN, least=8, metavar="N")
    describe: str | None = option(None, "The samples in a sentence, for a generator.", WRITTEN, metavar="TEXT")
    generator: str | None = option(None, "A model that writes samples.", WRITTEN, metavar="MODEL")
    generator_url: str | None = option(None, "A server that writes samples.", WRITTEN, metavar="URL")
    keep_texts: bool = option(False, "Store what was written: texts.jsonl.", WRITTEN)
    extra: str | None = option(None, "Unlabelled samples of anything, taught too.", SAMPLES, metavar="PATH")
    template: str | None = option(None, "Plain prompt of a text: 'Text: {text} Label:'.", SAMPLES, metavar="TEXT")
    labels: Literal["teacher", "data"] = option(
        "teacher", "Whose answers are taught: teacher, or data beside it.", SAMPLES, metavar="NAME"
    )

    def check(self) -> None:
        super().check()
        if self.generator is not None and self.generator_url is not None:
            raise OptionError("`generator` and `generator_url` both say who writes samples: pass one of them.")
        if self.template is not None and "{text}" not in self.template:
            raise OptionError(f"`template` is {self.template!r:.80}; expected {{text}} in it, where a text stands.")


class UpgradeConfig(LessonsConfig):
    samples: int | None = option(None, "Own samples at most (default: 2,000).", metavar="N", least=1)
    routes: tuple[str, ...] = LIST(ROUTES, "Of copy, port, distill, synthetic; separated by commas.")
    time: int | None = option(
        None, "Start no further route after this time, such as 10m.", parse=parse_seconds, metavar="TIME"
    )
    as_: str | None = FORMAT(None)
    rank: int | None = option(None, "Rank of a LoRA (default: 16).", least=1)
    steps: int | None = option(None, "Steps of distillation (default: by the samples).", least=1)
    overwrite: bool = OVERWRITE()
    synthetic: int | None = option(2000, "Samples to write.", WRITTEN, least=8, metavar="N")
    classes: tuple[str, ...] | None = CLASSES()
    exclude: Sequence[str] = EXCLUDE(group=TASK)
    batch_size: int = BATCH()
    accept_unlikely: bool = UNLIKELY()

    def check(self) -> None:
        super().check()
        for name in self.routes:
            if name not in ROUTES:
                raise OptionError(unknown_name("route", name, ROUTES))
        if self.as_ is not None and not FORMATS[self.as_].students and {"distill", "synthetic"} & set(self.routes):
            what = self.as_.replace("-", " ")
            raise OptionError(f'a distilled model is no {what} of a port: pass `as_="model"` or "adapter".')

    def check_known(self, data: object) -> None:
        """Refuse an upgrade for which there are no samples, and nothing to write them from."""
        if data is None and not self.describe and self.routes != ("synthetic",):
            raise OptionError(NOTHING)


class DistillInputs(Declared):
    finetuned: str = option(help="The teacher: a model, or an adapter with --source.", group=INPUTS)
    target: str = option(help="The student: any model that reads the same samples.", group=INPUTS)
    data: str | None = option(None, "Samples; labels are not used.", INPUTS)
    out: str = OUT()
    source: str | None = option(None, "The base of an adapter or a task vector.", INPUTS)


class DistillConfig(LessonsConfig):
    samples: int | None = COUNT()
    steps: int | None = option(None, "Updates of the student (default: by the samples).", least=1)
    lora: int | None = option(None, "Train a LoRA of this rank; write an adapter.", least=1, metavar="RANK")
    # beyond its largest, an update is no float32
    learning_rate: float | None = option(None, "Highest rate (default: by the student's width).", above=0, most=1e36)
    batch_size: int | None = option(None, "Samples of an update.", least=2)
    shard: bool = option(False, "Divide both models over the processes (FSDP).", MACHINE)
    overwrite: bool = OVERWRITE()
    sampler: str = SAMPLER()

    def check(self) -> None:
        super().check()
        if self.shard and (self.lora is None or self.trust_remote_code):
            raise OptionError(
                "`shard` trains a LoRA of models without own code: pass `lora`, and no `trust_remote_code`."
            )
        if self.shard and self.synthetic is not None and self.generator is None and self.generator_url is None:
            raise OptionError("sharded models write no samples: with `shard`, name a `generator` or a `generator_url`.")
        if self.synthetic is None and (self.describe or self.generator or self.generator_url or self.keep_texts):
            raise OptionError("`describe`, `generator`, `generator_url` and `keep_texts` go with `synthetic`.")


class EvaluateInputs(Declared):
    model: tuple[str, ...] = option(help="A model, or an adapter or task vector of one; or several.", argument=True)
    data: str | None = option(None, "Labelled data; the test split is scored.", INPUTS)
    ask: str | None = option(None, "A prompt that old, target and new answer.", INPUTS, metavar="TEXT")
    base: str | None = option(None, "The base of an adapter (default: the one it names).", INPUTS)


class EvaluateConfig(ModelConfig):
    protocol: Literal["zero-shot", "linear-probe", "perplexity", "likelihood"] | None = option(
        None, "How to score (default: by model and data).", metavar="NAME"
    )
    by_class: bool = option(False, "Also show the accuracy of each class.", control=True)
    classes: tuple[str, ...] | None = CLASSES()
    samples: int | None = option(None, "Linear probe: training samples (default: all).", SAMPLES, least=1)
    batch_size: int | None = option(None, "Samples per pass (default: 128; texts 16).", MACHINE, least=1)

    def check(self) -> None:
        super().check()
        if self.samples is not None and self.protocol != "linear-probe":
            words = f"{self.protocol} scores" if self.protocol else "the others score"
            raise OptionError(f'`samples` goes with `protocol="linear-probe"`; {words} the whole test split.')


class ExtractInputs(Declared):
    base: str = option(help="The base model: folder or weight file.", argument=True)
    finetuned: str = option(help="The fine-tuned model or adapter.", argument=True)
    out: str = option(help="The task-vector file to write (.safetensors).", group=INPUTS, flags=("--out", "-o"))


class ExtractConfig(Config):
    exclude: Sequence[str] = EXCLUDE()
    overwrite: bool = OVERWRITE()


class ApplyInputs(Declared):
    vector: str = option(help="A task-vector file.", argument=True, metavar="TAU")
    base: str = option(help="The model it belongs to.", argument=True)
    out: str = option(help="The folder to write.", group=INPUTS, flags=("--out", "-o"))


class ApplyConfig(Config):
    scale: float = option(1.0, "Strength of the change.")
    overwrite: bool = OVERWRITE()

    def check(self) -> None:
        super().check()
        if not math.isfinite(self.scale):
            raise OptionError(f"`scale` must be a finite number, got {self.scale}.")


class MergeInputs(Declared):
    finetuned: tuple[str, ...] = option(help="Task vectors, adapters or fine-tuned models of one base.", argument=True)
    out: str = option(help="The file or folder to write.", group=INPUTS, flags=("--out", "-o"))
    base: str | None = option(None, "Their base (default: the one that they name).", INPUTS)


class MergeConfig(AdapterConfig):
    weights: Sequence[float] | None = option(
        None, "A factor for each, separated by commas (default: 1).", parse=parse_weights, metavar="NUMBERS"
    )
    rule: Literal["sum", "ties", "dare", "dare-ties"] = option("sum", "How changes are combined.", metavar="RULE")
    density: float = option(0.2, "Share of entries that ties and dare keep.", above=0, most=1)
    seed: int = option(0, "Seed of the entries that dare keeps.", least=0, most=2**31 - 1)
    exclude: Sequence[str] = EXCLUDE(group=OUTPUT)
    as_: str = FORMAT("task-vector")
    accept_unlikely: bool = option(
        False, "Merge also what looks like fine-tunes of different bases.", MACHINE, listed=False
    )
    overwrite: bool = OVERWRITE()


class DemoInputs(Declared):
    out: str = option("tuneport-demo", "The folder to write.", INPUTS)


class DemoConfig(Config):
    seed: int = option(0, "Seed of the draw.", least=0, most=2**63 - 1)
    overwrite: bool = OVERWRITE()
