"""The commands in new processes, with open_clip and torchvision installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import open_clip
from open_clip.push_to_hf_hub import save_config_for_hf
from safetensors.torch import save_file
from typer.testing import CliRunner

from builders.family_twins import scatter
from builders.folders import Zoo, write_data
from tuneport.cli import app

VISION = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 4, "mlp_ratio": 2.0, "image_size": 8}
TEXT = {"layers": 1, "width": 16, "heads": 2, "context_length": 24, "vocab_size": 49408}


def tuneport(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tuneport", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("note: ") for line in done.stderr.splitlines()), done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def clip_folder(folder: Path, seed: int, **vision: int) -> Path:
    model = {"embed_dim": 12, "vision_cfg": {**VISION, **vision}, "text_cfg": TEXT}
    module = scatter(open_clip.CLIP(**model), seed)
    module.visual.image_mean = module.visual.image_std = (0.5, 0.5, 0.5)
    folder.mkdir()
    save_file(module.state_dict(), folder / "open_clip_model.safetensors")
    save_config_for_hf(module, folder / "open_clip_config.json", model)
    return folder


def test_open_clip_from_transfer_to_evaluation(tmp_path: Path) -> None:
    base, tuned = clip_folder(tmp_path / "base", 0), clip_folder(tmp_path / "tuned", 2)
    target = clip_folder(tmp_path / "target", 1, width=24, layers=3)
    data = write_data(tmp_path / "animals.npz")
    job = ("--source", base, "--finetuned", tuned, "--target", target, "--data", data, "--samples", 12)
    record = tuneport("transfer", *job, "--accept-unlikely", "--out", tmp_path / "out")
    assert len(record["layers"]) == 3 * 6 + 2
    assert {item["reason"] for item in record["not_transported"]} >= {"outside the image tower"}
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "out"), "--data", str(data), "--json"])
    assert json.loads(done.stdout)["samples"] == 30, done.output
    assert open_clip.create_model(f"local-dir:{tmp_path / 'out'}").visual.proj.shape == (24, 12)


def test_transformers_models_work_where_torchvision_is_installed(zoo: Zoo) -> None:
    assert tuneport("evaluate", zoo["clip-base"], "--data", zoo.data)["samples"] == 30


EACH_APART = """
import os, sys
import tuneport.cli, tuneport.pipeline.evaluate
data, *models = sys.argv[1:]
for model in models:
    if (child := os.fork()) == 0:
        sys.argv = ["tuneport", "evaluate", model, "--data", data]
        sys.exit(tuneport.cli.main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_broken_torchvision_is_named_in_one_line(zoo: Zoo, tmp_path: Path) -> None:
    """Each model in a process of its own, forked from one that has imported torch, which takes seconds."""
    package = tmp_path / "broken" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    search = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    models = (zoo["clip-base"], clip_folder(tmp_path / "clip", 0))
    command = [sys.executable, "-c", EACH_APART, str(zoo.data), *map(str, models)]
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["1", "1"], done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr
    for line in done.stderr.splitlines():
        assert "does not work with torch" in line
        assert "torchvision 0.25.0" in line
