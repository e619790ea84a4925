"""The placement that merges attention: torch redistributes it correctly, and every other op raises by name."""

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest
import torch
from core_cases import each, merged_by_softmax, partial
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.core import CommLedger, LogSumExpPartial
from armillary.core.internal import compat, dtensor
from armillary.core.logsumexp_partial import merge_parts, pack_partial, unpack_partial
from armillary.core.testing import Dispatched, mesh, relative_error
from armillary.core.testing.dtensors import draw_placements, local_part

EXACT = 1e-14
B, N, H, D = 2, 11, 6, 4


def oracle(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The merged result in float64, packed."""
    return pack_partial(*merged_by_softmax(parts))


# -- without ranks ----------------------------------------------------------------------------------------------------


def test_unpack_inverts_pack():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out, lse = partial(0, N, dtype)
        packed = pack_partial(out, lse)
        assert packed.shape == (B, N, H, D + 1) and packed.dtype == torch.promote_types(dtype, torch.float32)
        back = unpack_partial(packed, dtype)
        assert torch.equal(back[0], out) and torch.equal(back[1], lse) and back[0].dtype == dtype
    assert pack_partial(out.bfloat16(), lse.double()).dtype == torch.float64
    with torch.no_grad():  # a leaf may be packed without gradients
        assert not pack_partial(out.requires_grad_(), lse.requires_grad_()).requires_grad


def test_rows_without_visible_keys_weigh_nothing_even_if_nan():
    out, lse = partial(0, N)
    clean = merge_parts([pack_partial(out, lse), pack_partial(*partial(1, N))])
    out[lse == -torch.inf] = torch.nan
    assert torch.equal(merge_parts([pack_partial(out, lse), pack_partial(*partial(1, N))]), clean)
    alone = merge_parts([pack_partial(out, lse)])
    assert (alone[:, 0, :, :-1] == 0).all() and (alone[:, 0, :, -1] == -torch.inf).all()


def test_the_placement_equals_only_its_own_kind():
    packed, single = LogSumExpPartial(), LogSumExpPartial(packed=False)
    different = [single, Partial("logsumexp"), Partial("sum"), Partial(packed.reduce_op), Replicate(), Shard(0)]
    for other in different:
        assert packed != other and other != packed and {packed: 1, other: 2}[packed] == 1
    assert packed == LogSumExpPartial() and hash(packed) == hash(LogSumExpPartial())
    assert (repr(packed), repr(single)) == ("LogSumExpPartial()", "LogSumExpPartial(packed=False)")
    for same in (packed, single):
        for copied in (copy.copy(same), copy.deepcopy(same), pickle.loads(pickle.dumps(same))):
            assert type(copied) is LogSumExpPartial and copied == same and copied.packed == same.packed
        source, names = same.__fx_repr__()
        assert eval(source, names) == same
    assert packed.is_partial() and not packed.is_partial("sum") and not packed.is_replicate()


OPS: dict[str, Callable[[DTensor], object]] = {
    "aten.mul": lambda x: x * 2,
    "aten.slice": lambda x: x[:, :2],
    "aten.transpose": lambda x: x.transpose(0, 1),
    "aten.cat": lambda x: torch.cat([x, x]),
    "aten.sum": lambda x: x.sum(),
    "aten.argmax": lambda x: x.argmax(),
    "aten._to_copy": lambda x: x.bfloat16(),
    "aten.mul_": lambda x: x.mul_(2),
    "aten.copy_": lambda x: x.copy_(x),
    "aten.detach": lambda x: x.detach(),
    "aten.clone": lambda x: x.clone(),
    "aten._foreach_mul": lambda x: torch._foreach_mul([x], 2),
    "aten.unbind": lambda x: x.unbind(0),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten.dropout": lambda x: torch.nn.functional.dropout(x),
}


def of(placements: Sequence[Placement], on, x: Tensor | None = None) -> DTensor:
    return DTensor.from_local(pack_partial(*partial(0, N)) if x is None else x, on, placements)


@pytest.mark.parametrize("packed", [True, False])
def test_every_op_is_refused_by_name(packed, fake_mesh):
    """Runs each op on a sum of the same shape and dtype first, because torch caches sharding by such keys."""
    ranks = fake_mesh(ring=4)
    x = of([LogSumExpPartial(packed)], ranks["ring"])
    for make in ("sum", "avg"):
        for op in ("aten.mul", "aten.slice", "aten.transpose"):
            OPS[op](of([Partial(make)], ranks["ring"]))
    expected = "redistribute it first" if packed else "merge_scatter"
    for name, op in OPS.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"LogSumExpPartial\(.*{expected}") as refused:
                op(x)
        made_of_others = {"aten.dropout": "aten.empty_like", "aten.argmax": "" if not packed else name}
        assert str(refused.value).startswith(made_of_others.get(name, name)), (name, refused.value)


def test_a_merging_placement_stays_and_is_not_made_of_a_full_one(fake_mesh):
    ring = fake_mesh(ring=4)["ring"]
    x = of([LogSumExpPartial()], ring)
    same = x.redistribute(placements=[LogSumExpPartial()])
    assert same.placements == (LogSumExpPartial(),) and torch.equal(same.to_local(), x.to_local())
    assert "LogSumExpPartial()" in repr(x)
    with pytest.raises((RuntimeError, ValueError)):
        of([Replicate()], ring).redistribute(placements=[LogSumExpPartial()])
    summed = of([Partial("sum")], ring).requires_grad_()  # other DTensors keep their gradients
    (summed.redistribute(placements=[Shard(0)]) * 3).to_local().sum().backward()
    assert summed.grad is not None and summed.grad.shape == summed.shape


# -- on ranks, against one process ------------------------------------------------------------------------------------


L, R, S0, S1, S2 = LogSumExpPartial(), Replicate(), Shard(0), Shard(1), Shard(2)
TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-6, torch.bfloat16: 1e-6}
ON_ONE_AXIS: list[tuple[Placement, int, torch.dtype]] = [
    *((to, N, torch.float64) for to in (R, S0, S2)),
    *((to, 3, torch.float64) for to in (R, S1)),  # fewer tokens than ranks
    (R, 12, torch.float32),
    (S1, 12, torch.bfloat16),
]


def merged(target: Placement, tokens: int, dtype: torch.dtype) -> tuple[float, bool]:
    """Returns the error of the local result, and whether exactly the documented bytes were sent."""
    on = mesh(ring=4)["ring"]
    parts = [partial(rank, tokens, dtype) for rank in range(4)]
    x = of([L], on, pack_partial(*parts[on.get_local_rank()]))
    with Dispatched() as dispatched, CommLedger() as ledger:
        y = x.redistribute(placements=[target])
    assert y.placements == (target,) and y.shape == x.shape and y.dtype == x.dtype
    exact_bytes = ledger.bytes() == bytes_of(x, y) and dispatched.sent == Dispatched.of(ledger)
    return relative_error(y.to_local(), local_part(oracle(parts), on, [target])), exact_bytes


def bytes_of(x: DTensor, y: DTensor) -> int:
    """Bytes that a rank sends on an axis of 4."""
    if y.placements != (R,):
        return x.to_local().nbytes - y.to_local().nbytes
    rows = dtensor.chunk_sizes(x.numel() // x.shape[-1], 4)
    sent_rows = sum(rows) - rows[x.device_mesh.get_local_rank()] + 3 * max(rows)
    return sent_rows * x.shape[-1] * x.element_size()


def test_redistributing_merges(worlds):
    for rank in worlds(4).run(each, merged, ON_ONE_AXIS):
        for (actual, exact_bytes), case in zip(rank, ON_ONE_AXIS, strict=True):
            assert actual <= TOLERANCE[case[-1]] and exact_bytes, case


MESHES = ({"ring": 2, "ulysses": 2, "tp": 2}, {"ring": 4, "tp": 2}, {"shard": 2, "ring": 4}, {"ring": 8})


def drawn(number: int) -> tuple[float, str]:
    """Redistributes random placements, partial on one or two axes, to random others, which may stay partial on one."""
    draw = Random(number)
    axes, tokens = draw.choice(MESHES), draw.randint(3, 14)
    on, names = mesh(**axes)[tuple(axes)], list(axes)
    pending = sorted(draw.sample(range(on.ndim), min(on.ndim, draw.randint(1, 2))))
    kept_places = pending[:1] if draw.random() < 0.3 else []
    source = draw_placements(draw, on, (0, 1, 2), {names[place]: L for place in pending})
    target = draw_placements(draw, on, (0, 1, 2), {names[place]: L for place in kept_places})
    return merged_over(on, source, target, tokens)


def merged_over(
    on: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement], tokens: int
) -> tuple[float, str]:
    """Returns the error of the local result, and the case."""
    pending = [place for place, placement in enumerate(source) if placement == L]
    ranks = list(product(*(range(on.size(place)) for place in pending)))
    own_key = tuple(on.get_local_rank(place) for place in pending)
    remaining = sum(placement == L for placement in target)
    parts = {at: partial(seed, tokens) for seed, at in enumerate(ranks)}
    full = pack_partial(*parts[own_key])
    x = DTensor.from_local(local_part(full, on, source), on, source, shape=full.shape, stride=full.stride())
    y = x.redistribute(placements=target)
    expected = oracle([part for at, part in parts.items() if at[:remaining] == own_key[:remaining]])
    assert y.placements == tuple(target) and y.shape == full.shape
    return relative_error(y.to_local(), local_part(expected, on, target)), f"{on} {tokens} {source} to {target}"


def test_any_placements_become_any_others(worlds):
    for rank in worlds(8).run(each, drawn, [(number,) for number in range(40)]):
        assert [case for actual, case in rank if not actual <= EXACT] == []


def over_a_joint_axis() -> list[tuple[float, str]]:
    """On a flattened mesh, as for FSDP2, torch merges over several axes at once."""
    built = mesh(ring=2, ulysses=2, tp=2)
    compat.flatten(built, ("shard", "ring", "ulysses"), "joint")
    on, results = built["ring", "ulysses", "tp"], ((R, R), (S1, S1), (S2, S2), (S1, R), (R, S1))
    cases = [((L, L, last), (*result, last), tokens) for last in (R, S2) for result in results for tokens in (9,)]
    return [merged_over(on, *case) for case in cases]


def test_merge_on_a_flattened_mesh(worlds):
    for rank in worlds(8).run(over_a_joint_axis):
        assert [case for actual, case in rank if not actual <= EXACT] == []
