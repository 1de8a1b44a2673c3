"""Upgrade a text classifier: its fine-tune comes to a new encoder by the best route, and classifies a text.

python examples/upgrade_text_classifier.py --source minilm --finetuned minilm-reviews --target mpnet --data d.jsonl
python examples/upgrade_text_classifier.py   # tiny models, trained in about a minute
"""

from stand_ins import arguments, text_models
from transformers import pipeline

import tuneport

given, out = arguments(__doc__, text_models, steps=150)
found = tuneport.upgrade(**given)
print(found)  # the decision, and every route
if found.result is not None:
    print("written to", found.save(out))
    text = tuneport.read_data(given["data"], "test").inputs[0]
    print(text, pipeline("text-classification", model=str(out), tokenizer=str(out))(text))
