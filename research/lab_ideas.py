"""Claim: of forty-two ideas to get more out of the same samples, a few help, and most do not (research/notes/ideas.md).

    python research/lab_ideas.py --root ../shared --out ideas.jsonl [--samples 20 100] [--seeds 0 1 2] [--cells C ...]
    python research/lab_ideas.py --out ideas.jsonl --table

All ideas are tried on one measurement of each cell of the shared zoo, or with --encoders of text: moments of inputs and
output gradients, for each half of the calibration samples. Maps of a shape are solved together, without completion,
and the scales are evaluated together; so numbers differ a little from those of `tuneport transfer`. The scale is chosen
by `tuneport.pipeline.scale`, from maps of one half judged on the
other half. Made for a GPU; says so where the zoo is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import CELLS, FULL, Places
from lab_cell import BICO, Bench, Idea
from lab_study import begin, keep, study_parser

from tuneport.pipeline.scale import Score, choose_scale

IDEAS = [
    BICO,
    Idea("changed views of the samples (bico+)", inputs="X views"),
    Idea("inputs centred", centred=True),
    Idea("centred; six random cotangents in place of labels", gradients="R", centred=True),
    Idea("centred; labels and six random cotangents, same energy", gradients="G+R", centred=True),
    Idea("changed views; labels and random cotangents", inputs="X views", gradients="G+R"),
    Idea("labels of the fine-tuned source in place of true ones", gradients="P"),
    Idea("centred; residual-stream signals pooled half with all blocks", inputs="X pooled", gradients="G pooled",
         centred=True),
    Idea("pooled, with random cotangents", inputs="X pooled", gradients="G+R pooled", centred=True),
    Idea("inputs of base and fine-tuned source", inputs="X both"),
    Idea("directions below a hundredth dropped", into="cut 0.01", out="cut 0.01"),
    Idea("singular values shrunk, s / (s + 0.01)", into="soft 0.01", out="soft 0.01"),
    Idea("attention head by head", into="heads", out="heads"),
    Idea("ridge of target gradients on source gradients, norm kept", out="forward 1", keep_norm=True, centred=True),
    Idea("output ridge, with random cotangents", out="forward 1", gradients="G+R", keep_norm=True, centred=True),
    Idea("functional input map, affine", into="backward 0.1", after="affine", centred=True),
    Idea("functional input map, norm kept", into="backward 0.1", keep_norm=True, centred=True),
    Idea("functional maps on both sides", into="backward 0.1", out="backward 0.1", gradients="G+R", after="affine",
         centred=True),
    Idea("ridge of target inputs on source inputs, norm kept", into="forward 0.1", keep_norm=True, centred=True),
    Idea("entries against the gradient dropped", after="sign"),
    Idea("layers against the gradient dropped", after="gate"),
    Idea("each layer by the cosines of its maps", after="cosine"),
    Idea("each layer's relative effect as in the source", after="effect"),
    Idea("without biases", after="no bias"),
    Idea("with norms' biases", after="norms"),
    Idea("with class and position embeddings", after="embeddings"),
    Idea("change divided among blocks that share a source block", after="split"),
    Idea("rank of each map by cross-validation between halves", into="crossed", out="crossed"),
    Idea("each layer by the agreement of its maps between halves", after="trust"),
    Idea("gradients at the sharpness that suits the samples best", gradients="G sharp"),
    Idea("one map for each hidden space", inputs="X joint", gradients="G joint"),
    Idea("signals half-way, of half the fine-tune and half the transfer", inputs="X mid", gradients="G mid"),
    Idea("the source's change cut to half of its energy", after="half"),
    Idea("attention and MLPs scaled apart, by held-out loss", after="apart"),
    Idea("blocks matched by similarity of what they read", after="depth"),
    Idea("two sources, the mean of their changes", after="two sources"),
    Idea("more data: inputs of 500 further samples without labels", inputs="X unlabelled"),
    Idea("more data: the same, with random cotangents", inputs="X unlabelled", gradients="G+R"),
    Idea("more data: the same 500, labelled by the fine-tuned source", inputs="X unlabelled", gradients="P unlabelled"),
    Idea("oracle: inputs of 2,000 labelled samples", inputs="X all"),
    Idea("oracle: gradients of 2,000 labelled samples", gradients="G all"),
    Idea("oracle: both of 2,000 labelled samples", inputs="X all", gradients="G all"),
]  # fmt: skip


def chosen(row: dict[str, Any]) -> float:
    """The scale by the rule of today, where the held-out losses are there, else that of the run."""
    if "losses" not in row:
        return float(row["chosen"])
    held = {float(s): torch.tensor(values, dtype=torch.float64) for s, values in row["losses"].items()}
    scores = {scale: Score(float(losses.mean()), losses=losses) for scale, losses in held.items()}
    return choose_scale(scores.__getitem__, samples=row["samples"], held_out=True, candidates=tuple(held)).scale


def table(rows: list[dict[str, Any]]) -> str:
    """Gains in points over the target, and against bico at scale 1 with a paired bootstrap interval over cells."""
    random, lines = np.random.default_rng(0), []
    for samples in sorted({row["samples"] for row in rows}):
        here = [row for row in rows if row["samples"] == samples]
        cells = sorted({row["cell"] for row in here})
        draws = random.integers(0, len(cells), (10_000, len(cells)))
        seeds = len({row["seed"] for row in here})
        lines += [
            f"| N = {samples}, {len(cells)} cells, {seeds} draws each | scale 1 | against bico | chosen | share "
            "| against bico | worst cell | best |",
            "|---|---|---|---|---|---|---|---|",
        ]

        def gains(idea: str, value: Any, here: Any = here, cells: Any = cells) -> np.ndarray[Any, Any]:
            found = [[value(r) - r["accuracy"]["0.0"] for r in here if (r["cell"], r["idea"]) == (cell, idea)]
                     for cell in cells]  # fmt: skip
            return np.array([np.mean(values) if values else np.nan for values in found])

        def words(values: np.ndarray[Any, Any], draws: Any = draws) -> str:
            low, high = np.nanpercentile(np.nanmean(values[draws], 1), [2.5, 97.5])
            return f"{np.nanmean(values):+.1f} ({low:+.1f} to {high:+.1f})"

        own = [np.mean([r["accuracy"]["0.0"] for r in here if r["cell"] == cell]) for cell in cells]
        room = np.array([FULL[tuple(cell.split(":")[1:])] for cell in cells]) - np.array(own)  # type: ignore[index]
        base = gains("bico", lambda r: r["accuracy"]["1.0"])
        for name in dict.fromkeys(row["idea"] for row in here):
            one = gains(name, lambda r: r["accuracy"]["1.0"])
            picked = gains(name, lambda r: r["accuracy"][str(chosen(r))])
            best = gains(name, lambda r: max(r["accuracy"].values()))
            lines.append(
                f"| {name} | {np.nanmean(one):+.1f} | {words(one - base)} | {np.nanmean(picked):+.1f} "
                f"| {100 * np.nanmean(picked / room):.0f} % | {words(picked - base)} | {np.nanmin(picked):+.1f} "
                f"| {np.nanmean(best):+.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--encoders", type=Path, help="the folder with text encoders")
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", default=[":".join(cell) for cell in CELLS], help="source:target:task")
    parser.add_argument("--ideas", nargs="+", default=[], help="only those with one of these words in their names")
    parser.add_argument("--test", type=int, default=1000, help="test samples at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options, rows = begin(parser, table)
    places = Places(options.root, options.encoders)
    wanted = [idea for idea in IDEAS if not options.ideas or any(word in idea.name for word in options.ideas)]
    done = {(r["cell"], r["samples"], r["seed"], r["idea"]) for r in rows}
    for seed in options.seeds:
        for samples in options.samples:
            for cell in options.cells:
                left = [idea for idea in wanted if (cell, samples, seed, idea.name) not in done]
                if not left:
                    continue
                about = {"cell": cell, "samples": samples, "seed": seed}
                bench = Bench(places, cell, samples, seed, options.device, options.test)
                found = [{**about, **row} for row in bench.rows(left)]
                keep(options.out, found)
                print(*about.values(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
