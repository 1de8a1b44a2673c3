"""The inputs of same_bits.py: tiny models, fine-tunes, adapters and data, made from seeds without tuneport."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = ("cat", "dog", "owl")
PROJECTION = 12
SENTENCES = (
    "the cat sat on the mat and looked at the bird",
    "a small dog barked at the tall man in the garden",
    "rain falls softly on the old stone houses of the town",
    "she reads a long letter by the light of the window",
    "the teacher asked a question that nobody could answer",
    "two ships sailed past the lighthouse before the storm",
    "he plays the violin, badly, but with great joy",
    "the train to the mountains leaves at seven",
    "winter nights are quiet, dark and very cold here",
    "the river carries leaves and boats down to the sea",
)


class Inputs:
    """Folders and files under `root`; `demo_models` is the folder of one checkout, of which `small` is fine-tuned."""

    def __init__(self, root: Path, demo_models: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        root.mkdir()
        self._root = root
        self.images = _write_images(root / "animals.npz")
        self._make_clip()
        self._make_vit()
        self._make_texts()
        self.digits = _write_digits(root / "digits.npz")
        self.mirrored = _finetune_digits(demo_models / "small", self.digits, root / "small-mirrored")

    def _make_clip(self) -> None:
        """A CLIP vision tower, its fine-tune, its twin in other coordinates, and a wider tower."""
        source = _clip(16, 2, 4, 24, seed=0)
        twin, turn = _clip_twin(source)
        embeds = torch.randn(len(CLASSES), PROJECTION, generator=torch.Generator().manual_seed(3))
        other = torch.randn(len(CLASSES), PROJECTION, generator=torch.Generator().manual_seed(4))
        self.clip = self._write_tower("clip", source, embeds)
        self.clip_tuned = self._write_tower("clip-tuned", _finetuned(source), embeds)
        self.clip_twin = self._write_tower("clip-twin", twin, embeds @ turn.T)
        self.clip_wide = self._write_tower("clip-wide", _clip(40, 3, 5, 64, seed=1), other)

    def _write_tower(self, name: str, module: Any, embeds: Tensor) -> Path:
        folder = self._root / name
        module.save_pretrained(folder)
        _write_processor(folder, module.config.image_size)
        (folder / "heads").mkdir()
        tensors = {"class_embeds": embeds.contiguous(), "logit_scale": torch.tensor(3.0)}
        save_file(tensors, folder / "heads/animals.safetensors", {"classes": json.dumps(CLASSES)})
        return folder

    def _make_vit(self) -> None:
        """ViT classifiers: small, fine-tuned, with a LoRA, and wider with larger images."""
        base = _vit(16, 2, 2, 16, seed=0)
        for name, module in (("vit", base), ("vit-tuned", _finetuned(base)), ("vit-wide", _vit(48, 3, 3, 24, seed=1))):
            module.save_pretrained(self._root / name)
            _write_processor(self._root / name, module.config.image_size)
        self.vit, self.vit_tuned, self.vit_wide = (self._root / name for name in ("vit", "vit-tuned", "vit-wide"))
        names = [name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, nn.Linear)]
        self.vit_lora = _write_lora(base, [name for name in set(names) if name != "classifier"], self._root / "lora")

    def _make_texts(self) -> None:
        """T5s that share a tokenizer, Llamas with one each, labelled texts, and prompts with targets."""
        root, random = self._root, np.random.default_rng(0)
        rows = []
        for index in range(60):
            label = CLASSES[index % len(CLASSES)]
            words = random.choice(SENTENCES[index % len(SENTENCES)].split(), 6).tolist()
            rows.append({"text": " ".join([*words, label]), "label": label, "split": "train"})
        self.labelled = _write_rows(root / "labelled.jsonl", rows)
        halves = [sentence.split() for sentence in SENTENCES for _ in range(4)]
        cuts = random.integers(2, 5, len(halves)).tolist()
        pairs = [{"prompt": " ".join(w[:c]), "target": " ".join(w[c:])} for w, c in zip(halves, cuts, strict=True)]
        self.prompts = _write_rows(root / "prompts.jsonl", pairs)
        pieces, letters = _word_pieces(120), _byte_pairs(300)
        source, small = _t5(24, 2, 4, 48, seed=0), _t5(16, 2, 2, 32, seed=1)
        self.t5 = _write_text_model(root / "t5", source, pieces)
        self.t5_tuned = _write_text_model(root / "t5-tuned", _finetuned(source), pieces)
        self.t5_target = _write_text_model(root / "t5-target", small, pieces)
        llama, wide = _llama(16, 2, 4, 120, seed=0), _llama(24, 3, 6, 300, seed=1)
        self.llama = _write_text_model(root / "llama", llama, pieces)
        self.llama_tuned = _write_text_model(root / "llama-tuned", _finetuned(llama), pieces)
        self.llama_target = _write_text_model(root / "llama-target", wide, letters)
        self.llama_lora = _write_lora(llama, ["q_proj", "v_proj", "down_proj"], root / "llama-lora")


# --- models


def _seeded(module: Any, seed: int) -> Any:
    """Every parameter random, of a size that keeps signals alive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in module.modules():
            norm = "norm" in type(part).__name__.lower()
            for parameter in part.parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
                parameter.copy_(parameter + 0.05 * noise if norm else noise * fan_in**-0.5)
    return module.eval()


