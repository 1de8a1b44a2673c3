"""Tiny text models of every known family, made from configs, and tokenizers made of a few sentences."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

VOCABULARY = 120
LABELS = 30
LENGTH = 40
SENTENCES = (
    "the cat sat on the mat and looked at the bird",
    "a small dog barked at the tall man in the garden",
    "rain falls softly on the old stone houses of the town",
    "she reads a long letter by the light of the window",
    "the teacher asked a question that nobody could answer",
    "fresh bread smells better than anything else in the morning",
    "two ships sailed past the lighthouse before the storm",
    "he plays the violin, badly, but with great joy",
    "why do stars shine brighter far away from cities?",
    "my grandmother's garden grows tomatoes, beans and herbs",
    "the train to the mountains leaves at seven",
    "children laughed while the clown juggled oranges",
    "an honest mistake is better than a clever lie",
    "winter nights are quiet, dark and very cold here",
    "the river carries leaves and boats down to the sea",
    "no one remembers who painted the blue door",
)


@dataclass(frozen=True)
class Size:
    width: int = 16
    depth: int = 2
    heads: int = 4
    groups: int = 2
    head_width: int = 4
    hidden: int = 24
    seed: int = 0


SMALL = Size()
LARGE = Size(width=20, depth=3, heads=5, groups=5, head_width=4, hidden=32, seed=1)


def _plain(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "num_labels": LABELS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        **more,
    }


def _grouped(size: Size, **more: Any) -> dict[str, Any]:
    return _plain(size, num_key_value_heads=size.groups, head_dim=size.head_width, **more)


def _distil(size: Size) -> dict[str, Any]:
    own = {"dim": size.width, "hidden_dim": size.hidden, "n_layers": size.depth, "n_heads": size.heads}
    return {**own, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_labels": LABELS}


def _gpt2(size: Size) -> dict[str, Any]:
    own = {"n_embd": size.width, "n_inner": size.hidden, "n_layer": size.depth, "n_head": size.heads}
    return {**own, "vocab_size": VOCABULARY, "n_positions": LENGTH, "bos_token_id": 1, "eos_token_id": 2}


def _t5(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "d_model": size.width,
        "d_kv": size.head_width + 1,  # inner attention width is not d_model
        "d_ff": size.hidden,
        "num_layers": size.depth,
        "num_decoder_layers": size.depth,
        "num_heads": size.heads,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
        "num_labels": LABELS,
        **more,
    }


@dataclass(frozen=True)
class TextFamily:
    """A class with its configuration; what the tests must know beyond that."""

    kind: str
    config: str
    arguments: Callable[[Size], dict[str, Any]]
    rotary: bool = False  # coordinates inside a query and a key head cannot be mixed
    tied: bool = False


T = TextFamily
FAMILIES: dict[str, TextFamily] = {
    "bert": T("BertForSequenceClassification", "BertConfig", _plain),
    "roberta": T(
        "RobertaForSequenceClassification", "RobertaConfig", lambda s: _plain(s, pad_token_id=1, bos_token_id=0)
    ),
    "mpnet": T("MPNetForSequenceClassification", "MPNetConfig", lambda s: _plain(s, pad_token_id=1, bos_token_id=0)),
    "distilbert": T("DistilBertForSequenceClassification", "DistilBertConfig", _distil),
    "modernbert": T("ModernBertForSequenceClassification", "ModernBertConfig", _plain, rotary=True),
    "t5": T("T5ForConditionalGeneration", "T5Config", _t5, tied=True),
    "t5-gated": T(
        "T5ForConditionalGeneration",
        "T5Config",
        lambda s: _t5(s, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "t5-classifier": T("T5ForSequenceClassification", "T5Config", _t5),
    "t5-encoder": T("T5EncoderModel", "T5Config", _t5),
    "llama": T("LlamaForCausalLM", "LlamaConfig", _grouped, rotary=True),
    "llama-tied": T("LlamaForCausalLM", "LlamaConfig", lambda s: _grouped(s, tie_word_embeddings=True), True, True),
    "llama-classifier": T("LlamaForSequenceClassification", "LlamaConfig", _grouped, rotary=True),
    "qwen2": T("Qwen2ForCausalLM", "Qwen2Config", _grouped, rotary=True),
    "qwen3": T("Qwen3ForCausalLM", "Qwen3Config", lambda s: {**_grouped(s), "head_dim": 6}, rotary=True),
    "mistral": T("MistralForCausalLM", "MistralConfig", lambda s: _grouped(s, sliding_window=6), rotary=True),
    "gemma": T("GemmaForCausalLM", "GemmaConfig", lambda s: {**_grouped(s), "head_dim": 6}, True, True),
    "gemma2": T("Gemma2ForCausalLM", "Gemma2Config", lambda s: {**_grouped(s), "head_dim": 6}, True, True),
    "gemma3": T("Gemma3ForCausalLM", "Gemma3TextConfig", lambda s: {**_grouped(s), "head_dim": 6}, True, True),
    "phi3": T("Phi3ForCausalLM", "Phi3Config", _grouped, rotary=True),
    "gpt2": T("GPT2LMHeadModel", "GPT2Config", _gpt2, tied=True),
    "gpt-neox": T("GPTNeoXForCausalLM", "GPTNeoXConfig", _plain, rotary=True),
}


def make(family: str, size: Size = SMALL, **more: Any) -> Any:
    """A model with weights of ordinary size everywhere; attention as plain matrix products."""
    entry = FAMILIES[family]
    config = getattr(transformers, entry.config)(**{**entry.arguments(size), **more})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(size.seed)
        module = getattr(transformers, entry.kind)(config)
        if family == "t5-gated":  # transformers ties T5s unless the files hold two matrices, as those of Flan-T5 do
            module.lm_head.weight = nn.Parameter(torch.zeros_like(module.shared.weight))
            config.tie_word_embeddings = False
        scatter(module)
    return module.eval()


def scatter(module: nn.Module) -> None:
    """Random weights: norms near what they were, everything else of the size that keeps signals alive."""
    with torch.no_grad():
        for part in module.modules():
            norm = "norm" in type(part).__name__.lower()
            for parameter in part.parameters(recurse=False):
                if norm:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
                elif isinstance(part, nn.Embedding):
                    parameter.copy_(torch.randn_like(parameter))
                else:
                    fan_in = parameter.shape[-1] if parameter.ndim > 1 else 25
                    parameter.copy_(torch.randn_like(parameter) * fan_in**-0.5)


def tokens(count: int, length: int = 10, seed: int = 7, batch: int = 64) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Random token numbers without padding, and random labels: of samples (N,), or of tokens (N, 6)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    labels = torch.randint(3, VOCABULARY, (count, 6), generator=generator)
    mask = torch.ones_like(ids)
    cut = range(0, count, batch)
    return [
        ({"input_ids": ids[at : at + batch], "attention_mask": mask[at : at + batch]}, labels[at : at + batch])
        for at in cut
    ]


# --- tokenizers


# Trainers of word pieces and unigrams break ties by chance, so these vocabularies are counted here.


def _counted(words: list[str], mark: str, count: int) -> list[str]:
    """All letters and the most frequent parts of the words; parts inside a word begin with the mark."""
    letters, parts = Counter[str](), Counter[str]()
    for word in words:
        for begin in range(len(word)):
            start = mark if begin else ""
            letters[start + word[begin]] += 1
            for end in range(begin + 2, len(word) + 1):
                parts[start + word[begin:end]] += end - begin
    most = sorted(parts, key=lambda part: (-parts[part], part))
    return [*sorted(letters), *most][:count]


@functools.cache
def _wordpiece(size: int) -> str:
    split = pre_tokenizers.BertPreTokenizer()
    words = [word for sentence in SENTENCES for word, _ in split.pre_tokenize_str(sentence)]
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocabulary = [*special, *_counted(words, "##", size - len(special))]
    tokenizer = Tokenizer(models.WordPiece({part: i for i, part in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer.to_str()


@functools.cache
def _bytes(size: int, frame: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
        )
    return tokenizer.to_str()


@functools.cache
def _pieces(size: int) -> str:
    words = [f"▁{word}" for sentence in SENTENCES for word in sentence.split()]
    parts = _counted(words, "", size - 3)
    special = ["<pad>", "</s>", "<unk>"]
    scores = [(part, -float(place) / len(part)) for place, part in enumerate(parts, start=1)]
    tokenizer = Tokenizer(models.Unigram([*((part, 0.0) for part in special), *scores], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer.to_str()


def _fast(content: str, names: Mapping[str, str], longest: int = LENGTH) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(content),
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def bert_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Word pieces, `[CLS] a [SEP] b [SEP]`."""
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    found = _fast(_wordpiece(size), names)
    found.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return found


def roberta_tokenizer(size: int = 320) -> PreTrainedTokenizerFast:
    """Byte pairs, `<s> a </s></s> b </s>`; at least 260 tokens, for the bytes."""
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _fast(_bytes(size, True), names)


def gpt_tokenizer(size: int = 320) -> PreTrainedTokenizerFast:
    """Byte pairs without anything around them, and without a token for padding."""
    return _fast(_bytes(size, False), {"bos_token": "<s>", "eos_token": "</s>"})


def t5_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Unigram pieces, `a </s>`."""
    return _fast(_pieces(size), {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"})


TOKENIZERS: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "bert": bert_tokenizer,
    "roberta": roberta_tokenizer,
    "gpt": gpt_tokenizer,
    "t5": t5_tokenizer,
}


def write(folder: Path, module: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """A model folder as a user has it."""
    module.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
