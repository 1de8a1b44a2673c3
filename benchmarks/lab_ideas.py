"""Claim: of eighteen ideas to get more out of the same samples, a few help, and most do not (docs/lab/ideas.md).

    python benchmarks/lab_ideas.py --root ../shared --out ideas.json [--samples 20 100] [--seeds 0] [--cells C ...]
    python benchmarks/lab_ideas.py --out ideas.json --table

All ideas are tried on one measurement of each cell of the shared zoo: first and second moments of inputs and output
gradients, for each half of the calibration samples. Maps of a shape are solved together, without completion, and the
scales are evaluated together; so numbers differ a little from those of `tuneport transfer`. The scale is chosen by
`tuneport.scaling`, from maps of one half judged on the other. Made for a GPU; says so where the zoo is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tuneport.capture import measure
from tuneport.data import align_labels
from tuneport.evaluation import encoded
from tuneport.families import Head, choose_head
from tuneport.methods.base import matrix_of
from tuneport.preparation import Job, prepare
from tuneport.scaling import SCALES, choose_scale, score_of_classes
from tuneport.task_vector import as_dense
from tuneport.tasks import read_data

TASKS = ("cifar10", "fashion", "gtsrb", "mnist")
CELLS = [f"a:{target}:{task}" for target in ("a2", "b", "c") for task in TASKS]
CELLS += [f"c:{target}:{task}" for target in ("a", "a2", "b") for task in ("cifar10", "mnist")]
RESIDUAL_IN, RESIDUAL_OUT = ("q_proj", "fc1"), ("out_proj", "fc2")  # what reads and writes the residual stream
COTANGENTS, UNLABELLED = 6, 500


class Moments:
    """First and second moments of two signals over the same tokens."""

    def __init__(self, ours: int, theirs: int, device: Any) -> None:
        shapes = {"AA": (ours, ours), "AB": (ours, theirs), "BB": (theirs, theirs), "a": (ours,), "b": (theirs,)}
        self.parts = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        self.n = 0.0
        self.source_energy = self.target_energy = torch.ones((), device=device)  # `measure` looks at these

    def update(self, ours: Tensor, theirs: Tensor) -> None:
        x, y = ours.double(), theirs.double()
        for name, more in (("AA", x.T @ x), ("AB", x.T @ y), ("BB", y.T @ y), ("a", x.sum(0)), ("b", y.sum(0))):
            self.parts[name] += more
        self.n += len(x)

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["parts"][name]

    def of(self, parts: Mapping[str, Tensor], n: float) -> Moments:
        found = Moments(*self.AB.shape, self.AB.device)
        found.parts, found.n = dict(parts), n
        return found

    def __add__(self, other: Moments) -> Moments:
        return self.of({name: part + other.parts[name] for name, part in self.parts.items()}, self.n + other.n)

    def __mul__(self, factor: float) -> Moments:
        return self.of({name: part * factor for name, part in self.parts.items()}, self.n * factor)

    def unit(self) -> Moments:
        return self * (1.0 / (float((self.AA.trace() * self.BB.trace()).sqrt()) or 1.0))

    def centred(self) -> Moments:
        a, b, n = self.a, self.b, max(self.n, 1e-9)
        moved = {"AA": self.AA - torch.outer(a, a) / n, "AB": self.AB - torch.outer(a, b) / n}
        return self.of({**moved, "BB": self.BB - torch.outer(b, b) / n, "a": 0 * a, "b": 0 * b}, self.n)


Sums = dict[str, Moments]  # by target layer; layers that read one tensor share theirs


def joined(combine: Callable[..., Moments], *many: Sums) -> Sums:
    """Layer by layer; what was shared stays shared."""
    known: dict[tuple[int, ...], Moments] = {}
    found = {}
    for name in many[0]:
        key = tuple(id(sums[name]) for sums in many)
        found[name] = known.setdefault(key, combine(*(sums[name] for sums in many)))
    return found


def with_units(one: Sums, two: Sums) -> Sums:
    return joined(lambda x, y: x.unit() + y.unit(), one, two)


def pooled(sums: Sums, roles: Iterable[str]) -> Sums:
    """Half a layer's own, half the mean over all layers at the residual stream."""
    inside = [name for name in sums if any(role in name for role in roles)]
    shared = {id(sums[name]): sums[name].unit() for name in inside}
    first, *rest = shared.values()
    mean = sum(rest, first) * (1.0 / len(shared))
    return {name: shared[id(m)] * 0.5 + mean * 0.5 if id(m) in shared else m for name, m in sums.items()}


