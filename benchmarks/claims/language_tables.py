"""The page of results of `language_models`: a table for each pair and task, and what is not measured."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.claims.language_tasks import ALL_DATA, VALIDATION

TRANSFERS = ("naive@1", "theseus@1", "bico@1", "bico@auto", "bico@safe", "bico+@auto", "bico+@safe")
DISTILLED = "bico@auto,distill"
PARTS = ("source", "fine-tuned source", "target", *TRANSFERS, DISTILLED, "few-shot", "all-data")
TRIAL = ("source", "fine-tuned source", "target", "bico@1", "bico@0.1", "bico@default", "bico@safe", "bico+@default",
         "theseus@1", "bico+@auto,distill", "few-shot", "why")  # fmt: skip
ONCE = ("source", "fine-tuned source", "target", "why", "all-data")  # parts without a draw
SAME = {"bico@auto": "bico@default"}  # the default of texts
FULL = "{steps} steps of {batch}".format(**ALL_DATA)
CELL = ("pair", "task", "samples", "lora", "max_tokens")  # keys of rows that are compared with each other
PEAKS = {"port": "bico@1", "distillation": DISTILLED}  # the first row of a draw makes the port
FORMS = {"accuracy": ".1f", "bits": ".4f", "perplexity": ",.2f"}
ABOUT = (
    "The LoRA has rank 16, on all linear layers. `source` and `target` are the bare models; `METHOD@SCALE` is a port "
    "with N samples, `auto` and `safe` choose the scale; `distill` lets the fine-tuned source teach the port for 100 "
    "steps (in the trial 300); `few-shot` is a LoRA of the target, trained on the same N samples with the best of four "
    f"schedules on {VALIDATION} validation samples; `all-data` is a LoRA of the target, trained like that of the "
    "source. Several draws: mean ± standard deviation. Chats have no views, so `bico+` is `bico` on trec6. Perplexity "
    "does not compare between tokenizers; bits per character do. At 40fc3d2, scales were judged by the loss of the "
    "right answers alone, and a quarter was the smallest but zero: on trec6, what `auto` and `safe` chose then is the "
    "row `bico@0.25`. Since then, samples with answers to choose from are judged by that choice. Up to a6e24b4, "
    "`auto` needed no evidence to leave zero; after that, where there are answers to choose from, two standard errors. "
    "The held-out loss of a distillation is that of the texts; at 40fc3d2 it was the divergence from the teacher."
)


def page(rows: list[dict[str, Any]], parts: Sequence[str], draws: Sequence[int], pairs: Sequence[str]) -> Iterator[str]:
    """The lines of the page; of `parts`, `draws` and `pairs`, it says what no row holds."""
    yield "# Real language models: a LoRA ported to a larger model, or to another family\n"
    yield textwrap.fill(ABOUT, 120, break_on_hyphens=False) + "\n"
    known = {key: ", ".join(sorted({row[key] for row in rows})) for key in ("commit", "device", "torch")}
    yield f"{known['device']}, torch {known['torch']}, commit {known['commit']}:"
    yield "`python -m benchmarks.claims.language_models`. `seconds` are those of a GPU that several runs share."
    cells: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(tuple(row.get(key) for key in CELL), []).append(row)
    for found in cells.values():
        yield from section([row for row in found if "error" not in row], parts, draws)
        for row in found:
            if "error" in row:
                yield f"\n**Failed**: {row['row']}, draw {row['draw']}: {row['error']}"
    if missing := [pair for pair in pairs if not any(row["pair"] == pair for row in rows)]:
        yield f"\n**Not measured at all**: {', '.join(missing)}."


def section(rows: list[dict[str, Any]], parts: Sequence[str], draws: Sequence[int]) -> Iterator[str]:
    """The table of one pair and task, the losses behind the choice of the scale, and what is missing."""
    first = rows[0]
    limit = f", at most {first['max_tokens']} tokens" if first.get("max_tokens") else ""
    yield f"\n## {first['task']}: {first['pair'].replace(':', ' to ')}, N = {first['samples']}{limit}\n"
    yield f"A LoRA of {first['lora']}; {first['test']} test samples.\n"
    yield "| row | draws | accuracy | bits per character | perplexity | scale | seconds | commit |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in sorted(dict.fromkeys(row["row"] for row in rows), key=lambda name: place(name, parts)):
        found = list({row.get("draw", 0): row for row in rows if row["row"] == name}.values())  # the last of each
        cells = [spread([row[key] for row in found], form) for key, form in FORMS.items()]
        scales = ", ".join(f"{row['scale']:g}" for row in found if "scale" in row)
        seconds = statistics.fmean(row["seconds"] for row in found)
        shown = "" if name in ("source", "target") or name.startswith("why") else f"{seconds:.0f}"
        commits = ", ".join(sorted({row["commit"].partition(" ")[0] for row in found}))
        yield f"| {name} | {len(found)} | {' | '.join(cells)} | {scales} | {shown} | {commits} |"
    for row in [row for row in rows if row.get("losses") and row["row"] == "bico@1"]:
        right = {scale: f" ({share:.0%} right)" for scale, share in row.get("right", {}).items() if share is not None}
        losses = ", ".join(f"{scale}: {loss:.4g}{right.get(scale, '')}" for scale, loss in row["losses"].items())
        when = f"draw {row['draw']}, {row['commit'].partition(' ')[0]}"
        yield f"\nLoss of held-out calibration samples by the scale of `bico`, {when}: {losses}."
    for row in [row for row in rows if row.get("curve")]:
        curve, best = row["curve"], min(row["curve"], key=lambda mark: mark[1])
        which = "its start" if best[0] == 0 else f"step {best[0]} ({best[1]:.3f})"
        ends = f"{curve[0][1]:.3f} at the start, {curve[-1][1]:.3f} after {curve[-1][0]} steps"
        yield f"\nHeld-out loss of `{row['row']}`, draw {row['draw']}: {ends}; it keeps {which}."
    peaks = {name: [row.get("peak_gib", 0.0) for row in rows if row["row"] == part] for name, part in PEAKS.items()}
    if most := [f"{name} {max(found):.1f} GiB" for name, found in peaks.items() if any(found)]:
        yield f"\nAllocated on the GPU at most, scoring included: {', '.join(most)}."
    missing: dict[str, list[str]] = {}
    for part in parts:
        there = {row.get("draw") for row in rows if row["row"].partition(":")[0] == part}
        lacking = [] if part in ONCE else [str(draw) for draw in draws if draw not in there]
        if not there or lacking:
            missing.setdefault(f" (draw {', '.join(lacking)})" if there else "", []).append(part)
    if missing:
        yield f"\n**Not measured**: {'; '.join(', '.join(names) + which for which, names in missing.items())}."


def place(name: str, parts: Sequence[str]) -> int:
    return parts.index(name) if name in parts else len(parts)


def spread(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.fmean(known):{form}}" + (f" ± {statistics.stdev(known):{form}}" if len(known) > 1 else "")


def summary(trial: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[str]:
    """The most important rows of all cells that hold a port, one line for each score."""
    shown = ("target", "theseus@1", "bico@1", "bico@auto", DISTILLED, "few-shot", "all-data", "fine-tuned source")
    named = " | ".join(shown).replace(DISTILLED, "distill")
    lines = [f"| task | pair | {named} |", "|---" * (len(shown) + 2) + "|"]
    cells: dict[Any, list[dict[str, Any]]] = {}
    for row in [*trial, *rows]:
        if row["samples"] == 100 and "error" not in row:
            cells.setdefault((row["task"], row["pair"].replace(":", " to "), row["lora"]), []).append(row)
    for (task, pair, lora), found in cells.items():
        for key, name, form in (("accuracy", "%", ".1f"), ("bits", "bits", ".2f")):
            texts = []
            for part in shown:
                known = [row[key] for row in found if row["row"] in (part, SAME.get(part)) and row[key] is not None]
                texts.append(f"{statistics.fmean(known):{form}}" if known else "")
            if texts[shown.index("bico@1")]:
                steps = "" if lora == FULL else f" ({lora.partition(' of ')[0]})"
                lines.append(f"| {task}{steps}, {name} | {pair} | {' | '.join(texts)} |")
    return lines
