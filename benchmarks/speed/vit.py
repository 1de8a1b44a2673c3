"""A whole transfer between two CLIP vision towers against the bare passes and against plain Algorithm 1.

    python benchmarks/speed/vit.py --shapes small --samples 50 --out benchmarks/results/speed
    python benchmarks/speed/vit.py --shapes large --samples 100 --device cuda --out benchmarks/results/speed
    python benchmarks/speed/vit.py --shapes large --samples 100 --device cuda --dtype bfloat16 --first --out OUT

`small` is ViT-S/16 to ViT-B/16, `large` ViT-B/16 to ViT-L/14, `tiny` a trial; random weights, random images, the task
vector random and dense in every linear layer of the blocks. Four contenders, each in a process of its own, after a
warm-up with one batch (on a CPU only of the passes): `bare` (forward and backward passes of both models as in
training), `frozen` (the same without gradients of the weights: all that is needed), `tuneport` (measure, solve,
transport), and `reference` (reference.py).
With --max-tokens, `limited` is tuneport from fewer tokens: other maps, so a row by itself. With --dtype, `half` is
tuneport with both models in it, `half-bare` the bare passes of these, and `half-reference` the reference on these. Peak
memory is what a contender needs beyond the models and the task vector. On a CPU that others use too, look at the CPU
seconds of --threads 1, in which the stages are given as well. The floor counts FLOP, those in float64 twice, at the
speed of one large float32 product on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from record import Trial, in_own_process, now, peak_memory, prepare, publish, stages, table
from reference import reference_transfer
from torch import Tensor, nn
from torch.nn import functional as F

SHAPES = {  # width, depth, heads, patch, of source and target
    "tiny": ((128, 3, 4, 32), (192, 4, 4, 32)),
    "small": ((384, 12, 6, 16), (768, 12, 12, 16)),
    "large": ((768, 12, 12, 16), (1024, 24, 16, 14)),
}
CONTENDERS = ("bare", "frozen", "half-bare", "tuneport", "limited", "half", "reference", "half-reference")
NEEDS = {"limited": "max_tokens", **dict.fromkeys(("half", "half-bare", "half-reference"), "dtype")}
CLASSES = 10


def tower(width: int, depth: int, heads: int, patch: int, device: torch.device, seed: int) -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=224,
        patch_size=patch,
        projection_dim=512,
    )
    return CLIPVisionModelWithProjection(config).to(device).eval()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A head without parameters of its own: the first features are the class scores."""
    scores = model(pixel_values=batch[0]).image_embeds[:, :CLASSES].float()
    return F.cross_entropy(scores, batch[1], reduction="sum")


