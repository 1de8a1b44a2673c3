"""Language models by plain transformers and peft: train a LoRA, load one, score it.

This is the second opinion on what tuneport writes, so nothing of tuneport is imported here. Rows are padded on the
left: answers end where the row ends, logits are computed only there, and prompts are ready to be continued.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.skill.cells import Sample, Schedule, Task
from benchmarks.skill.place import fast_products
from benchmarks.skill.scores import exact, percent, slot_f1

RANK, ALPHA = 16, 32
WARM_UP = 0.1  # share of the steps
LOGITS = 2**28  # numbers of one pass of a scoring, at most
ROWS = 256  # prompts that are continued at once


@dataclass(frozen=True)
class Scores:
    """Scores of a model on the test part; what it answers and whether that is right, where there are answers."""

    values: dict[str, float]
    answers: tuple[str, ...] = ()
    right: tuple[bool, ...] | None = None


class LanguageModel:
    """A causal language model and its tokenizer, with at most one LoRA."""

    def __init__(self, folder: Path, device: str, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        kind = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
        self.module: Any = model.to(self.device).eval().requires_grad_(False)
        pad = self.tokenizer.pad_token_id
        self.padding = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def encode(self, sample: Sample, *, ended: bool = False) -> tuple[list[int], int]:
        """Return the tokens of a sample, with the end of the text if it is `ended`, and where its answer begins.

        Prompt and answer are encoded as one text. A first token that nothing precedes cannot be predicted.
        """
        whole = self._tokens(sample.prompt + sample.answer)
        start = self._tokens(sample.prompt) if sample.prompt else whole[: self._specials(whole)]
        place = next(
            (at for at, (one, other) in enumerate(zip(start, whole, strict=False)) if one != other), len(start)
        )
        end = [int(self.tokenizer.eos_token_id)] if ended and sample.prompt else []
        return whole + end, max(1, min(place, len(whole) - 1))

    def _tokens(self, text: str) -> list[int]:
        found = list(self.tokenizer(text, verbose=False)["input_ids"])
        while found and found[-1] == self.tokenizer.eos_token_id:
            found.pop()
        return found

    def _specials(self, tokens: Sequence[int]) -> int:
        """The number of special tokens before a text."""
        return int(bool(tokens) and tokens[0] == self.tokenizer.bos_token_id)

    def batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return rows of tokens, padded on the left, and the mask."""
        width = max(map(len, rows))
        ids = torch.tensor([[self.padding] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def losses(self, rows: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        """Return the loss of each answer in nats, summed over its tokens, and the number of these."""
        ids, mask = self.batch([tokens for tokens, _ in rows])
        counts = torch.tensor([len(tokens) - start for tokens, start in rows], device=self.device)
        longest = int(counts.max())
        places = (mask.cumsum(1) - 1).clamp(min=0)
        found = self.module(input_ids=ids, attention_mask=mask, position_ids=places, logits_to_keep=longest + 1)
        wanted = torch.arange(longest, device=self.device) >= longest - counts[:, None]  # (N, K)
        logits = found.logits[:, :-1][wanted].float()
        each = torch.nn.functional.cross_entropy(logits, ids[:, -longest:][wanted], reduction="none")
        owner = torch.arange(len(rows), device=self.device)[:, None].expand_as(wanted)[wanted]
        return torch.zeros(len(rows), device=self.device).index_add(0, owner, each), counts

    def train(self, samples: Sequence[Sample], schedule: Schedule, *, seed: int = 0, autocast: bool = False) -> None:
        """Train a new LoRA on all linear layers of the blocks; the loss is that of the answers."""
        from peft import LoraConfig, get_peft_model

        self.drop()
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self.module = get_peft_model(self.module, config).train()
        trained = [each for each in self.module.parameters() if each.requires_grad]
        cuda = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(trained, lr=schedule.rate, weight_decay=0.0, fused=cuda)
        rows = [self.encode(sample, ended=True) for sample in samples]
        batches = _batches(len(rows), schedule.batch, random.Random(seed))
        with fast_products():
            for step in range(schedule.steps):
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate * _share(step, schedule.steps)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                    total, counts = self.losses([rows[at] for at in next(batches)])
                    loss = total.sum() / counts.sum()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
        self.module.eval()

    def save(self, folder: Path) -> None:
        """Write the LoRA."""
        self.module.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Load a LoRA in the place of the present one."""
        from peft import PeftModel

        self.drop()
        self.module = PeftModel.from_pretrained(self.module, str(folder)).eval().requires_grad_(False)

    def drop(self) -> None:
        """Take the LoRA away."""
        if hasattr(self.module, "peft_config"):
            self.module = self.module.unload().eval().requires_grad_(False)
            if hasattr(self.module, "peft_config"):
                del self.module.peft_config

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Context in which the model is its base."""
        if not hasattr(self.module, "disable_adapter"):
            yield
            return
        with self.module.disable_adapter():
            yield

    @torch.inference_mode()
    def all_losses(self, samples: Sequence[Sample]) -> list[tuple[float, int]]:
        """The loss of each answer in nats, and the number of characters that it stands for."""
        rows = [self.encode(sample) for sample in samples]
        found: list[tuple[float, int]] = [(0.0, 0)] * len(rows)
        size = int(self.module.config.vocab_size)
        order = sorted(range(len(rows)), key=lambda at: len(rows[at][0]))
        for part in _groups(order, rows, LOGITS // size):
            total, _ = self.losses([rows[at] for at in part])
            for at, loss in zip(part, total.tolist(), strict=True):
                tokens, start = rows[at]
                lost = self.tokenizer.decode(tokens[:start], skip_special_tokens=True) if not samples[at].prompt else ""
                found[at] = loss, len(samples[at].answer) - len(lost)
        return found

    def bits(self, samples: Sequence[Sample]) -> float:
        """Bits per character of the answers."""
        found = self.all_losses(samples)
        return sum(loss for loss, _ in found) / math.log(2) / sum(length for _, length in found)

    def choose(self, prompts: Sequence[str], words: Sequence[str]) -> list[str]:
        """The likeliest of some words after each prompt."""
        found = self.all_losses([Sample(prompt, f" {word}") for prompt in prompts for word in words])
        losses = torch.tensor([loss for loss, _ in found]).view(len(prompts), len(words))
        return [words[at] for at in losses.argmin(1).tolist()]

    @torch.inference_mode()
    def write(self, prompts: Sequence[str], longest: int) -> list[str]:
        """The likeliest continuation of each prompt, token by token, to the end of its line."""
        rows = [self._tokens(prompt) for prompt in prompts]
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        texts = [""] * len(rows)
        for at in range(0, len(order), ROWS):
            part = order[at : at + ROWS]
            ids, mask = self.batch([rows[index] for index in part])
            written = self.module.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=self.ends,
                pad_token_id=self.padding,
            )
            for index, tokens in zip(part, written[:, ids.shape[1] :], strict=True):
                texts[index] = self.tokenizer.decode(tokens, skip_special_tokens=True).split("\n")[0].strip()
        return texts

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a line or a text."""
        size = len(self.tokenizer)
        texts = self.tokenizer.batch_decode([[token] for token in range(size)])
        own = self.module.generation_config.eos_token_id
        given = own if isinstance(own, list) else [own]
        known = [token for token in (*given, self.tokenizer.eos_token_id) if token is not None]
        return sorted({*known, *(token for token in range(size) if "\n" in texts[token])})

    def score(self, task: Task, samples: Sequence[Sample]) -> Scores:
        """Score the model on samples of a task."""
        if task.lower_is_better:
            return Scores({"bits": self.bits(samples)})
        prompts, wanted = [sample.prompt for sample in samples], [sample.answer.strip() for sample in samples]
        got = self.choose(prompts, task.words) if task.words else self.write(prompts, task.longest)
        right = exact(got, wanted)
        values = {"accuracy": percent(right)}
        if task.kind == "slots":
            values = {"f1": slot_f1(got, wanted), **values}
        return Scores(values, tuple(got), tuple(right))


def _share(step: int, steps: int) -> float:
    """The share of the rate at a step: a warm-up, then half a cosine."""
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(count: int, size: int, chance: random.Random) -> Iterator[list[int]]:
    """Batches without end: every sample once, in a new order each time round."""
    stream = chain.from_iterable(chance.sample(range(count), count) for _ in repeat(None))
    while True:
        yield [next(stream) for _ in range(min(size, count))]


def _groups(order: Sequence[int], rows: Sequence[tuple[list[int], int]], most: int) -> Iterator[list[int]]:
    """Rows of similar length whose logits fit into one pass."""
    part: list[int] = []
    longest = 0
    for at in order:
        longest = max(longest, len(rows[at][0]) - rows[at][1] + 1)
        if part and (longest * (len(part) + 1) > most or len(part) == ROWS):
            yield part
            part, longest = [], len(rows[at][0]) - rows[at][1] + 1
        part.append(at)
    if part:
        yield part
