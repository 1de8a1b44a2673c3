"""Ablations: arms with one thing changed, whose rows beside those of the plain arm show what it brings.

They change what no option changes, so they reach into tuneport; no other part of the benchmarks does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, eq=False)
class Ablation:
    """An arm with one thing changed.

    Args:
        arm: the plain one.
        options: of tuneport, in place of the plain ones.
        generator: the model that writes, by its name among the models.
        changed: a context in which tuneport does something otherwise.
    """

    arm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    generator: str | None = None
    changed: Callable[[], AbstractContextManager[object]] = nullcontext


def _unjudged(*, duplicates: bool = False) -> AbstractContextManager[object]:
    """Written texts are kept whatever the old model's doubt and a probe say, with `duplicates` also near duplicates."""
    from tuneport.synthetic import collect, filters, samples

    def kept(generator: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        options |= {"judges": ()} | ({"filters": [filters.form(prompts)]} if duplicates else {})
        return collect.collect(generator, prompts, *rest, **options)

    return patch.object(samples, "collect", kept)


def _by_text() -> AbstractContextManager[object]:
    """Models with one tokenizer are taken for models with two: what the old model writes is taught, not its doubts."""
    from tuneport.models.tokenizer import Reader

    return patch.object(Reader, "same_tokens", lambda *_: False)


ABLATIONS = {
    "distill-by-text": Ablation("distill", changed=_by_text),
    "synthetic-unjudged": Ablation("synthetic", changed=_unjudged),
    "synthetic-unfiltered": Ablation("synthetic", changed=partial(_unjudged, duplicates=True)),
    **{f"synthetic-{count}": Ablation("synthetic", {"synthetic": count}) for count in (250, 500, 1000, 4000)},
    **{
        f"synthetic-by-{name}": Ablation("synthetic", generator=name)
        for name in ("smollm2-135m", "gemma3-270m", "qwen-coder-0.5b", "qwen-coder-1.5b")
    },
}
STARTS = {"distill-ported": True, "distill-unported": False}  # whether a student begins at the port, come what may
WRITTEN = tuple(name for name, each in ABLATIONS.items() if each.arm == "synthetic")


@cache
def of(arm: str) -> Ablation:
    """The ablation of that name; a plain arm changes nothing."""
    return ABLATIONS.get(arm) or Ablation(arm)


@contextmanager
def every_route(begin: bool | None = None) -> Iterator[dict[str, Any]]:
    """The results of all routes of an upgrade, which gives that of the chosen one alone.

    With `begin`, a student begins at the port or at the target whichever is better.
    """
    from tuneport.pipeline.upgrade import _Routes

    made: dict[str, Any] = {}
    take, teach = _Routes.take, _Routes._teach

    def taken(self: Any, name: str, *rest: Any) -> Any:
        made[name] = take(self, name, *rest)
        return made[name]

    def taught(self: Any, name: str, lessons: Any, port: Any, helps: bool) -> Any:
        return teach(self, name, lessons, port, helps if begin is None else begin)

    with patch.multiple(_Routes, take=taken, _teach=taught):
        yield made
