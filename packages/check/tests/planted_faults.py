"""A small transformer with its own context parallelism, and a switch for each mistake that `check_model` names."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from armillary.check import CheckBatch, StepOutput

EMBED, HEADS, VOCABULARY, WINDOWS = 16, 2, 64, (11, None, 11)


@dataclass
class Context:
    """A shard's place in the sequence, and the fault."""

    positions: torch.Tensor
    documents: tuple[int, ...]
    fault: str
    windows: tuple[int | None, ...] = WINDOWS


class State:
    """The context that all layers read, and the window of the last call."""

    def __init__(self):
        self.context, self.window = None, None


class Gather(torch.autograd.Function):
    """Gathers the shards of all ranks; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, ctx.size = dim, x.shape[dim]
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x.contiguous())
        return torch.cat(shards, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.narrow(ctx.dim, dist.get_rank() * ctx.size, ctx.size), None


def gather(x, dim=1):
    return Gather.apply(x, dim)


def visible(context, keys, window):
    ends = torch.tensor(context.documents)
    q, k = context.positions[:, None], keys[None]
    mask = (k <= q) & (torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True))
    return mask if window is None else mask & (k >= q - window)


def merged_in_bfloat16(q, k, v, mask):
    """Attends to the ranks' keys one after another; rounds partial results when merging them."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for part in torch.arange(k.shape[2]).chunk(dist.get_world_size()):
        scores = (q @ k[:, :, part].mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, part], -1e30)
        partial_lse = scores.logsumexp(-1)
        both = torch.logaddexp(lse, partial_lse)
        new = (scores - both[..., None]).exp() @ v[:, :, part]
        out, lse = ((lse - both).exp()[..., None] * out + new).bfloat16().double(), both
    return out


class LastWindowInBackward(torch.autograd.Function):
    """Attention whose backward recomputes with the window of the last call of any layer."""

    @staticmethod
    def forward(ctx, q, k, v, context, keys, window, state):
        ctx.save_for_backward(q, k, v)
        ctx.context, ctx.keys, ctx.state, state.window = context, keys, state, window
        return F.scaled_dot_product_attention(q, k, v, visible(context, keys, window))

    @staticmethod
    def backward(ctx, dout):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        mask = visible(ctx.context, ctx.keys, ctx.state.window)
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, mask)
        return *torch.autograd.grad(out, (q, k, v), dout), None, None, None, None


def attention_with_sinks(q, k, v, mask, sinks, biases):
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + biases).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


class Attention(nn.Module):
    def __init__(self, layer, state, sinks):
        super().__init__()
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)
        self.layer, self.state, self.window = layer, state, WINDOWS[layer]
        self.sinks, self.distances = None, None
        if sinks:
            self.sinks, self.distances = nn.Parameter(torch.randn(HEADS)), nn.Embedding(8, HEADS)

    def forward(self, x):
        context = self.state.context
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        window, keys = context.windows[self.layer], context.positions
        if context.fault not in ("own shard", "no-op"):
            k, v, keys = gather(k, 2), gather(v, 2), gather(keys, 0)
        if context.fault == "window":
            window = None
        if context.fault == "shared mask":
            window = context.windows[0]
        if context.fault == "low precision":
            out = merged_in_bfloat16(q, k, v, visible(context, keys, window))
        elif context.fault == "shared mask in backward":
            out = LastWindowInBackward.apply(q, k, v, context, keys, window, self.state)
        elif self.sinks is not None and context.fault != "sinks":
            biases = self.distances((context.positions[:, None] - keys).clamp(0, 7)).permute(2, 0, 1)
            sinks, on_second_rank = self.sinks, dist.get_rank() == 1
            sinks = sinks * 0 if context.fault == "sinks of a rank" and on_second_rank else sinks
            biases = biases * 0 if context.fault == "biases of a rank" and on_second_rank else biases
            out = attention_with_sinks(q, k, v, visible(context, keys, window), sinks, biases)
        else:
            out = F.scaled_dot_product_attention(q, k, v, visible(context, keys, window))
        return self.out(out.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """Causal, over three tokens. Shards are contiguous, so that a rank's halo is the end of the shard before it."""

    def __init__(self, state):
        super().__init__()
        self.conv, self.state = nn.Conv1d(EMBED, EMBED, 3, groups=EMBED), state

    def forward(self, x):
        context, start = self.state.context, int(self.state.context.positions[0])
        if context.fault == "no halo":
            return self.conv(F.pad(x.mT, (2, 0))).mT
        every = F.pad(gather(x).mT, (2, 0))
        return self.conv(every[..., start : start + x.shape[1] + 2]).mT


class Block(nn.Module):
    def __init__(self, layer, state, sinks):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(EMBED), Attention(layer, state, sinks)
        self.mlp = nn.Sequential(nn.LayerNorm(EMBED), nn.Linear(EMBED, EMBED), nn.GELU())

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, convolution=False, sinks=False):
        super().__init__()
        self.state = State()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(256, EMBED)
        self.convolution = Convolution(self.state) if convolution else nn.Identity()
        self.layers = nn.ModuleList(Block(layer, self.state, sinks) for layer in range(len(WINDOWS)))
        self.norm, self.head = nn.LayerNorm(EMBED), nn.Linear(EMBED, VOCABULARY)

    def forward(self, ids, position_ids):
        x, context = self.convolution(self.tokens(ids) + self.positions(position_ids)), self.state.context
        if context.fault == "computed twice":  # the first token of each shard
            self.state.context = replace(context, positions=torch.cat([context.positions[:1], context.positions]))
            x = torch.cat([x[:, :1], x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, -ids.shape[1] :]))


