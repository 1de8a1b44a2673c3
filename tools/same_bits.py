"""Claim: two checkouts of tuneport compute the same task vectors, to the bit.

    python tools/same_bits.py BEFORE AFTER [--shared ../shared] [--out same.json] [--expected wanted.json]
    python tools/same_bits.py BEFORE AFTER --cases 'planted/*' 'llama/*'

Tiny models, adapters and data are made once, from seeds. Each checkout then runs all cases on them in one process of
its own (PYTHONPATH=CHECKOUT/src, one thread, CPU). A case is one `tuneport transfer` command with every option stated,
or one call of the public Python API. Its answer is the name, shape, dtype and bytes of every tensor it writes, factors
of low-rank updates as they are stored, and the scale in the run record; the SHA-256 of both sides are compared.

The exit status is 1 if a case differs or fails. A wanted difference is listed with its reason in EXPECTED below or in a
JSON file, {"case or glob": "reason"}. --shared adds cells of the zoo of trained models. --demo adds the whole
`tuneport demo`, which takes a minute longer. Cases under planted/, demo/ and zoo/ read head files (`class_embeds`,
`logit_scale`); the others do not, nor do naive, theseus and transfusion.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from same_bits_inputs import Inputs

EXPECTED: dict[str, str] = {}  # case or glob -> why its answer is meant to change
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # bits depend on their number
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DEMO_MODELS = "{demo_models}"  # replaced by the folder of the checkout under test
STATED = {"method": "bico", "samples": 24, "sampler": "random", "seed": 0, "scale": "1.0", "labels": "data"}
STATED |= {"batch-size": 32, "device": "cpu", "dtype": "float32"}
Case = dict[str, Any]  # name, kind (a value of --as, or python, modules, demo), options


# --- the cases


def all_cases(inputs: Inputs, shared: Path | None, demo: bool) -> Iterator[Case]:
    """Every case, in the order in which they run."""
    yield from _image_cases(inputs)
    yield from _text_cases(inputs)
    digits = {"finetuned": inputs.mirrored, "data": inputs.digits, "head": "digits"}
    digits |= {"source": f"{DEMO_MODELS}/small", "target": f"{DEMO_MODELS}/large"}
    for method in ("bico", "theseus", "naive"):
        yield _case(f"demo/{method}", digits, method=method, samples=40)
    if demo:
        yield {"name": "demo/command", "kind": "demo", "options": {}}
    if shared is not None:
        yield from _zoo_cases(shared)


def _image_cases(inputs: Inputs) -> Iterator[Case]:
    clip = {"source": inputs.clip, "finetuned": inputs.clip_tuned, "data": inputs.images, "head": "animals"}
    for target, path in (("twin", inputs.clip_twin), ("wide", inputs.clip_wide)):
        more = ("transfusion", "gradfix") if target == "twin" else ("input_only", "output_only", "gradient_only")
        for method in ("bico", "theseus", "naive", "bico+", *more):
            yield _case(f"planted/{target} {method}", clip, target=path, method=method)
    yield _case("planted/wide model", clip, "model", target=inputs.clip_wide)
    yield _case("planted/wide python", clip, "python", target=inputs.clip_wide)

    vit = {"source": inputs.vit, "finetuned": inputs.vit_tuned, "target": inputs.vit_wide, "data": inputs.images}
    kept = {**vit, "head-fit": "none"}  # a task vector holds no fitted head
    yield _case("vit/bico", kept, **{"batch-size": 7})
    yield _case("vit/completion none", kept, "python", completion="none")
    yield _case("vit/scale auto", kept, scale="auto")
    yield _case("vit/scale safe", kept, scale="safe")
    yield _case("vit/max-tokens", kept, **{"max-tokens": 100})
    yield _case("vit/labels source", kept, labels="source")
    yield _case("vit/exclude", kept, exclude="*mlp*")
    yield _case("vit/live modules", kept, "modules")
    for method, budget in (("bico", "2000KiB"), ("theseus", "850KiB")):  # little more than the least
        yield _case(f"vit/memory-budget {method}", kept, method=method, **{"memory-budget": budget})
    low = {**vit, "finetuned": inputs.vit_lora}
    yield _case("lora/task vector", {**kept, "finetuned": inputs.vit_lora})
    yield _case("lora/adapter", low, "adapter")
    yield _case("lora/adapter rank 2", low, "adapter", rank=2)
    yield _case("lora/dense to adapter", vit, "adapter", energy=0.9)


def _text_cases(inputs: Inputs) -> Iterator[Case]:
    t5 = {"source": inputs.t5, "finetuned": inputs.t5_tuned, "target": inputs.t5_target, "data": inputs.labelled}
    yield _case("t5/bico", t5)
    yield _case("t5/theseus", t5, method="theseus")
    yield _case("t5/encoder", t5, exclude="decoder.*")
    llama = {"source": inputs.llama, "finetuned": inputs.llama_tuned, "target": inputs.llama_target}
    llama["data"] = inputs.prompts
    yield _case("llama/bico", llama)
    yield _case("llama/theseus", llama, method="theseus")
    yield _case("llama/max-tokens", llama, **{"max-tokens": 60})
    yield _case("llama/lora", {**llama, "finetuned": inputs.llama_lora})


def _zoo_cases(shared: Path) -> Iterator[Case]:
    for source, target, task in (("a", "a2", "mnist"), ("a", "c", "cifar10")):
        places = {
            "source": shared / "zoo" / source,
            "finetuned": shared / "zoo" / f"{source}-{task}",
            "target": shared / "zoo" / target,
            "data": shared / "data" / "images" / f"{task}.npz",
        }
        missing = [str(path) for path in places.values() if not path.exists()]
        if missing:
            print(f"zoo/{source}-{target} {task}: skipped, no {', '.join(missing)}", flush=True)
            continue
        more = ("bico+", "transfusion", "gradfix") if target == "a2" else ()  # the last two need equal shapes
        for method in ("bico", "theseus", "naive", *more):
            yield _case(f"zoo/{source}-{target} {task} {method}", {**places, "head": task}, method=method, samples=20)


def _case(name: str, places: Mapping[str, Any], kind: str = "task-vector", **options: Any) -> Case:
    stated = {key: str(value) for key, value in {**STATED, **places, **options}.items()}
    return {"name": name, "kind": kind, "options": stated}


# --- one checkout: runs in a process whose PYTHONPATH is that checkout's src


def work(cases: Path, out: Path) -> None:
    """Run all cases with the tuneport that can be imported; write tensors and a summary for each under `out`."""
    import tuneport

    if not Path(str(tuneport.__file__)).is_relative_to(os.environ["PYTHONPATH"]):
        sys.exit(f"{tuneport.__file__} is imported in place of the tuneport in {os.environ['PYTHONPATH']}")
    torch.set_num_threads(1)
    for index, case in enumerate(json.loads(cases.read_text())):
        place = out / f"{index:02d}"
        place.mkdir(parents=True)
        started, said = time.process_time(), io.StringIO()
        found: dict[str, Any] = {"scale": None, "error": None}
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found |= _RUNNERS.get(case["kind"], _transfer_command)(case, place)
        except Exception:
            found["error"] = (traceback.format_exc()[-2000:] + said.getvalue()[-2000:]).strip()
        found["cpu_seconds"] = round(time.process_time() - started, 2)
        (place / "summary.json").write_text(json.dumps(found))


def _command(*words: str) -> dict[str, Any]:
    """`python -m tuneport WORDS --json` in this process, which spares the imports."""
    printed, given = io.StringIO(), sys.argv
    sys.argv = ["tuneport", *words, "--json"]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module("tuneport", run_name="__main__")
        status: Any = 0
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.argv = given
    if status not in (0, None):
        raise RuntimeError(f"tuneport {' '.join(words)}: exit status {status}")
    record: dict[str, Any] = json.loads(printed.getvalue())
    return record


def _transfer_command(case: Case, place: Path) -> dict[str, Any]:
    options = [word for key, value in case["options"].items() for word in (f"--{key}", value)]
    name = {"task-vector": "task_vector.safetensors"}.get(case["kind"], "written")
    record = _command("transfer", *options, "--as", case["kind"], "--out", str(place / name))
    if case["kind"] == "task-vector":
        _check_reading(place / name)
    if "memory-budget" in case["options"] and record["passes"]["forward"] < 2:
        raise RuntimeError("the memory budget does not divide the layers into groups: make it smaller")
    return {"scale": record["scale"], "passes": record.get("passes")}


def _check_reading(path: Path) -> None:
    """What load_task_vector reads must be what the safetensors library reads."""
    import tuneport

    read, stored = _parts(tuneport.load_task_vector(path)), _tensors(path)
    if set(read) != set(stored) or not all(torch.equal(read[name], stored[name]) for name in stored):
        raise RuntimeError(f"load_task_vector reads other tensors from {path} than safetensors")


def _python(case: Case, place: Path) -> dict[str, Any]:
    import tuneport

    given = dict(case["options"])
    models = [given.pop(key) for key in ("source", "finetuned", "target")]
    plain = {key.replace("-", "_"): value for key, value in given.items() if key not in ("data", "scale")}
    plain |= {key: int(plain[key]) for key in ("samples", "seed", "batch_size")}
    method = tuneport.get_method(plain["method"])
    if "completion" in plain and hasattr(method, "completion"):  # an option of the transfer in older checkouts
        plain["method"] = replace(method, completion=plain.pop("completion"))
    result = tuneport.transfer(*models, given["data"], scale=float(given["scale"]), **plain)
    save_file(_parts(result.task_vector), place / "task_vector.safetensors")
    return {"scale": result.scale}


def _modules(case: Case, place: Path) -> dict[str, Any]:
    """Live modules, batches of tensors and a loss of the caller's own."""
    import transformers

    import tuneport

    given = case["options"]
    kind = transformers.ViTForImageClassification
    models = [kind.from_pretrained(given[key], dtype=torch.float32).eval() for key in ("source", "finetuned", "target")]
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(3, 8, 3, 16, 16, generator=generator)
    batches = list(zip(images, torch.randint(0, 3, (3, 8), generator=generator), strict=True))

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = module(images, interpolate_pos_encoding=True).logits
        return F.cross_entropy(logits, labels, reduction="sum")

    stated = {key: given[key] for key in ("method", "device", "dtype")}
    result = tuneport.transfer(*models, batches, loss=loss, scale=1.0, **stated)
    save_file(_parts(result.task_vector), place / "task_vector.safetensors")
    return {"scale": result.scale}


