import os

import torch

from armillary.attention import build_attention
from armillary.core import build_mesh

STAGES = 2
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = build_mesh(device, pipe=STAGES, ring=int(os.environ["WORLD_SIZE"]) // STAGES)
attend, stage = build_attention("ring", mesh), mesh["pipe"].get_local_rank()
from torch import nn

from armillary.attention import AttentionMask
from armillary.models import Llama, LlamaConfig, initialize
from armillary.models.block import Context

ROWS, LENGTH, MICRO_BATCHES = 4, 256, 2
SIZES = LlamaConfig(vocab_size=64, dim=64, layers=4, heads=4, kv_heads=2, hidden_dim=128, head_dim=16)
first, last = stage == 0, stage == STAGES - 1
layout = attend.layout(LENGTH)
positions = layout.positions(attend.shard).to(device)


class Stage(nn.Module):
    """The blocks of one stage, on the tokens of one rank; the first also embeds, the last also computes logits."""

    def __init__(self, model: Llama):
        super().__init__()
        decoder, size = model.model, SIZES.layers // STAGES
        self.blocks = nn.ModuleList(decoder.layers[stage * size : (stage + 1) * size])
        self.before = decoder.embed_tokens if first else nn.Identity()
        self.after = nn.Sequential(decoder.norm, model.lm_head) if last else nn.Identity()
        rotation = decoder.rotation(positions, torch.get_default_dtype())
        self.context = Context(len(positions), rotation, AttentionMask(), layout)  # the mask is causal

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x, self.context.for_block(block))
        return self.after(x)
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def local_loss(logits, labels):
    """The sum of a micro-batch's losses on this rank, divided by all tokens of the step: the results add up to the mean."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * LENGTH)


model = Llama(SIZES, attend).to(device)
initialize(model, seed=0)
module = Stage(model)
# PipelineStage infers shapes by running the stage, unless it is given example inputs and outputs.
shape = ROWS // MICRO_BATCHES, len(positions)
ids = torch.zeros(shape, dtype=torch.int64, device=device)
hidden, logits = (torch.empty(*shape, n, device=device, requires_grad=True) for n in (SIZES.dim, SIZES.vocab_size))
examples = {"input_args": ids if first else hidden, "output_args": logits if last else hidden}
pipeline = PipelineStage(module, stage, STAGES, torch.device(device), group=mesh["pipe"].get_group(), **examples)
schedule = ScheduleGPipe(pipeline, MICRO_BATCHES, loss_fn=local_loss, scale_grads=False)
import torch.distributed as dist

optimizer, losses, norms = torch.optim.SGD(module.parameters(), lr=0.1), [], []
for step in range(3):
    torch.manual_seed(step)
    rows = torch.randint(SIZES.vocab_size, (ROWS, LENGTH + 1), device=device)  # your rows, the same on every rank
    tokens, labels = (layout.take(x, attend.shard) for x in (rows[:, :-1], rows[:, 1:]))
    micro_losses = []
    schedule.step(*([tokens] if first else []), target=labels if last else None, losses=micro_losses)
    squares = torch.zeros((), device=device)  # of this stage's gradients
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=mesh["ring"].get_group())
        squares += parameter.grad.square().sum()
    dist.all_reduce(squares, group=mesh["pipe"].get_group())
    loss = sum(x.detach() for x in micro_losses) if last else torch.zeros((), device=device)
    dist.all_reduce(loss)
    losses.append(float(loss))
    norms.append(float(squares.sqrt()))
    optimizer.step()
    optimizer.zero_grad()

if dist.get_rank() == 0:
    print("losses", losses)
    print("norms", norms)
torch.distributed.destroy_process_group()
