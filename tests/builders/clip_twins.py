"""A tiny CLIP vision tower and its planted twin: LayerNorm allows only permutations of the residual stream."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from builders.folders import Size, clip_vision
from builders.toy import rotation


def random_clip(seed: int) -> nn.Module:
    """A CLIP vision tower in which every parameter is random, also biases and norms."""
    size = Size(width=16, depth=2, heads=4, image=8, seed=seed)
    model = clip_vision(size, intermediate_size=24, patch_size=4, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm.weight" in name))
    return model


def clip_twin(model: nn.Module, seed: int = 5) -> tuple[nn.Module, Tensor]:
    """Residual stream, heads and hidden units permuted; q/k and v/out rotated per head; embeddings rotated."""
    generator = torch.Generator().manual_seed(seed)
    heads, width, hidden = 4, 16, 24
    other = copy.deepcopy(model).double()
    stream = torch.randperm(width, generator=generator)
    tower = other.vision_model

    def per_head(order: Tensor) -> Tensor:
        blocks = torch.block_diag(*(rotation(width // heads, generator) for _ in range(heads)))
        return blocks.unflatten(0, (heads, -1))[order].flatten(0, 1)

    with torch.no_grad():
        tower.embeddings.class_embedding.copy_(tower.embeddings.class_embedding[stream])
        tower.embeddings.patch_embedding.weight.copy_(tower.embeddings.patch_embedding.weight[stream])
        tower.embeddings.position_embedding.weight.copy_(tower.embeddings.position_embedding.weight[:, stream])
        norms = [part for part in tower.modules() if isinstance(part, nn.LayerNorm)]
        for parameter in (parameter for norm in norms for parameter in norm.parameters()):
            parameter.copy_(parameter[stream])
        for block in tower.encoder.layers:
            attention, order = block.self_attn, torch.randperm(heads, generator=generator)
            qk, v = per_head(order), per_head(order)
            for layer, turn in ((attention.q_proj, qk), (attention.k_proj, qk), (attention.v_proj, v)):
                layer.weight.copy_(turn @ layer.weight[:, stream])
                layer.bias.copy_(turn @ layer.bias)
            attention.out_proj.weight.copy_((attention.out_proj.weight @ v.T)[stream])
            attention.out_proj.bias.copy_(attention.out_proj.bias[stream])
            units = torch.randperm(hidden, generator=generator)
            block.mlp.fc1.weight.copy_(block.mlp.fc1.weight[units][:, stream])
            block.mlp.fc1.bias.copy_(block.mlp.fc1.bias[units])
            block.mlp.fc2.weight.copy_(block.mlp.fc2.weight[stream][:, units])
            block.mlp.fc2.bias.copy_(block.mlp.fc2.bias[stream])
        embedding = rotation(12, generator)
        other.visual_projection.weight.copy_(embedding @ other.visual_projection.weight[:, stream])
    return other.float(), embedding.float()