def _clip(width: int, depth: int, heads: int, hidden: int, seed: int) -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=16,
        patch_size=8,
        projection_dim=PROJECTION,
    )
    return _seeded(transformers.CLIPVisionModelWithProjection(config), seed)


def _vit(width: int, depth: int, heads: int, image: int, seed: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        image_size=image,
        patch_size=8,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )
    return _seeded(transformers.ViTForImageClassification(config), seed)


def _t5(width: int, depth: int, heads: int, hidden: int, seed: int) -> Any:
    config = transformers.T5Config(
        d_model=width,
        d_kv=5,
        d_ff=hidden,
        num_layers=depth,
        num_heads=heads,
        vocab_size=120,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return _seeded(transformers.T5ForConditionalGeneration(config), seed)


def _llama(width: int, depth: int, heads: int, vocabulary: int, seed: int) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return _seeded(transformers.LlamaForCausalLM(config), seed)


def _finetuned(module: nn.Module, amount: float = 0.05, seed: int = 8) -> Any:
    """A copy with noise on its linear layers."""
    moved = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, part in moved.named_modules():
            if isinstance(part, (nn.Linear, nn.Conv2d)) and name != "lm_head":
                for parameter in part.parameters(recurse=False):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return moved


def _clip_twin(model: Any, seed: int = 5) -> tuple[Any, Tensor]:
    """The same function in other coordinates, and the rotation of its embeddings.

    Residual stream, heads and hidden units are permuted; queries with keys, and values, are rotated inside each head.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, width, hidden = 4, 16, 24
    other = copy.deepcopy(model).double()
    stream = torch.randperm(width, generator=generator)

    def rotation(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q

    def per_head(order: Tensor) -> Tensor:
        blocks = torch.block_diag(*(rotation(width // heads) for _ in range(heads)))
        return blocks.unflatten(0, (heads, -1))[order].flatten(0, 1)

    state = other.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if "patch_embedding" in name or "norm" in name or "layrnorm" in name or "class_embedding" in name:
                tensor.copy_(tensor[stream])
            elif "position_embedding.weight" in name:
                tensor.copy_(tensor[:, stream])
        for block in (part for part in other.modules() if hasattr(part, "self_attn")):
            attention, order = block.self_attn, torch.randperm(heads, generator=generator)
            together, value = per_head(order), per_head(order)
            turned = ((attention.q_proj, together), (attention.k_proj, together), (attention.v_proj, value))
            for layer, turn in turned:
                layer.weight.copy_(turn @ layer.weight[:, stream])
                layer.bias.copy_(turn @ layer.bias)
            attention.out_proj.weight.copy_((attention.out_proj.weight @ value.T)[stream])
            attention.out_proj.bias.copy_(attention.out_proj.bias[stream])
            units = torch.randperm(hidden, generator=generator)
            block.mlp.fc1.weight.copy_(block.mlp.fc1.weight[units][:, stream])
            block.mlp.fc1.bias.copy_(block.mlp.fc1.bias[units])
            block.mlp.fc2.weight.copy_(block.mlp.fc2.weight[stream][:, units])
            block.mlp.fc2.bias.copy_(block.mlp.fc2.bias[stream])
        turn = rotation(PROJECTION)
        other.visual_projection.weight.copy_(turn @ other.visual_projection.weight[:, stream])
    twin, images = other.float(), torch.randn(4, 3, 16, 16, generator=generator)
    with torch.no_grad():
        found, wanted = twin(images).image_embeds, model(images).image_embeds @ turn.float().T
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)  # else it is not a twin
    return twin, turn.float()


def _write_lora(base: nn.Module, layers: list[str], folder: Path) -> Path:
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=sorted(layers))
    model = peft.get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def _write_text_model(folder: Path, module: Any, tokenizer: Any) -> Path:
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _word_pieces(size: int) -> Any:
    """Words split into letters and frequent groups of them, `a </s>`."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>", "<s>", "<unk>"], show_progress=False
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([*SENTENCES, " ".join(CLASSES)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return _fast(tokenizer)


def _byte_pairs(size: int) -> Any:
    """Byte pairs without anything around them."""
    special, alphabet = ["<pad>", "</s>", "<s>", "<unk>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


# --- data


def _write_processor(folder: Path, image: int) -> None:
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": image, "width": image},
        "resample": 2,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.5, 0.25],
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _write_images(path: Path) -> Path:
    """Noisy images coloured by class."""
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {"classes": np.array(CLASSES)}
    for split, count in (("train", 60), ("test", 12)):
        labels = np.arange(count) % len(CLASSES)
        pixels = random.integers(0, 120, (count, 16, 16, 3))
        for channel in range(3):
            pixels[labels == channel, :, :, channel] += 120
        arrays |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels.astype(np.int64)}
    np.savez(path, **arrays)
    return path


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def _write_digits(path: Path) -> Path:
    """scikit-learn's digits, 16 x 16 and mirrored, as in the demo."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    pixels = F.interpolate(pixels, size=16, mode="bilinear", align_corners=False).round().byte()
    mirrored, labels = pixels[:, 0].flip(-1).numpy(), digits.target.astype(np.int64)
    classes = np.array([str(digit) for digit in range(10)])
    np.savez(
        path, x_train=mirrored[:400], y_train=labels[:400], x_test=mirrored[400:], y_test=labels[400:], classes=classes
    )
    return path


def _finetune_digits(base: Path, digits: Path, folder: Path) -> Path:
    """A few steps of training on the mirrored digits, away from the base model's weights."""
    shutil.copytree(base, folder)
    module = transformers.CLIPVisionModelWithProjection.from_pretrained(base, dtype=torch.float32).eval()
    head = load_file(base / "heads/digits.safetensors")["class_embeds"].float()
    data, side = np.load(digits), module.config.image_size
    images = torch.from_numpy(data["x_train"]).float()[:, None] / 127.5 - 1
    images = F.interpolate(images, size=side, mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    labels = torch.from_numpy(data["y_train"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(10):
        part = slice(32 * step, 32 * step + 32)
        features = F.normalize(module(images[part].contiguous()).image_embeds, dim=-1)
        loss = F.cross_entropy(10 * features @ F.normalize(head, dim=-1).T, labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.save_pretrained(folder)
    return folder
