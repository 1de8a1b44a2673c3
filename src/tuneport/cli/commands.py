"""The commands: each calls one function, and prints what came of it and what to do next.

Heavy imports happen inside, so that help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .. import config as options
from ..config.options import Config
from ..errors import TuneportError
from ..types import FORMATS, METHODS, Events
from .terminal import Bar, as_options, emit_json, note, say, show

if TYPE_CHECKING:
    from ..measure.accuracy import Evaluation

HARM = 3  # the exit code of --fail-on-harm
Record = Mapping[str, Any]


def give(content: Any, json: bool, *lines: str) -> None:
    if json:
        emit_json(content)
    else:
        for line in lines:
            say(line)


def run_together(words: str, device: str, work: Callable[[Events], Any]) -> Any:
    """What the processes that were started together make; all but the first end here, and say nothing."""
    from ..processes import processes

    with processes(device) as here:
        if not here.first:
            work(Events())
            raise typer.Exit
        with Bar(words) as events:
            return work(events)


def upgrade(inputs: options.UpgradeInputs, config: options.UpgradeConfig, json: bool) -> None:
    """Bring a fine-tune to a new base model by the best route."""
    if inputs.list_ is not None:
        _upgrade_list(inputs, config, json)
        return
    from ..pipeline.upgrade import upgrade_to_folder

    record = run_together("upgrading", config.device, lambda events: upgrade_to_folder(inputs.one(), config, events))
    out = record["out"]
    give(record, json, "nothing was written" if out is None else f"written to {out}")
    if json:
        return
    say(record["decision"], prose=True)
    print_routes(record)
    if out is not None:
        if not FORMATS[record["as"]].suffix:
            say(f"report: {Path(out, 'report.html')}; samples to look at: {Path(out, 'disagreements.jsonl')}")
        print_next(record)


def print_routes(record: Record) -> None:
    """Print the table of routes, and then what there is to say of each."""
    from ..report.summary import route_table

    heads, rows = route_table(record)
    show([[f"{name} (chosen)" if name == record["chosen"] else name, *row] for name, *row in rows], *heads)
    for row in record["routes"]:
        if row["note"]:
            say(f"{row['name']}: {as_options(row['note'])}", prose=True)


def _upgrade_list(inputs: options.UpgradeInputs, config: options.UpgradeConfig, json: bool) -> None:
    """Upgrade all fine-tunes of a list; the exit code is 1 if one of them failed."""
    from ..fleet.lines import read_lines

    lines = read_lines(inputs, config)
    from ..fleet.run import upgrade_lines
    from ..fleet.summary import PAGE

    with Bar("upgrading") as events:
        fleet = upgrade_lines(lines, inputs, events)
    if not json:
        heads, rows = fleet.table()
        show([row[:-1] for row in rows], *heads[:-1], fold=True)
        for name, *_, found in rows:
            say(f"{name}: {as_options(found)}", prose=True)
    give(fleet.to_json(), json, fleet.headline, f"report: {Path(inputs.out, PAGE)}")
    if fleet.count("failed"):
        raise typer.Exit(1)


def transfer(inputs: options.TransferInputs, config: options.TransferConfig, json: bool) -> None:
    """Port a fine-tune to a new base model."""
    from ..pipeline.run import run_to_folder

    record = run_together("measuring", config.device, lambda events: run_to_folder(inputs, config, events))
    if json:
        emit_json(record)
    else:
        _print_result(record, config.verbose)
        print_next(record)
    if config.fail_on_harm and record["outcome"] == "harm":
        raise typer.Exit(HARM)


def _print_result(record: Record, verbose: bool) -> None:
    """Print what there is now, how good it is, how sure that is, what to do; with `verbose`, also how it was made."""
    from ..report.summary import score_rows, score_words, summary_rows, written_words

    say(written_words(record))
    say(record["headline"], prose=True)
    if scores := score_rows(record):
        width = max(len(label) for label, _ in scores)
        for label, text in scores:
            say(f"  {label:<{width}}  {text}")
        say(f"  {score_words(record)}")
    say(record["recommendation"], prose=True)
    if verbose:
        for label, text in summary_rows(record):
            say(f"{label:<12} {as_options(text)}")
        if record["scale"]:
            _print_kept(record)
    if not FORMATS[record["as"]].suffix:
        say(f"report: {Path(record['out'], 'report.html')}")


def print_next(record: Record) -> None:
    from ..outputs import output_class

    for line in output_class(record["as"])().next_commands(record):
        say(f"next: {line}")


def _print_kept(record: Record) -> None:
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")


def distill(inputs: options.DistillInputs, config: options.DistillConfig, json: bool) -> None:
    """Let a fine-tuned model teach another one, without labels, and write the student."""
    from ..pipeline.distill import distill_to_folder
    from ..report.summary import distilled_words, written_words

    record = run_together("distilling", config.device, lambda events: distill_to_folder(inputs, config, events))
    taught = f"{distilled_words(record['distilled'])}, in {record['seconds']:.1f} s"
    give(record, json, written_words(record), taught, f"report: {Path(record['out'], 'report.html')}")
    if not json:
        print_next(record)


def extract(inputs: options.ExtractInputs, config: options.ExtractConfig, json: bool) -> None:
    """Write the task vector: fine-tuned minus base, one safetensors file."""
    from ..pipeline.arithmetic import extract_to_file

    with Bar("extracting") as events:
        done = extract_to_file(inputs.base, inputs.finetuned, inputs.out, config, events)
    give(done, json, f"{done['tensors']} tensors, norm {done['norm']:.4g}, written to {inputs.out}")


def apply(inputs: options.ApplyInputs, config: options.ApplyConfig, json: bool) -> None:
    """Write base + scale * task vector as a model folder."""
    from ..pipeline.arithmetic import apply
    from ..task_vectors.stored import stored_task_vector

    with Bar("applying") as events:
        apply(inputs.vector, inputs.base, inputs.out, events=events, **config.values())
    done = {"out": inputs.out, "tensors": len(stored_task_vector(inputs.vector)), "scale": config.scale}
    give(done, json, f"written to {inputs.out}")


def merge(inputs: options.MergeInputs, config: options.MergeConfig, json: bool) -> None:
    """Merge fine-tunes of one base into one: a task vector, an adapter or a model."""
    from ..pipeline.arithmetic import merge

    with Bar("merging") as events:
        record = merge(inputs.finetuned, inputs.out, inputs.base, events=events, **config.values())
    give(record, json, f"{len(inputs.finetuned)} fine-tunes, {record['tensors']} tensors, written to {inputs.out}")


def methods(config: Config, json: bool) -> None:
    """What methods there are, one line each."""
    del config
    names = {name: method.summary for name, method in METHODS.items()}
    give(names, json, *(f"{name:<{max(map(len, names))}} {summary}" for name, summary in names.items()))


def demo(inputs: options.DemoInputs, config: options.DemoConfig, json: bool) -> None:
    """The main job from end to end, offline, on what the package carries: about a minute on two cores."""
    from ..demo import run

    with Bar("preparing") as events:
        done = run.run_demo(Path(inputs.out), seed=config.seed, overwrite=config.overwrite, events=events)
    if not json:
        rows = [(row["model"], f"{row['accuracy']:.1f} %") for row in done["table"]]
        show(rows, "", "accuracy", title="mirrored digits, the larger model")
    give(done, json, f"the ported model: {done['out']}, its report: {done['report']}", f"next: {done['next']}")


def evaluate(inputs: options.EvaluateInputs, config: options.EvaluateConfig, json: bool) -> None:
    """Score models: with their head or by a linear probe; a language model by its loss or its likeliest answers."""
    from ..pipeline.evaluate import evaluate

    if inputs.ask is not None:
        _ask(inputs.ask, inputs, config, json)
        return
    data, more = inputs.data or "", config.values()
    found = run_together(
        "evaluating",
        config.device,
        lambda events: {model: evaluate(model, data, inputs.base, events=events, **more) for model in inputs.model},
    )
    if json:
        about = {"data": inputs.data, "head": config.head}
        rows = [{"model": name, **about, **_plain(result)} for name, result in found.items()]
        emit_json(rows[0] if len(rows) == 1 else {"data": inputs.data, "models": rows})
        return
    for result in found.values():
        if result.cut:
            note(f"{result.cut} of {result.samples} texts are cut; --max-length sets where")
    _print_scores(found)
    if config.by_class:
        _print_classes(found)


def _ask(prompt: str, inputs: options.EvaluateInputs, config: options.EvaluateConfig, json: bool) -> None:
    """Print the answers of the models to one prompt, side by side."""
    from ..pipeline.evaluate import ask

    with Bar("asking") as events:
        found = ask(prompt, inputs.model, inputs.base, events=events, **config.values())
    if json:
        rows = [{"model": name, "answer": each.text, "finished": each.finished} for name, each in found.items()]
        emit_json({"ask": prompt, "answers": rows})
        return
    show([[name, each.text + ("" if each.finished else " ...")] for name, each in found.items()], "", prompt, fold=True)


def _plain(found: Evaluation) -> dict[str, Any]:
    """A score as JSON values, with the interval of the accuracy and the classes."""
    from ..measure.accuracy import share_interval

    values = found.plain()
    if found.by_sample.right is not None:
        low, high = (100 * end for end in share_interval(int(found.by_sample.right.sum()), found.samples))
        values |= {"low": low, "high": high}
        values |= {"by_class": rows} if (rows := found.by_sample.by_class()) else {}
    return values


def _print_scores(found: Mapping[str, Evaluation]) -> None:
    """Lines of one model, or a table of several."""
    from ..report.summary import table_of

    rows = [{"model": name, **_cells(result)} for name, result in found.items()]
    if len(rows) > 1:
        heads, cells = table_of(rows, {key: (key, "") for key in rows[0]})
        show(cells, *heads, fold=True)
        return
    (result,), (row,) = found.values(), rows
    about = f"of {result.samples} samples"
    if row["accuracy"] is not None:
        ends = f"; 95 % interval {row['95 % interval']}" if row["95 % interval"] else ""
        say(f"{row['accuracy']} {about} right ({result.protocol}{ends})")
    if row["perplexity"] is not None:
        bits = f", {row['bits/character']} bits per character" if row["bits/character"] else ""
        say(f"perplexity {row['perplexity']} over {result.tokens} tokens {about}{bits}")


def _cells(found: Evaluation) -> dict[str, str | None]:
    """A score by the columns of a table."""
    values, bits = _plain(found), found.bits_per_character
    return {
        "accuracy": None if found.protocol == "perplexity" else f"{found.accuracy:.2f} %",
        "95 % interval": f"{values['low']:.1f} to {values['high']:.1f}" if "low" in values else None,
        "perplexity": None if found.perplexity is None else f"{found.perplexity:.4g}",
        "bits/character": None if found.perplexity is None or bits is None else f"{bits:.4g}",
        "samples": str(found.samples),
        "protocol": found.protocol,
    }


def _print_classes(found: Mapping[str, Evaluation]) -> None:
    rows = [{item["class"]: item["accuracy"] for item in result.by_sample.by_class()} for result in found.values()]
    if not any(rows):
        raise TuneportError("--by-class needs data with classes.")
    names = dict.fromkeys(name for row in rows for name in row)
    table = [[name, *(f"{row[name]:.1f} %" if name in row else "" for row in rows)] for name in names]
    show(table, "class", *found, fold=True)


def plan(inputs: options.PlanInputs, config: options.PlanConfig, json: bool) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the memory."""
    from ..pipeline.estimate import estimate_shapes, plan

    if config.shapes_only:
        found = estimate_shapes(inputs.source, inputs.target, config)
    else:
        found = plan(**inputs.values(), **config.values())
    for text in found.pop("notes", ()):
        note(text)
    if json:
        emit_json(found)
    elif config.shapes_only:
        _print_shapes(found, config)
    else:
        _print_plan(found, config.layers)


