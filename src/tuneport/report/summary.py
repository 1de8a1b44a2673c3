"""A run record in words: rows of tables, and the command that repeats the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median_high
from typing import Any

from ..config import (
    DistillConfig,
    DistillInputs,
    EvaluateConfig,
    EvaluateInputs,
    TransferConfig,
    TransferInputs,
    UpgradeConfig,
)
from ..config.options import Declared
from ..config.options import repeat_command as command_of
from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..types import FORMATS
from .record import Record

SCORE_FORMS = {"accuracy": (".1f", " %"), "bits per character": (".3f", ""), "fidelity": (".3f", "")}


def number_text(value: float | None, form: str = "") -> str:
    """A number for a table: a dash if it is missing, NaN or infinite. By default four digits, and integers in full."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form or ("d" if isinstance(value, int) else ".4g"))


def summary_rows(record: Record) -> list[tuple[str, str]]:
    """The transfer in a few rows of label and text."""
    layers, choice = record["layers"], record.get("scale_choice")
    chosen = f", chosen by {choice['rule']} on {choice['samples']} samples" if choice else ""
    rows = [
        ("method", f"{record['method']}, scale {record['scale']:g}{chosen}"),
        ("samples", ", ".join(filter(None, (str(record["samples"]), label_words(record))))),
    ]
    if "head" in record:
        by_labels = record["options"].get("labels") == "data" and record.get("command", "transfer") == "transfer"
        by = "the labels" if by_labels else "the scores of the fine-tuned source"
        count = len(record["head"]["classes"])
        rows.append(("head", f"{count} {'classes' if count > 1 else 'output'}, fitted to {by}"))
    if layers:
        rows.append(("moved", moved_words(record) if record["scale"] else "nothing: the scale is 0"))
        rows.append(("target", _changed_words(record)))
    if found := record.get("distilled"):
        rows.append(("distilled", distilled_words(found)))
    for side in ("in", "out"):
        residuals = sorted(layer[f"residual_{side}"] for layer in layers if layer[f"residual_{side}"] is not None)
        if residuals:
            text = f"residual {residuals[0]:.3f} to {residuals[-1]:.3f}, median {median_high(residuals):.3f}"
            rows.append((f"{side}put side", text))
    if "adapter" in record:
        modules = record["adapter"]["modules"]
        ranks, lost = [item["rank"] for item in modules], max(item["lost_energy"] for item in modules)
        span = f"rank {min(ranks)} to {max(ranks)}" if min(ranks) < max(ranks) else f"rank {max(ranks)}"
        cost = f"at most {100 * lost:.2g} % of a layer's squared norm cut off" if lost > 0 else "nothing cut off"
        rows.append(("adapter", f"{len(modules)} modules, {span}, {cost}"))
        if found := record["adapter"].get("vllm"):
            rank = f"vLLM loads it with --max-lora-rank {found['max_lora_rank']}"
            rows.append(("server", f"vLLM refuses {'; '.join(found['refused'])}" if found["refused"] else rank))
    taught = record.get("distilled", {}).get("seconds") if layers else None
    more = "" if taught is None else f" to port, {taught:.1f} s to distill"
    return [*rows, ("time", f"{record['seconds']:.1f} s{more}")]


STATES = {  # what an output is worth, by its outcome
    "gain": "better than the target was",
    "harm": "nothing useful was written: it is worse than the target was",
    "no clear change": "nothing useful was written, as far as the samples tell",
    "nothing moved": "nothing useful was written: it is the target as it was",
    "not measured": "how good it is was not measured",
}


def written_words(record: Record) -> str:
    """What a run has written, and what it is worth."""
    kind, state = FORMATS[record["as"]].words.format_map(record), STATES.get(record.get("outcome", ""))
    return f"written to {record['out']}: {kind}{'' if state is None else f'; {state}'}"


def _changed_words(record: Record) -> str:
    """What the target's files have changed by, and what stays."""
    if record["scale"]:
        return f"{len(record['layers'])} layers changed; {len(record['not_transported'])} tensors stay as they were"
    if record.get("distilled", {}).get("best"):
        return "changed by the distillation only"
    return (
        "the head changed; all other tensors stay as they were" if "head" in record else "every tensor stays as it was"
    )


