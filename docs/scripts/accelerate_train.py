import os

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from armillary.attention import ContextParallel
from armillary.integrations import share_rows
from armillary.core import build_mesh

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])
fsdp = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["MistralDecoderLayer"],
)
torch.manual_seed(0)
folder = "model"  # any folder or name that from_pretrained takes
data = torch.randint(64, (3 * ranks, 60))  # rows of tokens, all of one length here
cp = ContextParallel("ring", build_mesh(device, shard=2, ring=ranks // 2), data="shard")  # two groups of ranks
accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=fsdp)
share_rows(accelerator, cp)
model = AutoModelForCausalLM.from_pretrained(folder)
cp.prepare(model)
optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.1), [], []
loader = DataLoader(data, batch_size=ranks // 2)  # rows of one group
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    with cp.shard(ids) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)  # the mean over all labels of all groups
    accelerator.backward(loss)
    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
