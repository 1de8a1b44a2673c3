"""Texts that models write: the tokens, their likelihood, where they end, and that chance follows the prompt alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.texts import SENTENCES
from builders.writers import taught_writer, writer
from tuneport.errors import CaptureError, DataError, TuneportError
from tuneport.models.base import Model
from tuneport.models.generation import BITS, HEAD, Sampling, draw, generate_texts

PROMPTS = [sentence[: 4 + 3 * place] for place, sentence in enumerate(SENTENCES[:7])]
FREE = Sampling(max_new_tokens=12, seed=3)


def one_by_one(model: Model, prompt: str, steps: int) -> tuple[list[int], float]:
    """The likeliest tokens after a prompt that is read alone and without a cache, and their mean log-likelihood."""
    assert model.inputs.reader is not None
    module: Any = model.module
    ids = model.inputs.reader.tokenizer(prompt, return_tensors="pt")["input_ids"]
    found: list[int] = []
    logs = []
    while len(found) < steps and not (found and found[-1] in model.inputs.reader.ends):
        if model.generates == "causal":
            scores = module(input_ids=torch.cat([ids, torch.tensor([found], dtype=torch.long)], 1)).logits
        else:
            start = module.config.decoder_start_token_id
            scores = module(input_ids=ids, decoder_input_ids=torch.tensor([[start, *found]])).logits
        found.append(int(scores[0, -1].argmax()))
        logs.append(float(scores[0, -1].log_softmax(-1).max()))
    return found, sum(logs) / len(logs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "gpt-neox", "t5"])
def test_greedy_texts_are_those_of_each_prompt_alone(family: str, tmp_path: Path) -> None:
    """Padding, batches and the cache change nothing; mistral's window of six is shorter than the prompts."""
    model = writer(tmp_path, family)
    with torch.no_grad():
        oracles = [one_by_one(model, prompt, 10) for prompt in PROMPTS]
    found = generate_texts(model, PROMPTS, Sampling(10, temperature=0), batch_size=4)
    assert model.inputs.reader is not None
    for (tokens, likelihood), written in zip(oracles, found, strict=True):
        ended = tokens[-1] in model.inputs.reader.ends
        text = model.inputs.reader.tokenizer.decode(tokens, skip_special_tokens=True)
        assert written.text.strip() == text.strip()
        assert written.finished == ended
        assert written.log_likelihood == pytest.approx(likelihood, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "gpt-neox", "t5"])
