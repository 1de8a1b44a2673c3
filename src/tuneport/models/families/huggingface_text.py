"""transformers' text classes: encoders, decoders, encoder-decoders, and their heads.

A class is recognised by its model type and the end of its name (BertModel, BertForSequenceClassification, ...),
fused projections by the name of their module. Embeddings and heads over the vocabulary are loose tensors. Of a mixture
of experts, attention and shared experts can be moved; the other experts and their router stay.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, first_of
from ...io.checkpoint import read_json
from ...layers import Layer, LooseTensor, RowRanges, find_layers, find_loose
from ..base import MIXTURE, Architecture, Batch, Generation, Inputs, Model, Outputs, outside_of
from ..tokenizer import Reader
from . import TOKENIZER_FILES, open_tokenizer
from .huggingface_generation import answer_logits, end_tokens, generate

ENCODER, DECODER, SEQ2SEQ = "encoder", "decoder", "seq2seq"
TEXT_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert"), ENCODER),
    **dict.fromkeys(("t5", "mt5"), SEQ2SEQ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), DECODER),
    **dict.fromkeys(("phi3", "gpt2", "gpt_neox"), DECODER),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), DECODER),
}
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
HEADS = (*CLASSIFIERS, *WRITERS, "ForMaskedLM", "EncoderModel", "TextModel", "Model")
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "mpnet")  # position ids begin after the padding index
POOLING = {  # the keys of sentence-transformers
    **dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_mean"), "mean"),
    **dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_cls"), "first"),
    "pooling_mode_lasttoken": "last",
}
EXPERTS = re.compile(r"\.experts\.|\.router\.|(mlp|block_sparse_moe)\.gate\.weight$")  # and what chooses among them
SENTENCE_SCALE = 20.0  # factor of cosines in the training of sentence encoders


def text_class(name: str, model_type: str) -> tuple[str, str] | None:
    """The kind and the head of a class of this name, or None if tuneport does not know it."""
    kind, head = TEXT_KINDS.get(model_type), next((head for head in HEADS if name.endswith(head)), None)
    if kind is None or head is None or (head in WRITERS and kind == ENCODER):
        return None
    return kind, head


def complete_text(model: Model, trust_remote_code: bool) -> Model:
    """The model with its layers, its tokenizer and the functions that run it."""
    module: Any = model.module
    config = module.config
    found = text_class(type(module).__name__, config.model_type)
    assert found is not None
    text_kind, head = found
    writes, embeds = head in WRITERS, text_kind == ENCODER and head not in CLASSIFIERS
    within: tuple[str, ...] = ()  # the name prefixes of everything but heads over the vocabulary
    if writes or head == "ForMaskedLM":
        within = ("shared.", "encoder.", "decoder.") if text_kind == SEQ2SEQ else (f"{module.base_model_prefix}.",)
    heads = int(getattr(config, "num_attention_heads", 0) or config.num_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    found_layers = find_layers(module, fused=_fused(module, heads, groups), within=within, heads=heads)
    layers = tuple(replace(layer, heads=groups) if layer.role in ("k", "v") else layer for layer in found_layers)
    loose = tuple(part for part in find_loose(module, layers, within=within) if not EXPERTS.search(part.name))
    reader = None
    if model.weights.folder is not None and any((model.weights.folder / name).is_file() for name in TOKENIZER_FILES):
        reader = _reader(open_tokenizer(model.weights.folder, trust_remote_code, "a text model"), module, config)
    pooling = _pooling(model.weights.folder, "last" if text_kind == DECODER else "mean")

    def features(part: Any, batch: Batch) -> Tensor:
        """One vector per text, of the last hidden states (N, T, d) without any head."""
        inner = getattr(part, "transformer", part).encoder if text_kind == SEQ2SEQ else part.base_model
        return _pool(inner(**batch).last_hidden_state, batch["attention_mask"], pooling)

    def token_logits(part: Any, batch: Batch, labels: Tensor, kept: Tensor) -> Tensor:
        """The scores (M, vocabulary) of the tokens that are `kept` (N, T), for labels (N, T)."""
        given = {"labels": labels} if text_kind == SEQ2SEQ else {}  # and the loss that is computed needs all scores
        head = None if given or kept.is_meta else part.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: inputs[0][kept][None]) if head is not None else None
        with hook or nullcontext():
            scores: Tensor = part(**batch, **given).logits
        if scores.shape[:2] == kept.shape:  # of all tokens
            return scores.flatten(0, 1) if kept.is_meta else scores[kept]
        return scores[0]

    def embed(texts: Sequence[str]) -> Tensor:
        assert reader is not None
        return features(module, model.place(reader.encode(texts)))

    outputs = Outputs(
        features,
        width=int(config.hidden_size),
        embed_texts=embed if embeds and reader is not None else None,
        logit_scale=SENTENCE_SCALE,
    )
    encode = reader.encode if reader is not None else None
    ways = ("causal", answer_logits) if text_kind == DECODER else ("seq2seq", None)
    vocabulary_head = _vocabulary_head(module, within) if writes else ()
    return replace(
        model,
        architecture=Architecture(layers, loose, vocabulary_head, _outside(model, layers, loose)),
        inputs=Inputs("text", encode, reader=reader, prompted=text_kind != ENCODER),
        outputs=outputs,
        generation=Generation(ways[0], generate, token_logits, ways[1]) if writes else None,
    )


def _outside(model: Model, layers: Sequence[Layer], loose: Sequence[LooseTensor]) -> dict[str, str]:
    """Heads over the vocabulary, and experts by their live names or, if the files hold them one by one, by those."""
    heads = outside_of(model.module, layers, loose, "head over the vocabulary: the target keeps its own")
    kept = {name: reason for name, reason in heads.items() if not EXPERTS.search(name)}
    return kept | {
        n: MIXTURE
        for n, file in model.weights.file_names.items()
        if EXPERTS.search(n) and file in model.weights.tensors
    }


def _vocabulary_head(module: Any, within: tuple[str, ...]) -> tuple[LooseTensor, ...]:
    """The layer that scores the tokens, unless it is tied to the embedding."""
    head = {id(parameter): suffix for suffix, parameter in module.get_output_embeddings().named_parameters()}
    return tuple(
        LooseTensor(name, tuple(parameter.shape), f"vocabulary head.{head[id(parameter)]}", "vocabulary head")
        for name, parameter in module.named_parameters()
        if id(parameter) in head and not name.startswith(within)
    )


def _fused(module: nn.Module, heads: int, groups: int) -> dict[str, dict[str, RowRanges]]:
    """The rows of each layer in fused projections."""
    grouped, halves = {"q": heads, "k": groups, "v": groups}, {"gate": 1, "up": 1}
    shares = {"c_attn": grouped, "Wqkv": grouped, "qkv_proj": grouped, "gate_up_proj": halves, "Wi": halves}
    shares["query_key_value"] = {"q": 1, "k": 1, "v": 1}  # head by head
    found: dict[str, dict[str, RowRanges]] = {}
    for path, part in module.named_modules():
        weight, last = getattr(part, "weight", None), path.rpartition(".")[2]
        if last in shares and isinstance(weight, Tensor) and weight.ndim == 2:
            rows = weight.shape[1] if type(part).__name__ == "Conv1D" else weight.shape[0]
            count = heads if last == "query_key_value" else 1
            unit = rows // (count * sum(shares[last].values()))
            sizes = {role: share * unit for role, share in shares[last].items()}
            starts = [place * sum(sizes.values()) for place in range(count)]
            found[f"{path}.weight"] = {
                role: tuple((start + end - size, start + end) for start in starts)
                for (role, size), end in zip(sizes.items(), accumulate(sizes.values()), strict=True)
            }
    return found


def _reader(tokenizer: Any, module: Any, config: Any) -> Reader:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if config.pad_token_id is None:  # classifiers look for the last token before the padding
        config.pad_token_id = tokenizer.pad_token_id
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    positions = positions or tokenizer.model_max_length  # relative positions have no end
    limits = {"max_position_embeddings": positions, "model_max_length of the tokenizer": tokenizer.model_max_length}
    for name, limit in limits.items():
        if not isinstance(limit, (int, float)) or not limit >= 1:
            raise CheckpointError(f"{name} is {limit!r}; expected the number of tokens that a text may have.")
    if config.model_type in OFFSET_POSITIONS:
        positions -= int(config.pad_token_id or 0) + 1
    limit = int(min(positions, tokenizer.model_max_length))
    accepted = inspect.signature(type(module).forward).parameters
    names = [name for name in tokenizer.model_input_names if name in accepted]
    wanted = tuple(dict.fromkeys((*names, "input_ids", "attention_mask")))
    return Reader(tokenizer, limit, wanted, int(config.vocab_size), ends=end_tokens(tokenizer, module))


def _pooling(folder: Path | None, default: str) -> str:
    """How token states become one vector: by the folder's 1_Pooling if it has one."""
    path = folder / "1_Pooling" / "config.json" if folder is not None else None
    if path is None or not path.is_file():
        return default
    config = read_json(path, "a pooling configuration")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [f"pooling_mode_{config['pooling_mode']}"] if isinstance(config.get("pooling_mode"), str) else modes
    known = [POOLING[mode] for mode in modes if mode in POOLING]
    if len(known) != 1 or len(modes) != 1:
        raise CheckpointError(
            f"{path} asks for {first_of(modes) or 'no pooling'}; tuneport knows one of {', '.join(POOLING)}."
        )
    return known[0]


def _pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
