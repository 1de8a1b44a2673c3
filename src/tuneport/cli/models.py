"""Commands on one model: `extract`, `apply`, `merge`, `evaluate` and `distill`.

Each checks its output path before it opens a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TuneportError
from ..types import Blocks
from .options import (
    AcceptUnlikely,
    AdapterDtype,
    As,
    Columns,
    Device,
    DtypeName,
    Energy,
    Exclude,
    HeadName,
    Json,
    MaxLength,
    Overwrite,
    Rank,
    Resume,
    SamplerName,
    Samples,
    SaveEvery,
    Seed,
    TrustRemoteCode,
    UniformRank,
    check_usage,
    parse_columns,
    parse_numbers,
)
from .terminal import emit_json, note, progress, say, show, watched
from .transfer import next_commands

if TYPE_CHECKING:
    from ..measure.accuracy import Evaluation


def extract(
    base: Annotated[str, typer.Argument(help="The base model: folder or weight file.")],
    finetuned: Annotated[str, typer.Argument(help="The fine-tuned model.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The task-vector file to write (.safetensors).")],
    exclude: Exclude = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the task vector: fine-tuned minus base, one safetensors file."""
    from ..io.output import check_new_file
    from ..models.open import path_of
    from ..pipeline import change
    from ..task_vectors.vector import save_task_vector

    check_new_file(out, overwrite, inputs=[path_of(base), path_of(finetuned)])
    vector = change.extract(base, finetuned, exclude=exclude or ())
    if exclude and (words := change.exclude_note(exclude, *map(change.names_of, (base, finetuned)))):
        note(words)
    about = {"base": base, "finetuned": finetuned, "base_fingerprint": change.fingerprint_of(base)}
    norm = save_task_vector(out, vector, about, overwrite=overwrite)
    if json:
        emit_json({"out": out, "tensors": len(vector), "norm": norm})
    else:
        say(f"{len(vector)} tensors, norm {norm:.4g}, written to {out}")


