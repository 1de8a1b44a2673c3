"""Every rival on the zoo's same-architecture pair (a -> a2), K shots per class: one comparison, written up.

    python -m benchmarks.claims.rivals --shared ../shared --tasks mnist fashion gtsrb cifar10 --out runs/rivals

Tasks and seeds may also be run one by one, into folders of their own, and put together afterwards:

    python -m benchmarks.claims.rivals --merge runs/mnist-0 runs/mnist-1 ... --out benchmarks/results/rivals

Needs the shared zoo and images. Fine-tuning uses the zoo's own learning rate (1e-4). Equal terms: the same samples,
seeds and scale rules for every method; scale `auto` looks at calibration samples only.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.common import load, merge, run_comparison, save
from benchmarks.rows import commit
from paper.schema import Comparison
from paper.tables import RESULTS, Comparing, markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="the folder with zoo/ and data/images/")
    parser.add_argument("--merge", type=Path, nargs="+", help="put saved runs together instead of running")
    parser.add_argument("--tasks", nargs="+", default=["mnist", "fashion", "gtsrb", "cifar10"])
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 5, 10, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--test", type=int, help="test samples at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="of the code, where git cannot tell it")
    parser.add_argument("--machine", help="in words; else the device's name")
    parser.add_argument("--note", help="anything else that a reader must know")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if (options.shared is None) == (options.merge is None):
        parser.error("give --shared, to run, or --merge, to put runs together")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.merge:
        write(merge([load(folder) for folder in options.merge]), options)
        return
    zoo, images = options.shared / "zoo", options.shared / "data/images"
    if not zoo.is_dir():
        sys.exit(f"{options.shared} has no zoo/: this benchmark needs the shared models and data")
    comparison = Comparison(
        source=str(zoo / "a"),
        target=str(zoo / "a2"),
        finetuned={task: str(zoo / f"a-{task}") for task in options.tasks},
        data={task: str(images / f"{task}.npz") for task in options.tasks},
        heads={task: task for task in options.tasks},
        methods=("naive", "transfusion", "gradfix", "gradfix_mean", "theseus", "bico"),
        shots=tuple(options.shots),
        seeds=tuple(options.seeds),
        steps=tuple(options.steps),
        warm_start="bico",
        learning_rate=1e-4,
        test_samples=options.test,
        device=options.device,
    )
    result = run_comparison(
        comparison, stage=lambda name, done, total: print(name, done, total, file=sys.stderr, flush=True)
    )
    write(result, options)


def write(result: Comparing, options: argparse.Namespace) -> None:
    """Save a comparison with how it was made next to the numbers."""
    settings = result.comparison
    words = {
        "tasks": settings.data,
        "shots": settings.shots,
        "seeds": settings.seeds,
        "steps": settings.steps,
    }
    command = "python -m benchmarks.claims.rivals --shared ../shared"
    command += "".join(f" --{name} {' '.join(map(str, values))}" for name, values in words.items())
    command += f" --out {options.out.name}"
    about = {"command": command, "commit": commit()}
    about |= {key: value for key, value in result.about.items() if key != "command"}
    about |= {key: getattr(options, key) for key in ("commit", "machine", "note") if getattr(options, key)}
    result = replace(result, about=about)
    path = save(result, options.out, overwrite=True) / RESULTS
    shared = Path(settings.source).parents[1]  # no machine's folders are in what is published
    path.write_text(path.read_text().replace(f"{shared}/", "../shared/"))
    print(markdown(result))


if __name__ == "__main__":
    main()
