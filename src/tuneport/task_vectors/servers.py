"""What a server makes of an adapter: the checks that vLLM applies when it loads one.

They are those of its `peft_helper.py`, `lora_model.py` and `config/lora.py`: plain LoRA factors of linear layers that
it knows, nothing stored whole, no biases, and a rank that `--max-lora-rank` can take. It does not read `rank_pattern`,
so one rank for all layers is the safe form. It casts the factors to its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import first_of
from .lora_format import Adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MODULES = frozenset((*ATTENTION, "gate_proj", "up_proj", "down_proj", "gate_up_proj"))


def vllm_rank(adapter: Adapter) -> int | None:
    """The least `--max-lora-rank` with which vLLM loads an adapter; None if no value is large enough."""
    return next((rank for rank in RANKS if rank >= int(adapter.config["r"])), None)


def vllm_refusals(adapter: Adapter) -> Iterator[str]:
    """The reasons why vLLM would refuse an adapter, or would serve something else."""
    config = adapter.config
    if vllm_rank(adapter) is None:
        yield f"rank {config['r']}, and {RANKS[-1]} is the largest: pass `rank=R`"
    if config.get("rank_pattern"):
        yield "layers of several ranks: pass `uniform_rank=True`"
    if config.get("use_dora"):
        yield "DoRA"
    if saved := config.get("modules_to_save"):
        yield f"modules that are stored whole ({first_of(saved)})"
    if config.get("bias", "none") != "none":
        yield "biases"
    paths = {key.partition(".lora_")[0].rpartition(".")[2] for key in adapter.tensors if ".lora_" in key}
    if others := sorted(paths - MODULES):
        yield f"layers that it does not adapt ({first_of(others)})"
