"""Which scale the rules take for ports of small vision towers, by which candidates, and what it is worth.

    python -m benchmarks.claims.rules --shared ../shared --rows benchmarks/results/rules.jsonl

Samples and the images that score a port are of the training split, by a draw that no table uses, so that rules may be
chosen by them. Also how much of each base is left in each fine-tune. The tables are in benchmarks/results/ablations.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import tuneport
from benchmarks.rows import add_row, commit, rows_in
from benchmarks.skill.towers import GRID, Tower, read
from tuneport.models.change import change_of
from tuneport.models.open import open_model
from tuneport.pipeline import scale
from tuneport.pipeline.inputs import relation

DRAW, SCORED = 10, 250  # images
FINER = tuple(sorted({*scale.SCALES, 0.125, 0.375, 0.75}))
CANDIDATES = {"": scale.SCALES, ", finer": FINER, ", up to 1": tuple(each for each in scale.SCALES if each <= 1)}


def port(shared: Path, pair: str, task: str, count: int) -> dict[str, Any]:
    """Port once, judge every candidate on the samples, and score the scales that the rules take on other images."""
    (source, target), zoo, kept = pair.split(">"), shared / "zoo", scale.choose_scale
    images, labels = read(shared, task).draw(DRAW, count + SCORED)
    judged: list[Mapping[float, scale.Score]] = []

    def choose(*score: Any, **options: Any) -> scale.ScaleChoice:
        judged.append((found := kept(*score, **options)).scores)
        return found

    with tempfile.TemporaryDirectory() as place, patch.multiple(scale, SCALES=FINER, choose_scale=choose):
        np.savez(data := Path(place) / "own.npz", x_train=images[:count])
        folders = [str(zoo / name) for name in (source, f"{source}-{task}", target)]
        options: dict[str, Any] = {"labels": "source", "head": task, "seed": DRAW, "samples": count, "device": "cpu"}
        result = tuneport.transfer(*folders, str(data), **options)
    tower, taken = Tower(zoo / target, zoo / target / f"heads/{task}.safetensors", "cpu"), taken_by_rules(judged[0])
    base = {name: tensor.clone() for name, tensor in tower.module.state_dict().items()}
    scored = {}
    for at in {0.0, 1.0, *taken.values()}:
        tower.module.load_state_dict(base | {name: tensor.float() for name, tensor in result.tensors(at).items()})
        scored[at] = round(100 * float(np.mean(tower.right((images[count:], labels[count:])))), 2)
    found = {rule: [at, scored[at]] for rule, at in taken.items()}
    return {"pair": pair, "task": task, "n": count, "target": scored[0.0], "one": scored[1.0], "taken": found}


def taken_by_rules(judged: Mapping[float, scale.Score]) -> dict[str, float]:
    """The scale that each rule takes among some of the candidates that were judged."""

    def taken(rule: Any, some: tuple[float, ...]) -> float:
        return scale.choose_scale(judged.__getitem__, samples=0, held_out=True, candidates=some, rule=rule).scale

    return {f"{rule}{name}": taken(rule, some) for rule in scale.RULES for name, some in CANDIDATES.items()}


def left(zoo: Path, of: str, tuned: str, base: str) -> dict[str, Any]:
    """How much of a base is left in a fine-tune, that of another one or its own."""
    model = open_model(zoo / base)
    weights = [layer.weight for layer in model.architecture.layers]
    share = relation(model.stored_parameters(), change_of(model, str(zoo / tuned)), weights)[1]
    return {"base": base, "tuned": tuned, "of": of, "left": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    known = {tuple(row.get(key) for key in ("pair", "task", "n", "tuned", "base")) for row in rows_in(options.rows)}
    tuned = [(pair.partition(">")[0], task) for pair in ("a>a2", "c>a") for task in GRID[pair]]
    for source, task in tuned:
        for base in ("a", "a2") if source == "a" else ("c",):  # those of its shapes
            if (None, None, None, f"{source}-{task}", base) not in known:
                row = left(options.shared / "zoo", source, f"{source}-{task}", base)
                add_row(options.rows, {**row, "commit": commit()})
    for count, (pair, tasks) in product((100, 20), GRID.items()):
        for task in tasks:
            if (pair, task, count, None, None) not in known:
                add_row(options.rows, {**port(options.shared, pair, task, count), "commit": commit()})


if __name__ == "__main__":
    main()
