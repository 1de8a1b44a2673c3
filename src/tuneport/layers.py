"""What a model is made of: linear layers with a role and a block, and loose tensors for the rest.

Works on any `nn.Module` by looking at module types and parameter names; families add what names cannot
tell. A Layer is a linear map wherever its weight is stored: a Linear, a row range of a fused projection,
a patch-embedding convolution, a transposed matrix. Names are those of `named_parameters()`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

RowRanges = tuple[tuple[int, int], ...]

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
FUSED: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "in_proj_weight": ("q", "k", "v")}
ATTENTION_ROLES = frozenset({"q", "k", "v", "out"})
ROTARY = re.compile(r"Rotary|Rope|RoFormer|GPTJ|CodeGen")  # in the name of a class
CROSS_ATTENTION = re.compile(r"cross|EncDec|encoder_attn", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """One linear map `y = x W^T + b` and where its numbers live.

    `rows` selects output rows of a fused weight; `transposed` weights are stored (in, out); `kernel` is
    (channels, height, width) of a patch-embedding convolution, whose inputs are unfolded patches; `heads` is
    the number of attention heads on the inner side of q, k, v and out, where it is known; `rotary` queries and keys
    have positions turned into them, so that the units of a head have places of their own.
    """

    weight: str
    bias: str | None
    weight_shape: tuple[int, ...]
    in_features: int
    out_features: int
    role: str
    stack: str = ""
    block: int | None = None
    rows: RowRanges | None = None
    transposed: bool = False
    kernel: tuple[int, int, int] | None = None
    heads: int | None = None
    rotary: bool = False

    @property
    def name(self) -> str:
        """The weight's name, with the role appended where several layers share one weight."""
        return self.weight if self.rows is None else f"{self.weight}[{self.role.rsplit('.', 1)[-1]}]"

    def matrix(self, weight: Tensor) -> Tensor:
        """The (out, in) matrix of this layer inside the stored weight (a view where possible)."""
        if self.kernel is not None:
            return weight.flatten(1)
        matrix = weight.T if self.transposed else weight
        return matrix if self.rows is None else _take(matrix, self.rows)

    def vector(self, bias: Tensor) -> Tensor:
        """The part of the stored bias that belongs to this layer."""
        return bias if self.rows is None else _take(bias, self.rows)

    def store(self, matrix: Tensor, into: Tensor) -> None:
        """Write an (out, in) matrix, or an (out,) bias, to its place in a tensor of the stored shape."""
        if matrix.ndim == 1:
            view, rows = into, matrix
        elif self.kernel is not None:
            view, rows = into, matrix.reshape(into.shape)
        else:
            view, rows = (into.T if self.transposed else into), matrix
        if self.rows is None:
            view.copy_(rows)
            return
        at = 0
        for start, stop in self.rows:
            view[start:stop] = rows[at : at + stop - start]
            at += stop - start


@dataclass(frozen=True)
class LooseTensor:
    """A parameter that belongs to no linear layer: a norm, a token, an embedding, a scale.

    A `tied` embedding is the weight of a linear layer as well: the head over its vocabulary.
    """

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
    fused: Mapping[str, Mapping[str, RowRanges]] | None = None,
    within: Sequence[str] = (),
    heads: int | None = None,
) -> tuple[Layer, ...]:
    """List the linear layers of any module, in the order of its parameters.

    `matrices` names bare parameters used as `x @ P` (stored in x out); `fused` maps the name of a fused
    weight to its roles and row ranges where thirds are not right; `within` keeps layers under the given
    name prefixes only; `heads` is the number of attention heads in every block.

    >>> [layer.role for layer in find_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))]
    ['0']
    """
    parameters = dict(module.named_parameters())
    embedded = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found: list[Layer] = []
    for path, part in module.named_modules():
        layers = _layers_of(path, part, parameters, fused or {})
        found.extend(layer for layer in layers if id(parameters[layer.weight]) not in embedded)
    for name in matrices:
        rows, columns = parameters[name].shape
        stack, block, role = locate(name)
        found.append(Layer(name, None, (rows, columns), rows, columns, role, stack, block, transposed=True))
    order = {name: index for index, name in enumerate(parameters)}
    kept = [layer for layer in found if not within or layer.weight.startswith(tuple(within))]
    if heads is not None:
        kept = [replace(layer, heads=heads) if _attends(layer) else layer for layer in kept]
    if any(ROTARY.search(type(part).__name__) for part in module.modules()):
        kept = [replace(layer, rotary=True) if layer.role in ("q", "k") else layer for layer in kept]
    return _distinct(sorted(kept, key=lambda layer: order[layer.weight]))


def find_loose(module: nn.Module, layers: Sequence[Layer], *, within: Sequence[str] = ()) -> tuple[LooseTensor, ...]:
    """List every parameter that no layer owns, with what kind of thing it is."""
    owned = {layer.weight for layer in layers} | {layer.bias for layer in layers}
    kinds = dict(_kinds(module))
    linear = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    loose = []
    for name, parameter in module.named_parameters():
        if name in owned or (within and not name.startswith(tuple(within))):
            continue
        stack, block, role = locate(name)
        kind, tied = kinds.get(name, "parameter"), id(parameter) in linear
        loose.append(LooseTensor(name, tuple(parameter.shape), role, kind, stack, block, tied))
    return _distinct(loose)


