"""Algorithm 1 of the paper, written down plainly: the oracle of the tests and the baseline of the timings.

Every signal of every layer is stored, nothing is shared or streamed, and each map comes from its own float64
`torch.linalg.svd`. It reads Hugging Face CLIP vision towers (`CLIPVisionModelWithProjection`) and shares no
code with the library. Rules it keeps: the two *base* models see the same samples, once forwards and once
backwards; target block j takes source block floor(j(D_A-1)/(D_B-1) + 1/2); a bias moves as tau_b R_out; the
pixels are one space for both models, so the patch embedding has R_in = identity.
Not unique below full rank: there U V^T depends on the LAPACK build, here as in any plain thin SVD.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, object], Tensor]
Grid = tuple[int, int]

SIGNALS = ("input", "output", "output_gradient", "input_gradient")
BICO = ("input", "output_gradient")
THESEUS = ("input", "output")
NAIVE = (None, None)


def reference_transfer(
    source: nn.Module,
    source_finetuned: nn.Module,
    target: nn.Module,
    batches: Iterable[object],
    loss_source: Loss,
    loss_target: Loss,
    in_signal: str | None = "input",
    out_signal: str | None = "output_gradient",
    grids: tuple[Grid, Grid] | None = None,
) -> dict[str, Tensor]:
    """Return tau_B = R_out^T tau_A R_in (eq. 8) for each Linear and Conv2d parameter of the target.

    `loss_source(source, batch)` and `loss_target(target, batch)` run the model and return the *sum* of the
    per-sample losses. A signal of None means zero-pad / crop. `grids` holds the patch grids (rows, columns)
    of source and target and is needed only where their token counts differ.
    """
    for signal in (in_signal, out_signal):
        if signal is not None and signal not in SIGNALS:
            raise ValueError(f"unknown signal {signal!r}. Known: {', '.join(SIGNALS)}, None.")
    source_layers, target_layers, finetuned_layers = layers(source), layers(target), layers(source_finetuned)
    pairs = {name: source_name(name, source_layers, target_layers) for name in target_layers}
    batches = list(batches)
    if in_signal is None and out_signal is None:
        batches = []
    source_signals = record(source, source_layers, batches, loss_source)
    target_signals = record(target, target_layers, batches, loss_target)

    def alignment(name: str, signal: str | None, d_source: int, d_target: int) -> Tensor:
        if signal is None:
            return torch.eye(d_source, d_target, dtype=torch.float64)
        a, b = source_signals[pairs[name]][signal], target_signals[name][signal]
        return procrustes(match_tokens(a, b, grids), b)

    deltas = {}
    for name, layer in target_layers.items():
        before, after = source_layers[pairs[name]], finetuned_layers[pairs[name]]
        pixels = isinstance(layer, nn.Conv2d)
        if pixels and before.weight.shape[1:] != layer.weight.shape[1:]:
            raise ValueError(f"{name}: patch embeddings of different patch sizes are not in the reference.")
        tau = (after.weight - before.weight).detach().cpu().double().flatten(1)  # (d_out_A, d_in_A)
        d_out, d_in = layer.weight.flatten(1).shape
        R_in = alignment(name, None if pixels else in_signal, tau.shape[1], d_in)
        R_out = alignment(name, out_signal, tau.shape[0], d_out)
        delta = R_out.T @ tau @ R_in  # (d_out_B, d_in_B)
        deltas[f"{name}.weight"] = delta.reshape(layer.weight.shape).to(layer.weight.dtype)
        if layer.bias is not None:
            tau_b = (after.bias - before.bias).detach().cpu().double()
            deltas[f"{name}.bias"] = (tau_b @ R_out).to(layer.bias.dtype)
    return deltas


def apply(target: nn.Module, deltas: dict[str, Tensor], scale: float = 1.0) -> None:
    """Add the deltas to the target's parameters in place (eq. 9)."""
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, delta in deltas.items():
            parameters[name].add_(delta.to(parameters[name].device), alpha=scale)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}