def score_rows(record: Record) -> list[tuple[str, str]]:
    """The scores on the test split, by model: what decides between them."""
    form, unit = SCORE_FORMS[record.get("evaluation", {}).get("metric", "accuracy")]
    rows = []
    for item in record.get("accuracies", ()):
        ends = "" if item["low"] is None else f" ({item['low']:{form}} to {item['high']:{form}})"
        rows.append((item["words"], f"{item['value']:{form}}{unit}{ends}"))
    return rows


def score_words(record: Record) -> str:
    found = record["evaluation"]
    ends = ", with 95 % intervals" if record["accuracies"][0]["low"] is not None else ""
    return f"{found['metric']} on {sample_words(found)}{ends}"


def sample_words(found: Mapping[str, Any]) -> str:
    """Which samples an evaluation is of, from its entry in a record."""
    if found.get("held_out"):
        return f"{found['samples']} samples of {found['data']} that calibration does not use"
    without = f", without {found['shared']} that are calibration samples" if found.get("shared") else ""
    return f"{found['samples']} test samples of {found['data']}{without}"


def distilled_words(found: Mapping[str, Any]) -> str:
    """What a distillation did, from its entry in a record."""
    first, best = found["curve"][0], next(mark for mark in found["curve"] if mark["step"] == found["best"])
    what = f"a LoRA of rank {found['lora']}" if found["lora"] else "all linear layers"
    left = f"; {count} samples had nothing to compare" if (count := found.get("left_out")) else ""
    views = f" and {count} views of them" if (count := found.get("views")) else ""
    if not found["best"]:
        kept = "" if found.get("neutral") is None else " without forgetting neutral text"
        return f"none of {found['steps']} steps lowered the loss on held-out samples{kept}: it is the start{left}"
    halves = "; each half judged what the other half taught, and both then taught it"
    again = f"{halves}, for {steps} steps" if (steps := found.get("again")) else ""
    return (
        f"by {found['teacher']}: {found['steps']} steps of {what} on {found['samples']} unlabelled samples{views}; "
        f"agreement on held-out samples {100 * first['agreement']:.0f} % before, {100 * best['agreement']:.0f} % after"
        f"{left}{again}"
    )


def left_shares(record: Record) -> Sequence[tuple[str, float]]:
    """The shares of the change that were left behind, by kind, the largest first."""
    left: Counter[str] = Counter()
    for item in record.get("left_behind", ()):
        left[item["kind"]] += item["share"]
    return left.most_common()


def moved_words(record: Record) -> str:
    """The share of the change that moved, and what was left behind, by kind."""
    parts = ", ".join(f"{kind} {100 * share:.2g} %" for kind, share in left_shares(record))
    moved = f"{100 * record['moved_share']:.1f}".removesuffix(".0")
    return f"{moved} % of the change (squared norm)" + (f"; left behind: {parts}" if parts else "")


def label_words(record: Record) -> str:
    """A note if the fine-tuned source labelled the samples, with its agreement with the data's labels."""
    found = record.get("data", {}).get("labels")
    if not found:
        return ""
    share = "" if found["agreement"] is None else f", {100 * found['agreement']:.0f} % as in the data"
    return f"labelled by the fine-tuned source{share}"


def table_of(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]
) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of a table; `columns` names the key and the form of each.

    Columns without a value are left out.
    """
    cells = {
        head: ["" if _is_missing(row.get(key)) else format(row[key], form) for row in rows]
        for head, (key, form) in columns.items()
    }
    shown = {head: column for head, column in cells.items() if any(column) or not rows}
    return [*shown], [list(row) for row in zip(*shown.values(), strict=True)]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


ROUTE_COLUMNS = {
    "route": ("name", ""),
    "score": ("score", ".4g"),
    "agreement, %": ("agreement", ""),
    "flips": ("flips", "d"),
    "neutral, %": ("neutral", "+.1f"),
    "seconds": ("seconds", ".1f"),
    "memory": ("memory", ""),
}


def route_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the table of routes; the first column has their names."""
    rows = []
    for row in record["routes"]:
        agreement, memory = number_text(row["agreement"], ".1f"), row["memory"]
        if row["interval"] is not None:
            agreement += " ({:.1f} to {:.1f})".format(*row["interval"])
        said = {"agreement": None if row["agreement"] is None else agreement}
        rows.append({**row, **said, "memory": None if memory is None else format_bytes(memory)})
    return table_of(rows, ROUTE_COLUMNS)


