"""Comparison with torch's ring attention, which is private and may move or disappear."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import product
from types import ModuleType

import pytest
import torch

from armillary.attention import AttentionMask, Ring, TokenRing
from armillary.core.testing import mesh

pytestmark = pytest.mark.long

PLACES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",  # since torch 2.10
    "torch.distributed.tensor.experimental._attention",
)
NAMES = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}
B, T, H, D = 2, 8, 4, 16


@cache
def torch_ring() -> ModuleType | str:
    """Returns the module with torch's ring, or the reason why there is none."""
    missing = []
    for place in PLACES:
        try:
            module = import_module(place)
        except ImportError as error:
            missing.append(str(error))
            continue
        if all(hasattr(module, name) for name in NAMES):
            return module
        missing.append(f"{place} has no {', '.join(name for name in NAMES if not hasattr(module, name))}")
    return f"torch {torch.__version__} keeps its ring elsewhere: {'; '.join(missing)}"


def by_torch(group, q, k, v, dout, causal: bool) -> tuple[torch.Tensor, ...]:
    """Returns out, lse, dq, dk, dv of torch's ring in Armillary's shapes. By default it accumulates in float32."""
    ring = torch_ring()
    assert isinstance(ring, ModuleType)
    ring._cp_options.enable_load_balance = False  # contiguous shards
    ring._cp_options.convert_to_f32 = q.dtype != torch.float64
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    forward: Callable = aten._scaled_dot_product_flash_attention_for_cpu
    backward: Callable = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def backward_by_name(grad_out, query, key, value, out, logsumexp, is_causal, **_):
        return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    out, lse = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=causal)[:2]
    gradients = ring._templated_ring_attention_backward(
        *(group, 2, backward_by_name, dout, "grad_out", q, k, v, out, lse), is_causal=causal
    )
    return out.transpose(1, 2), lse.transpose(1, 2), *(x.transpose(1, 2) for x in gradients[:3])


def both(ranks: int, method: str, dtype: torch.dtype, causal: bool) -> dict[str, float] | str:
    """Returns relative differences from torch's ring on this rank, or the reason why torch has none."""
    if isinstance(reason := torch_ring(), str):
        return reason
    axis = mesh(ring=ranks)["ring"]
    attend = TokenRing(axis) if method == "token_ring" else Ring(axis, backward=method)
    layout = attend.layout(ranks * T, "contiguous")
    generator = torch.Generator().manual_seed(attend.shard)
    q, k, v, dout = (torch.randn(B, T, H, D, dtype=dtype, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, mask=AttentionMask(causal), layout=layout, return_lse=True)
    actual = (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))
    with torch.no_grad():
        reference = by_torch(axis.get_group(), q, k, v, dout, causal)
    names = ("out", "lse", "dq", "dk", "dv")
    return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, actual, reference, strict=True)}


CASES = list(product(["keys", "queries", "token_ring"], LIMITS, [True, False]))


def each(ranks: int) -> list[dict[str, float] | str]:
    return [both(ranks, *case) for case in CASES]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rings_agree_with_torchs_ring(worlds, ranks):
    for rank, answers in enumerate(worlds(ranks).run(each, ranks)):
        for (method, dtype, causal), actual in zip(CASES, answers, strict=True):
            if isinstance(actual, str):
                pytest.skip(actual)
            messages = f"rank {rank}, {method}, {dtype}, causal={causal}: {actual}"
            assert all(error <= LIMITS[dtype] for error in actual.values()), messages
