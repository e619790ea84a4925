"""Flow matching on a tiny Flux of diffusers: TokenRing shards each image's tokens, FSDP2 the parameters.

torchrun --nproc-per-node 4 examples/diffusers_token_ring.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel
from armillary.core import build_mesh

ROWS, COLUMNS, TEXT, BATCH, STEPS = 9, 11, 7, 2, 4  # 99 image tokens and 7 text tokens
SIZES = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16}
INPUTS = {"in_channels": 8, "joint_attention_dim": 24, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6)}


def new_model():
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**SIZES, **INPUTS)  # or the `transformer` of a pipeline
    nn.init.normal_(model.proj_out.weight, std=0.1)
    return model.double()


def sharded(ranks):
    mesh, model = build_mesh("cpu", ring=ranks), new_model()
    model.enable_gradient_checkpointing()
    ContextParallel("token_ring", mesh).prepare(model)
    for part in (*model.transformer_blocks, *model.single_transformer_blocks, model):
        fully_shard(part, mesh=mesh["ring"])
    return model


def train(model):
    """Trains; returns the loss and the gradient norm of each step. The code is the same for one rank and many."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(1.0 * ROWS), torch.arange(1.0 * COLUMNS))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # equal data, noise and times on all ranks
        image, noise = torch.randn(2, BATCH, ROWS * COLUMNS, 8, generator=generator, dtype=torch.float64)
        text, pooled = (
            torch.randn(BATCH, *size, generator=generator, dtype=torch.float64) for size in ((TEXT, 24), (12,))
        )
        time = torch.rand(BATCH, generator=generator, dtype=torch.float64)
        noisy = torch.lerp(image, noise, time[:, None, None])
        conditions = {"encoder_hidden_states": text, "pooled_projections": pooled, "timestep": time}
        flow = model(
            noisy, **conditions, img_ids=ids, txt_ids=torch.zeros(TEXT, 3)
        ).sample  # of all image tokens, on every rank
        loss = F.mse_loss(flow, noise - image)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(float(loss.detach()))
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def errors(ranks):
    """Returns the largest relative errors of losses and of gradient norms, compared with one rank."""
    results, expected = train(sharded(ranks)), train(new_model())
    return [max(abs(a / b - 1) for a, b in zip(*pair, strict=True)) for pair in zip(results, expected, strict=True)]


def main():
    losses, norms = errors(int(os.environ.get("WORLD_SIZE", "1")))
    print(f"rank {dist.get_rank()}: losses differ from one rank's by {losses:.1e}, gradients' norms by {norms:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
