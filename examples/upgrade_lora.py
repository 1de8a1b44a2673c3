"""Port a LoRA of a language model: it becomes a LoRA of another model, with a report, and you can chat with it.

    pip install 'tuneport[adapters]'
    python examples/port_lora.py --source old-llm --finetuned old-llm-lora --target new-llm --data chats.jsonl
    python examples/port_lora.py   # tiny models, trained in a few minutes

After the transfer, the fine-tuned source teaches the ported LoRA for `--distill` steps, without labels. The data are
chats, with a column `messages`, and `split` (train, test). The models' tokenizers need a chat template.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel
from stand_ins import arguments, command, language_models
from transformers import AutoModelForCausalLM, AutoTokenizer

import tuneport


def main() -> None:
    given, out = arguments(__doc__, language_models, steps=150)
    given.setdefault("--distill", "300")
    words = [word for pair in given.items() for word in pair]
    command("transfer", *words, "--as", "adapter", "--rank", "8", "--evaluate", "--out", out)
    print("the report:", (out / "report.html").resolve())
    chat(given["--target"], out, given["--data"])


def chat(base: str, adapter: Path, data: str) -> None:
    """Print the answers of the new base without and with the LoRA, with transformers and peft alone."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    question = tuneport.read_data(data, "test", labelled=False).inputs[0][:-1]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = AutoModelForCausalLM.from_pretrained(base)
    print("\nuser:", question[-1]["content"])
    print("new base:", answer(plain, tokenizer, ids))
    print("with the ported LoRA:", answer(PeftModel.from_pretrained(plain, adapter), tokenizer, ids))


def answer(model: torch.nn.Module, tokenizer: object, inputs: dict[str, torch.Tensor]) -> str:
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
