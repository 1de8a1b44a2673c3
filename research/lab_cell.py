"""One cell of the lab (a source, a target, a task, a draw of samples), on which lab_ideas.py tries its ideas.

Signals are measured once, by halves of the samples and where asked by quarters, and every map and change of weights is
made of them when an idea asks. A part of the samples is named by a string: "" is all, "0" and "1" are the halves, "00"
is the first quarter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lab import TEXTS, Places
from lab_maps import (
    Maps,
    Moments,
    Sums,
    half_of_energy,
    in_hidden_spaces,
    joined,
    pooled,
    similarity,
    trust,
    with_units,
)
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.job import Job
from tuneport.measure.accuracy import encode_batches
from tuneport.measure.capture import measure_pairs
from tuneport.methods.entries import matrix_of
from tuneport.models.heads import Head, choose_head
from tuneport.pairing import DepthRule, LayerPair, nearest_block
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.scale import SCALES, Score, choose_scale, score_of_classes
from tuneport.task_vectors.low_rank import as_dense

READS = ("q_proj", "fc1", "self.query", "attn.q", "intermediate.dense")  # the residual stream
WRITES = ("out_proj", "fc2", "attn.o", "output.dense")
HEADS = ("q_proj", "k_proj", "v_proj", ".query", ".key", ".value", "attn.q", "attn.k", "attn.v")  # what comes by heads
AFTER_HEADS = ("out_proj", "attention.output.dense", "attn.o")
MLP = ("fc1", "fc2", "intermediate.dense", "output.dense")
COTANGENTS, UNLABELLED, ALL = 6, 500, 2000
APART = [(1.0, 1.0)] + [pair for share in (0.5, 0.25, 0.0) for pair in ((1.0, share), (share, 1.0))]

Change = dict[str, Tensor]  # of the target's weights, by name


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


BICO = Idea("bico")


class Bench(nn.Module):
    """One cell: the job, its parts, its test samples, and the target under any change of weights."""

    def __init__(
        self, places: Places, cell: str, samples: int, seed: int, device: str, tested: int,
        *, like: Bench | None = None, depth_rule: DepthRule = nearest_block,
    ) -> None:  # fmt: skip
        super().__init__()
        self.given = (places, cell, samples, seed, device, tested)
        source, target, task = cell.split(":")
        tuned, data = places.model(f"{source}-{task}"), places.data(task)
        models = (places.model(source), tuned, places.model(target))
        if like is not None:
            models = (like.job.source, tuned, like.job.target)  # type: ignore[assignment]
        sampler = "class_balanced" if task in TEXTS else "random"
        self.job: Job = prepare(
            *models, data, samples=samples, seed=seed, device=device, sampler=sampler, depth_rule=depth_rule,
            batch_size=(samples + 1) // 2,
        )  # fmt: skip
        self.more = (self.job.source, tuned, self.job.target, data)
        self.module, self.text = self.job.target.module, task in TEXTS
        for tower in (self.module, self.job.source.module):
            tower.config._attn_implementation = "eager"
        train = read_data(data, "train")
        assert self.job.heads is not None
        self.head: Head = self.job.heads.target
        self.source_head = choose_head(self.job.source, None, train)
        self.base = {name: tensor.detach().clone() for name, tensor in self.module.named_parameters()}
        sides = (self.job.source.module.config, self.module.config)
        self.heads = (sides[0].num_attention_heads, sides[1].num_attention_heads)
        readers = Counter(pair.source.name for pair in self.job.plan.pairs)
        self.readers = {pair.target.name: readers[pair.source.name] for pair in self.job.plan.pairs}
        self.jobs, self.known, self.plain = {"": self.job}, dict[tuple[str, str], Sums](), dict[str, Change]()

    @cached_property
    def test(self) -> list[Any]:
        places, cell, _, _, device, tested = self.given
        test = align_labels(read_data(places.data(cell.split(":")[2]), "test"), self.head.classes)
        some = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[:tested]))
        return [(batch, labels.to(device)) for batch, labels in encode_batches(self.job.target, some, 250)]

    @cached_property
    def unlabelled(self) -> list[Any]:
        options = {"samples": UNLABELLED, "seed": self.given[3] + 100, "device": self.given[4], "batch_size": 250}
        return list(prepare(*self.more, **options).samples)  # type: ignore[arg-type]

    @cached_property
    def all(self) -> list[Any]:
        options = {"samples": ALL, "seed": 1000, "device": self.given[4], "batch_size": 250}
        return list(prepare(*self.more, **options).samples)  # type: ignore[arg-type]

    @cached_property
    def other(self) -> Bench | None:
        """The same cell with another source, where the zoo has one."""
        places, cell, *rest = self.given
        source, target, task = cell.split(":")
        for name in {"a", "c"} - {source, target}:
            if source in ("a", "c") and (places.root / "zoo" / f"{name}-{task}").is_dir():
                return Bench(places, f"{name}:{target}:{task}", *rest)
        return None

    @cached_property
    def rematched(self) -> Bench:
        """The same cell with blocks matched by similarity, in order: linear CKA of what they read, without labels."""
        places = [
            {layer.block: layer for layer in model.layers if any(role in layer.name for role in READS[:1] + READS[2:4])}
            for model in (self.job.source, self.job.target)
        ]
        similarities = torch.zeros(len(places[1]), len(places[0]))
        for column, source in enumerate(places[0].values()):
            pairs = [LayerPair(source, target) for target in places[1].values()]
            found = self.sums("input", self.batches(""), pairs=pairs, full=True)
            similarities[:, column] = torch.tensor([similarity(found[pair.target.name]) for pair in pairs])
        matched = in_order(similarities)
        return Bench(*self.given, like=self, depth_rule=lambda block, *_: matched[block])

    def forward(self, batch: Any) -> Tensor:
        return self.head.scores(self.job.target, self.module, batch)

    def of(self, part: str) -> Job:
        if part not in self.jobs:
            self.jobs[part[:-1] + "0"], self.jobs[part[:-1] + "1"] = self.of(part[:-1]).halves()
        return self.jobs[part]

    def batches(self, part: str) -> list[Any]:
        return list(self.of(part).samples)

    def labelled_by_source(self, batches: Iterable[Any]) -> list[Any]:
        """The same samples with the labels that the fine-tuned source gives them."""
        found = []
        with self.tuned_source(), torch.no_grad():
            for batch in batches:
                labels = self.source_head.scores(self.job.source, self.job.source.module, batch.source[0]).argmax(-1)
                sides = {"source": (batch.source[0], labels), "target": (batch.target[0], labels)}
                found.append(replace(batch, **sides, part=None))
        return found

    def tuned_source(self, share: float = 1.0) -> Any:
        """The source with a share of its fine-tune, for a while."""
        module, vector = self.job.source.module, self.job.task_vector
        names = [name for name, _ in module.named_parameters() if name in vector]
        return changed(module, {name: as_dense(vector[name]) for name in names}, share)

    def sums(
        self, signal: str, batches: Iterable[Any], losses: tuple[Any, Any] | None = None, full: bool = False,
        pairs: Any = None,
    ) -> Sums:  # fmt: skip
        job = self.job
        source_loss, target_loss = losses or job.losses
        found = measure_pairs(
            job.source.module, self.module, pairs or job.plan.pairs, batches, signals=[signal], source_loss=source_loss,
            target_loss=target_loss, match=job.match, make_sum=lambda *given: Moments(*given[2:], full=full),
        )  # fmt: skip
        return {key[0]: value for key, value in found.covariances.items()}  # type: ignore[misc]

    def signal(self, name: str, part: str) -> Sums:
        """The sums of a name over a part of the samples, found when first asked for."""
        key = (name, "" if name.endswith((" unlabelled", " all")) else part)
        if key not in self.known:
            self.known[key] = self._found(*key)
        return self.known[key]

    def _found(self, name: str, part: str) -> Sums:
        kind = {"X": "input"}.get(name[0], "output_gradient")
        if name == "G+R":
            return with_units(self.signal("G", part), self.signal("R", part))
        if name.endswith(" pooled"):
            return pooled(self.signal(name.removesuffix(" pooled"), part), READS if kind == "input" else WRITES)
        if name.endswith(" joint"):
            return in_hidden_spaces(self.signal("X", part), self.signal("G", part))[name[0]]
        if name.endswith(" all"):
            return self.sums(kind, self.all)
        if name.endswith(" unlabelled"):
            return self.sums(kind, self.labelled_by_source(self.unlabelled) if name[0] == "P" else self.unlabelled)
        if name.endswith(" mid"):
            change = self.change(BICO, part)
            with self.tuned_source(0.5), changed(self.module, change, 0.5):
                return self.sums(kind, self.batches(part))
        if part == "" and name in ("X", "G", "R", "G sharp", "X views"):
            return joined(Moments.__add__, self.signal(name, "0"), self.signal(name, "1"))
        if name == "R":
            return self._random_cotangents(part)
        if name == "P":
            return self.sums(kind, self.labelled_by_source(self.batches(part)))
        if name == "G sharp":
            return self.sums(kind, self.batches(part), self._sharpened(part))
        if name == "X both":
            own = self.signal("X", part)
            with self.tuned_source():
                return joined(Moments.__add__, own, self.sums(kind, self.batches(part)))
        if name == "X views":
            views = self.of(part).samples.views(self.job.seed)
            assert views is not None
            return joined(Moments.__add__, self.signal("X", part), self.sums(kind, views))
        return self.sums(kind, self.batches(part), full=len(part) == 1)

    def _random_cotangents(self, part: str) -> Sums:
        """Gradients of the scores along random directions, the same for both models."""
        (batch,) = self.batches(part)
        sides = ((self.job.source, self.source_head), (self.job.target, self.head))
        found = []
        for number in range(COTANGENTS):
            generator = torch.Generator().manual_seed(10 * number + int(part))
            V = torch.randn(len(batch.target[1]), len(self.head.classes), generator=generator)
            V = (V - V.mean(1, keepdim=True)).to(batch.target[1].device)

            def along(model: Any, head: Head, V: Tensor = V) -> Callable[..., Tensor]:
                return lambda module, side: (head.scores(model, module, side[0]) / head.logit_scale * V).sum()

            losses = (along(*sides[0]), along(*sides[1]))
            found.append(self.sums("output_gradient", [batch], losses, full=True))
        return joined(lambda first, *rest: sum(rest, first), *found)

    def _sharpened(self, part: str) -> tuple[Any, Any]:
        """The losses of both models at the sharpness of their scores that suits the samples best."""
        (batch,) = self.batches(part)

        def loss(model: Any, head: Head, side: Any) -> Callable[..., Tensor]:
            with torch.no_grad():
                scores = head.scores(model, model.module, side[0])
            factor = score_of_classes(scores.cpu(), side[1].cpu()).sharpness
            return lambda module, side: F.cross_entropy(factor * head.scores(model, module, side[0]), side[1])

        return (
            loss(self.job.source, self.source_head, batch.source),
            loss(self.job.target, self.head, batch.target),
        )

    def gradients(self, part: str) -> dict[str, Tensor]:
        """Of the loss with respect to the target's weights."""
        assert self.job.losses is not None
        self.module.requires_grad_(True)
        for batch in self.batches(part):
            self.job.losses.target(self.module, batch.target).backward()
        found = {name: p.grad.detach().clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad(set_to_none=True)
        self.module.requires_grad_(False)
        return found

    def change(self, idea: Idea, part: str, maps: Maps | None = None) -> Change:
        maps = maps or Maps(self.heads)
        if idea == BICO:
            if part not in self.plain:
                self.plain[part] = self._entries(idea, part, maps)
            return self.plain[part]
        if idea.after == "depth":
            return self.rematched.change(BICO, part)
        if idea.after == "two sources":
            assert self.other is not None
            one, two = self.change(BICO, part), self.other.change(BICO, part)
            return {name: (one[name] + two[name]) / 2 for name in one}
        if idea.after == "apart":
            return scaled_apart(self.change(BICO, part), *self.factors)
        return self._entries(idea, part, maps)

    @cached_property
    def factors(self) -> tuple[float, float]:
        """Of attention and MLPs: those of least loss on the half that the maps have not seen, at any scale."""
        losses = {}
        for pair in APART:
            held = self.held_out({part: scaled_apart(self.change(BICO, part), *pair) for part in "01"})
            losses[pair] = min(score.loss for score in held.values())
        return min(losses, key=losses.__getitem__)

    def held_out(self, changes: Mapping[str, Change]) -> dict[float, Score]:
        answers = {part: self.answers(change, part) for part, change in changes.items()}
        return self.score_of(answers)

    def answers(self, change: Change, part: str) -> tuple[Tensor, Tensor]:
        """Scores of the other half's samples, at every scale, and their labels."""
        (batch,) = self.batches("1" if part == "0" else "0")
        return self.scores(change, batch.target[0]).cpu(), batch.target[1].cpu()

    def score_of(self, answers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[float, Score]:
        scores = torch.cat([answers[part][0] for part in "01"], dim=1)
        labels = torch.cat([answers[part][1] for part in "01"])
        return {scale: score_of_classes(scores[index], labels) for index, scale in enumerate(SCALES)}

    @torch.no_grad()
    def scores(self, entries: Mapping[str, Tensor], batch: Any) -> Tensor:
        """(scales, N, classes)."""
        if self.text:
            return torch.stack([self._at(entries, scale, batch) for scale in SCALES])
        steps = torch.tensor(SCALES, device=next(iter(self.base.values())).device)
        weights = {
            f"module.{name}": self.base[name] + steps.view(-1, *[1] * delta.ndim) * delta
            for name, delta in entries.items()
        }
        return vmap(lambda weights: functional_call(self, weights, (batch,)))(weights)

    def _at(self, entries: Mapping[str, Tensor], scale: float, batch: Any) -> Tensor:
        weights = {f"module.{name}": self.base[name] + scale * delta for name, delta in entries.items()}
        return functional_call(self, weights, (batch,))

    def _trust(self, name: str, part: str, maps: Maps) -> dict[str, float]:
        one, two = self.signal(name, part + "0"), self.signal(name, part + "1")
        return trust(one, two, maps.of(one, "orthogonal", False), maps.of(two, "orthogonal", False))

    def _maps(self, idea: Idea, part: str, maps: Maps) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        X, G = self.signal(idea.inputs, part), self.signal(idea.gradients, part)
        if idea.into == "crossed":
            into, out = (
                maps.crossed(whole, self.signal(name, part + "0"), self.signal(name, part + "1"))
                for whole, name in ((X, "X"), (G, "G"))
            )
            return into, out
        return maps.of(X, idea.into, idea.centred, AFTER_HEADS), maps.of(G, idea.out, False, HEADS)

    def _entries(self, idea: Idea, part: str, maps: Maps) -> Change:
        X, G = self.signal(idea.inputs, part), self.signal(idea.gradients, part)
        into, out = self._maps(idea, part, maps)
        gradients = self.gradients(part) if idea.after in ("sign", "gate") else {}
        trusted = [self._trust(name, part, maps) for name in "XG"] if idea.after == "trust" else []
        weights = dict(self.job.source.module.named_parameters())
        vector, result = self.job.task_vector, Change()

        def at(name: str) -> Tensor:
            return result.setdefault(name, torch.zeros_like(self.base[name]))

        for pair in self.job.plan.pairs:
            name, source, target = pair.target.name, pair.source, pair.target
            if (pair.input_map is None and name not in into) or (pair.output_map is None and name not in out):
                continue  # nothing flows through it: the pooler of an encoder that is pooled by means
            device = self.base[target.weight].device
            tau = as_dense(matrix_of(source, vector[source.weight])).to(device).double()
            if idea.after == "half":
                tau = half_of_energy(tau)
            P = into[name] if pair.input_map is None else pair.input_map.to(tau)
            L = out[name] if pair.output_map is None else pair.output_map.to(tau)
            moved, bias = L.T @ tau @ P, None
            if target.bias is not None and source.bias is not None and idea.after != "no bias":
                bias = source.vector(as_dense(vector[source.bias])).to(device).double() @ L
                if idea.after == "affine" and name in X:
                    bias = bias + (tau @ (X[name].a / X[name].n - P @ (X[name].b / X[name].n))) @ L
            factor = float(tau.norm() / moved.norm().clamp_min(1e-30)) if idea.keep_norm else 1.0
            if idea.after == "split":
                factor = 1.0 / self.readers[name]
            if idea.after == "cosine":
                factor = float(X[name].cosine(P)) if pair.input_map is None else 1.0
                factor *= float(G[name].cosine(L)) if pair.output_map is None else 1.0
            if trusted:
                factor = trusted[0].get(name, 1.0) * trusted[1].get(name, 1.0)
            if idea.after == "effect" and name in X:
                m = X[name]
                own = [source.matrix(weights[source.weight].detach()), target.matrix(self.base[target.weight])]
                own = [w.reshape(len(w), -1).double() for w in own]
                ratios = ((d @ S @ d.T).trace() / (w @ S @ w.T).trace()
                          for d, w, S in ((tau, own[0], m.AA.double()), (moved, own[1], m.BB.double())))  # fmt: skip
                wanted, there = ratios
                factor = float((wanted / there.clamp_min(1e-30)).sqrt())
            if idea.after in ("sign", "gate"):
                slope = target.matrix(gradients[target.weight]).reshape(moved.shape).double()
                against = moved * slope > 0 if idea.after == "sign" else (moved * slope).sum() > 0
                moved = torch.where(against, 0.0, moved)
            view = target.matrix(at(target.weight))
            view.add_((factor * moved).reshape(view.shape).to(view))
            if bias is not None and target.bias is not None:
                target.vector(at(target.bias)).add_((factor * bias).to(view))
            if idea.after == "norms" and any(role in name for role in ("q_proj", "fc1")):
                norm = {"self_attn.q_proj.weight": "layer_norm1.bias", "mlp.fc1.weight": "layer_norm2.bias"}
                role = next(role for role in norm if name.endswith(role))
                old, new = (side.name.removesuffix(role) + norm[role] for side in (source, target))
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

    def rows(self, ideas: Iterable[Idea]) -> Iterator[dict[str, Any]]:
        """For each idea: test accuracy at every scale, and what the halves of the samples say about each other."""
        wanted = [idea for idea in ideas if not (self.text and idea.after in ("norms", "embeddings"))]
        wanted = [idea for idea in wanted if idea.after != "two sources" or self.other is not None]
        accuracy: dict[str, Tensor] = {}
        answers: dict[str, dict[str, tuple[Tensor, Tensor]]] = {idea.name: {} for idea in wanted}
        for part in ("", "0", "1"):
            maps = Maps(self.heads)
            for idea in wanted:
                change = self.change(idea, part, maps)
                if part == "":
                    accuracy[idea.name] = self._tested(change)
                else:
                    answers[idea.name][part] = self.answers(change, part)
                self._forget(idea, part, maps)
            for key in [key for key in self.known if key[1] == part and not key[0].endswith((" unlabelled", " all"))]:
                del self.known[key]
        for idea in wanted:
            held = self.score_of(answers[idea.name])
            choice = choose_scale(held.__getitem__, samples=self.job.samples, held_out=True)
            yield {
                "idea": idea.name,
                "accuracy": {str(s): round(float(x), 3) for s, x in zip(SCALES, accuracy[idea.name], strict=True)},
                "chosen": choice.scale,
                "losses": {
                    str(scale): [round(float(x), 4) for x in score.losses]
                    for scale, score in held.items()
                    if score.losses is not None
                },
            }

    def _forget(self, idea: Idea, part: str, maps: Maps) -> None:
        """What hardly another idea asks for: memory."""
        for name in {idea.inputs, idea.gradients} - {"X", "G", "G+R"}:
            self.known.pop((name, part), None)
        often = [self.known[name, part] for name in ("X", "G", "G+R") if (name, part) in self.known]
        maps.forget(m for sums in often for m in sums.values())

    def _tested(self, change: Change) -> Tensor:
        right = torch.zeros(len(SCALES))
        torch.set_float32_matmul_precision("high")  # TF32, for test samples only
        for batch, labels in self.test:
            right += (self.scores(change, batch).argmax(-1) == labels).sum(-1).cpu()
        torch.set_float32_matmul_precision("highest")
        return 100 * right / sum(len(labels) for _, labels in self.test)


@contextmanager
def changed(module: nn.Module, change: Mapping[str, Tensor], share: float) -> Iterator[None]:
    """The module with a share of a change of its weights, for a while."""
    weights = dict(module.named_parameters())
    old = {name: weights[name].detach().clone() for name in change}
    with torch.no_grad():
        for name, delta in change.items():
            weights[name].add_(delta.to(weights[name]), alpha=share)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in old.items():
                weights[name].copy_(tensor)


def scaled_apart(change: Change, attention: float, mlp: float) -> Change:
    def is_mlp(name: str) -> bool:
        return any(role in name for role in MLP) and "attention.output" not in name

    return {name: (mlp if is_mlp(name) else attention) * delta for name, delta in change.items()}


def in_order(similarities: Tensor) -> list[int]:
    """For each row the column that it takes, never before that of the row above, so that the sum is the largest.

    >>> in_order(torch.tensor([[0.1, 0.9], [0.8, 0.7], [0.2, 0.3]]))
    [1, 1, 1]
    """
    best, ways = similarities[0].tolist(), [[column] for column in range(similarities.shape[1])]
    for row in similarities[1:].tolist():
        at = [max(range(column + 1), key=best.__getitem__) for column in range(len(row))]
        ways = [[*ways[before], column] for column, before in enumerate(at)]
        best = [best[before] + row[column] for column, before in enumerate(at)]
    return ways[max(range(len(best)), key=best.__getitem__)]
