"""Claim: the paper's T5 protocol runs on a real flan-T5, as source and as target of a planted and of a wider twin.

The planted twin computes the same function: its residual stream, its heads and its hidden units are permuted. The wider
twin has random weights. A LoRA (rank 16, all linear layers) of each source is ported by BiCo: the encoder alone, at
scale 1, N samples, scored by a linear probe on the same samples. The error of the planted twin is the norm of what
differs from the permuted change, over the norm of that change. Needs a transformers folder of flan-T5 (get_models.py)
and the shared texts.

    python -m benchmarks.claims.flan_t5 --model MODELS/flan-t5-small-titles --data SHARED/data/text \
        --out flan-t5.md
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, T5ForConditionalGeneration

from benchmarks.claims.language_tasks import train_lora
from benchmarks.rows import commit
from tuneport import transfer
from tuneport.data.dataset import Dataset
from tuneport.measure.accuracy import linear_probe
from tuneport.models.open import open_model

CLASSES = ("negative", "positive")
WIDER = {"d_model": 640, "d_ff": 1280, "num_heads": 8}


class Permuted:
    """The coordinates of a twin of a T5: permutations of the residual stream, of heads and of hidden units."""

    def __init__(self, config: Any, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.stream, self.per_head = self.draw(config.d_model), config.d_kv
        self.heads = {stack: self.draw(config.num_heads) for stack in ("encoder", "decoder", "cross")}
        self.units: dict[str, Tensor] = {}
        self.hidden = config.d_ff

    def draw(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)

    def moved(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the T5, or a change of it, in the coordinates of the twin."""
        owner, last = name.split(".")[-2:]
        if "relative_attention_bias" in name:
            return tensor[:, self.heads[name.split(".")[0]]]
        if last == "weight" and tensor.ndim == 1:
            return tensor[self.stream]
        if owner in ("q", "k", "v", "o"):
            order = self.heads["cross" if "EncDecAttention" in name else name.split(".")[0]]
            rows = (order[:, None] * self.per_head + torch.arange(self.per_head)).flatten()
            return tensor[self.stream][:, rows] if owner == "o" else tensor[rows][:, self.stream]
        if owner in ("wi_0", "wi_1", "wi", "wo"):
            block = name.partition(".layer.")[0]
            units = self.units.setdefault(block, self.draw(self.hidden))
            return tensor[self.stream][:, units] if owner == "wo" else tensor[units][:, self.stream]
        return tensor[:, self.stream]  # the embedding, and the head over the vocabulary

    def twin(self, module: nn.Module) -> nn.Module:
        other = copy.deepcopy(module)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(self.moved(name, parameter.clone()))
        return other


def read_texts(path: Path, tested: int) -> dict[str, Dataset]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found = {}
    for split, count in (("train", 2000), ("test", tested)):
        part = [row for row in rows if row["split"] == split][:count]
        labels = np.array([row["label"] for row in part])
        found[split] = Dataset([row["text"] for row in part], labels, CLASSES, name="sst2")
    return found


def write_twins(model: Path, work: Path) -> tuple[dict[str, Path], Permuted]:
    """The real model, the planted twin and the wider random one, as folders in float32."""
    real = T5ForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    coordinates = Permuted(real.config)
    twin = coordinates.twin(real)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        one, other = (part(input_ids=ids, decoder_input_ids=ids).logits for part in (real, twin))
    assert torch.allclose(one, other, atol=1e-3 * float(one.abs().max())), "the twin must compute the same"
    config = copy.deepcopy(real.config)
    config.update(WIDER)
    torch.manual_seed(0)
    found = {}
    for name, module in (("real", real), ("planted", twin), ("wider", T5ForConditionalGeneration(config))):
        found[name] = work / name
        module.save_pretrained(found[name])
        AutoTokenizer.from_pretrained(model).save_pretrained(found[name])
    return found, coordinates


def rows(options: Any, work: Path) -> Iterator[dict[str, Any]]:
    data = read_texts(options.data / "sst2_stsa.jsonl.gz", options.test)
    folders, coordinates = write_twins(options.model, work)
    drawn = data["train"].subset(np.random.default_rng(0).choice(2000, options.samples, replace=False))
    adapters: dict[str, Path] = {}
    for source, target in (("real", "planted"), ("planted", "real"), ("real", "wider"), ("wider", "real")):
        old, new = (open_model(folders[name], device=options.device) for name in (source, target))
        if source not in adapters:
            adapters[source] = work / f"{source}-lora"
            tuned = train_lora(old, data["train"], steps=options.steps, rate=1e-3, batch=8, out=adapters[source])
        else:
            from peft import PeftModel

            base = T5ForConditionalGeneration.from_pretrained(folders[source]).to(old.device)
            tuned = PeftModel.from_pretrained(base, adapters[source]).merge_and_unload().eval()
        started = time.time()
        result = transfer(
            old,
            adapters[source],
            new,
            drawn,
            scale=1.0,
            samples=options.samples,
            exclude=["decoder.*"],
            accept_unlikely=True,  # a random model learns nothing in a few steps
            device=options.device,
        )
        seconds = time.time() - started
        probes = {"base": new.module, "ported": result.apply()}
        scores = {
            name: linear_probe(new.with_module(module), drawn, data["test"]).accuracy for name, module in probes.items()
        }
        yield {
            "pair": f"{source} to {target}",
            "layers": len(result.records),
            "source": linear_probe(old, drawn, data["test"]).accuracy,
            "fine-tuned": linear_probe(old.with_module(tuned), drawn, data["test"]).accuracy,
            **scores,
            "error": error_of(result, coordinates, source) if "wider" not in (source, target) else None,
            "seconds": seconds,
        }


def error_of(result: Any, coordinates: Permuted, source: str) -> float:
    """The norm of the ported change minus the planted one, over the norm of the planted one."""
    vector, wrong, whole = result.setup.change.vector, 0.0, 0.0
    for name in result.task_vector:
        found, given = (part.dense(name).double().cpu() for part in (result.task_vector, vector))
        if source == "real":
            given = coordinates.moved(name, given)
        else:
            found = coordinates.moved(name, found)
        wrong += float((found - given).square().sum())
        whole += float(given.square().sum())
    return (wrong / whole) ** 0.5


def table(found: list[dict[str, Any]], options: Any) -> Iterator[str]:
    yield "# The T5 protocol on a real flan-T5\n"
    yield f"SST-2, N = {options.samples}, {options.test} test samples, linear probe on the same N samples; a LoRA of"
    yield f"{options.steps} steps. `{options.model.name}`, {platform.machine()}, torch {torch.__version__}, commit"
    yield f"{commit()}, {time.strftime('%Y-%m-%d')}: `python -m benchmarks.claims.flan_t5`.\n"
    yield "| pair | layers | source | fine-tuned source | target | ported | error of the change | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found:
        numbers = " | ".join(f"{row[key]:.1f}" for key in ("source", "fine-tuned", "base", "ported"))
        error = "" if row["error"] is None else f"{row['error']:.4f}"
        yield f"| {row['pair']} | {row['layers']} | {numbers} | {error} | {row['seconds']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="transformers folder of flan-T5")
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared texts")
    parser.add_argument("--out", type=Path, help="where the table is written; also printed")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60, help="of the source's LoRA")
    parser.add_argument("--test", type=int, default=400, help="test samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = []
        for row in rows(options, Path(work)):
            print(json.dumps(row), flush=True)
            found.append(row)
    text = "\n".join(table(found, options)) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