@dataclass(frozen=True)
class Idea:
    """How both maps are made, from which sums, and what happens to the result."""

    name: str
    into: str = "orthogonal"
    out: str = "orthogonal"
    inputs: str = "X"
    gradients: str = "G"
    centred: bool = True
    keep_norm: bool = False
    after: str = ""


IDEAS = [
    Idea("bico", centred=False),
    Idea("inputs centred"),
    Idea("centred; six random cotangents in place of labels", gradients="R"),
    Idea("centred; labels and six random cotangents, same energy", gradients="G+R"),
    Idea("centred; residual-stream signals pooled half with all blocks", inputs="X pooled", gradients="G pooled"),
    Idea("pooled, with random cotangents", inputs="X pooled", gradients="G+R pooled"),
    Idea("centred; inputs of base and fine-tuned source", inputs="X both"),
    Idea("centred; inputs of 500 further images without labels", inputs="X unlabelled"),
    Idea("500 further images, with random cotangents", inputs="X unlabelled", gradients="G+R"),
    Idea("centred; ridge of target gradients on source gradients", out="forward 1", keep_norm=True),
    Idea("output ridge, with random cotangents", out="forward 1", gradients="G+R", keep_norm=True),
    Idea("functional input map, affine", into="backward 0.1", after="affine"),
    Idea("functional input map, norm kept", into="backward 0.1", keep_norm=True),
    Idea("functional maps on both sides", into="backward 0.1", out="backward 0.1", gradients="G+R", after="affine"),
    Idea("ridge of target inputs on source inputs", into="forward 0.1", keep_norm=True),
    Idea("centred, random cotangents; entries against the gradient dropped", gradients="G+R", after="sign"),
    Idea("centred; layers against the gradient dropped", after="gate"),
    Idea("centred, random cotangents; relative effect as in the source", gradients="G+R", after="effect"),
]


def polar(C: Tensor) -> Tensor:
    """Polar factors of a stack of matrices by a weighted Halley iteration; what is below 1e-8 stays small."""
    if C.shape[1] > C.shape[2]:
        return polar(C.mT).mT
    probe = torch.ones(len(C), C.shape[2], 1, dtype=C.dtype, device=C.device)
    for _ in range(10):
        probe = F.normalize(C.mT @ (C @ probe), dim=1)
    X = C / (1.2 * (C @ probe).norm(dim=1, keepdim=True)).clamp_min(1e-300)
    eye, low = torch.eye(C.shape[1], dtype=C.dtype, device=C.device), 1e-8
    while low < 1 - 1e-9:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        a = min(2e3, (1 + d) ** 0.5 + 0.5 * (8 - 4 * d + 8 * (2 - low**2) / (low**2 * (1 + d) ** 0.5)) ** 0.5)
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        X = (b / c) * X + (a - b / c) * torch.cholesky_solve(X, torch.linalg.cholesky(eye + c * (X @ X.mT)))
        low = min(low * (a + b * low**2) / (1 + c * low**2), 1.0)
    return X


