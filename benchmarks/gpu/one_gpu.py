"""Several ranks on one GPU: real NCCL through sockets, and recomputed attention in autograd's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.attention import Ring, build_attention, sdpa_parallel, sequence
from armillary.core import Axis, build_mesh
from armillary.core.testing import STAGED, RankFailed, World, relative_error
from armillary.models import Checkpointing, LlamaConfig
from gpu.arithmetic import RECOMPUTED, step_flops
from gpu.check import Check, Row, Setting, correct, not_run
from gpu.groups import wrong_sum
from gpu.launch import Place, on_ranks, sharing_gpu
from gpu.model import SMALL, TINY, Training
from gpu.steps import LIMITS, joint_error

Meshes = dict[str, dict[str, int]]
"""Axes by attention method."""
POLICY = Checkpointing("attention_output")

# -- NCCL --------------------------------------------------------------------------------------------------------------


def meshes(setting: Setting) -> Meshes:
    """Meshes of four ranks, or of two in a rehearsal."""
    real = {"ring": {"ring": 4}, "ulysses": {"ulysses": 4}, "usp": {"ring": 2, "ulysses": 2}}
    return setting.size(real, {"ring": {"ring": 2}, "ulysses": {"ulysses": 2}})


def check_shared(setting: Setting) -> Iterator[Row]:
    """Sums over every group, and a training step of each method on four ranks compared with one rank's in float32."""
    config, length = setting.size((SMALL, 1021), (TINY, 41))
    with setting.alone() as mesh:
        one = Training.on(mesh, config, length, POLICY, torch.float32)
        expected = float(one.backward()), one.gradients()
    del one
    setting.device.clean()
    transport = setting.size("NCCL, four ranks on one GPU", "gloo")
    try:
        sizes = meshes(setting), config, length
        every = on_ranks(setting, shared_steps, *sizes, expected, seconds=setting.seconds, ranks=setting.size(4, 2))
    except RankFailed as failure:
        if "Duplicate GPU" not in str(failure):
            raise
        yield not_run(transport, "this NCCL refuses ranks that share a GPU, in spite of NCCL_HOSTID")
        return
    for name in every[0][0]:
        wrong = [sums[name] for sums, _ in every if sums[name]]
        yield Row(f"{transport}: sum over {name}", wrong[0] if wrong else "right", "", "right", "sums", not wrong)
    for label, (_, limit) in every[0][1].items():
        error = max(errors[label][0] for _, errors in every)
        yield correct(f"{transport}, {label}", error, limit, "one rank in float32")


Errors = dict[str, tuple[float, float]]
"""By label, a relative error and its limit."""


def shared_steps(
    place: Place, axes_of: Meshes, config: LlamaConfig, length: int, expected: tuple[float, dict[str, Tensor]]
) -> tuple[dict[str, str], Errors]:
    """Errors of sums by group, "" for a correct sum; and errors of steps."""
    sums, errors = dict[str, str](), Errors()
    with sharing_gpu(place):
        for method, axes in axes_of.items():
            mesh = build_mesh(place.device, high_priority=("ring", "ulysses"), **axes)
            for name in axes:
                axis = Axis.of(mesh[name])
                for label, group in ((name, axis.group), (f"the duplicate of {name}", axis.duplicate().group)):
                    sums[f"{label}, {method}"] = wrong_sum(group, place.device, axis.size)
            for dtype, limit in LIMITS.items():
                training = Training.on(mesh, config, length, POLICY, dtype, build_attention(method, mesh))
                loss = training.backward()
                dist.all_reduce(loss)
                label = f"{method}, {str(dtype).removeprefix('torch.')}, {length:,} tokens"
                errors[f"{label}: loss"] = abs(loss.item() / expected[0] - 1), limit / 10
                errors[f"{label}: gradients"] = joint_error(training.gradients(), expected[1]), limit
                training.step()  # clipping, and the optimizer on shards
    return sums, errors


# -- SDPA with checkpointing -------------------------------------------------------------------------------------------

SDPA_LIMIT = 1e-4
WIDTH, SDPA_HEADS = 256, 4


class SdpaBlock(nn.Module):
    """Attention as plain code calls it. Records the threads that ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.threads = list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.get_ident())
        q, k, v = (y.unflatten(-1, (SDPA_HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def check_sdpa(setting: Setting) -> Iterator[Row]:
    """SDPA under `sdpa_parallel` in checkpointed blocks, which backward recomputes: on a GPU in a thread of autograd.

    Two ranks share the GPU and send through host memory.
    """
    length = setting.size(1022, 30)
    with World(2, backend=STAGED) as world:
        for reentrant in (False, True):
            results = world.run(sdpa_errors, setting.device.type, length, reentrant, timeout=setting.seconds)
            name = "reentrant" if reentrant else "non-reentrant"
            for tensor in ("out", "gradients"):
                error = max(errors[tensor] for errors, _ in results)
                yield correct(f"{name} checkpointing: {tensor}", error, SDPA_LIMIT, "the sequence on one rank, float32")
            threads = sorted({thread for _, thread in results})
            so = threads == ["another"]
            yield setting.is_so(
                f"{name} checkpointing: thread of recomputation", threads[-1], so, "another", "autograd"
            )


def sdpa_errors(device: str, length: int, reentrant: bool) -> tuple[dict[str, float], str]:
    """Relative errors of this rank's outputs and of the sum of gradients, and the thread that recomputed."""
    torch.manual_seed(0)
    blocks = nn.Sequential(SdpaBlock(), SdpaBlock()).to(device)
    full_x, full_dout = (torch.randn(2, length, WIDTH).to(device) for _ in range(2))
    full_out = blocks(full_x)
    expected = torch.autograd.grad(full_out, list(blocks.parameters()), full_dout)
    attend = Ring(build_mesh(device, ring=dist.get_world_size())["ring"])
    layout = attend.layout(length)
    x, dout, expected_out = (layout.take(y, attend.shard) for y in (full_x, full_dout, full_out.detach()))
    block = blocks[0]
    assert isinstance(block, SdpaBlock)
    with sequence(layout=layout), sdpa_parallel(attend):
        out = x.requires_grad_()
        for each in blocks:
            out = checkpoint(each, out, use_reentrant=reentrant)
        block.threads.clear()
        out.backward(dout)
    gradients = [p.grad for p in blocks.parameters() if p.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient)
    join = partial(map, Tensor.flatten)
    errors = {
        "out": relative_error(out.detach(), expected_out),
        "gradients": relative_error(torch.cat([*join(gradients)]), torch.cat([*join(expected)])),
    }
    return errors, "this" if threading.get_ident() in block.threads else "another" if block.threads else "none"


def shared_flops(setting: Setting) -> float:
    """Backward on one rank, and twice on four ranks by each method in each dtype."""
    config, length = setting.size((SMALL, 1021), (TINY, 41))
    return (1 + 2 * len(meshes(setting)) * len(LIMITS)) * RECOMPUTED * step_flops(config, length)


CHECKS = (
    Check(
        "nccl-one-gpu",
        "NCCL between four ranks on one GPU",
        check_shared,
        holds="sums, and a step of Ring, Ulysses and USP as on one rank",
        seconds=80,
        flops=shared_flops,
    ),
    Check(
        "sdpa-thread",
        "SDPA recomputed in autograd's thread",
        check_sdpa,
        holds="out and gradients as on one rank",
        seconds=40,
    ),
)
