"""Transfers in steps, for tests: prepare one with its options, look at it, run it, write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset
from tuneport.maps.statistics import Statistics
from tuneport.measure.fitted_heads import with_teacher_scores
from tuneport.measure.samples import Measurement, Samples
from tuneport.methods import Method, Problem, get_method
from tuneport.models.base import Model
from tuneport.models.change import Change
from tuneport.models.heads import Head
from tuneport.pairing import Plan
from tuneport.pipeline import transfer as pipeline
from tuneport.pipeline.estimate import describe
from tuneport.pipeline.run import write_run
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import Result
from tuneport.runtime.forecast import Forecast
from tuneport.runtime.passes import Passes, plan_passes
from tuneport.runtime.resume import Work
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Events, Loss, Sides


@dataclass(frozen=True, eq=False)
class Case:
    """A prepared transfer and its options."""

    setup: pipeline.Setup
    config: TransferConfig

    @property
    def models(self) -> Sides[Model]:
        return self.setup.models

    @property
    def source(self) -> Model:
        return self.setup.models.source

    @property
    def target(self) -> Model:
        return self.setup.models.target

    @property
    def change(self) -> Change:
        return self.setup.change

    @property
    def task_vector(self) -> TaskVector:
        return self.setup.change.vector

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    @property
    def samples(self) -> Samples:
        return self.setup.calibration.samples

    @property
    def losses(self) -> Sides[Loss] | None:
        return self.setup.calibration.losses

    @property
    def heads(self) -> Sides[Head] | None:
        return self.setup.calibration.heads

    @property
    def signals(self) -> frozenset[str]:
        return frozenset(self.setup.calibration.signals)

    @property
    def record(self) -> Mapping[str, Any]:
        return self.setup.about

    @property
    def fits_head(self) -> bool:
        return self.setup.change.fits_head

    @property
    def measurement(self) -> Measurement:
        """What is measured for the method of the options."""
        return self.setup.measurement(self.config, get_method(self.config.method))

    def using(self, **options: Any) -> Case:
        """The same transfer with other options."""
        config = TransferConfig.of(**{**self.config.values(), **options})
        scale = self.setup.scale if config.scale is None else config.scale
        return replace(self, setup=replace(self.setup, scale=scale), config=config)

    def on(self, samples: Samples) -> Case:
        """The same transfer on other samples."""
        calibration = replace(self.setup.calibration, samples=samples)
        return replace(self, setup=replace(self.setup, calibration=calibration))

    def with_scores(self) -> Case:
        """The same transfer with the scores of the fine-tuned source, where a head is fitted."""
        return self.on(with_teacher_scores(self.models, self.change, self.samples))


def prepare(
    source: Any,
    finetuned: Any,
    target: Any,
    data: Any = None,
    *,
    signals: str | Method | Iterable[Any] | None = None,
    **options: Any,
) -> Case:
    """Prepare a transfer; `signals` is a method, or the signals of several."""
    if isinstance(signals, (str, Method)):
        options["method"], signals = signals, None
    config = TransferConfig.of(**options)
    wanted = None if signals is None else frozenset(signals)
    return Case(pipeline.prepare(source, finetuned, target, data, config, signals=wanted), config)


def run(
    case: Case,
    method: str | Method | None = None,
    *,
    passes: Passes | None = None,
    work: Work | None = None,
    events: Events | None = None,
    **options: Any,
) -> Result:
    """Run a prepared transfer, with other options."""
    case = case.using(**options, **({} if method is None else {"method": method}))
    return pipeline.run(case.setup, case.config, passes=passes, work=work, events=events)


def port(
    case: Case,
    out: str | Path,
    *,
    test: Dataset | None = None,
    note: Callable[[str], Any] | None = None,
    progress: Callable[[int], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run a prepared transfer, with other options, and write it."""
    case = case.using(**options)
    return dict(write_run(case.setup, Path(out), case.config, Listener(note, progress), test=test))


class Listener(Events):
    """Calls functions with what a run says."""

    def __init__(
        self,
        note: Callable[[str], Any] | None = None,
        progress: Callable[[int], Any] | None = None,
        mark: Callable[[Any], Any] | None = None,
    ) -> None:
        self._note, self._progress, self._mark = note, progress, mark
        self._solves = False

    def step(self, name: str, units: float = 0.0, count: int = 0) -> None:
        del units, count
        self._solves = name.startswith("solving")  # layers are no samples

    def note(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def advance(self, count: int) -> None:
        if self._progress is not None and not self._solves:
            self._progress(count)

    def mark(self, mark: Any) -> None:
        if self._mark is not None:
            self._mark(mark)


def measured(case: Case, **more: Any) -> Statistics:
    """The statistics of a prepared transfer."""
    return measure(case.measurement, **more)


def problem(case: Case, statistics: Statistics) -> Problem:
    """What the method of a prepared transfer solves."""
    return problem_of(case.measurement, case.task_vector, statistics)


def expected(case: Case, method: str | Method | None = None, *, tested: int = 0, **options: Any) -> dict[str, Any]:
    """What a prepared transfer would do, with other options."""
    case = case.using(**options, **({} if method is None else {"method": method}))
    return describe(case.setup, case.config, tested=tested)


def planned(
    case: Case, budget: int | None, *, method: str | Method | None = None, forecast: Forecast | None = None
) -> Passes:
    """How a prepared transfer is divided within a budget, whatever its options say; a forecast can serve several."""
    case = case if method is None else case.using(method=method)
    return plan_passes(case.measurement, case.task_vector, get_method(case.config.method), budget, forecast)


def passes_for(case: Case, **options: Any) -> Passes:
    """How a prepared transfer is divided, with other options."""
    case = case.using(**options)
    return case.setup.passes(case.config, get_method(case.config.method))
