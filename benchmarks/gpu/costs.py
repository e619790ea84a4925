"""The cost of parts of a step: the loss, packed documents, pinned memory, and FSDP2 on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.attention import AttentionMask, Local
from armillary.core import SequenceLayout, to_device
from armillary.core.testing import relative_error
from armillary.models import Checkpointing, linear_token_loss
from gpu.arithmetic import DIM, HEADS, KEY_HEADS, attention_flops, causal_pairs, head_flops, step_flops
from gpu.check import Check, Row, Setting, correct, not_run
from gpu.kernels import LIMITS
from gpu.model import Training, cut

# -- the loss ----------------------------------------------------------------------------------------------------------


def loss_lengths(setting: Setting) -> tuple[int, int]:
    """Tokens of our loss alone, and beside torch's, whose logits take 10 bytes each."""
    return setting.size((32_768, 8192), (64, 32))


def check_loss(setting: Setting) -> Iterator[Row]:
    """The fused head and loss of an 8B model, beside its three matrix products and torch's loss."""
    config, (length, short) = cut(setting), loss_lengths(setting)
    place = {"dtype": torch.bfloat16, "device": setting.device.torch}
    weight = (0.02 * torch.randn(config.vocab_size, config.dim, **place)).requires_grad_()
    for tokens in (length, short):
        hidden = torch.randn(1, tokens, config.dim, **place).requires_grad_()
        labels = torch.randint(config.vocab_size, (1, tokens), device=setting.device.torch)
        own_loss = partial(loss_gradients, hidden, weight, labels, True)
        seconds = setting.time(own_loss)
        peak = setting.device.peak_flops
        share = "" if peak is None else f", {head_flops(config, tokens) / seconds / peak:.1%} of peak"
        yield Row(f"{tokens:,} tokens, {config.vocab_size:,} logits each{share}", 1e3 * seconds, "ms")
        if tokens == length:
            logits = 2 * tokens * config.vocab_size
            yield Row("its peak memory over that of all logits", setting.device.peak(own_loss).allocated / logits)
        products = partial(three_products, hidden[0].detach(), weight.detach(), min(tokens, setting.size(4096, 16)))
        label = f"{tokens:,} tokens: over its matrix products alone"
        yield setting.at_most(label, seconds / setting.time(products), 1.5, "x", "about 44 bytes a logit beside them")
        if tokens == short:
            torch_loss = partial(loss_gradients, hidden, weight, labels, False)
            label = f"{tokens:,} tokens: time over that of F.linear and F.cross_entropy"
            yield setting.at_most(label, seconds / setting.time(torch_loss), 1.0, "x", "torch")
            error = max(relative_error(x, y) for x, y in zip(own_loss(), torch_loss(), strict=True))
            yield correct("loss and gradients against torch's", error, LOSS_LIMIT, "torch, in bfloat16")


LOSS_LIMIT = 0.02
"""Limit of the relative errors between two losses of which both round in bfloat16."""


def loss_gradients(hidden: Tensor, weight: Tensor, labels: Tensor, fused: bool) -> list[Tensor]:
    """The mean loss and its gradients, by the fused loss or by torch's functions."""
    if fused:
        total, count = linear_token_loss(hidden, weight, labels)
        loss = total / count
    else:
        loss = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), labels.flatten())
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def three_products(hidden: Tensor, weight: Tensor, chunk: int) -> None:
    """Logits, and the gradients of hidden states and weight, from logits in place of their gradients."""
    for x in hidden.split(chunk):
        logits = F.linear(x, weight)
        logits @ weight
        logits.T @ x


def loss_flops(setting: Setting) -> float:
    """Our loss once more for its memory, and both losses once more for their values."""
    config, (length, short) = cut(setting), loss_lengths(setting)
    return (2 * setting.calls + 1) * head_flops(config, length) + (3 * setting.calls + 2) * head_flops(config, short)


# -- packed documents --------------------------------------------------------------------------------------------------


