"""Texts that transformers' models write: its loop with its cache runs the model, and a callback chooses the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parts import Batch, Choose
from . import quiet
from .huggingface_answers import KEPT, NEEDED, STRETCHED, accepts


def end_tokens(tokenizer: Any, module: Any) -> frozenset[int]:
    """The tokens that end a text by the tokenizer, the configuration, or the settings for generation."""
    holders = (module.config, getattr(module, "generation_config", None))
    stated = [tokenizer.eos_token_id, *(getattr(holder, "eos_token_id", None) for holder in holders)]
    flat = [token for one in stated for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in flat if isinstance(token, int))


@quiet()
def generate(module: Any, batch: Batch, most: int, choose: Choose) -> None:
    """Continue a batch by at most `most` tokens; equal rows that follow each other are read once.

    The model's own settings for generation have no effect.
    """
    from transformers import GenerationConfig

    finished = torch.zeros(0, dtype=torch.bool)

    def process(_: Tensor, scores: Tensor) -> Tensor:
        nonlocal finished
        chosen, finished = choose(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def stop(*_: Any, **__: Any) -> Tensor:
        return finished

    own, training = module.generation_config, module.training
    start = getattr(own, "decoder_start_token_id", None)
    start = getattr(module.config, "decoder_start_token_id", None) if start is None else start
    module.generation_config = GenerationConfig(
        max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=0, decoder_start_token_id=start
    )
    module.eval()
    try:
        cache = _shared_cache(module, batch)
        read = {} if cache is None else {"past_key_values": cache}
        module.generate(**batch, **read, logits_processor=[process], stopping_criteria=[stop])
    finally:
        module.generation_config = own
        module.train(training)


def _shared_cache(module: Any, batch: Batch) -> Any:
    """The cache of all but the last token of each row; None if few rows are equal or the cache cannot be used."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    rows, which = torch.cat([ids, mask], 1).unique_consecutive(dim=0, return_inverse=True)
    known = accepts(module)
    stretched = any(kind in str(getattr(module.config, "rope_parameters", "")) for kind in STRETCHED)
    if 2 * len(rows) > len(ids) or ids.shape[1] < 2 or stretched or not known >= NEEDED:
        return None
    ids, mask = rows[:, : ids.shape[1] - 1], rows[:, ids.shape[1] : -1]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    some = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    options = {"attention_mask": mask, "position_ids": places, "use_cache": True, **some}
    cache = module(input_ids=ids, **options).past_key_values
    if {type(layer).__name__ for layer in getattr(cache, "layers", [None])} - KEPT:
        return None
    cache.batch_select_indices(which)
    return cache
