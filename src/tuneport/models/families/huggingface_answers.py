"""Several answers to one question: a decoder reads what they share once, and the answers behind it in the same row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..parts import Batch
from ..tokenizer import IGNORED

NEEDED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
KEPT = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of attention: other caches have no places
STRETCHED = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length of what is read
MASKED = ("sdpa", "eager")  # attention that takes any mask
KINDS = {"full_attention", "sliding_attention"}  # of layers that do
STEP = 16  # tokens: rows are padded to a multiple of it, so that few shapes come back


def accepts(module: Any) -> set[str]:
    """The arguments of the forward pass of a model, or of that in an adapter."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    return set(inspect.signature(inner.forward).parameters)


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
    packed, at = (_padded(each, 0) for each in (tokens, places))
    seen = _seen(_padded(parts, -1))
    given: Any = _additive(seen, dtype).to(device)
    window = getattr(module.config, "sliding_window", None)
    if window is not None and int(at.max()) >= window:
        near = _additive(seen & (at[:, :, None] - at[:, None, :] < window), dtype).to(device)
        kinds = getattr(module.config, "layer_types", None)
        given = near if kinds is None else {"full_attention": given, "sliding_attention": near}
    steps = torch.arange(int(lengths.max()) + 1)
    wanted = (start[:, None] + steps - 1).where(steps > 0, shared[:, None] - 1)
    inside = steps <= lengths[:, None]
    wanted, rows = wanted.where(inside, 0).to(device), question[:, None].to(device)
    head = module.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, inputs: inputs[0][rows, wanted]):
        scores: Tensor = module(
            input_ids=packed.to(device), attention_mask=given, position_ids=at.to(device), use_cache=False
        ).logits
    named = labels.gather(1, (shared[:, None] + steps).clamp(max=labels.shape[1] - 1))
    return scores, named.where(inside, IGNORED).to(device)


def _takes_masks(module: Any) -> bool:
    """Whether the attention of all layers takes a mask that says which tokens each one sees."""
    config = module.config
    stretched = any(kind in str(getattr(config, "rope_parameters", "")) for kind in STRETCHED)
    known = set(getattr(config, "layer_types", None) or ()) <= KINDS and module.get_output_embeddings() is not None
    return known and not stretched and config._attn_implementation in MASKED and accepts(module) >= NEEDED


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """The rows (N, T), with a length that comes back."""
    found = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return torch.nn.functional.pad(found, (0, -found.shape[1] % STEP), value=value)


def _seen(parts: Tensor) -> Tensor:
    """Which tokens (N, T, T) each one sees: itself, earlier ones of its part, and earlier ones of part 0."""
    one, other = parts[:, :, None], parts[:, None, :]
    square = torch.ones(parts.shape[1], parts.shape[1], dtype=torch.bool)
    return square.tril() & (one >= 0) & ((other == one) | (other == 0)) | square.tril().triu()


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (N, 1, T, T) that is added to the scores of attention."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
