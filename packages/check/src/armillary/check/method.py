"""Checks your own attention method against `reference_attention`, on the ranks of its mesh.

def on_every_rank() -> None:
    attend = MyMethod(mesh(ring=4)["ring"])
    check_method(attend).assert_right()

def test_my_method(worlds):  # a fixture of armillary.core.testing.plugin
    worlds(4).run(on_every_rank)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention import AttentionMask, Method, reference_attention
from armillary.core.testing import LIMITS, relative_error

MASKS: Mapping[str, AttentionMask] = {
    "full": AttentionMask(causal=False),
    "causal": AttentionMask(),
    "window": AttentionMask(window=(9, None)),
    "documents": AttentionMask(documents=(0, 1, 11, 30, 61)),
}
Tensors = Mapping[str, Tensor]
LENGTH = 61  # odd, so that shards and documents are uneven


@dataclass(frozen=True)
class CheckedTensor:
    """The error of one tensor under one mask and layout, relative to the norm of the reference's tensor."""

    mask: str
    layout: str
    tensor: str
    error: float
    limit: float


@dataclass(frozen=True)
class MethodReport:
    """The errors of all tensors, the same on every rank.

    Args:
        differing: tensors whose bits differ between two runs, or between ranks that have the same shard.
    """

    errors: tuple[CheckedTensor, ...]
    differing: tuple[str, ...] = ()

    def assert_right(self) -> None:
        """Raises AssertionError that names each tensor above its limit, and each of `differing`."""
        wrong = [f"{e.mask} {e.layout}: {e.tensor} off by {e.error:.2g}" for e in self.errors if not e.error <= e.limit]
        wrong += [f"{name} differs between runs or ranks" for name in self.differing]
        assert not wrong, "; ".join(wrong)

    def show(self) -> None:
        rows = [("mask", "layout", "tensor", "error")]
        rows += [(error.mask, error.layout, error.tensor, f"{error.error:.2g}") for error in self.errors]
        print("\n".join(align_columns(rows)))


def check_method(
    attend: Method,
    *,
    masks: Mapping[str, AttentionMask] = MASKS,
    layouts: Sequence[str] = ("zigzag", "contiguous"),
    length: int = LENGTH,
    heads: int = 8,
    key_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> MethodReport:
    """Runs a method forward and backward twice per mask and layout. Returns the errors of out, lse, dq, dk and dv.

    Every rank of the world must call it: each builds the same global tensors from `seed`, runs the method on its own
    shard, and compares the joined shards with float64 attention on the CPU, under a random gradient of out.

    Args:
        masks: masks by name. The default has a full and a causal mask, a window, and documents that end at 61: for
            another `length`, give other masks.
        layouts: kinds that `attend.layout` takes.

    Raises:
        ValueError: a dtype other than float64 and float32.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype {dtype} has no limit; float64 or float32 is needed")
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": heads, "k": key_heads, "v": key_heads, "dout": heads}
    tensors = {
        name: torch.randn(2, length, count, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for name, count in shapes.items()
    }
    errors, differing = list[CheckedTensor](), list[str]()
    for (name, mask), kind in product(masks.items(), layouts):
        layout = attend.layout(length, kind)
        shard_tensors = {x: layout.take(tensor, attend.shard).to(device) for x, tensor in tensors.items()}
        run = partial(attend, mask=mask, layout=layout)
        first, second = (_results(run, shard_tensors) for _ in range(2))
        # (shard, results of the first run, results of the second run) of every rank of the world.
        rank_results = [(attend.shard, first, second)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            rank_results *= dist.get_world_size()
            dist.all_gather_object(rank_results, rank_results[0])
        shards = {shard: results for shard, results, _ in rank_results}
        exact_results = _results(partial(reference_attention, mask=mask), {x: t.double() for x, t in tensors.items()})
        for tensor, exact in exact_results.items():
            # Both runs, on all ranks that have the shard, must agree to the bit. Sums in order of arrival would not.
            copies = [(x[tensor], shards[shard][tensor]) for shard, *runs in rank_results for x in runs]
            if not all(torch.equal(a, b) for a, b in copies):
                differing.append(f"{name} {kind}: {tensor}")
            joined = layout.join([shards[shard][tensor] for shard in range(layout.shards)])
            errors.append(CheckedTensor(name, kind, tensor, relative_error(joined, exact), LIMITS[dtype]))
    return MethodReport(tuple(errors), tuple(differing))


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _results(attend: Callable[..., tuple[Tensor, Tensor]], tensors: Tensors) -> dict[str, Tensor]:
    q, k, v = (tensors[name].detach().requires_grad_() for name in "qkv")
    out, lse = attend(q, k, v, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    results = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True)
    return {name: x.detach().cpu() for name, x in results}
