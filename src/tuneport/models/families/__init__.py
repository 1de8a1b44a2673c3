"""Model libraries: the only modules that import transformers, open_clip or timm. Here is what they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, TuneportError, brief, first_of, reraised
from ...io.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from ...layers import TokenLayout
from ..base import Inputs

LARGEST_TOKENIZER = 100 * 10**6  # bytes of a file
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


write_one_file = partial(write_checkpoint, max_shard_size=2**62)  # for libraries that read one


@dataclass(frozen=True)
class Location:
    """What a reference to a model means: the name to build it by, its weight file, and its settings or folder."""

    build: str
    weights: Path | None = None
    pretrained: str | None = None
    folder: Path | None = None

    def open_weights(self) -> Checkpoint:
        """The weights under the names of the module, without the prefixes that training leaves."""
        assert self.weights is not None
        return open_checkpoint(self.weights).without_prefix("_orig_mod.").without_prefix("module.")


def load_library(module: str, extra: str) -> Any:
    """Import a model library that is an optional extra of this package, or raise one line that says what to install."""
    if find_spec(module.partition(".")[0]) is None:
        raise TuneportError(f'{module} is not installed, and this model needs it: pip install "tuneport[{extra}]".')
    try:
        return import_module(module)
    except Exception as error:
        raise not_imported(module, error) from error


def not_imported(what: str, error: Exception) -> TuneportError:
    """The error for a library that cannot be imported, often because of a torchvision built for another torch."""
    hint = ""
    try:
        if find_spec("torchvision") is not None:
            import_module("torchvision")
    except Exception:
        found = next((d.version for d in metadata.distributions(name="torchvision")), "unknown")
        hint = (
            f" torchvision {found} does not work with torch {torch.__version__}: install builds that fit each other, "
            "such as torch 2.10.0 and torchvision 0.25.0, or uninstall torchvision if only transformers is used."
        )
    return TuneportError(f"{what} cannot be imported: {brief(error)}.{hint}")


def image_inputs(transform: Callable[[Any], Tensor], prefix: int, patch: tuple[int, int]) -> Inputs:
    """What a model reads of images by a library's transform of one, cut into patches after some special tokens."""
    return Inputs(
        "image",
        lambda images: {"pixel_values": torch.stack([transform(image.convert("RGB")) for image in images])},
        lambda batch: TokenLayout.of_patches(prefix, patch, batch["pixel_values"]),
    )


def unknown_model(reference: str, library: str, name: str, known: Sequence[str]) -> CheckpointError:
    """The error for a name that a library does not know, with the nearest names that it does."""
    near = get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f" Did you mean {first_of(near)}?" if near else ""
    return CheckpointError(f"{reference} is no folder, and {library} knows no {name}.{hint}")


def fetching(reference: str, library: str, name: str) -> AbstractContextManager[None]:
    """Context in which a library finds weights in its cache or downloads them."""
    failed = f"the weights of {reference} are not in {library}'s cache and cannot be fetched"
    return reraised(f"{failed}. Fetch them where there is a network, or give {name}:FILE. The reason")


def check_tensors(
    tensors: Mapping[str, Tensor], stored: Checkpoint, reference: str, library: str, optional: Collection[str] = ()
) -> None:
    """Raise if a module's tensors, by their names in the weight file, are missing or have another shape there."""
    wrong = [
        name if name not in stored else f"{name} {stored.shape(name)} vs {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in optional and (name not in stored or stored.shape(name) != tuple(tensor.shape))
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(tensors)} tensors of {reference} are missing or misshapen in {stored.path}: "
            f"{first_of(wrong, 3)}. The weights belong to another model, or are not {library}'s model.state_dict()."
        )


def order_of(wanted: Sequence[str], known: Sequence[str]) -> list[int] | None:
    """Where each wanted class stands among the known ones; None if those are not the same classes."""
    same = len(set(known)) == len(known) and sorted(known) == sorted(wanted)
    return [known.index(name) for name in wanted] if same else None


@contextmanager
def quiet() -> Iterator[None]:
    """Context without transformers' progress bars and warnings; its settings are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def open_tokenizer(folder: Path, trust_remote_code: bool, part: str) -> Any:
    """Open the tokenizer in a model's folder; `part` names the part of the model that needs it."""
    # without any of these files, transformers makes a tokenizer with an empty vocabulary
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} has {part} but no tokenizer; copy its files from the original model, or pass `head`."
        )
    for name in (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "added_tokens.json"):
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size > LARGEST_TOKENIZER:
            most = f"a file of a tokenizer may have {LARGEST_TOKENIZER / 1e6:.0f} MB"
            raise CheckpointError(f"{folder / name} is refused: {size / 1e6:.0f} MB, and {most}.")
    with quiet(), reraised(f"{folder} has {part} but no usable tokenizer; pass a name or a file as `head`"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