class Setting:
    """Both models, the samples and a task vector, made from seeds on the device."""

    def __init__(self, options: argparse.Namespace) -> None:
        import tuneport.pipeline.transfer  # noqa: F401 - loading is no part of any time or memory

        self.device = torch.device(options.device)
        self.max_tokens = getattr(options, "max_tokens", None)
        self.first = getattr(options, "first", False)
        self.dtype = getattr(torch, getattr(options, "dtype", None) or "float32")
        torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
        shapes = SHAPES[options.shapes]
        if getattr(options, "depth", None):
            shapes = tuple((width, min(depth, options.depth), *rest) for width, depth, *rest in shapes)
        self.source, self.target = (tower(*shape, self.device, seed) for seed, shape in enumerate(shapes))
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(options.samples, 3, 224, 224, generator=generator).to(self.device)
        labels = torch.randint(0, CLASSES, (options.samples,), generator=generator).to(self.device)
        self.batches = list(zip(images.split(options.batch), labels.split(options.batch), strict=True))
        self.grids = tuple((224 // shape[3], 224 // shape[3]) for shape in shapes)
        torch.manual_seed(3)
        self.task_vector = {
            name: 0.01 * torch.randn_like(parameter)
            for name, parameter in self.source.named_parameters()
            if ".layers." in name and "norm" not in name
        }

    def halve(self) -> None:
        """Both models and the samples in the other dtype; the task vector stays as it is."""
        self.source, self.target = self.source.to(self.dtype), self.target.to(self.dtype)
        self.batches = [(images.to(self.dtype), labels) for images, labels in self.batches]

    def half(self, batches: list[Any]) -> dict[str, float]:
        return self.tuneport(batches)

    def bare(self, batches: list[Any], frozen: bool = False) -> None:
        for model in (self.source, self.target):
            model.requires_grad_(not frozen)
            for images, labels in batches:
                value = loss(model, (images.detach().requires_grad_(frozen), labels))
                value.backward()
                model.zero_grad(set_to_none=True)

    def limited(self, batches: list[Any]) -> dict[str, float]:
        return self.tuneport(batches, self.max_tokens)

    def tuneport(self, batches: list[Any], max_tokens: int | None = None) -> dict[str, float]:
        return stages(self.trial(batches, max_tokens), self.device)

    def trial(self, batches: list[Any], max_tokens: int | None = None) -> Trial:
        from tuneport.layers import TokenLayout
        from tuneport.measure.tokens import match_tokens

        layouts = [TokenLayout(1, grid) for grid in self.grids]
        return prepare(
            self.source,
            self.task_vector,
            self.target,
            batches,
            loss=loss,
            match=match_tokens(*layouts),
            device=str(self.device),
            max_tokens=max_tokens,
        )

    def reference(self, batches: list[Any]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        reference_transfer(
            self.source, self.task_vector, self.target, batches, (loss, loss), self.grids, seconds=seconds
        )
        return seconds

    def warm_up(self, contender: str) -> None:
        """Load what a GPU loads at its first use: kernels of the passes and of the solvers, at the real shapes."""
        from tuneport.maps.polar import polar_together
        from tuneport.pipeline.solve import measure

        first = self.batches[:1]
        widths = [(side.config.hidden_size, side.config.intermediate_size) for side in (self.source, self.target)]
        for n, m in zip(*widths, strict=True):
            C = torch.randn(n, m, device=self.device, dtype=torch.float64)
            if contender.endswith("reference"):
                torch.linalg.svd(C, full_matrices=False)
            else:
                for many in (4, 16):
                    polar_together([C] * many, 1e-9, fill=True)
                C[: n // 2] = 0.0  # the route of low ranks
                polar_together([C] * 4, 1e-9, fill=True)
                decay = 0.5 ** torch.arange(n, device=self.device, dtype=torch.float64)[:, None]
                polar_together([C.flip(0) * decay] * 4, 2e-3, fill=True)  # few directions, as in half precision
        if contender.endswith("reference"):
            self.bare(first, frozen=True)
        else:
            measure(self.trial(first).measurement)

    def run(self, contender: str) -> dict[str, Any]:
        if contender.startswith("half"):
            self.halve()
        if self.first:
            pass
        elif contender in ("bare", "frozen", "half-bare"):
            self.bare(self.batches[:1])
        elif self.device.type == "cuda":
            self.warm_up(contender)
        with peak_memory(self.device) as peak:
            now(self.device)
            started, worked = time.perf_counter(), time.process_time()
            if contender in ("bare", "frozen", "half-bare"):
                self.bare(self.batches, frozen=contender == "frozen")
                spent = {}
            else:
                spent = getattr(self, contender.removeprefix("half-"))(self.batches)
            now(self.device)
            seconds, worked = time.perf_counter() - started, time.process_time() - worked
        return {
            "contender": contender,
            "seconds": seconds,
            "cpu_seconds": worked,
            "stages": spent,
            "peak_bytes": peak.bytes,
        }


def floor(options: argparse.Namespace) -> str:
    """What a transfer has to compute, and how long that takes at the speed of one large float32 product."""
    (a, depth_a, _, patch_a), (b, depth_b, _, patch_b) = SHAPES[options.shapes]
    depth_a, depth_b = (min(depth, options.depth or depth) for depth in (depth_a, depth_b))
    tokens = [options.samples * (1 + (224 // patch) ** 2) for patch in (patch_a, patch_b)]
    passes = sum(
        (4 * 12 * width * width + 12 * width * count // options.samples) * depth * count
        for width, depth, count in ((a, depth_a, tokens[0]), (b, depth_b, tokens[1]))
    )
    step = (depth_a - 1) / max(depth_b - 1, 1)
    last = sum(int(j * step + 0.5) == depth_a - 1 for j in range(depth_b))  # where gradients are class tokens' only
    small, large = a * b, 16 * a * b
    sums = 2 * tokens[1] * (depth_b * (8 * small + 2 * large) - last * (3 * small + large))
    solve = sum(
        count * (3 * n * n * m + 9 * n**3)  # half a Gram matrix, its eigenvectors, the other side's vectors
        for count, n, m in ((8 * depth_b - 3 * last, a, b), (2 * depth_b - last, 4 * a, 4 * b))
    )
    carry = depth_b * (4 * 2 * (a * a * b + a * b * b) + 2 * 2 * (4 * a * a * b + 16 * a * b * b))
    device = torch.device(options.device)
    rate = 2 * 4096**3 / min(_product(device, options.threads) for _ in range(4))
    parts = {"passes": passes, "sums": 2 * sums, "solve": 2 * solve, "transport": 2 * carry}
    words = ", ".join(f"{name} {value / 1e12:.2f}" for name, value in parts.items())
    seconds = ", ".join(f"{name} {value / rate:.1f}" for name, value in parts.items())
    held = 8 * (depth_b * (8 * small + 2 * large) - last * (3 * small + large))
    return (
        f"Floor, TFLOP in float32 (those in float64 counted twice): {words}. At {rate / 1e12:.2f} TFLOP/s, as one "
        f"product of 4096 x 4096 float32 matrices runs here: {seconds}, in all {sum(parts.values()) / rate:.1f} s. "
        f"Statistics: {held / 2**20:.0f} MiB.\n\n"
    )


def _product(device: torch.device, threads: int) -> float:
    """Seconds of one product; on a CPU those of its threads, which others do not take away."""
    X = torch.randn(4096, 4096, device=device)
    begun, worked = now(device), time.process_time()
    X @ X
    spent = now(device) - begun
    return spent if device.type != "cpu" else (time.process_time() - worked) / threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--depth", type=int, help="use only this number of blocks of each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--tf32", action="store_true", help="let the models' products use TF32")
    parser.add_argument("--first", action="store_true", help="no warm-up: the first run of a process")
    parser.add_argument("--max-tokens", type=int, help="adds the contender `limited`")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="adds the contenders `half` and `half-bare`")
    parser.add_argument("--without", nargs="*", default=[], choices=CONTENDERS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only:
        print(json.dumps(Setting(options).run(options.only)))
        return
    rows = []
    for contender in CONTENDERS:
        if contender not in options.without and (contender not in NEEDS or getattr(options, NEEDS[contender])):
            rows.append(in_own_process(__file__, [*sys.argv[1:], "--only", contender]))
            print(f"{contender}: {rows[-1]['seconds']:.2f} s", file=sys.stderr)
    found = {row["contender"]: row for row in rows}

    def ratio(row: dict[str, Any], other: str, key: str = "seconds") -> float | None:
        return row[key] / max(found[other][key], 1e-9) if other in found else None

    head = ["contender", "seconds", "of the bare passes", "of the reference", "measure", "solve", "transport"]
    head += ["CPU seconds", "of the bare passes", "of the reference", "peak, MiB", "of the reference"]
    lines = [
        [
            row["contender"],
            row["seconds"],
            ratio(row, "bare"),
            ratio(row, "reference"),
            row["stages"].get("measure"),
            row["stages"].get("solve", row["stages"].get("solve_and_transport")),
            row["stages"].get("transport"),
            row["cpu_seconds"],
            ratio(row, "bare", "cpu_seconds"),
            ratio(row, "reference", "cpu_seconds"),
            row["peak_bytes"] / 2**20,
            ratio(row, "reference", "peak_bytes"),
        ]
        for row in rows
    ]
    data = {"options": {k: str(v) for k, v in vars(options).items() if k != "only"}, "rows": rows}
    blocks = f"-depth{options.depth}" if options.depth else ""
    blocks += f"-{options.dtype}" if options.dtype else ""
    name = f"vit-{options.shapes}{blocks}-{torch.device(options.device).type}{'-tf32' if options.tf32 else ''}"
    name += "-first" if options.first else ""
    only = f", {options.depth} blocks" if options.depth else ""
    title = f"{options.shapes}: N = {options.samples}, batches of {options.batch}{only}\n\n"
    bound = floor(options)
    publish(name, options.out, title + bound + table(head, lines), data, torch.device(options.device))


if __name__ == "__main__":
    main()
