"""Every rival on the zoo's same-architecture pair (a -> a2), K shots per class: one comparison, written up.

    python benchmarks/rivals.py --shared ../shared --tasks mnist fashion gtsrb cifar10 --out benchmarks/results/rivals

Needs the shared zoo and images. Fine-tuning uses the zoo's own learning rate (1e-4). Equal terms: the same samples,
seeds and scale rules for every method; scale `auto` looks at calibration samples only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tuneport.bench import Comparison, compare, markdown, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["mnist", "fashion", "gtsrb", "cifar10"])
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    zoo, images = options.shared / "zoo", options.shared / "data/images"
    if not zoo.is_dir():
        sys.exit(f"{options.shared} has no zoo/: this benchmark needs the shared models and data")
    comparison = Comparison(
        source=str(zoo / "a"),
        target=str(zoo / "a2"),
        finetuned={task: str(zoo / f"a-{task}") for task in options.tasks},
        data={task: str(images / f"{task}.npz") for task in options.tasks},
        heads={task: task for task in options.tasks},
        methods=("naive", "transfusion", "gradfix", "theseus", "bico"),
        shots=tuple(options.shots),
        seeds=tuple(options.seeds),
        steps=tuple(options.steps),
        warm_start="bico",
        learning_rate=1e-4,
        device=options.device,
    )
    result = compare(comparison, stage=lambda name, done, total: print(name, done, total, file=sys.stderr, flush=True))
    save(result, options.out, overwrite=True)
    print(markdown(result))


if __name__ == "__main__":
    main()
