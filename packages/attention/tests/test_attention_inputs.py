"""Inputs with all memory orders, under autocast, and with all scales: results equal the formula's."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from split_states import Split
from torch import Tensor

from armillary.attention import (
    AllGatherKV,
    AttentionMask,
    Local,
    Method,
    Ring,
    TokenRing,
    Ulysses,
    UPipe,
    WallFacer,
    reference_attention,
)
from armillary.attention.internal import FlashAttn3
from armillary.attention.kernels import (
    CpuFlash,
    CudaFlash,
    Dense,
    FlashAttn2,
    FlashAttn4,
    Scores,
    contiguous_rows,
    top_left,
)
from armillary.attention.tiling.accumulators import EVERYTHING, Merge, Sum
from armillary.attention.tiling.block_attention import BlockAttention
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import mesh, relative_error

N, HEADS, KEY_HEADS, DIM = 24, 4, 2, 8
CAUSAL = AttentionMask()
SPLIT = Split(HEADS, KEY_HEADS, DIM)

# -- memory orders ----------------------------------------------------------------------------------------------------

Order = Callable[[Tensor], Tensor]
"""Maps a tensor to an equal one with another memory order."""

ORDERS: dict[str, Order] = {
    "head dim outside heads": lambda x: x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
    "tokens innermost": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch innermost": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every other element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2],
    "every other token": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 2).flatten(1, 2)[:, ::2],
    "an offset": lambda x: torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape),
}
SAME = {
    "one row of the batch for all": lambda x: x[:1].expand(x.shape),
    "one head for all": lambda x: x[:, :, :1].expand(x.shape),
    "one number a head": lambda x: x[..., :1].expand(x.shape),
    "overlapping": lambda x: x.flatten(2)[..., : x.shape[2] + x.shape[3] - 1].unfold(2, x.shape[3], 1),
}
"""Orders that change values, because elements share memory."""


def of_four() -> dict[str, Method]:
    """Returns methods on four ranks."""
    ring, both = mesh(ring=4)["ring"], mesh(ring=2, ulysses=2)
    return {
        "ring of keys": Ring(ring, backward="keys"),
        "ring of queries": Ring(ring, backward="queries"),
        "token_ring": TokenRing(ring),
        "wall_facer": WallFacer(ring, team=2),
        "wall_facer, keys alone": WallFacer(ring, team=2, gather_keys=False),
        "all_gather": AllGatherKV(ring),
        "usp": Ulysses(both["ulysses"], inner=Ring(both["ring"])),
        "upipe": UPipe(both["ulysses"], inner=Ring(both["ring"]), heads_per_stage=2),
    }


def random_inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v and dout of the full sequence."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    q, k, v, dout = (torch.randn(2, N, h, DIM, generator=generator, dtype=torch.float64) for h in heads)
    return q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype)


def worst(attend: Method, full: tuple[Tensor, ...], order: Order = lambda x: x, **options) -> float:
    """Largest relative error of out, dq, dk and dv against float64, with inputs in the memory order `order`."""
    layout = attend.layout(N)
    q, k, v, dout = (order(layout.take(x, attend.shard)) for x in full)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, mask=CAUSAL, layout=layout, **options)
    result = (out, *torch.autograd.grad(out, inputs, dout.to(out.dtype)))
    exact = [x.double().requires_grad_() for x in full[:3]]
    expected = reference_attention(*exact, mask=CAUSAL, scale=options.get("scale"), softcap=options.get("softcap"))
    expected = [expected, *torch.autograd.grad(expected, exact, full[3].double())]
    expected = [layout.take(x, attend.shard) for x in expected]
    # A gradient of 0 (for scale 0) has no norm.
    return max(
        relative_error(a.double(), b) if b.norm() > 0 else a.double().norm().item()
        for a, b in zip(result, expected, strict=True)
    )


@pytest.mark.parametrize("kind", [*ORDERS, *SAME])
@pytest.mark.parametrize(
    "kernel", [CpuFlash(), CudaFlash(), FlashAttn2(), FlashAttn3(), FlashAttn4()], ids=lambda kernel: kernel.name
)
def test_kernels_get_contiguous_rows(monkeypatch, kernel, kind):
    """For all memory orders, the head dim is contiguous and rows do not overlap; some kernels also get aligned rows."""
    kernel_inputs = list[Tensor]()

    def forward(q, k, v, *_, **__):
        kernel_inputs.extend((q, k, v))
        out = torch.empty(q.shape)
        return out, torch.empty(q.shape[:-1]).mT

    def backward(tensors, *_, **__):
        kernel_inputs.extend(tensors[:5])
        return tuple(torch.empty(x.shape) for x in tensors[1:4])

    if isinstance(kernel, CpuFlash):
        monkeypatch.setattr(top_left, "_cpu_forward", lambda q, k, v, *_, **__: forward(q, k, v))
        monkeypatch.setattr(top_left, "_cpu_backward", lambda *tensors, **_: backward(tensors))
    else:
        monkeypatch.setattr(type(kernel), "call_forward", lambda self, *arguments: forward(*arguments))
        monkeypatch.setattr(type(kernel), "call_backward", lambda self, *arguments: backward(*arguments))
    q, k, v, dout = ({**ORDERS, **SAME}[kind](x) for x in random_inputs(torch.float32))
    block = BlockAttention(0, 0, kernel, Scores(0.3), 1, ((EVERYTHING, EVERYTHING, (None, 0)),))
    block.forward(q, k, v, Merge.of(q, v.shape[3]))
    block.backward(dout, q, k, v, dout, torch.zeros(2, N, HEADS), *map(Sum.like, (q, k, v)))
    assert len(kernel_inputs) == 8
    multiple = 1 if isinstance(kernel, CpuFlash) else 8
    assert all(x.stride(-1) == 1 and min(x.stride()[:-1]) >= DIM for x in kernel_inputs)
    assert all(start % multiple == 0 for x in kernel_inputs for start in (x.storage_offset(), *x.stride()[:-1]))


def test_the_usual_memory_orders_are_not_copied():
    x = torch.randn(2, 6, 3, 4, 8)  # q, k and v of one projection
    for usual in (x[:, :, 1], x.transpose(1, 3)[:, :, :, 2], x[:, 2:5, 0], x[:1, :, 1], x[:, :, 0, :1]):
        assert contiguous_rows(usual, 8) is usual


# -- scales -----------------------------------------------------------------------------------------------------------

SCALES = (-0.4, 0, -3, 1e-6, 0.7)


@pytest.mark.parametrize("scale", SCALES)
def test_every_finite_scale_works(scale):
    masks = [CAUSAL, AttentionMask(False, (3, 2)), AttentionMask(documents=[0, 5, N])]
    for kernel, softcap, mask in [("cpu_flash", None, masks[0]), ("dense", 1.5, masks[1]), ("dense", None, masks[2])]:
        q, k, v, dout = random_inputs(torch.float64)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = {"mask": mask, "scale": scale, "softcap": softcap, "return_lse": True}
        result, expected = (
            (*results, *torch.autograd.grad(results[0], leaves, dout))
            for results in (Local()(*leaves, kernel=kernel, **options), reference_attention(*leaves, **options))
        )
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# -- autocast ---------------------------------------------------------------------------------------------------------


def under_autocast() -> list[str]:
    """Inputs of one dtype are computed in it under every autocast; backward inside autocast or outside."""
    actual = list[str]()
    limits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    every, plain = list(product(limits, ({}, {"kernel": "dense"}, {"softcap": 2.0}))), [(torch.float32, {})]
    chosen = {"ring of keys": every[::2], "upipe": every[1::2]}
    for name, attend in of_four().items():
        for dtype, options in chosen.get(name, plain):
            with torch.autocast("cpu", torch.bfloat16):
                error = worst(attend, random_inputs(dtype), **options)
            if not error < limits[dtype]:
                actual.append(f"{name}, {dtype}, {options}: {error:.1e}")
        # q and k in float32, as after RoPE, v in autocast's dtype: cast like scaled_dot_product_attention's arguments
        layout = attend.layout(N)
        q, k, v, _ = (layout.take(x, attend.shard) for x in random_inputs(torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(q, k, v.bfloat16(), mask=CAUSAL, layout=layout)
        same = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=CAUSAL, layout=layout)
        if out.dtype != torch.bfloat16 or not torch.equal(out, same):
            actual.append(f"{name}, mixed dtypes")
    return actual


def test_autocast_does_not_change_attention(worlds):
    assert worlds(4).run(under_autocast) == [[]] * 4


# -- infinite sinks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [Local(), UPipe(Axis.alone("ulysses"), heads_per_stage=2)], ids=["plain", "stages"])
@pytest.mark.parametrize("rows", [0, slice(0), slice(1), slice(2)], ids=["[H]", "[0, H]", "[1, H]", "[2, H]"])
@pytest.mark.parametrize("sink", [-math.inf, 0.5])
def test_sink_of_minus_infinity_has_no_effect_even_without_visible_keys(sink, rows, attend):
    """Of 24 queries, the last 10 see none of 12 keys; the second head has no sink."""
    q, k, v, dout = random_inputs(torch.float64)
    k, v = k[:, :12], v[:, :12]
    sinks = torch.tensor([[sink, -math.inf, 0.1, sink], [0.3, -math.inf, -math.inf, 2.0]], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks[rows])]
    mask, keys = AttentionMask(causal=False, window=(2, 0)), SequenceLayout.contiguous(12, 1)
    layout = SequenceLayout.contiguous(N, 1)
    result = attend(*leaves[:3], mask=mask, layout=layout, key_layout=keys, sinks=leaves[3])
    expected = reference_attention(*leaves[:3], mask=mask, sinks=leaves[3])
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    finite = torch.autograd.grad(result, leaves, dout)
    assert all(grad.isfinite().all() for grad in finite)
    for a, b in zip(finite, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_sinks_are_summed_in_float32_at_least(dtype):
    """Rounded to bfloat16, the log of 64 equal sinks would be off by 0.2%, and so would each output."""
    q, k, v, _ = (x.to(dtype) for x in random_inputs(torch.float64))
    sinks = torch.full((64, HEADS), 1.234, dtype=dtype)
    expected = reference_attention(q.double(), k.double(), v.double(), mask=CAUSAL, sinks=sinks, return_lse=True)[1]
    lse = Local()(q, k, v, mask=CAUSAL, sinks=sinks, return_lse=True)[1]
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


# -- autograd and torch.func ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [Local(), UPipe(Axis.alone("ulysses"))], ids=["local", "upipe"])
def test_result_can_be_modified_in_place(attend):
    q, k, v, _ = (x.requires_grad_() for x in random_inputs(torch.float32))
    out = attend(q, k, v, mask=CAUSAL)
    assert not out._is_view()
    out.add_(1)
    out, lse = attend(q, k, v, mask=CAUSAL, return_lse=True)
    out *= 2
    lse.detach().add_(1)
    with torch.no_grad():
        attend(q, k, v, mask=CAUSAL).add_(1)
    x = torch.randn(1, N, SPLIT.width)
    assert torch.equal(attend.projected(x, SPLIT, mask=CAUSAL).add_(1), attend.projected(x, SPLIT, mask=CAUSAL) + 1)


def tangent(inputs: list[Tensor], dual_index: int) -> Tensor:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) if i == dual_index else x for i, x in enumerate(inputs)]
        return Local()(*duals[:3], mask=CAUSAL, sinks=duals[3])


@pytest.mark.parametrize("which", range(4))
def test_forward_mode_raises_instead_of_a_zero_tangent(which):
    inputs = [*random_inputs(torch.float32)[:3], torch.zeros(HEADS)]
    with pytest.raises(ValueError, match=r"forward-mode"):
        tangent(inputs, which)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Local()(q, k, v, mask=CAUSAL)


TRANSFORMS = {
    "jvp": lambda q, k, v: torch.func.jvp(lambda q: attended(q, k, v), (q,), (torch.ones_like(q),)),
    "grad": lambda q, k, v: torch.func.grad(lambda q: attended(q, k, v).sum())(q),
    "vjp": lambda q, k, v: torch.func.vjp(lambda q: attended(q, k, v), q),
    "vmap": lambda q, k, v: torch.func.vmap(lambda q: attended(q, k, v))(torch.stack([q, q])),
    "jacfwd": lambda q, k, v: torch.func.jacfwd(lambda v: attended(q, k, v).sum())(v),
    "projected": lambda q, k, v: torch.func.jvp(
        lambda x: Local().projected(x, SPLIT, mask=CAUSAL),
        (torch.ones(1, N, SPLIT.width),),
        (torch.ones(1, N, SPLIT.width),),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_refused_by_name(transform):
    with pytest.raises(ValueError, match=r"torch.func's transforms \(jvp, grad, vjp, vmap\)"):
        TRANSFORMS[transform](*random_inputs(torch.float32)[:3])


def test_tensors_without_transform_are_computed_inside_one():
    q, k, v, _ = random_inputs(torch.float32)
    _, slope = torch.func.jvp(lambda a: a * attended(q, k, v).sum(), (torch.tensor(1.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(slope, attended(q, k, v).sum())


def test_a_second_derivative_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in random_inputs(torch.float32))
    (dq,) = torch.autograd.grad(attended(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_kernels_get_contiguous_rows_and_positive_scales():
    """A user's kernel gets contiguous rows and scales above 0."""

    class Asking(Dense):
        def forward(self, q, k, v, band, scores):
            assert scores.scale > 0 and all(x.stride(-1) == 1 for x in (q, k, v))
            return super().forward(q, k, v, band, scores)

    order = ORDERS["head dim outside heads"]
    assert worst(Local(), random_inputs(torch.float64), order, kernel=Asking(), scale=-0.3) < 1e-12


# -- inside torch.compile ---------------------------------------------------------------------------------------------


def test_compiled_torch_func_raises():
    def slope(q, k, v):
        return torch.func.jvp(lambda q: attended(q, k, v), (q,), (torch.ones_like(q),))[1]

    with pytest.raises(Exception, match=r"torch\.func"):
        torch.compile(slope, backend="eager")(*random_inputs(torch.float32)[:3])
