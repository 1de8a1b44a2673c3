"""A transfer between two language models of the 70B class, planned from their configurations for 1, 2, 4 and 8 GPUs.

    python benchmarks/speed/seventy.py --budgets 130GiB 75GiB --out OUT

From Llama-3-70B's shapes to Qwen2.5-72B's (80 blocks each, MLP 28672 to 29568), bfloat16, 100 texts of 256 tokens in
batches of 4, maps from 2048 tokens, a full change. A second table has the teaching of a LoRA with written texts, models
in parts, scaled from 8B. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from record import publish, table

COMMON = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
COMMON |= {"tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 8192}
MODELS = {
    "llama-70b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 28672}
    | {"vocab_size": 128256},
    "qwen-72b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "intermediate_size": 29568}
    | {"vocab_size": 152064},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=["130GiB", "75GiB"], help="memory of one GPU")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tuneport.config import PlanConfig
    from tuneport.io.sizes import format_bytes
    from tuneport.pipeline.estimate import estimate_shapes

    rows, data, taught = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, own in MODELS.items():
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").write_text(json.dumps({**COMMON, **own}))
        started = time.perf_counter()
        for budget in options.budgets:
            asked = {"batch_size": options.batch, "max_tokens": 2048, "memory_budget": budget, "dtype": "bfloat16"}
            source, target = (Path(folder, name) for name in MODELS)
            found = estimate_shapes(source, target, PlanConfig.of(**asked))
            teaching = found["teaching"]
            for line in teaching["plans"]:
                hours = [line.get(name, "too small") for name in ("hours", "hours_of_1000")]
                taught.append([budget, line["devices"], line["peak_bytes"] / 2**30, *hours])
            for line in found["plans"]:
                sizes = [line["peak_bytes"] / 2**30, line["home_bytes"] / 2**30, format_bytes(line["fetched_bytes"])]
                rows.append([budget, line["devices"], line["runs"], *sizes])
                data.append({"budget": budget, **line})
        spent = time.perf_counter() - started
    head = ["budget", "GPUs", "runs", "peak of one, GiB", "at home, GiB", "fetched by one"]
    title = f"Llama-3-70B to Qwen2.5-72B shapes, planned in {spent:.0f} s on the CPU\n\n"
    text = f"\n\nA LoRA is taught {teaching['texts']} texts of 256 tokens, scaled from 8B on one {teaching['gpu']}\n\n"
    text += table(["budget", "GPUs", "peak of one, GiB", "hours", "hours of 1,000 adapters"], taught)
    publish("plan-70b", options.out, title + table(head, rows) + text, {"plans": data}, torch.device("cpu"))


if __name__ == "__main__":
    main()
