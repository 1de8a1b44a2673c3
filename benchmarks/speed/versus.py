"""One transfer by two checkouts of tuneport, in turns: is the second slower or larger than the first?

    python benchmarks/speed/versus.py BEFORE AFTER --shapes small --samples 16 --turns 3

Each turn runs `vit.py --only tuneport` of both checkouts, each in a process of its own with its own sources. The ratios
are those of the least seconds and of the least peak memory over the turns: other programs on the machine only add.
What the C library keeps of freed memory differs by some 4 % from run to run. MALLOC_MMAP_THRESHOLD_=65536 and
MALLOC_TRIM_THRESHOLD_=0 in the environment let it keep nothing: memory is then good to 0.2 %, and seconds are longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from record import publish, table


def run(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """The JSON object that one run of a checkout's vit.py prints."""
    command = [sys.executable, str(checkout / "benchmarks" / "speed" / "vit.py"), *arguments, "--only", "tuneport"]
    paths = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=paths)
    if done.returncode:
        raise SystemExit(f"{checkout}: vit.py failed with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options, given = parser.parse_known_args()  # the rest goes to vit.py
    arguments = [*given, "--device", options.device]
    rows: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for turn in range(options.turns):
        for name in ("before", "after") if turn % 2 == 0 else ("after", "before"):
            rows[name].append(run(getattr(options, name), arguments))
            print(f"turn {turn + 1}, {name}: {rows[name][-1]['seconds']:.2f} s", file=sys.stderr)
    least = {name: {key: min(row[key] for row in found) for key in found[0] if key.endswith(("seconds", "bytes"))}
             for name, found in rows.items()}  # fmt: skip
    lines = [
        [name, found["seconds"], found["cpu_seconds"], found["peak_bytes"] / 2**20] for name, found in least.items()
    ]
    ratios = [least["after"][key] / least["before"][key] for key in ("seconds", "cpu_seconds", "peak_bytes")]
    lines.append(["after / before", *ratios])
    title = f"vit.py {' '.join(arguments)}, least of {options.turns} turns\n\n"
    text = title + table(["checkout", "seconds", "CPU seconds", "peak, MiB"], lines)
    publish("versus-vit", options.out, text, {"rows": rows, "ratios": ratios}, torch.device(options.device))


if __name__ == "__main__":
    main()