def step(model, batch: CheckBatch, fault="", backward=True) -> StepOutput:
    """One step without the reduction of gradients. On one rank there is no fault."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fault = fault if ranks > 1 else ""
    positions = torch.arange(batch.ids.shape[1]).chunk(1 if fault == "no-op" else ranks)[rank * (fault != "no-op")]
    ids, position_ids, labels = (x[:, positions] for x in (batch.ids, batch.position_ids, batch.shifted_labels))
    if fault == "positions":
        position_ids = torch.arange(len(positions))[None]
    if fault == "labels shifted twice":
        labels = batch.shifted_labels.roll(-1, 1)[:, positions]
    if fault == "labels":
        labels = F.pad(batch.labels[:, positions][:, 1:], (0, 1), value=-100)
    documents = batch.documents or (0, batch.ids.shape[1])
    if fault == "documents":
        documents = (0, batch.ids.shape[1])
    if fault == "two micro-batches" and model.state.context is not None:
        documents = model.state.context.documents
    model.state.context = Context(positions, documents, fault)
    logits = model(ids, position_ids)
    if fault == "recompute":
        model.state.context = Context(positions, documents, fault, windows=(None, None, None))
    count = (batch.shifted_labels != -100).sum()
    if fault == "labels":
        count = count - (ranks - 1)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    local_loss = total / (labels != -100).sum() / ranks if fault == "loss averaged" else total / count
    if not backward:
        return StepOutput(local_loss, positions)
    local_loss.backward()
    loss = local_loss.detach().clone()
    dist.all_reduce(loss)
    return StepOutput(loss, positions)


def replicated_step(model, batch: CheckBatch):
    """Every rank has all tokens. On several ranks, all activations are wrong."""
    if dist.get_world_size() > 1:
        with torch.no_grad():
            model.tokens.weight.mul_(2)
    positions = torch.arange(batch.ids.shape[1])
    model.state.context = Context(positions, (0, len(positions)), "own shard")
    logits = model(batch.ids, batch.position_ids)
    return StepOutput(F.cross_entropy(logits.flatten(0, 1), batch.shifted_labels.flatten()), positions)


def reduce(model, fault=""):
    for name, parameter in model.named_parameters():
        if fault == "all not reduced" or (fault == "not reduced" and "norm" in name) or parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad)
        if fault == "averaged":
            parameter.grad /= dist.get_world_size()
        if fault == "summed twice":
            dist.all_reduce(parameter.grad)


def build(convolution=False):
    return Model(convolution)


def check_arguments(fault, convolution=False):
    return {
        "build": partial(build, convolution),
        "step": partial(step, fault=fault),
        "reduce": partial(reduce, fault=fault),
    }
