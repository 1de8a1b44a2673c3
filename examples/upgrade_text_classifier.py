"""Port a text classifier: three models and a table of texts become a ported model, its report and an answer.

    python examples/port_text_classifier.py --source minilm --finetuned minilm-reviews --target mpnet \
        --data reviews.jsonl
    python examples/port_text_classifier.py   # tiny models, trained in about a minute

The table has the columns `text`, `label` and `split` (train, test). The fine-tune is a folder with a classification
head; the two bases need none.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stand_ins import arguments, command, text_models
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import tuneport


def main() -> None:
    given, out = arguments(__doc__, text_models, steps=150)
    words = [word for pair in given.items() for word in pair]
    command("transfer", *words, "--evaluate", "--out", out)
    print("the report:", (out / "report.html").resolve())
    classify(out, given["--data"])


def classify(folder: Path, data: str) -> None:
    """Print what the ported model says of three test texts, with transformers alone."""
    test = tuneport.read_data(data, "test")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ask = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    for text in (test.inputs[index] for index in (0, len(test) // 2, len(test) - 1)):
        print(f"{text!r}: {ask(text)[0]['label']}")


if __name__ == "__main__":
    sys.exit(main())
