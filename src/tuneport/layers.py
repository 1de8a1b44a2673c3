"""The parts of a model: linear layers with a role and a block, and loose tensors for the rest.

They follow from module types and the names of `named_parameters()`; families add what names do not say.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

RowRanges = tuple[tuple[int, int], ...]
Fused = Mapping[str, Mapping[str, RowRanges]]  # of a fused weight, the rows of each role

# Role of a layer inside a block, by the end of its name: the words of transformers, timm, open_clip, torch.
ROLES: tuple[tuple[str, str], ...] = (
    ("q", r"(q|q_proj|q_lin|query|wq|to_q|q_proj_weight)"),
    ("k", r"(k|k_proj|k_lin|key|wk|to_k|k_proj_weight)"),
    ("v", r"(v|v_proj|v_lin|value|wv|to_v|v_proj_weight)"),
    ("out", r"(o|o_proj|out_proj|out_lin|to_out|attention\.output\.dense|(attn|attention)\.(dense|proj|c_proj|wo|Wo))"),
    ("gate", r"(gate_proj|wi_0|w1)"),
    ("up", r"(up_proj|wi_1|w3)"),
    ("down", r"(down_proj|w2|mlp\.Wo)"),
    ("fc1", r"(fc1|c_fc|lin1|wi|intermediate\.dense|dense_h_to_4h)"),
    ("fc2", r"(fc2|lin2|wo|output\.dense|dense_4h_to_h|mlp\.(c_proj|proj))"),
    ("norm1", r"(layer_norm1|layernorm_before|norm1|ln_1|input_layernorm)"),
    ("norm2", r"(layer_norm2|layernorm_after|norm2|ln_2|post_attention_layernorm)"),
    ("scale1", r"(layer_scale1\.lambda1|ls1\.gamma)"),
    ("scale2", r"(layer_scale2\.lambda1|ls2\.gamma)"),
)
# The same outside the blocks.
OUTER_ROLES: tuple[tuple[str, str], ...] = (
    ("patch", r"(patch_embedding|patch_embeddings\.projection|patch_embed\.proj|conv1)"),
    ("projection", r"(visual_projection|proj)"),
    ("pooler", r"pooler\.dense"),
    ("pre-classifier", r"(pre_classifier|classifier\.dense|(classification_)?head\.dense)"),
    ("classifier", r"(classifier|head|score|(classifier|classification_head)\.out_proj)"),
    ("class token", r"(class_embedding|cls_token)"),
    ("position embedding", r"(position_embeddings?|positional_embedding|pos_embed)"),
    ("final norm", r"(post_layernorm|(vit|dinov2\w*)\.layernorm|ln_post|norm)"),
    ("first norm", r"(pre_layrnorm|ln_pre|norm_pre)"),
)
FUSED = frozenset({"qkv", "in_proj_weight"})  # weights with the rows of q, k and v, a third each
ATTENTION_ROLES = frozenset({"q", "k", "v", "out"})
ROTARY = re.compile(r"Rotary|Rope|RoFormer|GPTJ|CodeGen")  # in the name of a class
CROSS_ATTENTION = re.compile(r"cross|EncDec|encoder_attn", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """One linear map `y = x W^T + b` and where its weight is stored.

    `rows` selects output rows of a fused weight; `transposed` weights are stored (in, out); `heads` is the number of
    attention heads of q, k, v and out, if known. The units of a head have fixed places in `rotary` queries and keys.
    """

    weight: str
    bias: str | None
    weight_shape: tuple[int, ...]
    role: str
    stack: str = ""
    block: int | None = None
    rows: RowRanges | None = None
    transposed: bool = False
    heads: int | None = None
    rotary: bool = False

    @property
    def in_features(self) -> int:
        return self.weight_shape[0] if self.transposed else math.prod(self.weight_shape[1:])

    @property
    def out_features(self) -> int:
        return self.stored_rows if self.rows is None else sum(stop - start for start, stop in self.rows)

    @property
    def stored_rows(self) -> int:
        """The output units of the stored weight, of all layers that share it."""
        return self.weight_shape[1 if self.transposed else 0]

    @property
    def kernel(self) -> tuple[int, ...] | None:
        """(channels, height, width) of a patch-embedding convolution, whose inputs are unfolded patches."""
        return self.weight_shape[1:] if len(self.weight_shape) == 4 else None

    @property
    def name(self) -> str:
        """The weight's name, with the role appended where several layers share one weight."""
        return self.weight if self.rows is None else f"{self.weight}[{self.role.rsplit('.', 1)[-1]}]"

    def matrix(self, weight: Tensor) -> Tensor:
        """The (out, in) matrix of this layer inside the stored weight (a view where possible)."""
        return self.vector(weight.T if self.transposed else weight.flatten(1))

    def vector(self, stored: Tensor) -> Tensor:
        """The rows of this layer in a bias, or in a matrix whose rows are all stored output units."""
        if self.rows is None:
            return stored
        parts = [stored[start:stop] for start, stop in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def store(self, matrix: Tensor, into: Tensor) -> None:
        """Write an (out, in) matrix, or an (out,) bias, to its place in a tensor of the stored shape."""
        self.store_rows(matrix, into.T if self.transposed and matrix.ndim == 2 else into)

    def store_rows(self, values: Tensor, into: Tensor) -> None:
        """Write values by output unit to the rows of this layer among all stored output units."""
        if self.rows is None:
            into.copy_(values.reshape(into.shape))
            return
        sizes = [stop - start for start, stop in self.rows]
        for (start, stop), part in zip(self.rows, values.split(sizes), strict=True):
            into[start:stop] = part


@dataclass(frozen=True)
class LooseTensor:
    """A parameter of no linear layer; a `tied` embedding is also the weight of the head over its vocabulary."""

    name: str
    shape: tuple[int, ...]
    role: str
    kind: str
    stack: str = ""
    block: int | None = None
    tied: bool = False


@dataclass(frozen=True)
class TokenLayout:
    """How a vision model orders its tokens: `prefix` special tokens (class token first), then a 2-D grid."""

    prefix: int
    grid: tuple[int, int]

    @classmethod
    def of_patches(cls, prefix: int, patch: tuple[int, int], pixels: Tensor) -> TokenLayout:
        """That of images (N, channels, height, width) cut into patches.

        >>> TokenLayout.of_patches(1, (16, 16), torch.zeros(1, 3, 32, 64))
        TokenLayout(prefix=1, grid=(2, 4))
        """
        height, width = pixels.shape[-2:]
        return cls(prefix, (height // patch[0], width // patch[1]))


def find_layers(
    module: nn.Module,
    *,
    matrices: Sequence[str] = (),
    fused: Fused | None = None,
    within: Sequence[str] = (),
    heads: int | None = None,
) -> tuple[Layer, ...]:
    """List the linear layers of any module, in the order of its parameters.

    `matrices` names bare parameters used as `x @ P` (stored in x out); `fused` maps the name of a fused weight to its
    roles and row ranges, if they are not thirds; `within` keeps layers under the given name prefixes only; `heads` is
    the number of attention heads in every block.

    >>> [layer.role for layer in find_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    ['0']
    """
    parameters = dict(module.named_parameters())
    embedded = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found: list[Layer] = []
    for path, part in module.named_modules():
        found.extend(_layers_of(f"{path}." if path else "", part, parameters, fused or {}))
    found = [layer for layer in found if id(parameters[layer.weight]) not in embedded]
    for name in matrices:
        found.extend(_split(name, None, parameters[name], fused or {}, transposed=True))
    order = {name: index for index, name in enumerate(parameters)}
    rotary = any(ROTARY.search(type(part).__name__) for part in module.modules())
    kept = [
        replace(
            layer,
            heads=heads if layer.role.removeprefix("cross_") in ATTENTION_ROLES else None,
            rotary=rotary and layer.role in ("q", "k"),
        )
        for layer in found
        if not within or layer.weight.startswith(tuple(within))
    ]
    return _distinct(sorted(kept, key=lambda layer: order[layer.weight]))


def find_loose(module: nn.Module, layers: Sequence[Layer], *, within: Sequence[str] = ()) -> tuple[LooseTensor, ...]:
    """List the parameters of no layer, each with its kind."""
    owned = {layer.weight for layer in layers} | {layer.bias for layer in layers}
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    loose = []
    for name, parameter in module.named_parameters():
        if name in owned or (within and not name.startswith(tuple(within))):
            continue
        stack, block, role = locate(name)
        kind = _kind(name.lower(), module.get_submodule(name.rpartition(".")[0]))
        loose.append(LooseTensor(name, tuple(parameter.shape), role, kind, stack, block, id(parameter) in linear))
    return _distinct(loose)


def locate(name: str) -> tuple[str, int | None, str]:
    """Split a parameter name into its stack of blocks, the index of its block, and its role.

    >>> locate("vision_model.encoder.layers.3.self_attn.q_proj.weight")
    ('vision_model.encoder.layers', 3, 'q')
    >>> locate("vit.layers.0.layernorm_before.bias")
    ('vit.layers', 0, 'norm1.bias')
    """
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    if found is None:
        return "", None, _role(name.removeprefix("vision_model."), OUTER_ROLES)
    stack, inner = name[: found.start(1)].rstrip("."), name[found.end() :]
    if inner in ("weight", "bias"):  # a bare layer in a Sequential is not a block
        return "", None, name.removesuffix(".weight")
    role = _role(inner, ROLES)
    return stack, int(found.group(1)), f"cross_{role}" if CROSS_ATTENTION.search(inner) else role


Part = TypeVar("Part", Layer, LooseTensor)


def _distinct(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts; those of a block that share a role get their own names as roles."""
    count = Counter((part.stack, part.block, part.role) for part in parts)
    return tuple(
        replace(part, role=part.name.removesuffix(".weight").removeprefix(f"{part.stack}.{part.block}."))
        if count[part.stack, part.block, part.role] > 1
        else part
        for part in parts
    )


def _role(name: str, table: Sequence[tuple[str, str]]) -> str:
    stem, _, last = name.rpartition(".")
    path, suffix = (stem, "") if last == "weight" else (stem, ".bias") if last == "bias" else (name, "")
    for role, pattern in table:
        if re.search(rf"(?:^|\.){pattern}$", path):
            return role + suffix
    return path + suffix


def _layers_of(prefix: str, part: nn.Module, parameters: Mapping[str, Tensor], fused: Fused) -> Iterator[Layer]:
    name, bias = f"{prefix}in_proj_weight", f"{prefix}in_proj_bias"
    if name in parameters:  # nn.MultiheadAttention, or open_clip's own attention
        yield from _split(name, bias if bias in parameters else None, parameters[name], fused)
        return
    if isinstance(part, nn.MultiheadAttention):  # separate projections share one bias, which stays loose
        for name in (f"{prefix}{role}_proj_weight" for role in "qkv"):
            yield from _split(name, None, parameters[name], fused)
        return
    name = f"{prefix}weight"
    if name not in parameters:
        return
    weight, own_bias = parameters[name], f"{prefix}bias" if getattr(part, "bias", None) is not None else None
    stored_in_out = type(part).__name__ == "Conv1D" and weight.ndim == 2  # transformers' GPT-2 layer
    if isinstance(part, nn.Linear) or stored_in_out:
        yield from _split(name, own_bias, weight, fused, transposed=stored_in_out)
    elif isinstance(part, nn.Conv2d) and is_patch_embedding(part):
        stack, block, role = locate(name)
        yield Layer(name, own_bias, tuple(weight.shape), role, stack, block)


def is_patch_embedding(conv: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer over disjoint patches."""
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding in ((0, 0), "valid")
    return plain and conv.kernel_size == conv.stride


def _split(weight: str, bias: str | None, tensor: Tensor, fused: Fused, *, transposed: bool = False) -> Iterator[Layer]:
    shape = (int(tensor.shape[0]), int(tensor.shape[1]))
    rows = shape[1 if transposed else 0]
    stack, block, role = locate(weight)
    ranges = fused.get(weight)
    if ranges is None and weight.removesuffix(".weight").rpartition(".")[2] in FUSED and rows % 3 == 0:
        ranges = {part: ((i * rows // 3, (i + 1) * rows // 3),) for i, part in enumerate("qkv")}
    if ranges is None:
        yield Layer(weight, bias, shape, role, stack, block, transposed=transposed)
        return
    outer = "" if block is not None else role.rpartition(".")[0] + "."
    cross = "cross_" if role.startswith("cross_") else ""
    for part, part_rows in ranges.items():
        yield Layer(weight, bias, shape, f"{outer}{cross}{part}", stack, block, part_rows, transposed)


def _kind(name: str, owner: nn.Module) -> str:
    """The first kind that fits a parameter, by its name in lower case and the module that holds it."""
    kinds = {
        "norms": "norm" in type(owner).__name__.lower(),
        "position embeddings": ("pos" in name and "emb" in name) or "relative_attention_bias" in name,
        "class tokens": "cls_token" in name or "class_embedding" in name,
        "embeddings": isinstance(owner, nn.Embedding),
        "temperature": "logit_scale" in name or "logit_bias" in name,
        "layer scales": "layer_scale" in name or "lambda" in name or "gamma" in name,
        "learnt tokens": "token" in name or "probe" in name or "latent" in name,
        "convolutions": isinstance(owner, nn.modules.conv._ConvNd),
    }
    return next((kind for kind, fits in kinds.items() if fits), "other parameters")
