"""Commands on models: `distill`, `evaluate`, `extract`, `apply` and `merge`. Each calls one public function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import config as options
from ..errors import TuneportError
from .terminal import Bar, emit_json, listening, note, say, show
from .transfer import print_next

if TYPE_CHECKING:
    from ..measure.accuracy import Evaluation


def extract(inputs: options.ExtractInputs, config: options.ExtractConfig, json: bool) -> None:
    """Write the task vector: fine-tuned minus base, one safetensors file."""
    from ..pipeline.arithmetic import extract_to_file

    with Bar("extracting") as events:
        done = extract_to_file(inputs.base, inputs.finetuned, inputs.out, config, events)
    if json:
        emit_json(done)
    else:
        say(f"{done['tensors']} tensors, norm {done['norm']:.4g}, written to {inputs.out}")


def apply(inputs: options.ApplyInputs, config: options.ApplyConfig, json: bool) -> None:
    """Write base + scale * task vector as a model folder."""
    from ..pipeline.arithmetic import apply
    from ..task_vectors.vector import load_task_vector

    with Bar("applying") as events:
        apply(inputs.vector, inputs.base, inputs.out, events=events, **config.values())
    if json:
        emit_json({"out": inputs.out, "tensors": len(load_task_vector(inputs.vector)), "scale": config.scale})
    else:
        say(f"written to {inputs.out}")


def merge(inputs: options.MergeInputs, config: options.MergeConfig, json: bool) -> None:
    """Merge fine-tunes of one base into one: a task vector, an adapter or a model."""
    from ..pipeline.arithmetic import merge

    with Bar("merging") as events:
        record = merge(inputs.finetuned, inputs.out, inputs.base, events=events, **config.values())
    if json:
        emit_json(record)
    else:
        say(f"{len(inputs.finetuned)} fine-tunes, {record['tensors']} tensors, written to {inputs.out}")


def distill(inputs: options.DistillInputs, config: options.DistillConfig, json: bool) -> None:
    """Let a fine-tuned model teach another one, without labels, and write the student."""
    from ..pipeline.distill import distill_to_folder
    from ..processes import processes
    from ..report.summary import distilled_words, written_words

    with processes(config.device) as here, listening("distilling", here.first) as events:
        record = distill_to_folder(inputs, config, events)
    if not here.first:
        return
    if json:
        emit_json(record)
        return
    say(written_words(record))
    say(f"{distilled_words(record['distilled'])}, in {record['seconds']:.1f} s")
    say(f"report: {Path(record['out'], 'report.html')}")
    print_next(record)


def evaluate(inputs: options.EvaluateInputs, config: options.EvaluateConfig, json: bool) -> None:
    """Score models: with their head or by a linear probe; a language model by its loss or its likeliest answers."""
    from ..pipeline.evaluate import evaluate
    from ..processes import processes

    if inputs.ask is not None:
        _ask(inputs.ask, inputs, config, json)
        return
    assert inputs.data is not None
    found: dict[str, Evaluation] = {}
    with processes(config.device) as here:
        for model in inputs.model:
            with listening("evaluating", here.first) as events:
                found[model] = evaluate(model, inputs.data, inputs.base, events=events, **config.values())
    if not here.first:
        return
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
    if len(found) > 1:
        table = {name: _cells(result) for name, result in found.items()}
        columns = list(dict.fromkeys(column for row in table.values() for column in row))
        rows = [[name, *(row.get(column, "") for column in columns)] for name, row in table.items()]
        show(rows, "model", *columns, fold=True)
        return
    for result in found.values():
        cells = _cells(result)
        about = f"of {result.samples} samples"
        if "accuracy" in cells:
            ends = f"; 95 % interval {cells['95 % interval']}" if "95 % interval" in cells else ""
            say(f"{cells['accuracy']} {about} right ({result.protocol}{ends})")
        if "perplexity" in cells:
            bits = f", {cells['bits/character']} bits per character" if "bits/character" in cells else ""
            say(f"perplexity {cells['perplexity']} over {result.tokens} tokens {about}{bits}")


def _cells(found: Evaluation) -> dict[str, str]:
    """A score by the columns of a table that it has."""
    values, cells = _plain(found), {}
    if found.protocol != "perplexity":
        cells["accuracy"] = f"{found.accuracy:.2f} %"
        if "low" in values:
            cells["95 % interval"] = f"{values['low']:.1f} to {values['high']:.1f}"
    if found.perplexity is not None:
        cells["perplexity"] = f"{found.perplexity:.4g}"
        if found.bits_per_character is not None:
            cells["bits/character"] = f"{found.bits_per_character:.4g}"
    return {**cells, "samples": str(found.samples), "protocol": found.protocol}


def _print_classes(found: Mapping[str, Evaluation]) -> None:
    rows = [{item["class"]: item["accuracy"] for item in result.by_sample.by_class()} for result in found.values()]
    if not any(rows):
        raise TuneportError("--by-class needs data with classes.")
    names = dict.fromkeys(name for row in rows for name in row)
    table = [[name, *(f"{row[name]:.1f} %" if name in row else "" for row in rows)] for name in names]
    show(table, "class", *found, fold=True)