def source_name(name: str, source_layers: dict[str, nn.Module], target_layers: dict[str, nn.Module]) -> str:
    """The name of the source layer that a target layer takes: same role, block by the depth rule."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    if found is None:
        return name
    depth_source, depth_target = depth(source_layers), depth(target_layers)
    j = int(found.group(1))
    steps = j * (depth_source - 1) / (depth_target - 1) if depth_target > 1 else depth_source - 1
    i = math.floor(steps + 0.5)
    return name[: found.start(1)] + str(i) + name[found.end(1) :]


def depth(named_layers: dict[str, nn.Module]) -> int:
    return 1 + max(int(m.group(1)) for n in named_layers if (m := re.search(r"\.layers\.(\d+)\.", n)))


def record(
    model: nn.Module, named_layers: dict[str, nn.Module], batches: list[object], loss: Loss
) -> dict[str, dict[str, Tensor]]:
    """Store all four signals of every layer on every batch, each (samples, tokens, d), float32."""
    model.eval()
    rows: dict[str, dict[str, list[Tensor]]] = {n: {s: [] for s in SIGNALS} for n in named_layers}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # every parameter is frozen: let the graph begin here
            output.requires_grad_()
        seen[name] = (args[0], output)

    handles = [
        layer.register_forward_hook(lambda _layer, args, output, name=name: keep(name, args, output))
        for name, layer in named_layers.items()
    ]
    try:
        for batch in batches:
            seen.clear()
            value = loss(model, batch)
            gradients = torch.autograd.grad(value, [output for _, output in seen.values()])
            for (name, (x, y)), g in zip(seen.items(), gradients, strict=True):
                row = rows[name]
                if isinstance(named_layers[name], nn.Conv2d):  # its input is never aligned: pixels are shared
                    row["output"].append(y.detach().flatten(2).mT)  # (n, d, h, w) -> (n, h*w, d)
                    row["output_gradient"].append(g.flatten(2).mT)
                    continue
                row["input"].append(as_tokens(x.detach()))
                row["output"].append(as_tokens(y.detach()))
                row["output_gradient"].append(as_tokens(g))
                row["input_gradient"].append(as_tokens(g @ named_layers[name].weight.detach()))
    finally:
        for handle in handles:
            handle.remove()
    return {n: {s: torch.cat(v) for s, v in signals.items() if v} for n, signals in rows.items()}


def as_tokens(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 2 else x  # the projection sees one pooled token per sample


def match_tokens(a: Tensor, b: Tensor, grids: tuple[Grid, Grid] | None) -> Tensor:
    """Resize the source's patch grid to the target's, bilinearly, and keep its class token as it is."""
    if a.shape[1] == b.shape[1]:
        return a
    if grids is None:
        raise ValueError(f"source has {a.shape[1]} tokens, target {b.shape[1]}. Pass grids=(source, target).")
    (rows, columns), size = grids
    n_class = a.shape[1] - rows * columns
    if n_class not in (0, 1) or b.shape[1] - n_class != size[0] * size[1]:
        raise ValueError(f"grids {grids} do not fit {a.shape[1]} and {b.shape[1]} tokens.")
    patches = a[:, n_class:].mT.unflatten(2, (rows, columns))  # (n, d, rows, columns)
    patches = nn.functional.interpolate(patches, size=size, mode="bilinear", align_corners=False)
    return torch.cat([a[:, :n_class], patches.flatten(2).mT], dim=1)


def procrustes(a: Tensor, b: Tensor) -> Tensor:
    """R = U V^T of C = A^T B (eq. 6, 7): the orthogonal map that best takes the rows of A to those of B."""
    C = a.flatten(0, 1).double().T @ b.flatten(0, 1).double()  # (d_A, d_B)
    U, _, Vh = torch.linalg.svd(C, full_matrices=False)
    return (U @ Vh).cpu()