def _demo(_: Case, place: Path) -> dict[str, Any]:
    table = _command("demo", "--out", str(place / "written"))["table"]
    return {"scale": [row["accuracy"] for row in table]}


_RUNNERS = {"python": _python, "modules": _modules, "demo": _demo}


def _parts(vector: Any) -> dict[str, Tensor]:
    """The entries of a task vector, a low-rank one as its two factors under the names that files have for them."""
    found = {}
    for name in vector:
        entry = vector[name]
        factors = {"": entry} if isinstance(entry, Tensor) else {"::out": entry.out_factor, "::in": entry.in_factor}
        found |= {name + end: part.detach().contiguous().clone() for end, part in factors.items()}
    return found


# --- both checkouts


def demo_models(checkout: Path) -> Path:
    """The folder of the demo's models, in older and newer checkouts."""
    return next(found for name in ("demo_models", "demo/models") for found in (checkout / "src").rglob(name))


def run_both(checkouts: Sequence[Path], cases: list[Case], root: Path) -> list[list[dict[str, Any]]]:
    """For each checkout, for each case: its summary and its tensors."""
    running = []
    for side, checkout in zip(("before", "after"), checkouts, strict=True):
        listed = root / f"{side}.json"
        listed.write_text(json.dumps(cases).replace(DEMO_MODELS, str(demo_models(checkout))))
        words = [sys.executable, str(Path(__file__).resolve()), "--work", str(listed), str(root / side)]
        environment = {**os.environ, **THREADS, **OFFLINE, "PYTHONPATH": str(checkout / "src")}
        running.append(subprocess.Popen(words, env=environment, cwd=root))
    if any(status != 0 for status in [process.wait() for process in running]):
        sys.exit("a checkout could not run the cases; its error is above")
    found = []
    for side in ("before", "after"):
        places = [root / side / f"{index:02d}" for index in range(len(cases))]
        found.append([json.loads((place / "summary.json").read_text()) | {"place": place} for place in places])
    return found


