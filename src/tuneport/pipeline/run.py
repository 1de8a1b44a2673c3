"""A transfer whose result is written to files, and that can be resumed after a kill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import DistillConfig, TransferConfig, TransferInputs, UpgradeConfig
from ..data.dataset import Dataset
from ..errors import DataError, TuneportError
from ..io.output import claimed
from ..io.sizes import format_bytes
from ..io.state import StateFile
from ..measure.fitted_heads import with_teacher_scores
from ..measure.unseen import Unseen, unseen
from ..methods import get_method
from ..models.open import path_of
from ..outputs import Output, Update, output_of
from ..processes import by_first, ranks
from ..report.summary import label_words
from ..runtime.budget import passes_of
from ..runtime.passes import Passes
from ..runtime.resume import Work, fingerprint
from ..types import Events, ScaleRule
from .comparison import USUAL, Comparison, Role, check_test, compare, read_test, summarize, usual_test
from .estimate import units_of
from .evaluate import open_written, with_protocol
from .inputs import conditions_of
from .result import Result
from .transfer import Setup, choose_rule, prepare, run


def run_to_folder(inputs: TransferInputs, config: TransferConfig, events: Events | None = None) -> Mapping[str, Any]:
    """Run a transfer, write its result to `inputs.out` and return the run record; a killed run can be resumed.

    What is measured is saved in a hidden folder next to the output, which a finished run removes. Of several processes
    the first writes.
    """
    events = events or Events()
    given = (inputs.source, inputs.finetuned, inputs.target, inputs.data)
    test = read_test(inputs.data, config.columns) if config.evaluate else None
    labelled = test is not None and test.labels is not None  # others are scored without a loss
    out, output = Path(inputs.out), output_of(config)
    with claimed_by_first(out):
        check_out(out, output, config, inputs.source, *inputs.finetuned, inputs.target, inputs.data, config.head)
        setup, untested = prepare(*given, config, tested=labelled or None), ""
        about = with_protocol(setup.about, setup.models.target, inputs.data, config.head, config.columns)
        setup = replace(setup, about=about)
        if config.evaluate is None:
            usual = usual_test(setup.models.target, setup.calibration, inputs.data, config.columns)
            test, untested = (None, usual) if isinstance(usual, str) else (usual, "")
        return write_run(setup, out, config, events, test=test, untested=untested)


def check_out(out: Path, output: Output, config: TransferConfig | DistillConfig | UpgradeConfig, *read: object) -> None:
    """Refuse, before anything is read, an output that cannot be written there."""
    paths = [path_of(place) for place in read if isinstance(place, (str, Path))]
    by_first(lambda: output.check_place(out, config.overwrite or config.resume, inputs=paths))


@contextmanager
def claimed_by_first(out: Path) -> Iterator[None]:
    """Hold the lock of an output in the first process while the block lasts in all of them."""
    with ExitStack() as held:
        by_first(lambda: held.enter_context(claimed(out)))
        yield


@contextmanager
def refused_whole(work: Work) -> Iterator[None]:
    """Remove what a run has saved if its samples cannot bring the task: a resumed run could only say so again."""
    try:
        yield
    except DataError:
        if ranks().first:
            work.remove()
        raise


def write_run(
    setup: Setup,
    out: Path,
    config: TransferConfig,
    events: Events,
    *,
    test: Dataset | None = None,
    untested: str = "",
) -> Mapping[str, Any]:
    """Run a prepared transfer, write its result to `out` and return the run record; use `claimed_by_first`.

    The data `test` are scored; `untested` says why there are none.
    """
    _check(setup, config, output_of(config), test)
    _tell_notes(setup, events)
    on, untested = _to_score(setup, config, test, untested, events)
    method, output, scale = get_method(config.method), output_of(config), choose_rule(setup, config.scale)
    if config.scale is None and isinstance(scale, float):
        events.note("the scale is 1, as in the paper: no sample can be scored to choose it")
    conditions = conditions_of(setup.about, config, method, scale)
    work = Work(out, conditions, config.save_every)
    done = finished(work, output) if config.resume else None
    if done is not None:
        events.note(f"{out} was complete already")
        if on is None or done.get("evaluation", {}).get("samples") == len(on.test):
            return done
        events.step("scoring the test split")
        return _score_finished(setup, out, config, done, on)
    update = Update(setup.models.target, setup.change.vector, fits_head=setup.change.fits_head)
    size = output.size(setup.plan, update, method)
    by_first(lambda: output.check_place(out, config.overwrite, needed_bytes=size))
    by_first(lambda: _resume(work, config.resume, events))
    passes = _passes(setup, config, scale, events)
    units = units_of(setup, config, scale, passes, tested=0 if on is None else len(on.test))
    events.plan(units.whole)
    try:
        ported = result = run(setup, config, passes=passes, work=work, events=events)
        if config.distill is not None:
            lora = config.rank if config.as_ == "adapter" else None
            events.step("distilling", units.distilling, config.distill)
            result = ported.distill(config.distill, lora=lora, events=events, saved=state_file(work))
        found = None
        if on is not None:
            events.step("scoring the test split", units.scoring, units.scored)
            made: dict[Role, Result] = {"port": ported} if ported is result else {"port": ported, "distilled": result}
            outputs = {role: (each.target, output.written(each.update)) for role, each in made.items()}
            samples = ported.setup.calibration if ported.setup is not None else setup.calibration
            given, name = (setup.models, setup.change, samples), setup.about["finetuned"]["name"]
            try:
                found = compare(*given, outputs, on, config, name=name, progress=events.advance)
            except DataError as error:  # the port is not lost for it
                untested = _reason(error, events)
        events.step("writing")
        record = {**result.record, **_outcome(result.record, found, result.scale, scale, untested)}
        written = by_first(lambda: replace(result, record=record).write(out))
    except KeyboardInterrupt:
        if work.exists():
            events.note("what was measured is kept; the same call with `resume=True` continues from it")
        raise
    by_first(work.remove)
    return written


def _check(setup: Setup, config: TransferConfig, output: Output, test: Dataset | None) -> None:
    """Refuse, before a model runs, a transfer whose result could not be written or scored."""
    method, target = get_method(config.method), setup.models.target
    method.check(setup.plan)
    output.check(setup.plan, Update(target, setup.change.vector, fits_head=setup.change.fits_head), method)
    if test is not None:
        check_test(target, setup.calibration, test)
        target.require_in_memory("an evaluation", "evaluate the result afterwards, with 'tuneport evaluate'")
    for model in setup.models if config.distill is not None else ():
        model.require_in_memory("a distillation", "give a larger one, or leave `distill` out")


def _tell_notes(setup: Setup, events: Events) -> None:
    """Tell what a user may not expect."""
    if words := label_words(setup.about):
        events.note(f"{len(setup.calibration.samples)} samples {words}")
    for text in setup.about.get("notes", ()):
        events.note(text)


def _passes(setup: Setup, config: TransferConfig, scale: float | ScaleRule, events: Events) -> Passes | None:
    """The passes that the memory needs, and how much work there is."""
    method = get_method(config.method)
    measurement = setup.measurement(config, method)
    passes = passes_of(measurement, setup.change.vector, method, chooses_scale=isinstance(scale, str))
    runs = 1 if passes is None else len(passes.groups)
    words = f"{runs} runs" if runs > 1 else "one run"
    if passes is not None and config.memory_budget is None:
        events.note(f"{words} over the calibration data: all statistics at once would take too much of the free memory")
    elif passes is not None:
        events.note(f"expected peak {format_bytes(passes.peak_bytes)}, in {words} over the calibration data")
        if passes.fetched_bytes:
            events.note(
                f"the models exceed the memory budget: {format_bytes(passes.fetched_bytes)} of weights are streamed"
            )
    return passes


def _to_score(
    setup: Setup, config: TransferConfig, test: Dataset | None, untested: str, events: Events
) -> tuple[Unseen | None, str]:
    """Choose the test samples that are scored, and say which; where there are none, the reason."""
    if test is None:
        return None, untested
    try:
        on = unseen(setup.models.target, setup.calibration, test, None if config.evaluate else USUAL)
    except TuneportError as error:
        return None, _reason(error, events)
    if on.note:
        events.note(on.note)
    return on, ""


def _reason(error: TuneportError, events: Events) -> str:
    """Say why there are no scores, and return it for the record."""
    reason = str(error).rstrip(".")
    events.note(f"there will be no scores: {reason}")
    return reason


def _score_finished(
    setup: Setup, out: Path, config: TransferConfig, done: dict[str, Any], on: Unseen
) -> Mapping[str, Any]:
    """Score an output that is there already, and write what it has come to into its record, card and report."""
    target, output, scale = setup.models.target, output_of(config), choose_rule(setup, config.scale)
    dtype = next(target.module.parameters()).dtype
    base = None if config.as_ == "model" else done["target"].get("path")
    model = replace(open_written(out, base, device=target.device, dtype=dtype), name=target.name)
    if target.inputs.reader is not None:
        model = model.cut_at(target.inputs.reader.max_length)
    taught = done.get("distilled", {})
    role: Role = "distilled" if taught.get("best") or taught.get("lora") else "port"
    samples = with_teacher_scores(setup.models, setup.change, setup.calibration.samples)
    calibration = replace(setup.calibration, samples=samples)
    name = setup.about["finetuned"]["name"]
    found = compare(setup.models, setup.change, calibration, {role: (model, {})}, on, config, name=name)
    strength = done["scale"] if role == "port" else 1.0
    record = {**done, **_outcome(done, found, strength, scale, "")}
    by_first(lambda: output.rewrite(out, record, target.weights.library))
    return record


def _outcome(
    record: Mapping[str, Any], found: Comparison | None, strength: float, scale: float | ScaleRule, reason: str
) -> dict[str, Any]:
    """What the record says of the scores, and of what the transfer has come to."""
    told = summarize(
        found,
        scale=strength,
        rule=scale if isinstance(scale, str) else None,
        head="head" in record,
        distilled=bool(record.get("distilled", {}).get("best")),
        reason=reason,
    )
    return {**({} if found is None else found.record()), **asdict(told)}


def _resume(work: Work, resume: bool, events: Events) -> None:
    """Check what an unfinished run has saved, or remove it."""
    if resume:
        work.check()
        events.note("continuing what an earlier run has saved" if work.exists() else "nothing to resume: starting over")
    elif work.exists():
        events.note(f"what an unfinished run for {work.out} has measured is dropped; `resume=True` continues from it")
        work.remove()


def state_file(work: Work) -> StateFile:
    """Where a run keeps the state of its distillation."""
    work.make_folder()
    return StateFile(work.training_state, work.conditions, work.every)


def finished(work: Work, output: Output) -> dict[str, Any] | None:
    """The run record of an output that is there already, if the same conditions made it; its work is removed."""

    def read() -> dict[str, Any] | None:
        try:
            record = output.read_record(work.out)
        except (TuneportError, KeyError, ValueError, RecursionError):
            return None
        same = isinstance(record, dict) and record.get("fingerprint") == fingerprint(work.conditions)
        if same:
            work.remove()
        return record if same else None

    return by_first(read)
