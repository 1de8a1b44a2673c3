"""Claim: at scale 1 the update of SmolLM2 has several times the effect on Gemma's signals that it has on its own.

Orthogonal maps keep the norm of an update. The norms of weights and signals differ between models, and decide what an
update of one norm does: of each role, the table has the medians over the layers of both. The last column is the effect
that an aligned update has in the target over its effect in the source: |x_B| / |x_A| over |y_B| / |y_A|, where x and y
are the inputs and outputs of a layer (norms of a token). Random updates of the same norms and rank show what the norm
alone does. Needs two transformers folders, a LoRA of the first (`--work` of language_models.py) and the shared texts.

    python -m benchmarks.claims.signal_scales --source MODELS/smollm2-135m --lora LORA --target MODELS/gemma3-270m \
        --data SHARED/data/text --out benchmarks/results/signal-scales.md
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.claims.language_models import read_task
from benchmarks.rows import commit
from tuneport.data.dataset import Dataset
from tuneport.measure.objectives import batch_for, choose_objective, next_tokens
from tuneport.models.base import Model
from tuneport.models.change import change_of
from tuneport.models.open import open_model
from tuneport.pairing import count_blocks, nearest_block
from tuneport.task_vectors.lora_format import open_adapter


def run(model: Model, texts: Dataset, weights: Collection[str] = ()) -> tuple[dict[str, tuple[float, float]], float]:
    """The norms of a token in the inputs and outputs of layers, and the perplexity of the texts."""
    found, hooks = {}, []
    for name, part in model.module.named_modules():
        if f"{name}.weight" in weights:

            def hook(_: Any, given: Any, out: Tensor, key: str = f"{name}.weight") -> None:
                count = given[0][..., 0].numel()
                found[key] = (float(given[0].norm()) / math.sqrt(count), float(out.norm()) / math.sqrt(count))

            hooks.append(part.register_forward_hook(hook))
    batch = batch_for(model, choose_objective(texts, [model]).encode(model, texts))
    with torch.no_grad():
        scores, labels = next_tokens(model, model.module, batch)
    for each in hooks:
        each.remove()
    return found, math.exp(float(F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where the table is written; also printed")
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--max-length", type=int, default=64)
    options = parser.parse_args()
    source, target = (open_model(path).cut_at(options.max_length) for path in (options.source, options.target))
    texts = read_task("shakespeare", options.data, 40)["test"].subset(np.arange(options.passages))
    change = change_of(source, open_adapter(options.lora))
    signals, _ = run(source, texts, change)
    others, before = run(target, texts, {layer.weight for layer in target.layers})
    places = {(layer.block, layer.role): layer.weight for layer in source.layers}
    depths = [next(iter(count_blocks(model.layers).values())) for model in (source, target)]
    rows: dict[str, list[tuple[float, ...]]] = {}
    generator = torch.Generator().manual_seed(0)
    for layer in target.layers:
        assert layer.block is not None
        name = places[nearest_block(layer.block, *depths), layer.role]
        weight, own = target.module.get_parameter(layer.weight), source.module.get_parameter(name)
        norm, (x, y), (u, v) = change.norm(name), signals[name], others[layer.weight]
        relative = [norm / float(part.detach().norm()) for part in (own, weight)]
        rows.setdefault(layer.role, []).append((*relative, x, u, y, v, (u / x) / (v / y)))
        rank = change.spec(name).rank or 1
        out, into = (torch.randn(size, rank, generator=generator) for size in weight.shape)
        noise = out @ into.T
        with torch.no_grad():
            weight.add_(noise * (norm / float(noise.norm())))
    _, after = run(target, texts)
    lines = [
        f"# What an update of one norm does in {options.source.name} and in {options.target.name}\n",
        "| role | norm of update over weight: source | target | input: source | target | output: source | target | "
        "effect, target over source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for role, found in rows.items():
        lines.append(f"| {role} | " + " | ".join(f"{value:.3g}" for value in np.median(found, axis=0)) + " |")
    lines.append(f"\nPerplexity of the target: {before:.1f}; with random updates of these norms: {after:.1f}.")
    lines.append(
        f"{options.passages} passages of Shakespeare, {options.max_length} tokens. {platform.machine()}, torch "
        f"{torch.__version__}, commit {commit()}, {time.strftime('%Y-%m-%d')}.\n"
    )
    if options.out is not None:
        options.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
