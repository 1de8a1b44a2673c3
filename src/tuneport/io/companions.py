"""What stands beside a model's weights and belongs to it: configuration, tokenizer, processor, heads, pooling.

Rules kept here: the model's weights, our own files and hidden files stay behind; a link that leads out of its folder is
refused, since an output may be published.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import CheckpointError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
README = "README.md"
MODULES = "[1-9]_*"  # folders of what comes after the transformer in a sentence encoder: 1_Pooling, 2_Dense
OUR_FILES = (README, "tuneport.json", "report.html")


def copy_companions(source: Path | None, folder: Path) -> None:
    """Carry over what stands beside the weights."""
    if source is None:
        return
    for file in companions(source):
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(_inside(file, source), place)


def companions(folder: Path, *more: str) -> list[Path]:
    """The files beside a model's weights that belong to it, and those of our own that are named."""
    found = [
        item
        for item in sorted(folder.iterdir())
        if not item.name.startswith(".")
        and (item.name not in OUR_FILES or item.name in more)
        and not _is_weight(item.name)
        and item.is_file()
    ]
    parts = (*folder.glob("heads/[!.]*.safetensors"), *folder.glob(f"{MODULES}/[!.]*"))
    return [*found, *sorted(file for file in parts if file.is_file())]


def _inside(file: Path, folder: Path) -> Path:
    """The file, unless it is a link to something that is neither in its folder nor in the hub's cache around it.

    Files are copied into an output that may be published; a folder from elsewhere must not choose which.
    """
    real, home = file.resolve(), folder.resolve()
    places = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(place in real.parents for place in places):
        raise CheckpointError(
            f"{file} is a link to {real}, outside its folder, and is not copied to the output. "
            "Put the file itself there."
        )
    return file


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES) or name.endswith(".index.json")
