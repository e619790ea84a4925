import os

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import MistralConfig, MistralForCausalLM

from armillary.attention import ContextParallel
from armillary.core import build_mesh

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks = int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
batches = [torch.randint(64, (2, 250), device=device) for _ in range(3)]  # tokens [B, N], the same on every rank
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 60}
model = MistralForCausalLM(MistralConfig(**sizes, **heads)).to(device)  # or from_pretrained(folder)
precision = MixedPrecisionPolicy()
cp = ContextParallel("ring", build_mesh(device, ring=ranks))
cp.prepare(model)
model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.0))
mesh = init_device_mesh(device, (ranks,))
for part in (*model.get_base_model().model.layers, model):
    fully_shard(part, mesh=mesh, mp_policy=precision)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer, losses, norms = torch.optim.SGD(adapters, lr=0.1), [], []
for ids in batches:
    with cp.shard(ids) as batch:
        loss = cp.loss(model(**batch.inputs).loss, batch)  # the mean over all labels, the same on every rank
    loss.backward()
    norms.append(float(nn.utils.clip_grad_norm_(adapters, 1.0).full_tensor()))
    losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