LAYER_COLUMNS = {
    "target layer": ("target", ""),
    "source layer": ("source", ""),
    "rank in": ("rank_in", "d"),
    "rank out": ("rank_out", "d"),
    "residual in": ("residual_in", ".4g"),
    "residual out": ("residual_out", ".4g"),
    "|tau| source": ("norm_source", ".4g"),
    "|tau| target": ("norm_target", ".4g"),
    "rank": ("rank", "d"),
}


def kept_rows(record: Record, key: str = "not_transported") -> list[tuple[str, int]]:
    """The number of tensors that were not transported, or were left behind, by reason."""
    return Counter(item["reason"] for item in record[key]).most_common()


def plan_rows(layers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row for all layers of a stack with the same shapes, from the same blocks: roles, blocks and shapes."""
    stacks = short_names(str(layer["stack"]) for layer in layers if layer["block"] is not None)
    alone = [layer["target"].removesuffix(".weight") for layer in layers if layer["block"] is None]
    ends = Counter(name.rpartition(".")[2] for name in alone)
    roles: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for layer in layers:
        whole = layer["target"].removesuffix(".weight")
        end = whole.rpartition(".")[2]
        outside = (end if ends[end] == 1 else whole) if layer["block"] is None else ""  # a layer of its own
        shapes = ["{} x {}".format(*layer[key]) for key in ("target_shape", "source_shape")]
        key = (outside or stacks[str(layer["stack"])], "" if outside else str(layer["role"]), *shapes)
        roles.setdefault(key, []).append(layer)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (name, role, *shapes), found in roles.items():
        blocks = [_ranges(layer[key] for layer in found) for key in ("block", "source_block")]
        rows.setdefault((name, blocks[0], shapes[0], blocks[1], shapes[1]), []).append(role)
    return [[key[0], ", ".join(filter(None, names)), *key[1:]] for key, names in rows.items()]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names without the parts that all of them begin or end with.

    >>> short_names(["vision.encoder.layers", "text.encoder.layers"])
    {'vision.encoder.layers': 'vision', 'text.encoder.layers': 'text'}
    """
    parts = {name: name.split(".") for name in names}
    for at in (0, -1):
        while all(len(words) > 1 for words in parts.values()) and len({words[at] for words in parts.values()}) == 1:
            for words in parts.values():
                words.pop(at)
    return {name: ".".join(words) for name, words in parts.items()}


PLAN_COLUMNS = ("target layers", "roles", "blocks", "shape", "from", "shape")


def _ranges(numbers: Iterable[int | None]) -> str:
    """Numbers in words: those that follow each other as a range.

    >>> _ranges([0, 1, 2, 2, 5])
    '0-2, 5'
    """
    known = sorted({number for number in numbers if number is not None})
    runs = [[number for _, number in run] for _, run in groupby(enumerate(known), lambda item: item[1] - item[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def repeat_command(record: Record, **changes: Any) -> str | None:
    """The command that repeats the run, with `changes`; None if it used Python objects that no command can name."""
    places: dict[str, Any] = {key: record.get(key, {}).get("path") for key in ("source", "finetuned", "target")}
    several, command = record.get("finetuned", {}).get("parts"), record.get("command", "transfer")
    tuned = tuple(part.get("path") for part in several) if several else (places["finetuned"],)
    place = data_reference(record)
    unnamed = bool(record.get("data", {}).get("name")) and place is None
    if unnamed or not all((places["source"], places["target"], *tuned)):
        return None
    options = {**record.get("options", {}), **changes}
    given = {**places, "out": str(options.pop("out", record.get("out", "OUT"))), "data": place}
    try:
        if command == "distill":
            base = None if places["source"] == tuned[0] else places["source"]
            inputs: Declared = DistillInputs(**{**given, "source": base, "finetuned": tuned[0], "data": place or ""})
            return command_of(command, inputs, DistillConfig.from_json(options))
        config = (UpgradeConfig if command == "upgrade" else TransferConfig).from_json(options)
        return command_of(command, TransferInputs(**{**given, "finetuned": tuned}), config)
    except TuneportError:
        return None


def evaluate_command(record: Record, out: str, data: str) -> str:
    """The command that scores an output on data, with the options of the run that an evaluation has too."""
    known = {key: value for key, value in record.get("options", {}).items() if key in ("head", "columns", "max_length")}
    return command_of("evaluate", EvaluateInputs(model=(out,), data=data), EvaluateConfig.from_json(known))


def data_reference(record: Record) -> str | None:
    """What names the data on the command line, with its task."""
    task, path = record.get("data", {}).get("task"), record.get("data", {}).get("path")
    return f"{task}:{path}" if task and path else path
