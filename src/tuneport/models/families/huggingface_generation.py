"""How transformers' models write: texts by its loop and cache, and the scores of several answers to one question.

A decoder reads what the answers share once, and the answers behind it in the same row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..base import Batch, Choose
from ..tokenizer import IGNORED
from . import quiet

NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
KEPT = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of attention: other caches have no places
STRETCHED = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length of what is read
MASKED = ("sdpa", "eager")  # attention that takes any mask
KINDS = {"full_attention", "sliding_attention"}  # of layers that do
STEP = 16  # tokens: rows are padded to a multiple of it, so that few shapes come back


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

    own, training = module.generation_config, module.training
    starts = (getattr(holder, "decoder_start_token_id", None) for holder in (own, module.config))
    start = next((token for token in starts if token is not None), None)
    module.generation_config = GenerationConfig(
        max_new_tokens=most, do_sample=False, use_cache=True, pad_token_id=0, decoder_start_token_id=start
    )
    module.eval()
    try:
        cache = _shared_cache(module, batch)
        read = {} if cache is None else {"past_key_values": cache}
        module.generate(**batch, **read, logits_processor=[process], stopping_criteria=[lambda *_, **__: finished])
    finally:
        module.generation_config = own
        module.train(training)


def _shared_cache(module: Any, batch: Batch) -> Any:
    """The cache of all but the last token of each row; None if few rows are equal or the cache cannot be used."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    rows, which = torch.cat([ids, mask], 1).unique_consecutive(dim=0, return_inverse=True)
    known = _accepts(module)
    if 2 * len(rows) > len(ids) or ids.shape[1] < 2 or _is_stretched(module) or not known >= NEEDED:
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


def answer_logits(module: Any, batch: Batch, labels: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Scores (N, K, vocabulary) of the next tokens and their labels (N, K), for rows that differ in their answers.

    The first `counts[0]` rows are answers to one question, and so on. An answer sees the question and itself. The
    result is None if the answers to a question share no tokens, or if the model cannot be told what a token sees.
    """
    if set(batch) != {"input_ids", "attention_mask"} or labels.is_meta or not _takes_masks(module):
        return None
    device, dtype = labels.device, next(module.parameters()).dtype
    ids, mask, labels = batch["input_ids"].cpu(), batch["attention_mask"].bool().cpu(), labels.cpu()
    sizes = torch.tensor(counts)
    question = torch.repeat_interleave(torch.arange(len(counts)), sizes)
    begin = (sizes.cumsum(0) - sizes)[question]
    same = (ids == ids[begin]) & mask & mask[begin] & (labels == IGNORED)
    leading = same.long().cumprod(1).sum(1)
    shared = torch.full_like(sizes, labels.shape[1]).scatter_reduce(0, question, leading, "amin")[question]
    ends = mask.sum(1)
    if int(shared.min()) < 1 or int((ends - shared).min()) < 1 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        return None
    # a row for each question: what is shared, then each answer without its last token, which predicts nothing
    lengths = ends - shared - 1
    before = lengths.cumsum(0) - lengths
    start = shared + before - before[begin]  # where an answer begins in its row
    tokens, places, parts = [], [], []
    for first, count in zip((sizes.cumsum(0) - sizes).tolist(), counts, strict=True):
        answers = ((row, int(shared[row]), int(ends[row]) - 1) for row in range(first, first + count))
        spans = [(first, 0, int(shared[first])), *answers]
        tokens.append(torch.cat([ids[row, begun:end] for row, begun, end in spans]))
        places.append(torch.cat([torch.arange(begun, end) for _, begun, end in spans]))
        parts.append(torch.cat([torch.full((end - begun,), part) for part, (_, begun, end) in enumerate(spans)]))
    packed, at, owner = _padded(tokens, 0), _padded(places, 0), _padded(parts, -1)
    # a token sees itself, earlier ones of its part, and earlier ones of part 0
    one, other = owner[:, :, None], owner[:, None, :]
    earlier = torch.ones(owner.shape[1], owner.shape[1], dtype=torch.bool).tril()
    seen = earlier & (one >= 0) & ((other == one) | (other == 0)) | earlier.triu()

    def additive(seen: Tensor) -> Tensor:
        """A mask (N, 1, T, T) that is added to the scores of attention."""
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None].to(device)

    given: Any = additive(seen)
    window = getattr(module.config, "sliding_window", None)
    if window is not None and int(at.max()) >= window:
        near = additive(seen & (at[:, :, None] - at[:, None, :] < window))
        kinds = getattr(module.config, "layer_types", None)
        given = near if kinds is None else {"full_attention": given, "sliding_attention": near}
    steps = torch.arange(int(lengths.max()) + 1)
    inside = steps <= lengths[:, None]
    wanted = (start[:, None] + steps - 1).where(steps > 0, shared[:, None] - 1).where(inside, 0).to(device)
    rows = question[:, None].to(device)
    with module.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: inputs[0][rows, wanted]):
        options = {"attention_mask": given, "position_ids": at.to(device), "use_cache": False}
        scores: Tensor = module(input_ids=packed.to(device), **options).logits
    named = labels.gather(1, (shared[:, None] + steps).clamp(max=labels.shape[1] - 1))
    return scores, named.where(inside, IGNORED).to(device)


def _accepts(module: Any) -> set[str]:
    """The arguments of the forward pass of a model, or of that in an adapter."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    return set(inspect.signature(inner.forward).parameters)


def _is_stretched(module: Any) -> bool:
    return any(kind in str(getattr(module.config, "rope_parameters", "")) for kind in STRETCHED)


def _takes_masks(module: Any) -> bool:
    """Whether the attention of all layers takes a mask that says which tokens each one sees."""
    config = module.config
    known = set(getattr(config, "layer_types", None) or ()) <= KINDS and module.get_output_embeddings() is not None
    masked = config._attn_implementation in MASKED and _accepts(module) >= NEEDED
    return known and masked and not _is_stretched(module)


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """The rows (N, T), with a length that comes back."""
    found = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return torch.nn.functional.pad(found, (0, -found.shape[1] % STEP), value=value)
