"""`tuneport merge`, and `transfer` of several fine-tunes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders import texts
from builders.commands import Run, assert_refused, options
from builders.folders import SMALL, Zoo, build, perturb
from builders.loras import adapted, saved
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


@pytest.fixture
def loras(zoo: Zoo, tmp_path: Path) -> list[Path]:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    settings = [(2, ["q_proj", "fc1"]), (3, ["q_proj", "v_proj"])]
    return [
        saved(adapted(base, seed, target_modules=modules, r=seed), tmp_path / f"lora{seed}")
        for seed, modules in settings
    ]


def merged_by_peft(base: Path, *loras: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of the base with each adapter, merged by peft."""
    found = []
    for lora in loras:
        model = transformers.CLIPVisionModelWithProjection.from_pretrained(base)
        found.append(dict(peft.PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()))
    return found


def test_adapters_into_a_model(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    done = run("merge", *loras, "--weights", "1,0.5", "--as", "model", "--out", place / "both", "--json")
    assert done.code == 0, done.err
    assert done.json["weights"] == [1.0, 0.5]
    assert done.json["base"]["path"] == str(zoo["clip_vision-base"]), "the adapters name it"
    written = json.loads((place / "both" / "tuneport.json").read_text())
    assert {key: value for key, value in written.items() if key != "files"} == done.json
    base = load_file(zoo["clip_vision-base"] / "model.safetensors")
    first, second = merged_by_peft(zoo["clip_vision-base"], *loras)
    written = load_file(place / "both" / "model.safetensors")
    for name, tensor in base.items():
        expected = tensor + (first[name] - tensor) + 0.5 * (second[name] - tensor)
        torch.testing.assert_close(written[name], expected, atol=2e-6, rtol=1e-5)


def test_adapters_into_an_adapter(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    assert run("merge", *loras, "--as", "adapter", "--out", place / "both").code == 0
    assert run("merge", *loras, "--as", "model", "--out", place / "model").code == 0
    [merged] = merged_by_peft(zoo["clip_vision-base"], place / "both")
    whole = load_file(place / "model" / "model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(merged[name], tensor, atol=2e-6, rtol=1e-5)
    config = json.loads((place / "both" / "adapter_config.json").read_text())
    assert config["r"] == 5, "the ranks of layers that both change add up"
    done = run("merge", *loras, "--as", "adapter", "--rule", "ties", "--out", place / "ties")
    assert_refused(done, 1, "the update is not low-rank: pass --rank R or --energy 0.95")
    cut = run("merge", *loras, "--as", "adapter", "--rule", "ties", "--rank", 2, "--out", place / "ties", "--json")
    assert cut.code == 0, cut.err
    assert cut.json["adapter"]["rank"] == 2


def test_what_an_adapter_cannot_hold_is_told(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    """Of a LoRA that also has trained norms, the matrices are merged, and a note names what is left out."""
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    more = saved(adapted(base, 4, target_modules=["q_proj"], modules_to_save=["post_layernorm"]), place / "norms")
    merged = run("merge", loras[0], more, "--as", "adapter", "--out", place / "both", "--json")
    assert merged.code == 0, merged.err
    [note] = merged.json["notes"]
    name = "vision_model.post_layernorm.bias: a LoRA cannot hold a parameter of LayerNorm"
    assert note.startswith(f"the change of 2 of {merged.json['tensors']} tensors is left out ({name}, ")
    assert f"note: {note}" in merged.err
    whole = ("merge", zoo["clip_vision-tuned"], "--base", zoo["clip_vision-base"], "--as", "adapter", "--energy", "1")
    unchanged = run(*whole, "--out", place / "whole", "--json")
    assert "notes" not in unchanged.json, "its norms are those of the base"


def test_task_vectors_need_no_base(run: Run, zoo: Zoo, place: Path) -> None:
    taus = [place / "one.safetensors", place / "two.safetensors"]
    for tau in taus:
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
    done = run("merge", *taus, "--weights", "0.25,0.5", "--out", place / "both.safetensors")
    assert done.code == 0, done.err
    assert done.out == f"2 fine-tunes, 40 tensors, written to {place / 'both.safetensors'}\n"
    one, both = load_task_vector(taus[0]), load_task_vector(place / "both.safetensors")
    assert all(torch.equal(both.dense(name), 0.25 * one[name] + 0.5 * one[name]) for name in one)
    found = run("evaluate", place / "both.safetensors", "--data", zoo.data, "--json")
    assert found.code == 0, found.err


def test_bad_input(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    out = ["--out", place / "out.safetensors"]
    assert_refused(run("merge", *loras, "--weights", "1", *out), 2, "2 fine-tunes and 1 --weights")
    assert_refused(run("merge", *loras, "--weights", "a,b", *out), 2, "--weights must be numbers separated by commas")
    assert_refused(run("merge", *loras, "--rule", "mean", *out), 2, "unknown rule 'mean'")
    assert_refused(run("merge", *loras, "--density", "0", "--rule", "dare", *out), 2, "--density must be above 0")
    assert_refused(run("merge", *loras, "--rank", "2", *out), 2, "they go with --as adapter")
    models = [zoo["vit-tuned"], zoo["vit-tuned"]]
    assert_refused(run("merge", *models, *out), 1, "the base that was fine-tuned is not known: pass it as --base.")
    assert run("merge", *models, "--base", zoo["vit-base"], *out).code == 0
    assert_refused(run("merge", *models, "--base", zoo["vit-base"], *out), 1, "exists")


def test_a_transfer_of_several_fine_tunes(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    """The maps do not depend on the fine-tune, so that the sum of two transfers is the transfer of the sum."""
    words = options(zoo, finetuned=loras[0])
    done = run(
        "transfer",
        "--scale",
        "1",
        *words,
        "--finetuned",
        loras[1],
        "--as",
        "adapter",
        "--out",
        place / "both",
        "--json",
    )
    assert done.code == 0, done.err
    assert [part["name"] for part in done.json["finetuned"]["parts"]] == ["lora2", "lora3"]
    assert done.json["finetuned"]["name"] == "lora2 + lora3"
    for lora in loras:
        alone = run(
            "transfer", "--scale=1", *options(zoo, finetuned=lora), "--as", "adapter", "--out", place / lora.name
        )
        assert alone.code == 0, alone.err
    ones = [place / lora.name for lora in loras]
    assert run("merge", *ones, "--as", "model", "--out", place / "sum").code == 0
    assert run("merge", place / "both", "--as", "model", "--out", place / "whole").code == 0
    first, second = (load_file(place / name / "model.safetensors") for name in ("sum", "whole"))
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)
    page = (place / "both" / "report.html").read_text()
    assert page.count("--finetuned") == 2 * page.count("tuneport transfer ") > 0
    planned = run("plan", *words, "--finetuned", loras[1])
    assert planned.code == 0, planned.err


def test_fine_tunes_of_two_bases_are_refused(run: Run, zoo: Zoo, loras: list[Path], place: Path) -> None:
    """As task vectors, adapters and models, with the base given or not."""
    other = build("clip_vision", replace(SMALL, seed=5), place / "other")
    perturb(other, tuned := place / "other-tuned")
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(other)
    foreign = saved(adapted(base, 4, target_modules=["q_proj"], r=2), place / "foreign")
    taus = [place / "one.safetensors", place / "two.safetensors"]
    assert run("extract", zoo["clip_vision-base"], zoo["clip_vision-tuned"], "-o", taus[0]).code == 0
    assert run("extract", other, tuned, "-o", taus[1]).code == 0
    out = ["--out", place / "out.safetensors"]
    own = ["--base", zoo["clip_vision-base"]]
    assert_refused(run("merge", *taus, *out), 1, "two.safetensors is no fine-tune of", "--accept-unlikely")
    assert_refused(run("merge", *loras, foreign, *out), 1, "foreign is no fine-tune of")
    assert_refused(run("merge", zoo["clip_vision-tuned"], tuned, *own, *out), 1, "other-tuned is no fine-tune of")
    assert run("merge", *taus, *out, "--accept-unlikely").code == 0
    assert run("merge", zoo["clip_vision-tuned"], taus[0], loras[0], *own, *out, "--overwrite").code == 0


def test_task_vectors_that_name_no_base_are_compared_with_each_other(run: Run, place: Path) -> None:
    taus = [place / "one.safetensors", place / "two.safetensors", place / "bare.safetensors"]
    random = torch.Generator().manual_seed(0)
    for tau in taus:
        values = [float(value) for value in torch.randn(8, generator=random)]
        mark = {} if tau == taus[2] else {"base_fingerprint": json.dumps({"a.weight": values})}
        save_task_vector(tau, TaskVector({"a.weight": torch.ones(4, 4)}), mark)
    out = ["--out", place / "out.safetensors"]
    assert_refused(run("merge", *taus, *out), 1, "one.safetensors and", "two.safetensors change different bases")
    done = run("merge", taus[0], taus[2], *out)
    assert done.code == 0, done.err
    assert "bare.safetensors does not say which base it changes" in done.err


@pytest.fixture
def classifiers(place: Path) -> Path:
    """A bare encoder, the same with a head, two fine-tunes with different heads, and an adapter of each."""
    base = texts.make("bert", num_labels=3)
    texts.write(place / "bare", base.bert, texts.bert_tokenizer())
    texts.write(place / "headed", base, texts.bert_tokenizer())
    for seed, (name, labels) in enumerate({"two": 2, "three": 3, "also": 3}.items()):
        model = texts.make("bert", num_labels=labels)
        model.bert.load_state_dict(base.bert.state_dict())
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "query" in key or "classifier" in key:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        texts.write(place / name, model, texts.bert_tokenizer())
        bare = transformers.BertForSequenceClassification.from_pretrained(place / "bare", num_labels=labels)
        saved(adapted(bare, target_modules=["query"], task_type="SEQ_CLS"), place / f"lora-{name}")
    return place


@pytest.mark.parametrize("base", ["bare", "headed"])
def test_the_advice_on_classifiers_works(run: Run, classifiers: Path, base: str) -> None:
    words = ["merge", classifiers / "two", classifiers / "three", "--base", classifiers / base, "--as", "model"]
    refused = run(*words, "--out", classifiers / "both")
    assert_refused(refused, 1, "Exclude them with --exclude")
    advice = re.search(r"with (--exclude .*)\.$", refused.err.strip())
    assert advice is not None
    done = run(*words, *shlex.split(advice[1]), "--out", classifiers / "both")
    assert done.code == 0, done.err
    model = transformers.AutoModel.from_pretrained(classifiers / "both")
    tuned = [transformers.AutoModel.from_pretrained(classifiers / name) for name in ("two", "three", "bare")]
    first, second, old = (dict(each.named_parameters()) for each in tuned)
    for key, parameter in model.named_parameters():
        if "query" in key:
            torch.testing.assert_close(parameter, first[key] + second[key] - old[key], atol=1e-6, rtol=1e-5)


def test_heads_are_not_dropped_or_added_in_silence(run: Run, classifiers: Path) -> None:
    loras = [classifiers / "lora-two", classifiers / "lora-three"]
    done = run("merge", *loras, "--base", classifiers / "bare", "--as", "model", "--out", classifiers / "a")
    assert done.code == 0, done.err
    assert f"the heads of {loras[0]}, {loras[1]} are left out" in done.err
    models = ["merge", classifiers / "three", classifiers / "also", "--base", classifiers / "headed", "--as", "model"]
    done = run(*models, "--out", classifiers / "b")
    assert done.code == 0, done.err
    assert "classifier.weight is the sum of 2 heads" in done.err
    advice = re.search(r"leave them out with (--exclude \S+)", done.err)
    assert advice is not None
    done = run(*models, *shlex.split(advice[1]), "--out", classifiers / "c")
    assert (done.code, done.err) == (0, "")
    head, own = (load_file(classifiers / name / "model.safetensors")["classifier.weight"] for name in ("c", "headed"))
    assert torch.equal(head, own)