def packed_ends(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Boundaries of documents by name: of equal ones, and of one long one among short ones."""
    tokens, document = setting.size((32_768, 1024), (64, 16))
    equal = tuple(range(0, tokens + 1, document))
    return {"equal": equal, "one half as long as all": (0, *equal[len(equal) // 2 :])}


def check_packed(setting: Setting) -> Iterator[Row]:
    """Attention over packed documents, beside a batch with one document in each row."""
    for name, ends in packed_ends(setting).items():
        tokens, place = ends[-1], {"dtype": torch.bfloat16, "device": setting.device.torch}
        tensors = [torch.randn(1, tokens, n, DIM, **place) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
        packed = partial(attention_gradients, tensors, AttentionMask(documents=ends))
        packed()
        waits = setting.device.syncs(packed)
        yield Row(f"{name}: waits of the host", len(waits), "", "0", "lengths are cached", not waits)
        seconds = setting.time(packed)
        rate = attention_flops(packed_pairs(ends)) / seconds / 1e12
        yield Row(f"{name}: {len(ends) - 1} documents in {tokens:,} tokens, visible pairs", rate, "TFLOP/s")
        by_row = tokens // (len(ends) - 1)
        if ends == tuple(range(0, tokens + 1, by_row)):
            rows = partial(attention_gradients, [x.view(-1, by_row, *x.shape[2:]) for x in tensors], AttentionMask())
            label, source = f"{name}: over a batch of {len(ends) - 1} rows", "the same pairs"
            yield setting.at_most(label, seconds / setting.time(rows), 1.2, "x", source)
            error = max(relative_error(x.view_as(y), y) for x, y in zip(packed(), rows(), strict=True))
            yield correct(f"{name}: out and gradients against that batch", error, LIMITS[torch.bfloat16], "the batch")


def attention_gradients(tensors: list[Tensor], mask: AttentionMask) -> list[Tensor]:
    """out, dq, dk and dv of q [B, T, H, D], k, v and dout."""
    *inputs, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = Local()(q, k, v, mask=mask, layout=SequenceLayout.contiguous(q.shape[1], 1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def packed_pairs(ends: tuple[int, ...]) -> int:
    return sum(causal_pairs(end - start) for start, end in pairwise(ends))


def packed_flops(setting: Setting) -> float:
    """Each case for warm-up, host waits, times and values; and the batch of rows."""
    return 2 * (setting.calls + 3) * attention_flops(sum(map(packed_pairs, packed_ends(setting).values())))


# -- pinned memory -----------------------------------------------------------------------------------------------------


def check_pinned(setting: Setting) -> Iterator[Row]:
    """Host time of pinned buffers: new ones, which the driver pins, and those that torch has cached."""
    pinned = setting.device.type == "cuda"
    if not pinned:
        yield not_run("pinned memory", "no GPU is here; ordinary memory in its place")
    for size, name in (
        (2**12, "4 KiB"),
        (setting.size(2**26, 2**16), "64 MiB, the largest buffer of an offloaded layer"),
    ):
        count = 4
        first, cached = (allocation_seconds(size, count, pinned) for _ in range(2))
        yield Row(f"{name}: new", 1e6 * first, "us", source=f"{size / first / 1e9:.3g} GB/s")
        yield setting.at_most(f"{name}: cached", 1e6 * cached, 50, "us", "torch's cache of host memory")
    x = torch.zeros(64, dtype=torch.int32)
    seconds = setting.host_time(partial(to_device, x, setting.device.torch))
    yield setting.at_most("boundaries of 64 documents to the device", 1e6 * seconds, 100, "us", "one call in a batch")


def allocation_seconds(size: int, count: int, pinned: bool) -> float:
    """Seconds of a buffer's allocation, the mean of `count` that live at once and are then freed."""
    start = time.perf_counter()
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
    return (time.perf_counter() - start) / len(buffers)


# -- FSDP2 on one rank -------------------------------------------------------------------------------------------------

STAGES = (3, 2, 1)
FSDP_LENGTH = 8192


def check_fsdp(setting: Setting) -> Iterator[Row]:
    """Forward and backward of an 8B cut under FSDP2 on one rank, over the same without it and weights in bfloat16."""
    config, length = cut(setting), setting.size(FSDP_LENGTH, 40)
    with setting.alone() as mesh:
        training = Training.on(mesh, config, length, Checkpointing(), precision=None)
        training.model.to(torch.bfloat16)
        plain = setting.time(partial(take_gradients, training))
        yield Row(f"without FSDP2, {length:,} tokens", 1e3 * plain, "ms")
        for stage in STAGES:
            del training
            setting.device.clean()
            training = Training.on(mesh, config, length, Checkpointing(), zero_stage=stage)
            ratio = setting.time(partial(take_gradients, training)) / plain
            source = "copies of 30 bytes a parameter, 20 ms of 170 ms on an H100"
            yield setting.at_most(f"ZeRO stage {stage}: over that", ratio, 1.15, "x", source)


def take_gradients(training: Training) -> None:
    training.backward()
    training.optimizer.zero_grad()


def fsdp_flops(setting: Setting) -> float:
    return (len(STAGES) + 1) * setting.calls * step_flops(cut(setting), setting.size(FSDP_LENGTH, 40))


CHECKS = (
    Check("loss", "The fused head and loss alone", check_loss, "1.5x its matrix products", 30, loss_flops),
    Check("packed", "Attention over packed documents", check_packed, "1.2x a batch of documents", 30, packed_flops),
    Check("pinned", "Allocations of pinned memory", check_pinned, "cached ones take no time", 15),
    Check("fsdp", "FSDP2 on one rank", check_fsdp, "at most 15% longer", 45, fsdp_flops),
)
