"""Upgrade a LoRA of a language model: a LoRA of the new base by the best route, and an answer of each model.

pip install 'tuneport[adapters]'
python examples/upgrade_lora.py --source old-llm --finetuned old-llm-lora --target new-llm --data chats.jsonl
python examples/upgrade_lora.py   # tiny models, trained in a few minutes
"""

from stand_ins import arguments, command, language_models

import tuneport

given, out = arguments(__doc__, language_models, steps=150)
found = tuneport.upgrade(**given)
print(found)  # the decision, and every route
if found.result is not None:
    print("written to", found.save(out))
    chat = tuneport.read_data(given["data"], "test", labelled=False).inputs[0]
    command("evaluate", out, "--ask", chat[0]["content"])
