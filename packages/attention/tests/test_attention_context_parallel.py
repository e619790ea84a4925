"""A style of `parallelize_module` makes a plain torch module attend over all shards, like one rank."""

from contextlib import nullcontext
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from armillary.attention import AttentionMask, Ring, Ulysses, reference_attention, sdpa_parallel, sequence
from armillary.attention.context_parallel import ContextParallelStyle
from armillary.core import distribute_sequence
from armillary.core.testing import mesh, relative_error

B, N, E, H = 2, 24, 32, 4
EXACT = 1e-12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(E, E, False, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, E // H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def full_inputs() -> list[Tensor]:
    """Returns the full x and gradient of the output."""
    return list(torch.randn(2, B, N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def on_one_rank(mask: AttentionMask) -> list[Tensor]:
    """Returns the output and the gradients of x and of the parameters."""
    model, (x, dout) = Attention(), full_inputs()
    x.requires_grad_()
    q, k, v = (f(x).unflatten(-1, (H, -1)) for f in (model.q, model.k, model.v))
    out = model.out(reference_attention(q, k, v, mask=mask).flatten(2))
    return [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)]


def usp():
    axes = mesh(ring=2, ulysses=2)
    return Ulysses(axes["ulysses"], inner=Ring(axes["ring"])), axes["ring", "ulysses"]


def errors(actual: list[Tensor], mask: AttentionMask, layout, shard: int) -> float:
    """Largest error of this rank's output and dx, and of parameter gradients summed over ranks."""
    for gradient in actual[2:]:
        dist.all_reduce(gradient)
    out, dx, *grads = on_one_rank(mask)
    expected = [layout.take(out, shard), layout.take(dx, shard), *grads]
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


class Setup(NamedTuple):
    """A style, the `sequence` block around it, and the expected mask.

    `style`, `block`: which of layout, documents and mask are their arguments. `mask`: the expected mask.
    """

    style: tuple[str, ...] = ("layout",)
    block: tuple[str, ...] | None = None
    mask: AttentionMask = AttentionMask()
    call: str = "eager"


DOCUMENTS = (0, 7, 16, N)
PACKED = AttentionMask(documents=DOCUMENTS)
NARROW = AttentionMask(window=(5, 0))
SETUPS = {
    "layout": Setup(),
    "layout of the block": Setup((), ("layout",)),
    "window": Setup(("layout", "mask"), None, NARROW),
    "checkpoint": Setup(call="checkpoint"),
    "documents of the block": Setup(("layout",), ("layout", "documents"), PACKED),
    "documents, layout of the block": Setup((), ("layout", "documents"), PACKED),
    "documents alone": Setup(("layout",), ("documents",), PACKED),
    "documents by row": Setup(("layout",), ("layout", "documents"), AttentionMask(documents=[DOCUMENTS, (0, 11, N)])),
    "documents and window": Setup(
        ("layout", "mask"), ("layout", "documents"), AttentionMask(window=(5, 0), documents=DOCUMENTS)
    ),
    "documents and chunks": Setup(
        ("layout", "mask"), ("layout", "documents"), AttentionMask.chunked(4, documents=DOCUMENTS)
    ),
    "documents, checkpoint": Setup(("layout",), ("layout", "documents"), PACKED, "checkpoint"),
    "mask of the block": Setup(("layout",), ("layout", "mask"), AttentionMask(window=(5, 0), documents=DOCUMENTS)),
}


def arguments(names: tuple[str, ...], setup: Setup, layout, style: bool) -> dict:
    """Returns the named arguments of a style or a block. A style's mask leaves out documents that the block has."""
    mask = setup.mask
    if style and "documents" in (setup.block or ()):
        mask = AttentionMask(mask.causal, mask.window, pattern=mask.pattern)
    values = {"layout": layout, "documents": setup.mask.documents, "mask": mask}
    return {name: values[name] for name in names}


def on_a_shard(name: str) -> float:
    setup, (attend, axes) = SETUPS[name], usp()
    layout, model = attend.layout(N), Attention()
    parallelize_module(model, axes, ContextParallelStyle(attend, **arguments(setup.style, setup, layout, True)))
    x, dout = (layout.take(x, attend.shard) for x in full_inputs())
    x.requires_grad_()
    block = nullcontext() if setup.block is None else sequence(**arguments(setup.block, setup, layout, False))
    with block:
        out = checkpoint(model, x, use_reentrant=False) if setup.call == "checkpoint" else model(x)
        actual = [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)]
    return errors(actual, setup.mask, layout, attend.shard)


def each_on_a_shard() -> list[float]:
    return [on_a_shard(name) for name in SETUPS]


def test_module_attends_over_all_shards(worlds):
    for rank in worlds(4).run(each_on_a_shard):
        assert max(rank) < EXACT, dict(zip(SETUPS, rank, strict=True))


def compiled() -> list[float]:
    axis = mesh(ring=1)["ring"]
    attend, model = Ring(axis), Attention()
    layout = attend.layout(N)
    parallelize_module(model, axis, ContextParallelStyle(attend, layout=layout))
    # Before torch 2.15, dynamo does not trace context variables, such as the one of `sequence`.
    model.compile(fullgraph=torch.__version__ >= "2.15", backend="aot_eager")
    answers: list[float] = []
    for documents in (None, DOCUMENTS, (0, 3, N)):
        x, dout = full_inputs()
        x.requires_grad_()
        with sequence(layout=layout, documents=documents):
            out = model(x)
        actual = [out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)]
        answers.append(errors(actual, AttentionMask(documents=documents), layout, 0))
    return answers


