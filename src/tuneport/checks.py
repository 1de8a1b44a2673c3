"""Refuse wrong inputs before a heavy library is loaded: names, the output, models, heads and data.

All mistakes of one kind are said at once. What only a model can tell is checked later, by the command.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from .config import UpgradeConfig
from .config.options import Config, Declared
from .data.dataset import count_drawn
from .data.formats import suffixes
from .data.tasks import read_data, split_reference
from .errors import CheckpointError, DataError, OptionError, TuneportError, first_of, printable, shortened, unknown_name
from .io.output import RECORD, check_new
from .io.places import ACCEPTED, CONFIG, looks_like_hub_id, nearest_path, why_no_adapter, why_no_model, why_unknown
from .types import FORMATS, METHODS, Split

# The names that heavy modules register; the tests compare them.
SAMPLERS = ("random", "class_balanced")
LOSSES = ("classification", "contrastive", "causal", "seq2seq")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "npu", "meta")

LARGE = 16 * 2**20  # bytes of a file, or
MANY = 20_000  # files of a folder, from which on the run alone reads it
_NAMED = re.compile(r"([\w.+-]{2,}):.")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


def check_command(inputs: Declared | None, config: Config) -> None:
    """Refuse what can be told of a command from names, paths and small data.

    Raises:
        OptionError: for names that are unknown.
        CheckpointError: for a model, a head or an output.
        DataError: for the data.
    """
    given = {} if inputs is None else inputs.values()
    _check_names(given, config)
    if config.command == "demo" or inputs is None:
        return
    head, generator, extra = (getattr(config, name, None) for name in ("head", "generator", "extra"))
    for place in (*(place for _, place in _named(given)), given.get("out"), head, generator, extra):
        if place is not None:
            _check_place(str(place))
    if "out" in given:
        _check_out(given, config)
    models = [(name, place) for name, place in _named(given) if name != "data"]
    found = (_wrong_input(name, place, config.command) for name, place in [*models, *_named({"target": generator})])
    wrong = list(dict.fromkeys(islice(filter(None, found), 10)))
    missing = list(dict.fromkeys(filter(None, map(_missing_data, (given.get("data"), extra)))))
    if wrong or missing:
        kind = TuneportError if wrong and missing else CheckpointError if wrong else DataError
        tail = f" Give {ACCEPTED}."
        said = " ".join(text.removesuffix(tail) for text in (*wrong, *missing))
        raise kind(said + (tail if any(text.endswith(tail) for text in wrong) else ""))
    if wrong_heads := list(_wrong_heads(given, head)):
        raise DataError(f"{' '.join(wrong_heads)} Pass one of its heads or a file as `head`.")
    if given.get("data") is not None:
        _check_data(str(given["data"]), config)


def _check_names(given: dict[str, Any], config: Config) -> None:
    wrong = []
    names = ("method", "sampler", "loss", "device", "weights", "shapes_only")
    method, sampler, loss, device, weights, shapes_only = (getattr(config, name, None) for name in names)
    for kind, name, known in (("method", method, METHODS), ("sampler", sampler, SAMPLERS)):
        if name is not None and name not in known:
            wrong.append(unknown_name(kind, name, known))
    if loss is not None and ":" not in loss and loss not in LOSSES:
        wrong.append(unknown_name("loss", loss, LOSSES) + " Or pass MODULE:FUNCTION.")
    if device is not None and device.partition(":")[0] not in DEVICES:
        wrong.append(f"device '{device}' is not available. Pass auto, cpu or cuda.")
    if weights is not None and len(weights) != len(given["finetuned"]):
        wrong.append(f"{len(given['finetuned'])} fine-tunes and {len(weights)} `weights`: give a weight for each.")
    if config.command == "transfer" and given["data"] is None and method in METHODS and METHODS[method].needs_data:
        wrong.append(f"the method {method} needs calibration data: pass `data`.")
    if config.command == "evaluate" and (given["data"] is None) == (given["ask"] is None):
        wrong.append("pass `data` to score models, or `ask` with a prompt that they answer: one of them.")
    if isinstance(config, UpgradeConfig):
        config.check_known(given["data"])
    if config.command == "plan" and not given["finetuned"] and not shapes_only:
        wrong.append("`finetuned` is needed; only `shapes_only` does without it.")
    if wrong:
        raise OptionError(" ".join(wrong))


def _named(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the inputs by their fields; some fields hold several."""
    for name, value in given.items():
        if name not in ("out", "ask") and value is not None:
            yield from ((name, str(each)) for each in (value if isinstance(value, tuple) else (value,)))


def _check_place(place: str) -> None:
    """Refuse what no file system takes as a path."""
    reason = ""
    try:
        os.lstat(place)
    except ValueError:
        reason = "it has a NUL or half a character"
    except OSError as error:
        reason = "it is too long" if error.errno == errno.ENAMETOOLONG else ""
    if reason:
        raise OptionError(f"{printable(shortened(place))} cannot be a path: {reason}.")