class Maps:
    """Maps of all layers, those of a shape solved together, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, bool], tuple[Moments, Tensor]] = {}

    def of(self, sums: Sums, kind: str, centred: bool) -> dict[str, Tensor]:
        shapes: dict[Any, dict[int, Moments]] = {}
        for m in sums.values():
            if (id(m), kind, centred) not in self._known:
                shapes.setdefault(tuple(m.AB.shape), {})[id(m)] = m
        for group in shapes.values():
            used = [m.centred() if centred else m for m in group.values()]
            for m, R in zip(group.values(), self._solve(used, kind), strict=True):
                self._known[id(m), kind, centred] = (m, R)
        return {name: self._known[id(m), kind, centred][1] for name, m in sums.items()}

    def _solve(self, used: list[Moments], kind: str) -> Tensor:
        AB = torch.stack([m.AB for m in used])
        if kind == "orthogonal":
            return polar(AB)
        way, weight = kind.split()
        gram = torch.stack([m.AA if way == "forward" else m.BB for m in used])
        ridge = float(weight) * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300)
        gram = gram + torch.diag_embed(ridge[:, None].expand(-1, gram.shape[1]))
        return torch.linalg.solve(gram, AB) if way == "forward" else torch.linalg.solve(gram, AB.mT).mT


class Bench(nn.Module):
    """One cell: the job, its two halves, its test images, and the target under any change of weights."""

    def __init__(self, root: Path, cell: str, samples: int, seed: int, device: str, tested: int) -> None:
        super().__init__()
        source, target, task = cell.split(":")
        places = (root / "zoo" / source, root / "zoo" / f"{source}-{task}", root / "zoo" / target)
        self.data = root / "data" / "images" / f"{task}.npz"
        options = {"samples": samples, "seed": seed, "batch_size": (samples + 1) // 2, "device": device}
        self.job: Job = prepare(*places, self.data, scored=True, **options)  # type: ignore[arg-type]
        more = {"samples": UNLABELLED, "seed": seed + 100, "batch_size": 250, "device": device}
        self.unlabelled = prepare(self.job.source, places[1], self.job.target, self.data, **more)  # type: ignore[arg-type]
        self.module = self.job.target.module
        for tower in (self.module, self.job.source.module):
            tower.config._attn_implementation = "eager"
        self.folds = list(self.job.batches)
        train, test = read_data(self.data, "train"), read_data(self.data, "test")
        assert self.job.target_head is not None
        self.head: Head = self.job.target_head
        self.source_head = choose_head(self.job.source, None, train.name, train.classes, train.prompts, ())
        test = align_labels(test, self.head.classes)
        some = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[:tested]))
        self.test = [(batch, labels.to(device)) for batch, labels in encoded(self.job.target, some, 500)]
        self.base = {name: tensor.detach().clone() for name, tensor in self.module.named_parameters()}

    def forward(self, batch: Any) -> Tensor:
        return self.head.scores(self.job.target, self.module, batch)

    def sums(self, signal: str, batches: Iterable[Any], losses: tuple[Any, Any] | None = None) -> Sums:
        job = self.job
        ours, theirs = losses or (job.source_loss, job.target_loss)
        found = measure(
            job.source.module, self.module, job.plan.pairs, batches, signals=[signal], source_loss=ours,
            target_loss=theirs, match=job.match, make_sum=lambda *given: Moments(*given[2:]),
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
            more = self.sums("output_gradient", [self.folds[fold]], losses)  # type: ignore[arg-type]
            found = more if found is None else joined(Moments.__add__, found, more)
        assert found is not None
        return found

    def tuned_inputs(self, fold: int) -> Sums:
        """Inputs of the fine-tuned source beside those of the target."""
        weights = dict(self.job.source.module.named_parameters())
        old = {name: weights[name].detach().clone() for name in self.job.task_vector if name in weights}
        with torch.no_grad():
            for name in old:
                weights[name].add_(as_dense(self.job.task_vector[name]).to(weights[name]))
            try:
                return self.sums("input", [self.folds[fold]])
            finally:
                for name, tensor in old.items():
                    weights[name].copy_(tensor)

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
    def scores(self, entries: Mapping[str, Tensor], scales: Iterable[float], batch: Any) -> Tensor:
        """(scales, N, classes)."""
        steps = torch.tensor(list(scales), device=next(iter(self.base.values())).device)
        changed = {
            f"module.{name}": self.base[name] + steps.view(-1, *[1] * delta.ndim) * delta
            for name, delta in entries.items()
        }
        return vmap(lambda weights: functional_call(self, weights, (batch,)))(changed)

    def signals(self) -> tuple[list[dict[str, Sums]], dict[str, Sums]]:
        """All sums by name, of each half and of both."""
        unlabelled = self.sums("input", self.unlabelled.batches)
        parts = []
        for fold, batch in enumerate(self.folds):
            found = {"X": self.sums("input", [batch]), "G": self.sums("output_gradient", [batch])}
            found["R"], found["T"] = self.random_cotangents(fold), self.tuned_inputs(fold)
            parts.append(found)
        whole = {name: joined(Moments.__add__, *(part[name] for part in parts)) for name in parts[0]}
        for found in (*parts, whole):
            found["G+R"] = with_units(found["G"], found["R"])
            found["X both"] = joined(Moments.__add__, found["X"], found["T"])
            found["X unlabelled"] = unlabelled
            found["X pooled"] = pooled(found["X"], RESIDUAL_IN)
            found["G pooled"] = pooled(found["G"], RESIDUAL_OUT)
            found["G+R pooled"] = pooled(found["G+R"], RESIDUAL_OUT)
        return parts, whole

    def entries(
        self, idea: Idea, found: Mapping[str, Sums], maps: Maps, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The change of the target's weights, by name."""
        X, G = found[idea.inputs], found[idea.gradients]
        into = maps.of(X, idea.into, idea.centred)
        out = maps.of(G, idea.out, False)
        weights = dict(self.job.source.module.named_parameters())
        result: dict[str, Tensor] = {}
        for pair in self.job.plan.pairs:
            name, theirs, vector = pair.target.name, pair.target, self.job.task_vector
            device = self.base[theirs.weight].device
            tau = as_dense(matrix_of(pair.source, vector[pair.source.weight])).to(device).double()
            P = into[name] if pair.input_map is None else pair.input_map.to(tau)
            L = out[name] if pair.output_map is None else pair.output_map.to(tau)
            moved, bias = L.T @ tau @ P, None
            if theirs.bias is not None and pair.source.bias is not None:
                bias = pair.source.vector(as_dense(vector[pair.source.bias])).to(device).double() @ L
                if idea.after == "affine" and name in X:
                    bias = bias + (tau @ (X[name].a / X[name].n - P @ (X[name].b / X[name].n))) @ L
            factor = float(tau.norm() / moved.norm().clamp_min(1e-30)) if idea.keep_norm else 1.0
            if idea.after == "effect" and name in found["X"]:
                m = found["X"][name]
                own = [
                    pair.source.matrix(weights[pair.source.weight].detach()),
                    theirs.matrix(self.base[theirs.weight]),
                ]
                own = [w.reshape(len(w), -1).double() for w in own]
                ours, both = ((d @ S @ d.T).trace() / (w @ S @ w.T).trace()
                              for d, w, S in ((tau, own[0], m.AA), (moved, own[1], m.BB)))  # fmt: skip
                factor = float((ours / both.clamp_min(1e-30)).sqrt())
            if idea.after in ("sign", "gate"):
                slope = theirs.matrix(gradients[theirs.weight]).reshape(moved.shape).double()
                against = moved * slope > 0 if idea.after == "sign" else (moved * slope).sum() > 0
                moved = torch.where(against, 0.0, moved)
            weight = result.setdefault(theirs.weight, torch.zeros_like(self.base[theirs.weight]))
            view = theirs.matrix(weight)
            view.add_((factor * moved).reshape(view.shape).to(view))
            if bias is not None and theirs.bias is not None:
                theirs.vector(result.setdefault(theirs.bias, torch.zeros_like(self.base[theirs.bias]))).add_(
                    (factor * bias).to(weight)
                )
        return result

    def rows(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        parts, whole = self.signals()
        slopes = [self.gradients(0), self.gradients(1)]
        slopes.append({name: slopes[0][name] + slopes[1][name] for name in slopes[0]})
        maps, rows = Maps(), []
        for idea in IDEAS:
            right = torch.zeros(len(SCALES))
            final = self.entries(idea, whole, maps, slopes[2])
            for batch, labels in self.test:
                right += (self.scores(final, SCALES, batch).argmax(-1) == labels).sum(-1).cpu()
            accuracy = 100 * right / sum(len(labels) for _, labels in self.test)
            answers, wanted = [], []
            for fold in (0, 1):
                batch, labels = self.folds[1 - fold].target
                answers.append(self.scores(self.entries(idea, parts[fold], maps, slopes[fold]), SCALES, batch).cpu())
                wanted.append(labels.cpu())
            scores, labels = torch.cat(answers, dim=1), torch.cat(wanted)
            held = {scale: score_of_classes(scores[index], labels) for index, scale in enumerate(SCALES)}
            chosen = choose_scale(held.__getitem__, samples=len(labels), held_out=True).scale
            by_scale = dict(zip(map(str, SCALES), accuracy.tolist(), strict=True))
            rows.append({**about, "idea": idea.name, "accuracy": by_scale, "chosen": chosen})
        return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Gains in points, and against bico at scale 1 with a paired bootstrap interval over cells."""
    random, lines = np.random.default_rng(0), []
    for samples in sorted({row["samples"] for row in rows}):
        here = [row for row in rows if row["samples"] == samples]
        cells = sorted({row["cell"] for row in here})
        draws = random.integers(0, len(cells), (10_000, len(cells)))
        lines += [
            f"| N = {samples}, {len(cells)} cells | scale 1 | against bico | chosen | against bico | worst | best |",
            "|---|---|---|---|---|---|---|",
        ]

        def gains(idea: str, value: Any, here: Any = here, cells: Any = cells) -> np.ndarray[Any, Any]:
            found = [[value(r) - r["accuracy"]["0.0"] for r in here if (r["cell"], r["idea"]) == (cell, idea)]
                     for cell in cells]  # fmt: skip
            return np.array([np.mean(values) for values in found])

        def words(values: np.ndarray[Any, Any], draws: Any = draws) -> str:
            low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
            return f"{values.mean():+.1f} ({low:+.1f} to {high:+.1f})"

        base = gains("bico", lambda r: r["accuracy"]["1.0"])
        for name in dict.fromkeys(row["idea"] for row in here):
            one = gains(name, lambda r: r["accuracy"]["1.0"])
            chosen = gains(name, lambda r: r["accuracy"][str(r["chosen"])])
            best = gains(name, lambda r: max(r["accuracy"].values()))
            lines.append(
                f"| {name} | {one.mean():+.1f} | {words(one - base)} | {chosen.mean():+.1f} | {words(chosen - base)} "
                f"| {chosen.min():+.1f} | {best.mean():+.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder with zoo/ and data/images/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cells", nargs="+", default=CELLS, help="source:target:task")
    parser.add_argument("--test", type=int, default=2000, help="test images at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.table:
        print(table(rows))
        return
    if options.root is None or not (options.root / "zoo").is_dir():
        sys.exit(f"there is no zoo in {options.root}; give the shared folder with --root.")
    for seed in options.seeds:
        for samples in options.samples:
            for cell in options.cells:
                about = {"cell": cell, "samples": samples, "seed": seed}
                if any({key: row[key] for key in about} == about for row in rows):
                    continue
                bench = Bench(options.root, cell, samples, seed, options.device, options.test)
                rows += bench.rows(about)
                options.out.write_text(json.dumps(rows))
                print(*about.values(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