def answer(summary: Mapping[str, Any]) -> dict[str, Tensor]:
    """Everything that a case has computed, by name: the tensors of all files that it wrote, and the scale."""
    place: Path = summary["place"]
    found = {"(scale)": torch.tensor(summary["scale"], dtype=torch.float64)}
    for path in sorted(place.rglob("*.safetensors")):
        if "heads" in path.parts:  # copied, not computed
            continue
        where = "" if path.parent == place else f"{path.relative_to(place)}: "
        found |= {where + name: tensor for name, tensor in _tensors(path).items()}
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of name, shape, dtype and bytes of every tensor, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """A phrase for each tensor that is not the same on both sides."""
    found = []
    for name in sorted({**before, **after}):
        if name not in before or name not in after:
            found.append(f"{name} only {'before' if name in before else 'after'}")
        elif digest({name: before[name]}) != digest({name: after[name]}):
            one, two = before[name], after[name]
            if one.shape != two.shape or one.dtype != two.dtype:
                found.append(f"{name} {tuple(one.shape)} {one.dtype} -> {tuple(two.shape)} {two.dtype}")
            else:
                found.append(f"{name} {float((one.double() - two.double()).abs().max()):.3g}")
    return found


def compare(case: Case, before: dict[str, Any], after: dict[str, Any], expected: Mapping[str, str]) -> dict[str, Any]:
    """One row of the table."""
    reason = next((why for glob, why in expected.items() if fnmatch.fnmatchcase(case["name"], glob)), None)
    row = {"case": case["name"], "expected": reason, "cpu_seconds": [before["cpu_seconds"], after["cpu_seconds"]]}
    errors = {side: found["error"] for side, found in (("before", before), ("after", after)) if found["error"]}
    if errors:
        return {**row, "tensors": 0, "same": False, "failed": errors, "differ": []}
    one, two = answer(before), answer(after)
    found = differences(one, two)
    computed = len(two) > 1 and any(bool(tensor.any()) for name, tensor in two.items() if name != "(scale)")
    if not computed:  # nothing or zeros only: the same bits would prove nothing
        return {**row, "tensors": len(two) - 1, "same": False, "failed": {"both": "no tensor above zero"}, "differ": []}
    hashes = {"before": digest(one), "after": digest(two)}
    passes = {"before": before.get("passes"), "after": after.get("passes")}
    return {**row, "tensors": len(two) - 1, "same": not found, "differ": found, "sha256": hashes, "passes": passes}


