"""A transfer whose result is written to files, and that can be resumed after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import DistillConfig, TransferConfig, TransferInputs, UpgradeConfig
from ..data.dataset import Dataset
from ..errors import DataError, TuneportError
from ..io.output import claimed
from ..io.places import path_of
from ..io.sizes import format_bytes
from ..measure.fitted_heads import with_teacher_scores
from ..measure.unseen import Unseen, unseen
from ..methods import get_method, name_of
from ..models.change import is_whole
from ..outputs import Output, Update, output_of
from ..processes import by_first, ranks
from ..runtime.passes import Costs, Passes
from ..runtime.resume import Work, fingerprint
from ..training.division import FEW, FEW_STUDENTS
from ..training.student import require_lora
from ..types import FORMATS, Events, ScaleRule
from .comparison import USUAL, Comparison, Role, check_test, compare, read_test, summarize, usual_test
from .evaluate import open_written, with_protocol
from .inputs import conditions_of, count_forward_passes
from .samples import SCORED
from .scale import Judge
from .transfer import Result, Setup, prepare, run

TAUGHT = 64  # samples of a step of distillation, as a rule


def run_to_folder(inputs: TransferInputs, config: TransferConfig, events: Events | None = None) -> Mapping[str, Any]:
    """Run a transfer, write its result to `inputs.out` and return the run record; a killed run can be resumed.

    What is measured is saved in a hidden folder next to the output, which a finished run removes. Of several processes
    the first writes.
    """
    given = (inputs.source, inputs.finetuned, inputs.target, inputs.data)
    test: Dataset | str | None = read_test(inputs.data, config.columns) if config.evaluate else None
    labelled = isinstance(test, Dataset) and test.labels is not None  # others are scored without a loss
    out, output = Path(inputs.out), output_of(config)
    with claimed_by_first(out):
        check_out(out, output, config, inputs.source, *inputs.finetuned, inputs.target, inputs.data, config.head)
        signals = get_method(config.method).signals | (SCORED if labelled else frozenset())
        setup = prepare(*given, config, signals=signals, optional=SCORED)
        setup = replace(setup, about=with_protocol(setup.about, setup.models.target, inputs.data, config))
        if config.evaluate is None:
            test = usual_test(setup.models.target, setup.calibration, inputs.data, config.columns)
        return write_run(setup, out, config, events or Events(), test=test)


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


def write_taught(
    work: Work,
    output: Output,
    config: DistillConfig | UpgradeConfig,
    make: Callable[[Work], Mapping[str, Any]],
    size: int = 0,
) -> Mapping[str, Any]:
    """What `make` writes, or the record of a complete output that the same conditions have made."""
    if config.resume and (done := finished(work, output)) is not None:
        return done
    by_first(lambda: output.check_place(work.out, config.overwrite, needed_bytes=size))
    if not config.resume:
        by_first(work.remove)
    try:
        written = make(work)
    except DataError:  # the samples cannot bring the task: a resumed run could only say so again
        if ranks().first:
            work.remove()
        raise
    by_first(work.remove)
    return written


def write_run(
    setup: Setup, out: Path, config: TransferConfig, events: Events, *, test: Dataset | str | None = None
) -> Mapping[str, Any]:
    """Run a prepared transfer, write its result to `out` and return the run record; use `claimed_by_first`.

    The data `test` are scored, or it says why there are none.
    """
    method, output = get_method(config.method), output_of(config)
    update = Update(setup.models.target, setup.change.vector, fits_head=setup.change.fits_head)
    method.check(setup.plan)
    output.check(setup.plan, update, method)
    if config.distill is not None and config.rank is not None:
        require_lora()
    for model in setup.models if config.distill is not None else ():
        model.require_in_memory("a distillation", "give a larger one, or leave `distill` out")
    if isinstance(test, Dataset):
        check_test(setup.models.target, setup.calibration, test)
    for text in setup.notes:
        events.note(text)
    on = _to_score(setup, config, test, events)
    if config.scale is None and setup.rule is None:
        events.note("the scale is 1, as in the paper: no sample can be scored to choose it")
    work = Work(out, conditions_of(setup.about, config, method=name_of(method), scale=setup.scale), config.save_every)
    if config.resume and (done := finished(work, output)) is not None:
        events.note(f"{out} was complete already")
        if isinstance(on, str) or done.get("evaluation", {}).get("sha256") == on.digest:
            return done
        events.step("scoring the test split")
        return _score_finished(setup, out, config, done, on)
    size = output.size(setup.plan, update, method)
    by_first(lambda: output.check_place(out, config.overwrite, needed_bytes=size))
    by_first(lambda: _resume(work, config.resume, events))
    try:
        written = _run_and_write(setup, config, work, on, events)
    except KeyboardInterrupt:
        if work.exists():
            events.note("what was measured is kept; the same call with `resume=True` continues from it")
        raise
    by_first(work.remove)
    return written


def _run_and_write(
    setup: Setup, config: TransferConfig, work: Work, on: Unseen | str, events: Events
) -> Mapping[str, Any]:
    output = output_of(config)
    untested, tested = (on, 0) if isinstance(on, str) else ("", len(on.test))
    passes = _passes(setup, config, events)
    units, distilling, scoring = _units(setup, config, passes, tested=tested)
    events.plan(units)
    ported = result = run(setup, config, passes=passes, work=work, events=events)
    if config.distill is not None:
        events.step("distilling", distilling, config.distill)
        result = ported.distill(config.distill, lora=config.rank, events=events, saved=work.state("training/state"))
    found = None
    if not isinstance(on, str):
        made: dict[Role, Result] = {"port": ported} if ported is result else {"port": ported, "distilled": result}
        models = 1 + len(made) + is_whole(setup.models.source, setup.change, config.exclude)
        events.step("scoring the test split", scoring, tested * models)
        outputs = {role: (each.target, output.new_parameters(each.update)) for role, each in made.items()}
        given, name = (setup.models, setup.change, ported.setup.calibration), setup.about["finetuned"]["name"]
        try:
            found = compare(*given, outputs, on, config, name=name, progress=events.advance)
        except DataError as error:  # the port is not lost for it
            untested = _reason(error, events)
    events.step("writing")
    record = {**result.record, **_outcome(result.record, found, result.scale, setup.rule, untested)}
    return write_result(replace(result, record=record), work.out, events)


def write_result(result: Result, out: Path, events: Events, **options: Any) -> Mapping[str, Any]:
    """Let the first process write a result; give out the notes on what only the writing shows, return the record."""
    record = by_first(lambda: result.write(out, **options))
    for note in record.get("notes", ())[len(result.record.get("notes", ())) :]:
        events.note(note)
    return record


def _passes(setup: Setup, config: TransferConfig, events: Events) -> Passes:
    """The passes that the memory needs, and how much work there is."""
    passes = setup.passes(config, get_method(config.method))
    runs = len(passes.groups)
    words = f"{runs} runs" if runs > 1 else "one run"
    if config.memory_budget is None and runs > 1:
        events.note(f"{words} over the calibration data: all statistics at once would take too much of the free memory")
    elif config.memory_budget is not None:
        events.note(f"expected peak {format_bytes(passes.peak_bytes)}, in {words} over the calibration data")
        if passes.fetched_bytes:
            events.note(
                f"the models exceed the memory budget: {format_bytes(passes.fetched_bytes)} of weights are streamed"
            )
    return passes


def _units(setup: Setup, config: TransferConfig, passes: Passes, *, tested: int) -> tuple[float, float, float]:
    """What a transfer costs as `Costs` counts: all of it, its distillation, and the scores of a test split."""
    measurement, pairs = setup.measurement(config, get_method(config.method)), setup.plan.pairs
    costs, count = Costs.of(measurement), len(setup.calibration.samples)
    asked = count_forward_passes(setup.models.source, setup.change, setup.calibration, config.exclude)
    whole = asked * costs.answer.source + costs.solve(pairs)
    whole += sum(count * costs.measure(group) for group in passes.groups)
    if setup.rule is not None:
        judge, halves = Judge(setup.models.target, setup.calibration, output_of(config)), measurement.halves()
        whole += costs.answer.target * judge.passes * judge.usually * count
        whole += (1 if halves[0] is halves[1] else 2) * costs.solve(pairs)
    steps = (config.distill or 0) * (FEW_STUDENTS if count < FEW else 1)
    distilling = steps * TAUGHT * (costs.answer.source + 3 * costs.answer.target)
    sources, targets = is_whole(setup.models.source, setup.change, config.exclude), 2 + (config.distill is not None)
    scoring = tested * (sources * costs.answer.source + targets * costs.answer.target)
    return whole + distilling + scoring, distilling, scoring


def _to_score(setup: Setup, config: TransferConfig, test: Dataset | str | None, events: Events) -> Unseen | str:
    """Choose the test samples that are scored, and say which; where there are none, the reason."""
    if not isinstance(test, Dataset):
        return test or ""
    try:
        on = unseen(setup.models.target, setup.calibration, test, None if config.evaluate else USUAL)
    except TuneportError as error:
        return _reason(error, events)
    if on.note:
        events.note(on.note)
    return on


def _reason(error: TuneportError, events: Events) -> str:
    """Say why there are no scores, and return it for the record."""
    reason = str(error).rstrip(".")
    events.note(f"there will be no scores: {reason}")
    return reason


def _score_finished(
    setup: Setup, out: Path, config: TransferConfig, done: dict[str, Any], on: Unseen
) -> Mapping[str, Any]:
    """Score an output that is there already, and write what it has come to into its record, card and report."""
    target, output = setup.models.target, output_of(config)
    dtype = next(target.module.parameters()).dtype
    base = None if FORMATS[config.as_].whole else done["target"].get("path")
    model = replace(open_written(out, base, device=target.device, dtype=dtype), name=target.name)
    if target.inputs.reader is not None:
        model = model.cut_at(target.inputs.reader.max_length)
    taught = done.get("distilled", {})
    role: Role = "distilled" if taught.get("best") or taught.get("lora") else "port"
    samples = with_teacher_scores(setup.models, setup.change, setup.calibration.samples)
    calibration = replace(setup.calibration, samples=samples)
    name = setup.about["finetuned"]["name"]
    found = compare(setup.models, setup.change, calibration, {role: (model, {})}, on, config, name=name)
    scale = done["scale"] if role == "port" else 1.0
    record = {**done, **_outcome(done, found, scale, setup.rule, "")}
    by_first(lambda: output.rewrite(out, record, target.weights.library))
    return record


def _outcome(
    record: Mapping[str, Any], found: Comparison | None, scale: float, rule: ScaleRule | None, reason: str
) -> dict[str, Any]:
    """What the record says of the scores, and of what the transfer has come to."""
    distilled = bool(record.get("distilled", {}).get("best"))
    told = summarize(found, scale=scale, rule=rule, head="head" in record, distilled=distilled, reason=reason)
    return {**({} if found is None else found.record()), **asdict(told)}


def _resume(work: Work, resume: bool, events: Events) -> None:
    """Check what an unfinished run has saved, or remove it."""
    if resume:
        work.check()
        events.note("continuing what an earlier run has saved" if work.exists() else "nothing to resume: starting over")
    elif work.exists():
        events.note(f"what an unfinished run for {work.out} has measured is dropped; `resume=True` continues from it")
        work.remove()


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
