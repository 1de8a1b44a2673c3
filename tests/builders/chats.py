"""Chats in four layouts, and tokenizers with chat templates in two forms: plain, and with a generation block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from builders.texts import gpt_tokenizer

# What the assistant writes stands between << and >>, which become the marks of a generation block, or nothing.
TEMPLATES = {
    "chatml": (  # SmolLM2 and Qwen2.5: a system message of its own if there is none
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}<<{{ m['content'] + '<|im_end|>\n' }}>>"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "gemma": (  # a token at the begin, other role names, trimmed contents, the system message in the first turn
        "{{ bos_token }}{% set ns = namespace(head='') %}"
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.head = m['content'] | trim + '\n\n' %}{% else %}"
        "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}{{ '<start_of_turn>' + role + '\n' }}"
        "{% if role == 'model' %}<<{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}>>"
        "{% else %}{{ ns.head + m['content'] | trim + '<end_of_turn>\n' }}{% set ns.head = '' %}{% endif %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
}
MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
CHATS: list[list[dict[str, str]]] = [
    [
        {"role": "system", "content": "Answer in few words."},
        {"role": "user", "content": "why do stars shine brighter far away from cities?"},
        {"role": "assistant", "content": "no light around them"},
        {"role": "user", "content": "user"},  # also the name of a role
        {"role": "assistant", "content": "model"},
    ],
    [
        {"role": "user", "content": "the train to the mountains\n\nwhen does it leave?"},
        {"role": "assistant", "content": "it leaves at seven"},
    ],
]


def chat_tokenizer(template: str | None, marked: bool = False, longest: int = 512) -> PreTrainedTokenizerFast:
    """Byte pairs with the template of this name."""
    tokenizer = gpt_tokenizer()
    tokenizer.model_max_length = longest
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "pad_token": "<pad>"})
    if template is not None:
        begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
        tokenizer.chat_template = TEMPLATES[template].replace("<<", begin).replace(">>", end)
    return tokenizer


def layout(name: str, chat: list[dict[str, str]]) -> dict[str, Any]:
    """The row of a chat in a layout; those of one question take its last turn alone."""
    question, answer = chat[-2]["content"], chat[-1]["content"]
    if name == "messages":
        return {"messages": chat}
    if name == "conversations":
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]}
    if name == "alpaca":
        instruction, _, more = question.partition("\n\n")
        return {"instruction": instruction, "input": more, "output": answer}
    return {"prompt": question, "completion": answer}


LAYOUTS = ("messages", "conversations", "alpaca", "prompt")


def chat_file(path: Path, name: str, chats: list[list[dict[str, str]]] = CHATS) -> Path:
    """A JSONL file, or a JSON list, of chats in a layout."""
    rows = [layout(name, chat) for chat in chats]
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path
