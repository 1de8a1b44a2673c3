"""Written adapters load by plain peft for every task type, with peft's own model classes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tuneport
from builders import texts
from builders.loras import adapted, outputs, saved, vit

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def token_labels(size: texts.Size) -> nn.Module:
    config = transformers.BertConfig(**texts._plain(size))
    torch.manual_seed(size.seed)
    module = transformers.BertForTokenClassification(config)
    texts.scatter(module)
    return module.eval()


def bare(size: texts.Size) -> nn.Module:
    return texts.make("bert", size).bert


def image_classifier(size: texts.Size) -> nn.Module:
    config = vit(size.width, size.depth).config
    config.num_labels = 5
    torch.manual_seed(size.seed)
    return transformers.ViTForImageClassification(config).eval()


Q_V = ["query", "value"]
CASES: dict[str, tuple[Any, str | None, dict[str, Any], str]] = {
    "bert": (lambda s: texts.make("bert", s), "SEQ_CLS", {"target_modules": Q_V}, "PeftModelForSequenceClassification"),
    "roberta": (
        lambda s: texts.make("roberta", s), "SEQ_CLS", {"target_modules": Q_V}, "PeftModelForSequenceClassification",
    ),
    "distilbert": (
        lambda s: texts.make("distilbert", s), "SEQ_CLS", {"target_modules": ["q_lin", "v_lin"]},
        "PeftModelForSequenceClassification",
    ),
    "llama classifier": (
        lambda s: texts.make("llama-classifier", s), "SEQ_CLS", {"target_modules": ["q_proj", "v_proj"]},
        "PeftModelForSequenceClassification",
    ),
    "tokens": (token_labels, "TOKEN_CLS", {"target_modules": Q_V}, "PeftModelForTokenClassification"),
    "llama": (
        lambda s: texts.make("llama", s), "CAUSAL_LM", {"target_modules": ["q_proj", "v_proj"]}, "PeftModelForCausalLM",
    ),
    "t5": (lambda s: texts.make("t5", s), "SEQ_2_SEQ_LM", {"target_modules": ["q", "v"]}, "PeftModelForSeq2SeqLM"),
    "bare": (bare, "FEATURE_EXTRACTION", {"target_modules": Q_V}, "PeftModelForFeatureExtraction"),
    "none": (bare, None, {"target_modules": Q_V}, "PeftModel"),
    "image head": (
        image_classifier, None, {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]}, "PeftModel",
    ),
}  # fmt: skip


def inputs(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if hasattr(module.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, texts.VOCABULARY, (2, 7), generator=generator)
    return {"input_ids": ids, **({"decoder_input_ids": ids} if module.config.is_encoder_decoder else {})}


# Each task type from an adapter and from whole weights; the width of the numbers does not depend on the task type.
@pytest.mark.parametrize(
    ("case", "dtype", "full"),
    [
        *((case, "float32", False) for case in CASES),
        *((case, "bfloat16", True) for case in CASES),
        ("bert", "bfloat16", False),
        ("bert", "float32", True),
    ],
)
def test_plain_peft_loads_what_is_written(case: str, dtype: str, full: bool, tmp_path: Path) -> None:
    make, task, options, kind = CASES[case]
    source, target = make(texts.SMALL), make(texts.LARGE)
    tuned: Any = adapted(source, task_type=task, **options)
    folder = saved(tuned, tmp_path / "lora")
    if full:
        tuned = tuned.merge_and_unload()
    result = tuneport.transfer(source, tuned if full else folder, target, method="naive")
    rank = 4 if full else None
    out = result.save(tmp_path / "out", as_="adapter", rank=rank, adapter_dtype=dtype, uniform_rank=full)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out).eval()
    # peft makes a bare model's adapter a plain one unless it is told the task
    assert type(loaded).__name__ == ("PeftModel" if full and case == "bare" else kind)
    batch = inputs(target)
    expected = outputs(result.apply(), batch)
    assert not torch.allclose(outputs(target, batch), expected, atol=1e-3)
    # float32: the same numbers, added in another order; bfloat16 has 8 bits, and the change is about as large as x
    tolerance = 1e-4 if dtype == "float32" else 0.1 * float(expected.abs().max())
    if not full:
        torch.testing.assert_close(outputs(loaded, batch), expected, atol=tolerance, rtol=1e-4)
    written = {part.weight.dtype for n, part in loaded.named_modules() if n.endswith("lora_A.default")}
    assert written == {torch.float32}  # peft widens what it loads
    ranks = {part.weight.shape[0] for n, part in loaded.named_modules() if n.endswith("lora_A.default")}
    assert ranks == ({4} if full else {3})
    configured = loaded.peft_config["default"]
    assert (configured.modules_to_save is not None) == (task in ("SEQ_CLS", "TOKEN_CLS") or case == "image head")
