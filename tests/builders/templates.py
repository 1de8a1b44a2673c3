"""Chat templates of eight families of models: their marks and layouts, as their tokenizers write them.

What the assistant writes stands between << and >>, which become the marks of a generation block, or nothing. `marks`
are tokens of the vocabulary; a family without a begin or an end of its own takes that of the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from builders.texts import gpt_tokenizer


@dataclass(frozen=True)
class Family:
    template: str
    marks: tuple[str, ...] = ()
    begin: str = "<s>"
    end: str = "</s>"
    system: bool = True  # whether a system message is allowed


_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
FAMILIES = {
    "chatml": Family(  # SmolLM2: a system message of its own if there is none
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}<<{{ m['content'] + '<|im_end|>' + '\n' }}>>"
        "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
    ),
    "llama-3": Family(  # trimmed contents, no line after the end of a turn
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        "{% if m['role'] == 'assistant' %}<<{{ m['content'] | trim + '<|eot_id|>' }}>>"
        "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma": Family(  # trimmed contents, another name for the assistant, no system message
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}" + _ALTERNATE + "{% if m['role'] == 'assistant' %}"
        "{{ '<start_of_turn>model\n' }}<<{{ m['content'] | trim + '<end_of_turn>\n' }}>>"
        "{% else %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        system=False,
    ),
    "mistral": Family(  # v0.3: the system message stands in the last message if that is the user's, or nowhere
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}" + _ALTERNATE + ""
        "{% if m['role'] == 'user' %}{% if loop.last and system is defined %}"
        "{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
        "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
        "{% else %}<<{{ ' ' + m['content'] | trim + eos_token }}>>{% endif %}{% endfor %}",
        ("[INST]", "[/INST]"),
    ),
    "phi-3": Family(  # one more token at the end of a whole chat
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' }}<<{{ m['content'] + '<|end|>\n' }}>>"
        "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}<<{{ eos_token }}>>{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        end="<|endoftext|>",
    ),
    "deepseek-r1": Family(  # the generation prompt opens a thought, which no answer of a chat shows
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<｜Assistant｜>' }}<<{{ content + '<｜end▁of▁sentence｜>' }}>>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "qwen-3": Family(  # a thought, if need be an empty one, in the answer to the last question, and in no other
        "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
        "{% endif %}{% set ns = namespace(last=messages | length - 1, open=true) %}"
        "{% for m in messages[::-1] %}{% if ns.open and m.role == 'user' %}{% set ns.open = false %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set content = m.content %}"
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}"
        "{% elif m.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "<<{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') + '<|im_end|>\n' }}>>"
        "{% else %}<<{{ content + '<|im_end|>\n' }}>>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        end="<|im_end|>",
    ),
    "zephyr": Family(  # marks that are no tokens
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' }}<<{{ m['content'] + eos_token + '\n' }}>>"
        "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% endif %}{% endfor %}",
    ),
}


def family_tokenizer(name: str, marked: bool = False) -> PreTrainedTokenizerFast:
    """Byte pairs with the marks and the template of a family, in its plain form or with a generation block."""
    family = FAMILIES[name]
    tokenizer = gpt_tokenizer()
    tokenizer.model_max_length = 4096
    named = {"bos_token": family.begin, "eos_token": family.end, "pad_token": "<pad>"}
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.marks), **named})
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    tokenizer.chat_template = family.template.replace("<<", begin).replace(">>", end)
    return tokenizer
