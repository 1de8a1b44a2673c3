"""What commands say of the old model, the target and the output, wherever they say it, against a second opinion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from builders.commands import Run

Numbers = dict[str, float]
ROLES = {"source": "finetuned", "before": "target", "after": "port"}


@pytest.fixture
def agree(run: Run) -> Callable[..., dict[str, Numbers]]:
    """Transfer, evaluate all models, and compare each number that is said with that of a plain script."""

    def call(
        models: dict[str, Path],
        out: Path,
        as_: str,
        score: Callable[[Path, Path | None], Numbers],
        *,
        said: str = "accuracy",
        bound: float = 0.0,
    ) -> dict[str, Numbers]:
        """Compare, and return what the script says.

        Args:
            models: the folders of source, finetuned and target, and the data.
            out: of the output.
            as_: what is written.
            score: the plain script. It gets a folder, and that of the base of an adapter; its numbers have the names of
                `evaluate --json`.
            said: the number that the transfer compares.
            bound: of the relative difference.
        """
        given = [word for name, path in models.items() for word in (f"--{name}", path)]
        given += ["--samples", 8, "--scale", 1, "--as", as_, *(["--rank", 2] if as_ == "adapter" else [])]
        done = run("transfer", *given, "--out", out, "--evaluate", "--json")
        assert done.code == 0, done.err
        record = json.loads((out / "tuneport.json").read_text(encoding="utf-8"))
        rows = {row["role"]: row["value"] for row in record["accuracies"]}
        folders = {"source": models["finetuned"], "before": models["target"], "after": out}
        bases = {"source": models["source"], "after": models["target"]} if as_ == "adapter" else {}
        wanted = {name: score(folder, bases.get(name)) for name, folder in folders.items()}
        for name, folder in folders.items():
            base = ["--base", models["source"]] if name == "source" and bases else []  # the output names its own
            alone = run("evaluate", folder, *base, "--data", models["data"], "--json")
            assert alone.code == 0, alone.err
            close = {key: pytest.approx(value, rel=bound, abs=0) for key, value in wanted[name].items()}
            for numbers in (done.json["evaluation"], record["evaluation"]):
                assert numbers[name] == close[said], name
            assert rows[ROLES[name]] == close[said], name
            assert {key: alone.json[key] for key in close} == close, name
            details = record["evaluation"].get("scores", {}).get(name, {})
            assert details == {key: close[key] for key in details}, name
        return wanted

    return call