def show(row: Mapping[str, Any]) -> str:
    """A line of the table; it names the first eight tensors that differ, the JSON file all."""
    if row.get("failed"):
        state = "FAILED " + "; ".join(f"{side}: {text.splitlines()[-1]}" for side, text in row["failed"].items())
    elif row["same"]:
        state = "same" if row["expected"] is None else f"same, though a difference is expected: {row['expected']}"
    else:
        listed = row["differ"][:8]
        more = len(row["differ"]) - len(listed)
        state = f"{len(row['differ'])} DIFFER (max abs difference): {', '.join(listed)}" + (
            f", {more} more" * (more > 0)
        )
        if row["expected"] is not None:
            state = f"differs as expected ({row['expected']}): {len(row['differ'])} tensors"
    return f"{row['case']:34} {row['tensors']:>7}  {state}"


def commit_of(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("--shared", type=Path, help="a folder with zoo/ and data/images/")
    parser.add_argument("--out", type=Path, help="write all rows, with their hashes, as JSON")
    parser.add_argument("--expected", type=Path, help='wanted differences as JSON: {"case or glob": "reason"}')
    parser.add_argument("--cases", nargs="+", default=["*"], help="globs of the cases to run")
    parser.add_argument("--demo", action="store_true", help="run the whole demo too")
    options = parser.parse_args()
    from same_bits_inputs import Inputs  # not at the top: the process of a checkout does not need peft

    started = time.perf_counter()
    checkouts = [options.before.resolve(), options.after.resolve()]
    for checkout in checkouts:
        if not (checkout / "src/tuneport").is_dir():
            parser.error(f"{checkout} is not a checkout: it has no src/tuneport")
    expected = {**EXPECTED, **(json.loads(options.expected.read_text()) if options.expected else {})}
    shared = options.shared.resolve() if options.shared is not None else None
    if shared is None:
        print("zoo/*: skipped, no --shared", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        inputs = Inputs(root / "inputs", demo_models(checkouts[0]))
        listed = all_cases(inputs, shared, options.demo)
        cases = [case for case in listed if any(fnmatch.fnmatchcase(case["name"], glob) for glob in options.cases)]
        before, after = run_both(checkouts, cases, root)
        rows = [compare(*each, expected) for each in zip(cases, before, after, strict=True)]
    print(f"{'case':34} {'tensors':>7}")
    for row in rows:
        print(show(row))
    wrong = [row["case"] for row in rows if row.get("failed") or not (row["same"] or row["expected"])]
    seconds, cpu = time.perf_counter() - started, sum(sum(row["cpu_seconds"]) for row in rows)
    print(f"{len(rows) - len(wrong)} of {len(rows)} cases as they should be, {len(wrong)} not")
    print(f"{seconds:.0f} s, and {cpu:.0f} s of CPU for the cases of both checkouts")
    if options.out is not None:
        about = {"before": commit_of(checkouts[0]), "after": commit_of(checkouts[1]), "torch": torch.__version__}
        options.out.write_text(json.dumps({**about, "seconds": round(seconds, 1), "rows": rows}, indent=1) + "\n")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
