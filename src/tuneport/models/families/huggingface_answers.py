"""Several answers to one question: a decoder reads the tokens that they share once, and keeps them in its cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..parts import Batch
from ..tokenizer import IGNORED

NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
KEPT = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of attention: other caches have no places
STRETCHED = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length of what is read


def accepts(module: Any) -> set[str]:
    """The arguments of the forward pass of a model, or of that in an adapter."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    return set(inspect.signature(inner.forward).parameters)


def answer_logits(module: Any, batch: Batch, labels: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Scores (N, K, vocabulary) of the next tokens and their labels (N, K), for rows that differ in their answers.

    The first `counts[0]` rows are answers to one question, and so on. The result is None if the answers to a question
    share no tokens, or if the model has no cache that can be used.
    """
    known = accepts(module)
    stretched = any(kind in str(getattr(module.config, "rope_parameters", "")) for kind in STRETCHED)
    if set(batch) != {"input_ids", "attention_mask"} or not known >= NEEDED or labels.is_meta or stretched:
        return None
    ids, mask, device = batch["input_ids"], batch["attention_mask"].bool(), labels.device
    sizes = torch.tensor(counts, device=device)
    question = torch.repeat_interleave(torch.arange(len(counts), device=device), sizes)
    begin = sizes.cumsum(0) - sizes
    same = (ids == ids[begin][question]) & mask & mask[begin][question] & (labels == IGNORED)
    leading = same.long().cumprod(1).sum(1)
    # the last shared token is read with each answer, since its scores are those of the answer's first token
    shared = torch.full_like(sizes, labels.shape[1]).scatter_reduce(0, question, leading, "amin") - 1
    if int(shared.min()) < 1 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        return None
    places = torch.arange(int(shared.max()), device=device) - (shared.max() - shared)[:, None]  # padded on the left
    seen = places >= 0
    places = places.clamp(min=0)
    some = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    cache = module(
        input_ids=ids[begin].gather(1, places),
        attention_mask=seen.long(),
        position_ids=places,
        use_cache=True,
        **some,
    ).past_key_values
    if {type(layer).__name__ for layer in getattr(cache, "layers", [None])} - KEPT:
        return None
    cache.batch_select_indices(question)
    ends = mask.sum(1)
    places = shared[question][:, None] + torch.arange(int((ends - shared[question]).max()), device=device)
    inside = places < ends[:, None]
    places = places.clamp(max=labels.shape[1] - 1)
    scores: Tensor = module(
        input_ids=ids.gather(1, places),
        attention_mask=torch.cat([seen[question], inside], dim=1).long(),
        position_ids=places,
        past_key_values=cache,
        use_cache=True,
    ).logits
    return scores[:, :-1], labels.gather(1, places).masked_fill(~inside, IGNORED)[:, 1:]
