"""Port an image classifier: three models and a folder of images become a ported model, its report and an answer.

    python examples/port_images.py --source old-base --finetuned old-base-cars --target new-base --data cars/
    python examples/port_images.py   # small models that come with tuneport, in about a minute on two cores

The data are image folders, `cars/train/CLASS/*.png` and `cars/test/CLASS/*.png`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stand_ins import arguments, command, image_models

import tuneport
from tuneport.models.heads import choose_head


def main() -> None:
    given, out = arguments(__doc__, image_models, steps=100)
    words = [word for pair in given.items() for word in pair]
    command("transfer", *words, "--evaluate", "--out", out)
    print("the report:", (out / "report.html").resolve())
    classify(out, given["--data"], given.get("--head"))


def classify(folder: Path, data: str, name: str | None = None) -> None:
    """Print what the ported model says of three test images."""
    test = tuneport.read_data(data, "test")
    model = tuneport.open_model(folder)
    head = choose_head(model, name, test)
    for index in (0, len(test) // 2, len(test) - 1):
        batch = model.inputs(model.encode([test.inputs[index]]))
        answer = head.classes[int(head.scores(model, model.module, batch).argmax())]
        print(f"test image {index} is {test.classes[test.labels[index]]}; the ported model says {answer}")


if __name__ == "__main__":
    sys.exit(main())
