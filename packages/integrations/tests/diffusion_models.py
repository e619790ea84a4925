"""Tiny diffusers transformers and their inputs, equal on every rank."""

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

B, HEADS, D, CHANNELS, TEXT, POOLED = 2, 4, 16, 8, 12, 10
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": D}
JOINT = {**SIZES, "in_channels": CHANNELS, "joint_attention_dim": TEXT}
Inputs = dict[str, object]


def flux(**config) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": POOLED, "axes_dims_rope": (4, 6, 6)}
    rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
    return build_model(FluxTransformer2DModel, **JOINT, **sizes, guidance_embeds=True, **config), {
        "hidden_states": draw(B, 25, CHANNELS),
        "encoder_hidden_states": draw(B, 7, TEXT),
        "pooled_projections": draw(B, POOLED),
        "timestep": torch.tensor([0.3, 0.8]),
        "guidance": torch.tensor([3.5, 2.0]),
        "img_ids": torch.stack([torch.zeros(25), rows.flatten(), columns.flatten()], -1),
        "txt_ids": torch.zeros(7, 3),
    }


def qwen(**config) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 2, "out_channels": 2, "axes_dims_rope": (4, 6, 6)}
    return build_model(QwenImageTransformer2DModel, **JOINT, **sizes, **config), {
        "hidden_states": draw(B, 26, CHANNELS),
        "encoder_hidden_states": draw(B, 9, TEXT),
        "encoder_hidden_states_mask": (torch.arange(9) < torch.tensor([[9], [4]])).long(),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_shapes": [[(1, 4, 4), (1, 5, 2)]] * B,
    }


def sd3(**config) -> tuple[nn.Module, Inputs]:
    sizes = {
        "num_layers": 2,
        "out_channels": 3,
        "sample_size": 8,
        "pos_embed_max_size": 8,
        "pooled_projection_dim": POOLED,
    }
    kinds = {"caption_projection_dim": HEADS * D, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    return build_model(SD3Transformer2DModel, **JOINT, **sizes, **kinds, **config), {
        "hidden_states": draw(B, CHANNELS, 10, 6),  # 15 tokens
        "encoder_hidden_states": draw(B, 2, TEXT),  # fewer than ranks
        "pooled_projections": draw(B, POOLED),
        "timestep": torch.tensor([300.0, 800.0]),
    }


def wan(**config) -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 2, "in_channels": 4, "out_channels": 4, "ffn_dim": 32, "freq_dim": 16, "text_dim": TEXT}
    return build_model(WanTransformer3DModel, **SIZES, **sizes, **config), {
        "hidden_states": draw(B, 4, 3, 6, 6),  # 27 tokens
        "encoder_hidden_states": draw(B, 7, TEXT),
        "timestep": torch.tensor([300.0, 800.0]),
    }


BUILD = {"flux": flux, "qwen": qwen, "sd3": sd3, "wan": wan}


def build_model(kind: type[nn.Module], **config) -> nn.Module:
    model, generator = kind(**config), torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # zero-initialized parameters would hide the layers before them
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.double()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
