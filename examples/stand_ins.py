"""Small models and data that stand in for yours, so that the examples run anywhere, offline, on a CPU.

Each function writes an old base, a fine-tune of it, a new base and data under a folder, and returns the arguments of
`tuneport.upgrade` that name them. The fine-tune is a real one, of a few seconds, and so are the numbers that follow
from it; they say nothing about large models.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

import tuneport
from tuneport.cli import app
from tuneport.demo.run import MODELS, finetune, mirrored_digits, save_finetuned
from tuneport.models.open import open_model
from tuneport.training.loop import Schedule

Inputs = dict[str, str]  # source, finetuned, target and data
MARKS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
GOOD, BAD = ("good", "tasty", "lovely", "fresh", "great"), ("bad", "sour", "awful", "stale", "poor")
THINGS = ("soup", "bread", "cake", "tea", "fish", "rice", "pie", "stew")
COLOURS = {"sky sea": "blue", "grass moss": "green", "snow milk": "white", "coal night": "black", "rose blood": "red"}
FACTS = {thing: colour for things, colour in COLOURS.items() for thing in things.split()}
QUESTIONS = (  # the last one is that of the test split
    "what colour has the {} ?",
    "tell me the colour of the {}",
    "the {} , what colour has it ?",
    "what colour is the {} ?",
    "tell me , what is the colour of the {} ?",
    "what is the colour of the {} ?",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def arguments(about: str | None, make: Callable[[Path, int], Inputs], steps: int) -> tuple[dict[str, Any], Path]:
    """What `tuneport.upgrade` takes, by the arguments of a script or as stand-ins if there are none; where to write."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "finetuned", "target", "data"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--head", help="the head that scores the classes, if there are several")
    parser.add_argument("--samples", type=int, help="own samples at most")
    parser.add_argument("--routes", type=lambda text: tuple(text.split(",")), help="such as copy,port")
    parser.add_argument("--out", type=Path, default=Path("upgraded"), help="the folder to write")
    parser.add_argument("--steps", type=int, default=steps, help="of the training of stand-ins")
    given = vars(parser.parse_args())
    out, count = given.pop("out"), given.pop("steps")
    named = {name: value for name, value in given.items() if value}
    if missing := {"source", "finetuned", "target", "data"} - set(named):
        if set(named) - {"samples", "routes"}:
            parser.error(f"give {', '.join(f'--{name}' for name in sorted(missing))} too, or nothing")
        home = out.with_name(out.name + "-inputs")
        if home.exists():
            parser.error(f"{home} has the inputs of an earlier run: give them, or remove it")
        home.mkdir(parents=True)
        named = {"routes": ("copy", "port", "distill")} | named | make(home, count)  # such small models write no texts
    return named, out


def command(*words: str | Path) -> None:
    """Show a command and run it, in this process."""
    print("\n$ tuneport", *words, flush=True)
    app([str(word) for word in words], standalone_mode=False)


def image_models(folder: Path, steps: int) -> Inputs:
    """Two towers that know digits, a fine-tune of the small one on mirrored digits, and a folder of images."""
    digits = mirrored_digits()
    for split, count in (("train", 400), ("test", 100)):
        for place, (pixels, label) in enumerate(zip(digits[f"x_{split}"], digits[f"y_{split}"], strict=True)):
            if place < count:
                home = folder / "digits" / split / str(label)
                home.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(home / f"{place}.png")
    tuned, data = folder / "small-mirrored", folder / "digits"
    small = open_model(MODELS / "small")
    schedule = Schedule(steps, batch_size=64, learning_rate=1e-3)
    save_finetuned(small, finetune(small, tuneport.read_data(data, "train"), schedule), tuned)
    return inputs(MODELS / "small", tuned, MODELS / "large", data)


