"""A report of 200 layers: how large it is, and how long a headless Chromium takes to open it.

    python -m benchmarks.claims.report_page --record out/tuneport.json --layers 200 --write report-page.md

The layers of a real run record are repeated under new names until there are enough. Opening is timed from the order to
navigate to the end of the first layout, in a browser that is already running; the median of five.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.builders.browser import Browser
from tuneport.report.page import report_page

ROLES = ("q", "k", "v", "out", "fc1", "fc2")


def stretched(record: dict[str, Any], count: int) -> dict[str, Any]:
    """The record with `count` layers, in blocks of six, and as many kept tensors for each as it has now."""
    layers, kept = record["layers"], record["not_transported"]
    many = [
        {**layers[index % len(layers)], "block": index // 6, "role": ROLES[index % 6], "stack": "layers"}
        | {"target": f"vision_model.encoder.layers.{index // 6}.{ROLES[index % 6]}_proj.weight"}
        for index in range(count)
    ]
    stay = [{**kept[i % len(kept)], "tensor": f"{i}.{kept[i % len(kept)]['tensor']}"} for i in range(count * 2 // 3)]
    like = [
        {**item, "block": block, "target": f"{block}.{item['target']}"}
        for block in range(count // 6 + 1)
        for item in record.get("similarity", ())[:18]
    ]
    return {**record, "layers": many, "not_transported": stay, **({"similarity": like} if like else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="tuneport.json of a transfer")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--write", type=Path, help="write the table to this file")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    lines = [
        "# The report page",
        "",
        "| layers | page, kB | opens in, s | messages | requests |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder, Browser() as tab:
        for content in (record, stretched(record, options.layers)):
            path = Path(folder) / "report.html"
            path.write_text(report_page(content), encoding="utf-8")
            times = [tab.open(path) for _ in range(5)]
            asked = {url for url in tab.requests if not url.startswith("data:")} - {path.as_uri()}
            size = path.stat().st_size / 1000
            lines.append(
                f"| {len(content['layers'])} | {size:.0f} | {statistics.median(times):.2f} | {len(tab.messages)} "
                f"| {len(asked)} |"
            )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    lines += [
        "",
        "Messages: console output, exceptions, violations of the page's policy. Requests: all but the page itself and",
        "the pictures inside it.",
        "",
        "- command: the one at the head of `benchmarks/claims/report_page.py`",
        f"- machine: {platform.machine()}, two CPU cores, shared with other work at the time",
        f"- commit: {commit.strip()}",
        f"- date: {datetime.now(timezone.utc).date()}",
    ]
    text = "\n".join(lines) + "\n"
    if options.write is not None:
        options.write.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