def _print_plan(found: Record, layers: bool) -> None:
    from ..io.sizes import format_bytes
    from ..report.summary import PLAN_COLUMNS, moved_words, plan_rows

    title = f"{found['method']}: {len(found['layers'])} layers"
    if layers:
        rows = [
            [word for side in ("target", "source") for word in (row[side], "{} x {}".format(*row[f"{side}_shape"]))]
            for row in found["layers"]
        ]
        show(rows, "target layer", "shape", "source layer", "shape", title=title, fold=True)
    else:
        show(plan_rows(found["layers"]), *PLAN_COLUMNS, title=title, fold=True)
    say(f"would move: {moved_words(found)}")
    _print_kept(found)
    if "same_tokenizer" in found:
        words = "the models have one tokenizer" if found["same_tokenizer"] else "the tokenizers differ"
        if tokens := found.get("tokens"):
            share = "{target_matched} of the {target_tokens} tokens of the target have a partner".format(**tokens)
            words += f": {share} in the source ({100 * tokens['share']:.0f} %)"
        say(words)
    cost = found["expected"]
    say(
        f"expected: {format_bytes(cost['statistics_bytes'])} of statistics; for the scale and the scores, the source "
        f"answers {cost['answers']['source']} samples and the target {cost['answers']['target']}"
    )
    say("upgrade would try: " + "; ".join(f"{name}{_route_words(row)}" for name, row in found["routes"].items()))
    if "groups" in cost:
        runs = f"{len(cost['groups'])} runs" if len(cost["groups"]) > 1 else "one run"
        if "peak_bytes" in cost:
            say(f"within the memory budget: {runs} over the calibration data, peak {format_bytes(cost['peak_bytes'])}")
        else:
            say(f"{runs} over the calibration data: all statistics at once would take too much of the free memory")
        if cost.get("fetched_bytes"):
            say(
                f"the models are larger: {format_bytes(cost['home_bytes'])} stay in {cost['home']}, and "
                f"{format_bytes(cost['fetched_bytes'])} of weights come from there, block by block"
            )