def test_compiled_module_uses_the_documents_of_each_block(worlds):
    assert max(worlds(1).run(compiled)[0]) < EXACT


def on_dtensors() -> float:
    attend, axes = usp()
    layout, model = attend.layout(N), Attention()
    parallelize_module(model, axes, ContextParallelStyle(attend, layout=layout))
    x, dout = (distribute_sequence(x, layout, axes) for x in full_inputs())
    x = x.detach().requires_grad_()
    out = model(x)
    grads = torch.autograd.grad(out, [x, *model.parameters()], dout)
    assert isinstance(out, DTensor) and isinstance(grads[0], DTensor)
    assert out.placements == grads[0].placements == (Shard(1), Shard(1)) and out.shape == (B, N, E)
    local = [out.detach().to_local(), grads[0].to_local(), *grads[1:]]
    return errors(local, AttentionMask(), layout, attend.shard)


def test_dtensors_keep_their_placements(worlds):
    assert max(worlds(4).run(on_dtensors)) < EXACT


def copied() -> tuple[bool, bool]:
    attend, axes = usp()
    layout, model = attend.layout(N), Attention()
    parallelize_module(model, axes, ContextParallelStyle(attend, layout=layout))
    copy, x = deepcopy(model), layout.take(full_inputs()[0], attend.shard)
    before = torch.equal(copy(x), model(x))
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    return before, bool((copy(x) == 0).all()) and bool((model(x) != 0).any())


def test_copied_module_uses_its_own_parameters(worlds):
    assert worlds(4).run(copied) == [(True, True)] * 4


def beside_tensor_parallelism() -> float:
    axes = mesh(ring=2, tp=2)
    attend, model = Ring(axes["ring"]), Attention()
    layout = attend.layout(N)
    parallelize_module(model, axes["ring"], ContextParallelStyle(attend, layout=layout))
    parallelize_module(model, axes["tp"], dict.fromkeys("qkv", ColwiseParallel()) | {"out": RowwiseParallel()})
    x, dout = (layout.take(x, attend.shard) for x in full_inputs())
    x.requires_grad_()
    out = model(x)
    (dx,) = torch.autograd.grad(out, x, dout)
    out_wanted, dx_wanted, *_ = on_one_rank(AttentionMask())
    expected = [layout.take(out_wanted, attend.shard), layout.take(dx_wanted, attend.shard)]
    return max(relative_error(a.detach(), b) for a, b in zip((out, dx), expected, strict=True))


def test_heads_of_a_tensor_parallel_rank_are_accepted(worlds):
    assert max(worlds(4).run(beside_tensor_parallelism)) < EXACT


def sdpa_on_dtensors() -> float:
    axes = mesh(ring=2, tp=2)
    over, attend = axes["ring", "tp"], Ring(axes["ring"])
    layout = attend.layout(N)
    generator = torch.Generator().manual_seed(2)
    full = [torch.randn(B, heads, N, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)]
    order = torch.cat([layout.positions(shard) for shard in range(2)])
    q, k, v, dout = (distribute_tensor(x[:, :, order], over, [Shard(2), Shard(1)]) for x in full)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with sequence(layout=layout), sdpa_parallel(attend):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, dout)
    plain = [x.transpose(1, 2).requires_grad_() for x in full[:3]]
    reference = reference_attention(*plain, mask=AttentionMask())
    expected = [reference.detach(), *torch.autograd.grad(reference, plain, full[3].transpose(1, 2))]
    assert all(x.placements == (Shard(2), Shard(1)) for x in (out, *grads))
    return max(
        relative_error(a.full_tensor().detach().transpose(1, 2), b[:, order])
        for a, b in zip((out, *grads), expected, strict=True)
    )


def test_sdpa_parallel_takes_dtensors(worlds):
    assert max(worlds(4).run(sdpa_on_dtensors)) < EXACT


def recomputed_outside() -> None:
    attend, full = usp()
    layout, x = attend.layout(N), torch.zeros(B, N // 4, E, dtype=torch.float64)
    model = parallelize_module(Attention(), full, ContextParallelStyle(attend, layout=layout))
    with sequence(layout=layout, documents=DOCUMENTS):
        out = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    with pytest.raises(ValueError, match="recomputed in backward"):
        out.sum().backward()


def test_recomputing_outside_of_the_sequence_block_raises(worlds):
    worlds(4).run(recomputed_outside)