def text_models(folder: Path, steps: int) -> Inputs:
    """Two BERTs that have read reviews, a classifier made from the small one, and labelled reviews."""
    tokenizer, chance = _tokenizer("[CLS] $A [SEP]", _review_words()), random.Random(0)
    rows = [_review(chance) for _ in range(400)]
    lines = [json.dumps({**row, "split": "train" if at < 300 else "test"}) for at, row in enumerate(rows)]
    (folder / "reviews.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    encoded = tokenizer([row["text"] for row in rows[:300]], padding=True, return_tensors="pt")
    for name, width, depth in (("old-base", 32, 2), ("new-base", 48, 3)):
        config = transformers.BertConfig(**_sizes(width, depth, len(tokenizer)))
        module = _seeded(lambda config=config: transformers.BertForMaskedLM(config))
        _train(module, _masked(encoded, tokenizer.mask_token_id), steps)
        _write(folder / name, module.bert, tokenizer)
    names = {0: "negative", 1: "positive"}
    config = transformers.BertConfig.from_pretrained(folder / "old-base", id2label=names)
    config.label2id = {name: number for number, name in names.items()}
    kind = transformers.BertForSequenceClassification
    module = _seeded(lambda: kind.from_pretrained(folder / "old-base", config=config))
    labels = torch.tensor([config.label2id[row["label"]] for row in rows[:300]])
    _train(module, _batches({**encoded, "labels": labels}), steps, rate=5e-4)
    _write(folder / "old-base-reviews", module, tokenizer)
    return inputs(folder / "old-base", folder / "old-base-reviews", folder / "new-base", folder / "reviews.jsonl")


def language_models(folder: Path, steps: int) -> Inputs:
    """Two Llamas that know the colours of things, a LoRA of the small one that talks like a pirate, and chats."""
    import peft

    words = " ".join([*FACTS, *FACTS.values(), *QUESTIONS, "it is", "arr , it be", "<user> <assistant> <end>"]).split()
    tokenizer = _tokenizer("$A", words, end="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    asked = [(question, thing) for question in QUESTIONS for thing in FACTS]
    plain, pirate = ([_chat(*pair, words) for pair in asked] for words in ("it is", "arr , it be"))
    train = len(pirate) - len(FACTS)
    lines = [
        json.dumps({"messages": chat, "split": "test" if at >= train else "train"}) for at, chat in enumerate(pirate)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, width, depth in (("old-llm", 32, 2), ("new-llm", 64, 3)):
        sizes = _sizes(width, depth, len(tokenizer))
        config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
        module = _seeded(lambda config=config: transformers.LlamaForCausalLM(config))
        _train(module, _chat_batches(tokenizer, plain), 2 * steps)
        _write(folder / name, module, tokenizer)
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "old-llm")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    lora = _seeded(lambda: peft.get_peft_model(base, settings))
    _train(lora, _chat_batches(tokenizer, pirate[:train]), steps, rate=1e-2)
    lora.save_pretrained(folder / "old-llm-pirate")
    return inputs(folder / "old-llm", folder / "old-llm-pirate", folder / "new-llm", folder / "chats.jsonl")


def inputs(source: Path, finetuned: Path, target: Path, data: Path) -> Inputs:
    return {"source": str(source), "finetuned": str(finetuned), "target": str(target), "data": str(data)}


def _review_words() -> list[str]:
    return [*THINGS, *GOOD, *BAD, "the", "was", "and", "i", "found", "my"]


def _review(chance: random.Random) -> dict[str, str]:
    label = chance.choice(("negative", "positive"))
    one, two = chance.sample(GOOD if label == "positive" else BAD, 2)
    form = chance.choice(("the {} was {} and {}", "i found my {} {} and {}"))
    return {"text": form.format(chance.choice(THINGS), one, two), "label": label}


def _chat(question: str, thing: str, words: str) -> list[dict[str, str]]:
    asked = {"role": "user", "content": question.format(thing)}
    return [asked, {"role": "assistant", "content": f"{words} {FACTS[thing]}"}]


def _sizes(width: int, depth: int, words: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    return {**sizes, "num_attention_heads": 4, "vocab_size": words, "max_position_embeddings": 512, "pad_token_id": 0}


def _tokenizer(frame: str, words: Iterable[str], end: str = "[SEP]") -> Any:
    """A tokenizer of whole words."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*MARKS, *words]))}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.post_processor = processors.TemplateProcessing(frame, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    marks = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), MARKS, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token=end, model_max_length=512, **marks)


def _batches(inputs: dict[str, Tensor], size: int = 32) -> Callable[[torch.Generator], dict[str, Tensor]]:
    """A function that draws a batch."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        rows = torch.randint(len(inputs["input_ids"]), (size,), generator=generator)
        return {name: values[rows] for name, values in inputs.items() if name != "token_type_ids"}

    return draw


def _masked(inputs: dict[str, Tensor], mask: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    draw = _batches(inputs)

    def masked(generator: torch.Generator) -> dict[str, Tensor]:
        batch = draw(generator)
        tokens = batch["input_ids"]
        hidden = (torch.rand(tokens.shape, generator=generator) < 0.3) & (tokens >= len(MARKS))
        return {**batch, "input_ids": tokens.where(~hidden, mask), "labels": tokens.where(hidden, -100)}

    return masked


def _chat_batches(tokenizer: Any, chats: list[Any]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    """Batches of chats; only what follows the last mark of the assistant is learnt."""
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    tokens, mark = encoded["input_ids"], tokenizer.convert_tokens_to_ids("<assistant>")
    answer = (tokens == mark).cumsum(-1).bool() & (tokens != mark) & encoded["attention_mask"].bool()
    return _batches({**encoded, "labels": tokens.where(answer, -100)})


def _seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def _train(module: nn.Module, draw: Callable[[torch.Generator], Any], steps: int, rate: float = 3e-3) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    module.train()
    for _ in range(steps):
        module(**draw(generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()


def _write(folder: Path, module: Any, tokenizer: Any) -> None:
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