def _check_out(given: dict[str, Any], config: Config) -> None:
    """Refuse an output that cannot be written, or that would take an input with it."""
    replaced = getattr(config, "overwrite", False) or getattr(config, "resume", False)
    places = [*(place for _, place in _named(given)), getattr(config, "head", None)]
    inputs = [place for place in places if place is not None and os.path.exists(place)]
    as_ = "task-vector" if config.command == "extract" else getattr(config, "as_", None) or "model"
    check_new(given["out"], replaced, suffix=FORMATS[as_].suffix, inputs=inputs)


def _wrong_input(name: str, place: str, command: str) -> str:
    """Say why there is no model or fine-tune at a place; nothing where there may be one."""
    whole = name in ("source", "target", "base") and command != "extract"
    return _wrong_model(place) if whole else _wrong_finetune(place, name)


def _wrong_model(place: str) -> str:
    """Say why there is no model at a place; nothing where there may be one."""
    path, named = Path(place), _NAMED.match(place)
    if looks_like_hub_id(place, bare=True):
        return why_unknown(place)
    if named and not path.exists():
        library, extra = ("timm", "timm") if named[1] == "timm" else ("open_clip", "open-clip")
        lacks = find_spec(library) is None
        return f'{place} needs {library}, which is not installed: pip install "tuneport[{extra}]".' if lacks else ""
    known = any((path / name).is_file() for name in ("config.json", "open_clip_config.json"))
    return "" if known or (path.suffix == ".gguf" and path.is_file()) else why_no_model(place)


def _wrong_finetune(place: str, name: str) -> str:
    """As `_wrong_model`, for what may also be an adapter, a task vector or a weight file."""
    path = Path(place)
    if not path.exists():
        if looks_like_hub_id(place, bare=True) or _NAMED.match(place):
            return _wrong_model(place)
        if name == "model":
            return why_no_model(place)
        what = {"finetuned": "fine-tune", "vector": "task vector"}.get(name, "model")
        return f"there is no {what} at {place}: {place} does not exist.{nearest_path(path)}"
    suffixes = (*_WEIGHTS, *(about.suffix for about in FORMATS.values() if about.suffix and about.reader))
    if (path / CONFIG).is_file() or (path.is_file() and path.suffix in suffixes):
        return why_no_adapter(path)
    holds = path.is_dir() and any(file.suffix in _WEIGHTS or file.name == RECORD for file in path.iterdir())
    return why_no_adapter(path) if holds else _wrong_model(place)


def _missing_data(data: str | None) -> str:
    """Say why there are no data at a place; nothing where there are some."""
    if data is None or os.path.exists(data):
        return ""
    if looks_like_hub_id(data, suffixes=suffixes()):
        return why_unknown(data, "dataset")
    try:
        task, place = split_reference(data)
    except DataError as error:
        return str(error)
    named = data if task is None else place
    return "" if place.exists() else f"no data at {named}: no such file or folder.{nearest_path(place)}"


def _wrong_heads(given: dict[str, Any], head: str | None) -> Iterator[str]:
    if head is None or Path(head).is_file():
        return
    models = [given[name] for name in ("source", "target") if given.get(name) is not None] or given.get("model", ())
    for model in map(Path, models):
        if not (model / "config.json").is_file():
            continue  # neither a name in a library nor an adapter shows its heads here
        names = sorted(file.stem for file in (model / "heads").glob("*.safetensors"))
        if head not in names:
            yield f"{model} has no head '{head}': it has {first_of(names) if names else 'none'}."


def _check_data(data: str, config: Config) -> None:
    """Read small data; refuse a draw that they do not have."""
    place = Path(data) if os.path.exists(data) else Path(data.partition(":")[2]).expanduser()
    files = (name for _, _, names in os.walk(place) for name in names)
    if not place.exists() or place.stat().st_size > LARGE or len(list(islice(files, MANY))) == MANY:
        return  # on the hub, or large
    splits: list[Split] = ["test" if config.command == "evaluate" else "train"]
    splits += ["test"] if config.command == "transfer" and getattr(config, "evaluate", None) else []
    columns = getattr(config, "columns", None)
    found = [read_data(data, split, labelled=False, columns=columns) for split in splits]
    if getattr(config, "by_class", False) and found[0].labels is None:
        raise DataError(f"{found[0]} has no classes, which `by_class` needs.")
    if config.command in ("transfer", "plan", "distill"):
        sampler = getattr(config, "sampler", "random")
        need = None if sampler == "random" else f"sampler '{sampler}'"
        count_drawn(found[0], getattr(config, "samples", None), getattr(config, "shots", None), labels_for=need)
