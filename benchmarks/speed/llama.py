"""A transfer between two language models of the 8B class, with random weights made on the device.

    python benchmarks/speed/llama.py --shapes 8b --device cuda --max-tokens 1024 --out OUT
    python benchmarks/speed/llama.py --shapes 8b --device cuda --max-tokens 1024 --lora 16 --out OUT
    python benchmarks/speed/llama.py --shapes 8b --device cuda --max-tokens 1024 --lora 16 --dtype float32 --out OUT

From Llama-3-8B's shapes to Qwen3-8B's (32 blocks to 36, MLP 14336 to 12288), N texts of 256 random tokens,
causal loss; the task vector is random, dense or of LoRA rank R, in every linear layer of the blocks. `tiny` is a trial
for the CPU. Also timed: the bare passes of both models without gradients of the weights. Peak memory is that of the
device, models and task vector included.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import now, peak_memory, prepare, publish, stages, table
from torch import Tensor, nn
from torch.nn import functional as F

SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 3, "vocab_size": 512},
        {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 600},
    ),
    "small": (
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 2000},
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "vocab_size": 2000},
    ),
    "slice": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 3, "vocab_size": 32000},
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "vocab_size": 32000},
    ),
    "1b": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936},
    ),
}


def make(kind: str, shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    heads = {
        "num_attention_heads": max(shape["hidden_size"] // 128, 4),
        "head_dim": min(128, shape["hidden_size"] // 4),
    }
    heads["num_key_value_heads"] = max(heads["num_attention_heads"] // 4, 2)
    configs = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = configs[kind]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model(config(**shape, **heads, tie_word_embeddings=False)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def random_change(source: nn.Module, rank: int | None) -> dict[str, Any]:
    from tuneport.task_vectors.low_rank import LowRank

    change: dict[str, Any] = {}
    for name, weight in source.named_parameters():
        if ".layers." not in name or weight.ndim != 2:
            continue
        if rank is None:
            change[name] = 0.01 * torch.randn_like(weight)
        else:
            out, in_ = weight.shape
            B, A = (torch.randn(size, device=weight.device, dtype=weight.dtype) for size in ((out, rank), (rank, in_)))
            change[name] = LowRank(0.01 * B, A)
    return change


def bare(models: tuple[nn.Module, ...], batches: list[Tensor]) -> None:
    """Forward and backward passes down to the first block's input."""
    for model in models:
        embed = model.get_input_embeddings()
        handle = embed.register_forward_hook(lambda _m, _a, output: output.requires_grad_(True))
        try:
            for batch in batches:
                loss(model, batch).backward()
        finally:
            handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--memory-budget", help="such as 100GiB; layers are measured in groups to keep it")
    parser.add_argument("--lora", type=int, metavar="R", help="a LoRA of this rank instead of a full change")
    parser.add_argument("--completion", choices=["svd", "none"], default="svd")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the models; bfloat16 on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    from tuneport import get_method
    from tuneport.io.sizes import format_bytes

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    shapes = SHAPES[options.shapes]
    source, target = make("llama", shapes[0], device, dtype), make("qwen", shapes[1], device, dtype)
    change = random_change(source, options.lora)
    vocabulary = min(shape["vocab_size"] for shape in shapes)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, vocabulary, (options.samples, options.length), generator=generator).to(device)
    batches = list(texts.split(options.batch))
    bare((source, target), batches[:1])
    started = now(device)
    bare((source, target), batches)
    floor = now(device) - started
    print(f"bare passes: {floor:.2f} s", file=sys.stderr, flush=True)
    with peak_memory(device) as peak:
        trial = prepare(
            source,
            change,
            target,
            batches,
            loss=loss,
            method=replace(get_method("bico"), completion=options.completion),
            max_tokens=options.max_tokens,
            memory_budget=options.memory_budget,
            device=str(device),
        )
        budget = trial.config.memory_budget
        passes = trial.passes(budget) if budget else None
        if passes is not None:
            print(f"{len(passes.groups)} runs, peak {format_bytes(passes.peak_bytes)} expected", file=sys.stderr)
        spent = stages(trial, device, passes)
    total = sum(spent.values())
    head = ["change", "tokens for maps", "bare passes, s", "measure", "solve", "transport", "total, s", "peak, GiB"]
    head += ["of that models and change", "runs", "expected peak without the change, GiB"]
    kind = f"LoRA of rank {options.lora}" if options.lora else "full"
    tokens = options.max_tokens or options.samples * options.length
    row = [kind, tokens, floor, *spent.values(), total, (peak.before + peak.bytes) / 2**30, peak.before / 2**30]
    row += [len(passes.groups) if passes else 1, passes.peak_bytes / 2**30 if passes else None]
    title = f"{options.shapes}: N = {options.samples} x {options.length} tokens, batches of {options.batch}, "
    title += f"{len(trial.setup.plan.pairs)} layers, completion {options.completion}\n\n"
    data = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "seconds": {"bare": floor, **spent, "total": total},
        "peak_bytes": peak.before + peak.bytes,
        "held_before_bytes": peak.before,
        "expected_peak_bytes": passes.peak_bytes if passes is not None else None,
        "runs": len(passes.groups) if passes is not None else 1,
    }
    name = f"llama-{options.shapes}-{'lora' if options.lora else 'full'}-{options.max_tokens or 'all'}-{device.type}"
    name += "".join(f"-{given}" for given in (options.memory_budget, options.dtype) if given)
    publish(name, options.out, title + table(head, [row]), data, device)


if __name__ == "__main__":
    main()