def apply(
    vector: Annotated[str, typer.Argument(metavar="TAU", help="A task-vector file.")],
    base: Annotated[str, typer.Argument(help="The model it belongs to.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to write.")],
    scale: Annotated[float, typer.Option(help="Strength.")] = 1.0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write base + scale * task vector as a model folder."""
    from ..io.output import check_new_folder
    from ..models.open import path_of
    from ..pipeline import change
    from ..task_vectors.vector import load_task_vector

    check_new_folder(out, overwrite, inputs=[vector, path_of(base)])
    loaded = load_task_vector(vector)
    change.apply(vector, base, out, scale=scale, overwrite=overwrite)
    if words := change.other_base_note(vector, base):
        note(words)
    if json:
        emit_json({"out": out, "tensors": len(loaded), "scale": scale})
    else:
        say(f"written to {out}")


def merge(
    finetuned: Annotated[list[str], typer.Argument(help="Task vectors, adapters or fine-tuned models of one base.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The file or folder to write.")],
    base: Annotated[str | None, typer.Option(help="Their base; the one that they name unless given.")] = None,
    weights: Annotated[str | None, typer.Option(help="A factor for each, separated by commas; 1 unless given.")] = None,
    rule: Annotated[str, typer.Option(help="sum, ties, dare or dare-ties.")] = "sum",
    density: Annotated[float, typer.Option(help="The share of entries that ties and dare keep.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the entries that dare keeps.", min=0, max=2**31 - 1)] = 0,
    as_: As = "task-vector",
    rank: Rank = None,
    energy: Energy = None,
    uniform_rank: UniformRank = False,
    adapter_dtype: AdapterDtype = "float32",
    accept_unlikely: AcceptUnlikely = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Merge fine-tunes of one base into one: a task vector, an adapter or a model."""
    check_usage(locals())
    from ..pipeline.merge import merge_finetunes
    from ..task_vectors.lora_write import AdapterForm

    form = AdapterForm(rank, energy, uniform_rank, adapter_dtype)
    form.check()
    record = merge_finetunes(
        finetuned,
        out,
        base=base,
        weights=None if weights is None else parse_numbers("weights", weights),
        rule=rule,
        density=density,
        seed=seed,
        kind=as_,
        form=form,
        accept_unlikely=accept_unlikely,
        overwrite=overwrite,
    )
    for words in record.get("notes", ()):
        note(words)
    if json:
        emit_json(record)
    else:
        say(f"{len(finetuned)} fine-tunes, {record['tensors']} tensors, written to {out}")


def evaluate(
    model: Annotated[list[str], typer.Argument(help="A model, or an adapter or task vector of one; or several.")],
    data: Annotated[str, typer.Option(help="Labelled data; the test split is scored.")],
    base: Annotated[
        str | None, typer.Option(help="The model of an adapter or task vector; the one that it names unless given.")
    ] = None,
    head: HeadName = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="zero-shot, linear-probe, perplexity or likelihood; else by the model and the data."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Linear probe: training samples (all unless given).")] = None,
    seed: Seed = 0,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per pass through the model (128; 16 for language models).", min=1)
    ] = None,
    by_class: Annotated[bool, typer.Option("--by-class", help="Also show the accuracy of each class.")] = False,
    columns: Columns = None,
    max_length: MaxLength = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Score models: with their head or by a linear probe; a language model by its loss or its likeliest answers."""
    asked = SimpleNamespace(**locals())
    from ..measure.accuracy import check_protocol

    asked.chosen = chosen = None if protocol is None else check_protocol(protocol)
    if samples is not None and chosen != "linear-probe":
        words = f"{chosen} scores" if chosen else "the others score"
        raise TuneportError(f"--samples goes with --protocol linear-probe; {words} the whole test split.")
    found = {name: _score(name, asked) for name in model}
    if json:
        rows = [{"model": name, "data": data, "head": head, **_plain(result)} for name, result in found.items()]
        emit_json(rows[0] if len(rows) == 1 else {"data": data, "models": rows})
        return
    for result in found.values():
        if result.cut:
            note(f"{result.cut} of {result.samples} texts are cut; --max-length sets where")
    _print_scores(found)
    if by_class:
        _print_classes(found)


def _score(model: str, asked: SimpleNamespace) -> Evaluation:
    """The score of one model on the test split, under the protocol that is asked for or fits."""
    from ..data.dataset import align_labels
    from ..data.samplers import select
    from ..data.tasks import read_data
    from ..measure import accuracy as evaluation
    from ..measure import language
    from ..models.heads import choose_head
    from ..models.open import pick_device
    from ..pipeline.written import open_written

    data, named = asked.data, parse_columns(asked.columns)
    test = read_data(data, "test", labelled=False, columns=named)
    device = pick_device(asked.device)
    opened = open_written(model, asked.base, device=device, trust_remote_code=asked.trust_remote_code)
    opened = opened.cut_at(asked.max_length)
    chosen = asked.chosen or language.usual_protocol(opened, test, asked.head)
    if chosen == "zero-shot" and asked.head is None and opened.logits is not None:
        evaluation.check_counted(opened, choose_head(opened, None, test))
    if chosen != "perplexity" and test.labels is None:
        read_data(data, "test", columns=named)  # the error says what is missing
    total = len(test)
    if chosen == "zero-shot":
        scorer = choose_head(opened, asked.head, test)
        align_labels(test, scorer.classes)
        score = partial(evaluation.zero_shot, opened, scorer, test)
    elif chosen == "perplexity":
        score = partial(language.perplexity, opened, test)
    elif chosen == "likelihood":
        score = partial(language.likelihood, opened, test)
    else:
        train = read_data(data, "train", columns=named)
        if asked.samples is not None:
            train = train.subset(select(train, samples=asked.samples, seed=asked.seed))
        score = partial(evaluation.linear_probe, opened, train, test)
        total += len(train)
    with progress("evaluating", total) as advance:
        size = asked.batch_size or (16 if chosen in ("perplexity", "likelihood") else 128)
        return score(batch_size=size, progress=advance)


def _plain(found: Evaluation) -> dict[str, Any]:
    """A score as JSON values, with the interval of the accuracy and the classes."""
    from ..measure.chance import share_interval

    values = found.plain()
    if found.right is not None:
        low, high = (100 * end for end in share_interval(int(found.right.sum()), found.samples))
        values |= {"low": low, "high": high}
        values |= {"by_class": rows} if (rows := found.by_class()) else {}
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
    rows = [{item["class"]: item["accuracy"] for item in result.by_class()} for result in found.values()]
    if not any(rows):
        raise TuneportError("--by-class needs data with classes.")
    names = dict.fromkeys(name for row in rows for name in row)
    table = [[name, *(f"{row[name]:.1f} %" if name in row else "" for row in rows)] for name in names]
    show(table, "class", *found, fold=True)


def distill(
    finetuned: Annotated[
        str, typer.Option(help="The teacher: a fine-tuned model, or an adapter or task-vector file with --source.")
    ],
    target: Annotated[str, typer.Option(help="The student: any model that reads the same kind of samples.")],
    data: Annotated[str, typer.Option(help="Data without labels, or with labels that are not used.")],
    out: Annotated[str, typer.Option(help="Where the taught student goes; must not exist.")],
    source: Annotated[str | None, typer.Option(help="The base of an adapter or a task-vector file.")] = None,
    steps: Annotated[int, typer.Option(help="Updates of the student.", min=1)] = 300,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest; by the student's width if not given.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of an update; fewer are faster on a CPU.", min=2)
    ] = None,
    lora: Annotated[int | None, typer.Option(help="Train a LoRA of this rank, and write an adapter.", min=1)] = None,
    blocks: Annotated[Blocks, typer.Option(help="Train all blocks, or the last ones: quicker, for images.")] = "all",
    samples: Samples = None,
    sampler: SamplerName = "random",
    seed: Seed = 0,
    head: HeadName = None,
    device: Device = "auto",
    dtype: DtypeName = "float32",
    resume: Resume = False,
    save_every: SaveEvery = 60.0,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Let a fine-tuned model teach another one, without labels, and write the student."""
    from ..io.output import check_new_folder
    from ..models.open import path_of
    from ..pipeline.lesson import prepare_lesson, run_lesson
    from ..report.summary import distilled_words
    from ..training.distill import Lesson

    inputs = [path_of(path) for path in (finetuned, target, data, source, head) if path]
    check_new_folder(out, overwrite or resume, inputs=inputs)
    prepared = prepare_lesson(
        finetuned,
        target,
        data,
        Lesson(steps, learning_rate, lora, seed, batch_size, blocks),
        source=source,
        head=head,
        samples=samples,
        sampler=sampler,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    places = {"overwrite": overwrite, "resume": resume}
    with watched("distilling", steps) as (advance, watch):
        record = run_lesson(prepared, out, **places, save_every=save_every, progress=advance, watch=watch)
    if json:
        emit_json(record)
        return
    say(f"{distilled_words(record['distilled'])}, in {record['seconds']:.1f} s")
    say(f"written to {out}, report in report.html")
    for command in next_commands(prepared.samples.models.target, record, data, head):
        say(f"next: {command}")
