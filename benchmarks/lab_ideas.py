"""Claim: of thirty ideas to get more out of the same samples, a few help, and most do not (docs/lab/ideas.md).

    python benchmarks/lab_ideas.py --root ../shared --out ideas.jsonl [--samples 20 100] [--seeds 0 1 2] [--cells C ...]
    python benchmarks/lab_ideas.py --out ideas.jsonl --table

All ideas are tried on one measurement of each cell of the shared zoo, or with --encoders of text: moments of inputs and
output gradients, for each half of the calibration samples. Maps of a shape are solved together, without completion,
and the scales are evaluated together; so numbers differ a little from those of `tuneport transfer`. The scale is chosen
by `tuneport.scaling`, from maps of one half judged on the other. Made for a GPU; says so where the zoo is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import CELLS, FULL, TEXTS, Places
from lab_maps import Maps, Moments, Sums, joined, pooled, with_units
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tuneport.capture import measure
from tuneport.crossfit import halves
from tuneport.data import align_labels
from tuneport.evaluation import encoded
from tuneport.families import Head, choose_head
from tuneport.methods.base import matrix_of
from tuneport.preparation import Job, prepare
from tuneport.rehearsal import views_of
from tuneport.scaling import SCALES, Score, choose_scale, score_of_classes
from tuneport.task_vector import as_dense
from tuneport.tasks import read_data

READS = ("q_proj", "fc1", "self.query", "intermediate.dense")  # the residual stream
WRITES = ("out_proj", "fc2", "output.dense")
HEADS = ("q_proj", "k_proj", "v_proj", ".query", ".key", ".value")  # what comes out by heads
AFTER_HEADS = ("out_proj", "attention.output.dense")
COTANGENTS, UNLABELLED, ALL = 6, 500, 2000


@dataclass(frozen=True)
class Idea:
    """How both maps are made, from which sums, and what happens to the result."""

    name: str
    into: str = "orthogonal"
    out: str = "orthogonal"
    inputs: str = "X"
    gradients: str = "G"
    centred: bool = False
    keep_norm: bool = False
    after: str = ""


IDEAS = [
    Idea("bico"),
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
    Idea("more data: inputs of 500 further samples without labels", inputs="X unlabelled"),
    Idea("more data: the same, with random cotangents", inputs="X unlabelled", gradients="G+R"),
    Idea("more data: the same 500, labelled by the fine-tuned source", inputs="X unlabelled", gradients="P unlabelled"),
    Idea("oracle: inputs of 2,000 labelled samples", inputs="X all"),
    Idea("oracle: gradients of 2,000 labelled samples", gradients="G all"),
    Idea("oracle: both of 2,000 labelled samples", inputs="X all", gradients="G all"),
]  # fmt: skip


class Bench(nn.Module):
    """One cell: the job, its two halves, its test samples, and the target under any change of weights."""

    def __init__(self, places: Places, cell: str, samples: int, seed: int, device: str, tested: int) -> None:
        super().__init__()
        source, target, task = cell.split(":")
        models = (places.model(source), places.model(f"{source}-{task}"), places.model(target))
        data, options = places.data(task), {"seed": seed, "device": device, "scored": True}
        options["sampler"] = "class_balanced" if task in TEXTS else "random"
        self.job: Job = prepare(*models, data, samples=samples, batch_size=(samples + 1) // 2, **options)  # type: ignore[arg-type]
        options |= {"batch_size": 250, "sampler": "random"}
        rest = (self.job.source, models[1], self.job.target, data)
        self.unlabelled = prepare(*rest, samples=UNLABELLED, **{**options, "seed": seed + 100})  # type: ignore[arg-type]
        self.all = prepare(*rest, samples=ALL, **{**options, "seed": 1000})  # type: ignore[arg-type]
        self.module, self.text = self.job.target.module, task in TEXTS
        for tower in (self.module, self.job.source.module):
            tower.config._attn_implementation = "eager"
        self.folds = list(self.job.batches)
        train, test = read_data(data, "train"), read_data(data, "test")
        assert self.job.target_head is not None
        self.head: Head = self.job.target_head
        self.source_head = choose_head(self.job.source, None, train.name, train.classes, train.prompts, ())
        test = align_labels(test, self.head.classes)
        some = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[:tested]))
        self.test = [(batch, labels.to(device)) for batch, labels in encoded(self.job.target, some, 250)]
        self.base = {name: tensor.detach().clone() for name, tensor in self.module.named_parameters()}
        sides = (self.job.source.module.config, self.module.config)
        self.heads = (sides[0].num_attention_heads, sides[1].num_attention_heads)
        readers = Counter(pair.source.name for pair in self.job.plan.pairs)
        self.readers = {pair.target.name: readers[pair.source.name] for pair in self.job.plan.pairs}

    def forward(self, batch: Any) -> Tensor:
        return self.head.scores(self.job.target, self.module, batch)

    def sums(
        self, signal: str, batches: Iterable[Any], losses: tuple[Any, Any] | None = None, full: bool = False
    ) -> Sums:
        job = self.job
        ours, theirs = losses or (job.source_loss, job.target_loss)
        found = measure(
            job.source.module, self.module, job.plan.pairs, batches, signals=[signal], source_loss=ours,
            target_loss=theirs, match=job.match, make_sum=lambda *given: Moments(*given[2:], full=full),
        )  # fmt: skip
        return {key[0]: value for key, value in found.covariances.items()}  # type: ignore[misc]

    def random_cotangents(self, fold: int) -> Sums:
        """Gradients of the scores along random directions, the same for both models."""
        found: Sums | None = None
        for number in range(COTANGENTS):
            generator = torch.Generator().manual_seed(10 * number + fold)
            labels = self.folds[fold].target[1]
            V = torch.randn(len(labels), len(self.head.classes), generator=generator).to(labels.device)
            V = V - V.mean(1, keepdim=True)
            sides = ((self.job.source, self.source_head), (self.job.target, self.head))
            losses = tuple(
                lambda module, batch, model=model, head=head: (
                    (
                        head.scores(model, module, batch[0]) / head.logit_scale * V  # noqa: B023 - used at once
                    ).sum()
                )
                for model, head in sides
            )
            more = self.sums("output_gradient", [self.folds[fold]], losses, full=True)  # type: ignore[arg-type]
            found = more if found is None else joined(Moments.__add__, found, more)
        assert found is not None
        return found

    @contextmanager
    def tuned_source(self) -> Iterator[nn.Module]:
        """The source with its fine-tune, for a while."""
        weights = dict(self.job.source.module.named_parameters())
        old = {name: weights[name].detach().clone() for name in self.job.task_vector if name in weights}
        with torch.no_grad():
            for name in old:
                weights[name].add_(as_dense(self.job.task_vector[name]).to(weights[name]))
            try:
                yield self.job.source.module
            finally:
                for name, tensor in old.items():
                    weights[name].copy_(tensor)

    def labelled_by_source(self, batches: Iterable[Any]) -> list[Any]:
        """The same samples with the labels that the fine-tuned source gives them."""
        found = []
        with self.tuned_source() as tuned:
            for batch in batches:
                labels = self.source_head.scores(self.job.source, tuned, batch.source[0]).argmax(-1)
                sides = {"source": (batch.source[0], labels), "target": (batch.target[0], labels)}
                found.append(replace(batch, **sides, part=None))
        return found

    def gradients(self, fold: int) -> dict[str, Tensor]:
        """Of the loss with respect to the target's weights."""
        assert self.job.target_loss is not None
        self.module.requires_grad_(True)
        self.job.target_loss(self.module, self.folds[fold].target).backward()
        found = {name: p.grad.detach().clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad(set_to_none=True)
        self.module.requires_grad_(False)
        return found

    @torch.no_grad()
    def scores(self, entries: Mapping[str, Tensor], batch: Any) -> Tensor:
        """(scales, N, classes)."""
        if self.text:
            return torch.stack([self._at(entries, scale, batch) for scale in SCALES])
        steps = torch.tensor(SCALES, device=next(iter(self.base.values())).device)
        changed = {
            f"module.{name}": self.base[name] + steps.view(-1, *[1] * delta.ndim) * delta
            for name, delta in entries.items()
        }
        return vmap(lambda weights: functional_call(self, weights, (batch,)))(changed)

    def _at(self, entries: Mapping[str, Tensor], scale: float, batch: Any) -> Tensor:
        changed = {f"module.{name}": self.base[name] + scale * delta for name, delta in entries.items()}
        return functional_call(self, changed, (batch,))

    def signals(self) -> tuple[list[dict[str, Sums]], dict[str, Sums]]:
        """All sums by name, of each half and of both."""
        pseudo, every = self.labelled_by_source(self.unlabelled.batches), list(self.all.batches)
        common = {
            "X unlabelled": self.sums("input", self.unlabelled.batches),
            "P unlabelled": self.sums("output_gradient", pseudo),
            "X all": self.sums("input", every),
            "G all": self.sums("output_gradient", every),
        }
        parts = []
        for fold, (batch, half) in enumerate(zip(self.folds, halves(self.job), strict=True)):
            found = {
                "X": self.sums("input", [batch], full=True),
                "G": self.sums("output_gradient", [batch], full=True),
                "P": self.sums("output_gradient", self.labelled_by_source([batch])),
                "R": self.random_cotangents(fold),
            }
            with self.tuned_source():
                found["X both"] = joined(Moments.__add__, found["X"], self.sums("input", [batch]))
            more = views_of(half)
            assert more is not None
            found["X views"] = joined(Moments.__add__, found["X"], self.sums("input", more.batches))
            parts.append(found)
        whole = {name: joined(Moments.__add__, *(part[name] for part in parts)) for name in parts[0]}
        for found in (*parts, whole):
            found["G+R"] = with_units(found["G"], found["R"])
            found["X pooled"] = pooled(found["X"], READS)
            found["G pooled"] = pooled(found["G"], WRITES)
            found["G+R pooled"] = pooled(found["G+R"], WRITES)
            found.update(common)
        return parts, whole

    def entries(
        self, idea: Idea, found: Mapping[str, Sums], maps: Maps, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The change of the target's weights, by name."""
        X, G = found[idea.inputs], found[idea.gradients]
        into = maps.of(X, idea.into, idea.centred, AFTER_HEADS)
        out = maps.of(G, idea.out, False, HEADS)
        weights = dict(self.job.source.module.named_parameters())
        vector, result = self.job.task_vector, dict[str, Tensor]()

        def at(name: str) -> Tensor:
            return result.setdefault(name, torch.zeros_like(self.base[name]))

        for pair in self.job.plan.pairs:
            name, ours, theirs = pair.target.name, pair.source, pair.target
            device = self.base[theirs.weight].device
            tau = as_dense(matrix_of(ours, vector[ours.weight])).to(device).double()
            P = into[name] if pair.input_map is None else pair.input_map.to(tau)
            L = out[name] if pair.output_map is None else pair.output_map.to(tau)
            moved, bias = L.T @ tau @ P, None
            if theirs.bias is not None and ours.bias is not None and idea.after != "no bias":
                bias = ours.vector(as_dense(vector[ours.bias])).to(device).double() @ L
                if idea.after == "affine" and name in X:
                    bias = bias + (tau @ (X[name].a / X[name].n - P @ (X[name].b / X[name].n))) @ L
            factor = float(tau.norm() / moved.norm().clamp_min(1e-30)) if idea.keep_norm else 1.0
            if idea.after == "split":
                factor = 1.0 / self.readers[name]
            if idea.after == "cosine":
                factor = float(X[name].cosine(P)) if pair.input_map is None else 1.0
                factor *= float(G[name].cosine(L)) if pair.output_map is None else 1.0
            if idea.after == "effect" and name in found["X"]:
                m = found["X"][name]
                own = [ours.matrix(weights[ours.weight].detach()), theirs.matrix(self.base[theirs.weight])]
                own = [w.reshape(len(w), -1).double() for w in own]
                ratios = ((d @ S @ d.T).trace() / (w @ S @ w.T).trace()
                          for d, w, S in ((tau, own[0], m.AA), (moved, own[1], m.BB)))  # fmt: skip
                wanted, there = ratios
                factor = float((wanted / there.clamp_min(1e-30)).sqrt())
            if idea.after in ("sign", "gate"):
                slope = theirs.matrix(gradients[theirs.weight]).reshape(moved.shape).double()
                against = moved * slope > 0 if idea.after == "sign" else (moved * slope).sum() > 0
                moved = torch.where(against, 0.0, moved)
            view = theirs.matrix(at(theirs.weight))
            view.add_((factor * moved).reshape(view.shape).to(view))
            if bias is not None and theirs.bias is not None:
                theirs.vector(at(theirs.bias)).add_((factor * bias).to(view))
            if idea.after == "norms" and any(role in name for role in ("q_proj", "fc1")):
                norm = {"self_attn.q_proj.weight": "layer_norm1.bias", "mlp.fc1.weight": "layer_norm2.bias"}
                role = next(role for role in norm if name.endswith(role))
                old, new = (side.name.removesuffix(role) + norm[role] for side in (ours, theirs))
                at(new).add_((as_dense(vector[old]).to(device).double() @ P).to(view))
            if idea.after == "embeddings" and "patch_embedding" in name:
                self._embeddings(at, L)
        return result

    def _embeddings(self, at: Any, L: Tensor) -> None:
        """Add the changes of class and position embeddings, carried over as the patch embedding's outputs are."""
        place = "vision_model.embeddings."
        vector = self.job.task_vector
        one, many = (as_dense(vector[place + name]).to(L) @ L
                     for name in ("class_embedding", "position_embedding.weight"))  # fmt: skip
        side, wide = (round((len(x) - 1) ** 0.5) for x in (many, self.base[place + "position_embedding.weight"]))
        grid = many[1:].T.unflatten(1, (side, side))[None]
        grid = F.interpolate(grid, size=(wide, wide), mode="bilinear", align_corners=False)[0].flatten(1).T
        at(place + "class_embedding").add_(one.float())
        at(place + "position_embedding.weight").add_(torch.cat([many[:1], grid]).float())

    def rows(self, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parts, whole = self.signals()
        slopes = [self.gradients(0), self.gradients(1)]
        slopes.append({name: slopes[0][name] + slopes[1][name] for name in slopes[0]})
        maps = Maps(self.heads)
        for idea in IDEAS:
            if self.text and idea.after in ("norms", "embeddings"):
                continue
            right = torch.zeros(len(SCALES))
            final = self.entries(idea, whole, maps, slopes[2])
            torch.set_float32_matmul_precision("high")  # TF32, for test samples only
            for batch, labels in self.test:
                right += (self.scores(final, batch).argmax(-1) == labels).sum(-1).cpu()
            torch.set_float32_matmul_precision("highest")
            accuracy = 100 * right / sum(len(labels) for _, labels in self.test)
            answers, wanted = [], []
            for fold in (0, 1):
                batch, labels = self.folds[1 - fold].target
                answers.append(self.scores(self.entries(idea, parts[fold], maps, slopes[fold]), batch).cpu())
                wanted.append(labels.cpu())
            scores, labels = torch.cat(answers, dim=1), torch.cat(wanted)
            held = {scale: score_of_classes(scores[index], labels) for index, scale in enumerate(SCALES)}
            choice = choose_scale(held.__getitem__, samples=len(labels), held_out=True)
            by_scale = {str(scale): round(float(value), 3) for scale, value in zip(SCALES, accuracy, strict=True)}
            losses = {
                str(scale): [round(float(x), 4) for x in score.losses]
                for scale, score in held.items()
                if score.losses is not None
            }
            yield {**about, "idea": idea.name, "accuracy": by_scale, "chosen": choice.scale, "losses": losses}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder with zoo/ and data/")
    parser.add_argument("--encoders", type=Path, help="the folder with text encoders")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", default=[":".join(cell) for cell in CELLS], help="source:target:task")
    parser.add_argument("--test", type=int, default=1000, help="test samples at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(rows))
        return
    if options.root is None or not (options.root / "zoo").is_dir():
        sys.exit(f"there is no zoo in {options.root}; give the shared folder with --root.")
    places, done = Places(options.root, options.encoders), {(r["cell"], r["samples"], r["seed"]) for r in rows}
    for seed in options.seeds:
        for samples in options.samples:
            for cell in options.cells:
                about = {"cell": cell, "samples": samples, "seed": seed}
                if tuple(about.values()) in done:
                    continue
                bench = Bench(places, cell, samples, seed, options.device, options.test)
                found = list(bench.rows(about))
                with options.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
                print(*about.values(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
