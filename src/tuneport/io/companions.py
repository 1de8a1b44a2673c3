"""The files that accompany a model's weights: configuration, tokenizer, processor, heads, pooling.

Rules kept here: weights, files that tuneport writes and hidden files are not companions; a link that points outside its
folder is refused, since an output may be published.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import CheckpointError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
README = "README.md"
MODULES = "[1-9]_*"  # folders of the modules after the transformer of a sentence encoder: 1_Pooling, 2_Dense
OWN_FILES = (README, "tuneport.json", "report.html")  # written by tuneport


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy the companions of the weights in `source`, if there is such a folder, to `folder`."""
    for file in _safe(source):
        place = folder / file.relative_to(source or folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)


def companion_bytes(source: Path | None) -> int:
    """The size of the companions; a CheckpointError if `copy_companions` would refuse one of them."""
    return sum(file.stat().st_size for file in _safe(source))


def companions(folder: Path, *more: str) -> list[Path]:
    """The companion files in a model's folder, and those of tuneport's own files that `more` names."""
    found = [
        item
        for item in sorted(folder.iterdir())
        if not item.name.startswith(".")
        and (item.name not in OWN_FILES or item.name in more)
        and not item.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
        and item.is_file()
    ]
    parts = (*folder.glob("heads/[!.]*.safetensors"), *folder.glob(f"{MODULES}/[!.]*"))
    return [*found, *sorted(file for file in parts if file.is_file())]


def _safe(folder: Path | None) -> list[Path]:
    """The companions, none of which is a link to outside the folder and the hub cache that the folder is in."""
    if folder is None:
        return []
    home, found = folder.resolve(), companions(folder)
    places = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    for file in found:
        if places.isdisjoint((real := file.resolve()).parents):
            raise CheckpointError(
                f"{file} is a link to {real}, outside its folder, and is not copied to the output. "
                "Replace the link by the file."
            )
    return found