def _route_words(row: Record) -> str:
    if "why_not" in row:
        return f", not: {as_options(row['why_not'])}"
    written = f" and {row['written']} written ones" if "written" in row else ""
    steps = f" in {row['steps']} steps" if "steps" in row else ""
    steps += f", for up to {row['students']} students" if "students" in row else ""
    return f" on {row['samples']} samples{written}{steps}" if row["samples"] else ""


def _print_shapes(found: Record, config: options.PlanConfig) -> None:
    from ..io.sizes import format_bytes

    rows = []
    for line in found["plans"]:
        sizes = [
            format_bytes(line[name]) if name in line else "" for name in ("peak_bytes", "home_bytes", "fetched_bytes")
        ]
        rows.append([str(line["devices"]), line.get("error") or str(line["runs"]), *sizes])
    columns = ("devices", "runs over the data", "peak of a device", "off the device", "fetched by a device")
    show(rows, *columns, title=f"{found['layers']} layers, {found['samples']} texts of {config.length} tokens")
    if "teaching" in found:
        _print_teaching(found["teaching"], config)


def _print_teaching(found: Record, config: options.PlanConfig) -> None:
    """Memory and hours of the teaching of a LoRA."""
    from ..io.sizes import format_bytes

    rows = []
    for line in found["plans"]:
        hours = [f"{line[name]:.3g}" if name in line else "too small" for name in ("hours", "hours_of_1000")]
        rows.append([str(line["devices"]), format_bytes(line["peak_bytes"]), *hours])
    title = f"teaching a LoRA {found['texts']} texts of {config.length} tokens, scaled from 8B on an {found['gpu']}"
    held = "models in parts" if found["in_parts"] else "both models"
    show(rows, "devices", f"peak of a device, {held}", "hours", "hours of 1,000 adapters", title=title)
