"""Host time of module boundaries with local tensors and with DTensors.

    uv run python benchmarks/boundaries.py

One process is rank 0 of 8 in a fake process group (mesh ring=4, tp=2), whose exchanges complete at once and send
nothing, as in `host.py`. Times are processor time of forward and backward of one boundary (of sums, forward), median
over calls, local tensors and DTensors in turns. ARCHITECTURE.md says which tensors are local in this repository, and
why.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from host import Nothing, in_world, mesh_of, report
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm

from armillary.attention import AttentionMask, Ring
from armillary.core.gradients import gradient_norm
from armillary.core.internal import compat
from armillary.data.console.units import count_argument
from armillary.models import all_gather_interleaved, reduce_scatter_interleaved

TOKENS, EMBED, HEADS, KEY_HEADS, HEAD_DIM, WEIGHTS = 64, 64, 32, 8, 128, 20
Call = Callable[[], object]
Boundary = tuple[str, Call, Call]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def dtensor(x: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, placements, run_check=False)


def forward_and_backward(forward: Callable[[], Tensor], *inputs: Tensor) -> Call:
    """A call of forward and backward."""

    def call() -> object:
        out = forward()
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return call


def interleaved(tp: DeviceMesh) -> Iterator[Boundary]:
    """All-gather of tokens after a norm, reduce-scatter after a row-parallel linear; token t of rank r is [B, t, r]."""
    local, all_tokens = random(1, TOKENS // 2, EMBED), random(1, TOKENS, EMBED)

    def gathered() -> Tensor:
        x = dtensor(local.unsqueeze(2), tp, Shard(2)).redistribute(placements=[Replicate()])
        return x.to_local(grad_placements=[Partial()]).flatten(1, 2)

    def summed() -> Tensor:
        x = dtensor(all_tokens.unflatten(1, (-1, 2)), tp, Partial()).redistribute(placements=[Shard(2)])
        return x.to_local().squeeze(2)

    yield (
        "tokens gathered over tp",
        forward_and_backward(lambda: all_gather_interleaved(local, tp), local),
        forward_and_backward(gathered, local),
    )
    local_way = forward_and_backward(lambda: reduce_scatter_interleaved(all_tokens, tp), all_tokens)
    yield "partial sums scattered over tp", local_way, forward_and_backward(summed, all_tokens)


def between(tp: DeviceMesh) -> Iterator[Boundary]:
    """The tensor-parallel MLP between two boundaries."""
    x, up, down = random(1, TOKENS, EMBED), random(2 * EMBED, EMBED), random(EMBED, 2 * EMBED)

    def local_way() -> Tensor:
        return F.linear(F.silu(F.linear(x, up)), down)

    def as_dtensors() -> Tensor:
        y, rows, columns = dtensor(x, tp, Replicate()), dtensor(up, tp, Shard(0)), dtensor(down, tp, Shard(1))
        return F.linear(F.silu(F.linear(y, rows)), columns).to_local()

    yield (
        "MLP between them",
        forward_and_backward(local_way, x, up, down),
        forward_and_backward(as_dtensors, x, up, down),
    )


def attention(ring: DeviceMesh) -> Iterator[Boundary]:
    attend = Ring(ring)
    mask, layout, kernel = AttentionMask(), attend.layout(TOKENS * 4), Nothing()
    inputs = [random(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    options: dict[str, Any] = {"mask": mask, "layout": layout, "kernel": kernel}

    def as_dtensors() -> Tensor:
        return attend(*(dtensor(x, ring, Shard(1)) for x in inputs), **options).to_local()

    yield (
        "attention (ring)",
        forward_and_backward(lambda: attend(*inputs, **options), *inputs),
        forward_and_backward(as_dtensors, *inputs),
    )


def sums(mesh: DeviceMesh) -> Iterator[Boundary]:
    """Sums once per step: the gradient norm and the loss."""
    flat = compat.flatten(mesh, ["ring", "tp"], "all")
    full = [torch.randn(EMBED, 64) for _ in range(WEIGHTS)]
    gradients = [distribute_tensor(x, flat, [Shard(0)], src_data_rank=None) for x in full]
    loss = torch.zeros(())

    def whole_norm() -> Tensor:
        norm = get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    yield f"norm of {WEIGHTS} gradients", lambda: gradient_norm(gradients), whole_norm
    as_dtensor = lambda: dtensor(loss, flat, Partial()).full_tensor()  # noqa: E731
    yield "loss summed", lambda: torch.distributed.all_reduce(loss.clone(), group=flat.get_group()), as_dtensor


def microseconds(calls: int, *ways: Call) -> list[float]:
    """Median processor time of this thread for alternating calls, after a warm-up."""
    durations: list[list[float]] = [[] for _ in ways]
    for _ in range(calls + 5):
        for way, times in zip(ways, durations, strict=True):
            start = time.thread_time_ns()
            way()
            times.append((time.thread_time_ns() - start) / 1e3)
    return [median(times[5:]) for times in durations]


def measure(calls: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)

    def rows() -> list[dict[str, Any]]:
        mesh = mesh_of({"ring": 4, "tp": 2})
        groups = interleaved(mesh["tp"]), between(mesh["tp"]), attention(mesh["ring"])
        table = list[dict[str, Any]]()
        for name, *ways in (boundary for group in (*groups, sums(mesh["ring", "tp"])) for boundary in group):
            local, global_ = microseconds(calls, *ways)
            table.append({"boundary": name, "local us": local, "DTensor us": global_, "ratio": global_ / local})
        return table

    return in_world(8, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=count_argument(), default=200, help="calls of each kind (default 200)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON and write no report")
    options = parser.parse_args()
    rows = measure(options.calls)
    print(json.dumps(rows) if options.json else report.write("boundaries", "Host time of a boundary, both ways", rows))


if __name__ == "__main__":
    main()
