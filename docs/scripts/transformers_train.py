import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from armillary.attention import ContextParallel
from armillary.core import build_mesh

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
folder = "model"  # any folder or name that from_pretrained takes
batches = [torch.randint(64, (2, 250), device=device) for _ in range(3)]  # tokens [B, N], the same on every rank
model = AutoModelForCausalLM.from_pretrained(folder).to(device)
cp = ContextParallel("ring", build_mesh(device, ring=ranks))
cp.prepare(model)
mesh = init_device_mesh(device, (ranks,))
for part in (*model.model.layers, model):
    fully_shard(part, mesh=mesh)
optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
for ids in batches:
    with cp.shard(ids) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)  # the mean over all labels, the same on every rank
    loss.backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
    losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
