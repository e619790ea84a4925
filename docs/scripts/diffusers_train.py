import os

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from armillary.attention import ContextParallel
from armillary.core import build_mesh

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])
folder = "model"  # any folder or name that from_pretrained takes
shapes = {"encoder_hidden_states": (2, 7, 24), "pooled_projections": (2, 12), "txt_ids": (7, 3), "img_ids": (27, 3)}
model = FluxTransformer2DModel.from_pretrained(folder).to(device)
cp = ContextParallel("token_ring", build_mesh(device, ring=ranks))
cp.prepare(model)
mesh = init_device_mesh(device, (ranks,))
for part in (*model.transformer_blocks, *model.single_transformer_blocks, model):
    fully_shard(part, mesh=mesh)
optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
torch.manual_seed(0)
for _ in range(3):
    image = torch.randn(2, 27, 8, device=device)  # your latents; the conditions of Flux are below
    conditions = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    noise, time = torch.randn_like(image), torch.rand_like(image[:, 0, 0])
    noisy = torch.lerp(image, noise, time[:, None, None])
    flow = model(noisy, timestep=time, **conditions).sample
    loss = F.mse_loss(flow, noise - image)
    loss.backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
    losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