def test_equal_prompts_are_read_once(family: str, tmp_path: Path) -> None:
    """The texts are those of each prompt alone; mistral's window is shorter than the prompts, one prompt is a token."""
    model = writer(tmp_path, family)
    prompts = ["a", *PROMPTS[3:6]]
    read: list[int] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        read.append(given["input_ids"].numel() if "input_ids" in given else 0)

    hook = model.module.register_forward_pre_hook(note, with_kwargs=True)
    alone = [generate_texts(model, [prompt], Sampling(10, temperature=0))[0] for prompt in prompts]
    longest = max(read)
    read.clear()
    found = generate_texts(model, [prompt for prompt in prompts for _ in range(5)], Sampling(10, temperature=0))
    hook.remove()
    assert [written.text for written in found] == [written.text for written in alone for _ in range(5)]
    for place, written in enumerate(found):
        assert written.log_likelihood == pytest.approx(alone[place // 5].log_likelihood, abs=1e-4)
    if model.generates == "causal":
        assert 0 < max(read) <= 4 * longest  # of 20 rows


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_texts_do_not_depend_on_the_order(top_p: float, tmp_path: Path) -> None:
    model, sampling = writer(tmp_path), replace(FREE, top_p=top_p)
    prompts = [*PROMPTS, PROMPTS[2], ""]
    found = generate_texts(model, prompts, sampling, batch_size=2)
    assert generate_texts(model, prompts[::-1], sampling, batch_size=2)[::-1] != found  # the two equal ones change
    order = [5, 1, 2, 0, 8, 6, 4, 3, 7]  # the equal ones stay in order
    mixed = generate_texts(model, [prompts[place] for place in order], sampling, batch_size=2)
    assert mixed == [found[place] for place in order]
    assert found[2].text != found[7].text
    assert [w.text for w in generate_texts(model, prompts, replace(sampling, seed=4), batch_size=2)] != [
        w.text for w in found
    ]


def test_no_state_of_chance_or_model_changes(tmp_path: Path) -> None:
    model = writer(tmp_path)
    module: Any = model.module
    expected = generate_texts(model, PROMPTS, FREE)
    module.generation_config.update(repetition_penalty=9.0, min_new_tokens=12, top_k=1, do_sample=True)
    own = module.generation_config
    module.train()
    state = torch.get_rng_state()
    assert generate_texts(model, PROMPTS, FREE) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert module.generation_config is own


def test_progress_counts_texts(tmp_path: Path) -> None:
    done: list[int] = []
    generate_texts(writer(tmp_path), PROMPTS, FREE, batch_size=3, advance=done.append)
    assert done == [3, 3, 1]


def test_a_text_ends_at_a_stop_or_is_unfinished(tmp_path: Path) -> None:
    lines = ["- the cat sat\n- a dog barked\n", "- rain falls softly\n- the end\n"]
    model = taught_writer(tmp_path, lines)
    line, long, short = (
        generate_texts(model, ["- the", "- rain"], Sampling(most, 0, stops=stops))
        for most, stops in ((30, ("\n",)), (30, ("\n- ",)), (2, ("\n",)))
    )
    assert [w.text for w in line] == [" cat sat", " falls softly"]
    assert [w.text for w in long] == [" cat sat", " falls softly"]  # a stop of several tokens
    assert all(w.finished for w in line + long)
    assert not any(w.finished for w in short)


@pytest.mark.parametrize("template", ["chatml", "gemma", None])
def test_a_chat_is_answered_to_the_end_of_the_turn(template: str | None, tmp_path: Path) -> None:
    mark = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", None: "</s>"}[template]
    before = {
        "chatml": "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n",
        "gemma": "<s><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n",
        None: "hello\n",
    }[template]
    model = taught_writer(tmp_path, [f"{before}good day{mark}\nmore"], template=template)
    (found,) = generate_texts(model, [[{"role": "user", "content": "hello"}]], Sampling(20, temperature=0))
    assert (found.text, found.finished) == ("good day", True)


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([[0.125, 0.5, 0.0, 0.375]])
    grid = torch.arange(1000) * 2**BITS // 1000
    drawn = torch.cat([draw(probabilities, chance[None]) for chance in grid])
    assert torch.bincount(drawn, minlength=4).tolist() == [125, 500, 0, 375]
    drawn = torch.cat([draw(probabilities, chance[None], top_p=0.8) for chance in grid])
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] - 1000 * 4 / 7) <= 1


def test_a_nucleus_may_be_larger_than_the_first_guess() -> None:
    flat = torch.full((1, 3 * HEAD), 1 / (3 * HEAD))
    last = draw(flat, torch.tensor([2**BITS - 1]), top_p=0.5)
    drawn = torch.cat([draw(flat, torch.tensor([k * 2**BITS // 3000]), top_p=0.5) for k in range(3000)])
    assert len(set(drawn.tolist())) == math.ceil(0.5 * 3 * HEAD)
    assert last[0] in drawn


def test_a_nucleus_is_the_same_beside_larger_and_smaller_ones() -> None:
    """Against the definition: sort all, add up until `top_p` is reached."""
    chance = torch.Generator().manual_seed(0)
    sharpness = torch.tensor([0.01, 1.0, 2.0, 3.0, 9.0])[:, None]
    probabilities = (sharpness * torch.randn(5, 20 * HEAD, generator=chance)).softmax(-1)
    draws = torch.randint(2**BITS, (40, 5), generator=chance)
    for row, each in enumerate(probabilities):
        ordered = torch.sort(torch.round(each * 2**BITS).long(), descending=True).values
        size = int((ordered.cumsum(0) - ordered < math.ceil(0.9 * 2**BITS)).sum())
        sums = ordered[:size].cumsum(0)
        wanted = [ordered[int((sums <= (int(one) * int(sums[-1]) >> BITS)).sum())] for one in draws[:, row]]
        drawn = [draw(probabilities, one, top_p=0.9)[row] for one in draws]
        assert [round(float(each[place]) * 2**BITS) for place in drawn] == [int(one) for one in wanted]
    widths = [int((torch.sort(each, descending=True).values.cumsum(0) < 0.9).sum()) for each in probabilities]
    assert widths[0] > 16 * HEAD > widths[2] > HEAD > widths[4], "every size is met"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = writer(tmp_path / "a")
    assert model.inputs.reader is not None
    with pytest.raises(DataError, match="at most 512 with 12 new ones"):
        generate_texts(model, ["the cat " * 200], FREE)
    with pytest.raises(TuneportError, match="does not write texts"):
        generate_texts(replace(model, generation=None), PROMPTS, FREE)
    with torch.no_grad():
        next(iter(model.module.parameters())).fill_(torch.nan)
    with pytest.raises(CaptureError, match="not finite"):
        generate_texts(model, PROMPTS, FREE)