def locate(name: str) -> tuple[str, int | None, str]:
    """Split a parameter name into the stack of blocks it stands in, the block's index, and its role.

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
    """Where two parts of a block would share a role, each is called by its own name instead."""
    count = Counter((part.stack, part.block, part.role) for part in parts)
    return tuple(
        replace(part, role=part.name.removesuffix(".weight").removeprefix(f"{part.stack}.{part.block}."))
        if count[part.stack, part.block, part.role] > 1
        else part
        for part in parts
    )


def _attends(layer: Layer) -> bool:
    return layer.role.removeprefix("cross_") in ATTENTION_ROLES


def _role(name: str, table: Sequence[tuple[str, str]]) -> str:
    stem, _, last = name.rpartition(".")
    path, suffix = (stem, "") if last == "weight" else (stem, ".bias") if last == "bias" else (name, "")
    for role, pattern in table:
        if re.search(rf"(?:^|\.){pattern}$", path):
            return role + suffix
    return path + suffix


def _layers_of(
    path: str, part: nn.Module, parameters: Mapping[str, Tensor], fused: Mapping[str, Mapping[str, RowRanges]]
) -> Iterator[Layer]:
    prefix = f"{path}." if path else ""
    if isinstance(part, nn.MultiheadAttention):
        names = ("in_proj_weight",) if part.in_proj_weight is not None else _SEPARATE
        for name in names:
            # separate projections still share one bias: no layer owns it, it stays loose
            fused_bias = part.in_proj_bias is not None and part.in_proj_weight is not None
            bias = f"{prefix}in_proj_bias" if fused_bias else None
            yield from _split(prefix + name, bias, parameters[prefix + name], fused, transposed=False)
        return
    if f"{prefix}in_proj_weight" in parameters:  # open_clip's own attention
        bias = f"{prefix}in_proj_bias" if f"{prefix}in_proj_bias" in parameters else None
        name = f"{prefix}in_proj_weight"
        yield from _split(name, bias, parameters[name], fused, transposed=False)
        return
    weight = getattr(part, "weight", None)
    if not isinstance(weight, nn.Parameter) or f"{prefix}weight" not in parameters:
        return
    bias = f"{prefix}bias" if getattr(part, "bias", None) is not None else None
    if isinstance(part, nn.Linear):
        yield from _split(f"{prefix}weight", bias, weight, fused, transposed=False)
    elif type(part).__name__ == "Conv1D" and weight.ndim == 2:  # transformers' GPT-2 layer: stored in x out
        yield from _split(f"{prefix}weight", bias, weight, fused, transposed=True)
    elif isinstance(part, nn.Conv2d) and is_patch_embedding(part):
        stack, block, role = locate(f"{prefix}weight")
        shape, kernel = tuple(weight.shape), (weight.shape[1], weight.shape[2], weight.shape[3])
        in_features = kernel[0] * kernel[1] * kernel[2]
        yield Layer(f"{prefix}weight", bias, shape, in_features, shape[0], role, stack, block, kernel=kernel)


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_patch_embedding(conv: nn.Conv2d) -> bool:
    """Whether a convolution is a linear layer over disjoint patches."""
    return (
        conv.kernel_size == conv.stride
        and conv.groups == 1
        and conv.padding in ((0, 0), "valid")
        and conv.dilation == (1, 1)
    )


def _split(
    weight: str,
    bias: str | None,
    tensor: Tensor,
    fused: Mapping[str, Mapping[str, RowRanges]],
    *,
    transposed: bool,
) -> Iterator[Layer]:
    shape = (int(tensor.shape[0]), int(tensor.shape[1]))
    rows, columns = shape[::-1] if transposed else shape
    stack, block, role = locate(weight)
    ranges = fused.get(weight)
    if ranges is None and weight.removesuffix(".weight").rpartition(".")[2] in FUSED and rows % 3 == 0:
        names = FUSED[weight.removesuffix(".weight").rpartition(".")[2]]
        third = rows // 3
        ranges = {part: ((i * third, (i + 1) * third),) for i, part in enumerate(names)}
    if ranges is None:
        yield Layer(weight, bias, shape, columns, rows, role, stack, block, transposed=transposed)
        return
    outer = "" if block is not None else role.rpartition(".")[0] + "."
    cross = "cross_" if role.startswith("cross_") else ""
    for part, part_rows in ranges.items():
        size = sum(stop - start for start, stop in part_rows)
        yield Layer(weight, bias, shape, columns, size, f"{outer}{cross}{part}", stack, block, part_rows, transposed)


def _kinds(module: nn.Module) -> Iterator[tuple[str, str]]:
    for path, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            yield full, _kind(full, part)


def _kind(name: str, owner: nn.Module) -> str:
    lowered = name.lower()
    if "norm" in type(owner).__name__.lower():
        return "normalisation"
    if ("pos" in lowered and "emb" in lowered) or "relative_attention_bias" in lowered:
        return "position embedding"
    if "cls_token" in lowered or "class_embedding" in lowered:
        return "class token"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if "logit_scale" in lowered or "logit_bias" in lowered:
        return "logit scale"
    if "layer_scale" in lowered or "lambda" in lowered or "gamma" in lowered:
        return "layer scale"
    if "token" in lowered or "probe" in lowered or "latent" in lowered:
        return "learnt token"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return "convolution"
    return "parameter"


def _take(tensor: Tensor, rows: RowRanges) -> Tensor:
    if len(rows) == 1:
        return tensor[rows[0][0] : rows[0][1]]
    return torch.cat([tensor[start:stop] for start, stop in rows])
