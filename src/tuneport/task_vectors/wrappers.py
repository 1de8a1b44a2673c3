"""Names of tensors across wrappers: `encoder.layer.0` of a bare model is `bert.encoder.layer.0` in one with a head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator


def renaming(names: Collection[str], base: Iterable[str]) -> Callable[[str], str]:
    """A function from `names` to those of the base, where one of the two models is inside a wrapper of any depth.

    >>> renaming(["bert.encoder.0.lora_A"], ["encoder.0.weight"])("bert.encoder.0.lora_A")
    'encoder.0.lora_A'
    >>> renaming(["encoder.0.weight"], ["bert.encoder.0.weight", "head.weight"])("encoder.0.weight")
    'bert.encoder.0.weight'
    """
    modules = {name.rpartition(".")[0] for name in base} - {""}
    if any(_first_in(modules, name) for name in names):
        return lambda name: name
    cut = (next((outer for outer, inner in _cuts(name) if _first_in(modules, inner)), None) for name in names)
    if removed := Counter(filter(None, cut)):
        return lambda name: name.removeprefix(removed.most_common(1)[0][0])
    inside: dict[str, set[str]] = {}
    for module in modules:
        for outer, inner in _cuts(module):
            inside.setdefault(inner, set()).add(outer)
    found = (inside.get(_first_in(inside, name), set()) for name in names)
    added = Counter(outer for outers in found if len(outers) == 1 for outer in outers)
    return lambda name: added.most_common(1)[0][0] + name if added else name


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a name after one of its dots."""
    parts = name.split(".")
    return ((".".join(parts[:at]) + ".", ".".join(parts[at:])) for at in range(1, len(parts)))


def _first_in(modules: Collection[str], name: str) -> str:
    """The module that a name begins with, the longest that is known; empty if none is."""
    return max((outer[:-1] for outer, _ in _cuts(name) if outer[:-1] in modules), key=len, default="")
