"""UPipe in training: frozen weights, FSDP2, checkpointing, autocast, saved tensors and sent bytes."""

import gc
import time
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_attention_upipe import (
    BATCH,
    DIM,
    USP,
    WIDTH,
    Case,
    Composition,
    Heads,
    Projected,
    Result,
    expected,
    inputs,
    joined,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.attention import AttentionMask, Method, Ulysses, UPipe
from armillary.core import CommLedger, SequenceLayout, sum_gradients
from armillary.core.testing import mesh, relative_error

GROUPED = Case(Heads(8, 4, 2), ("norm", "rope"))
EVEN = GROUPED._replace(length=32)

# -- frozen weights ---------------------------------------------------------------------------------------------------


class Forbidden(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *_: Tensor) -> Tensor:
        raise AssertionError("a gradient is computed that nobody needs")


class Guarded(Projected):
    """Raises if a gradient is computed for a frozen base weight, or for x if `x_is_frozen`."""

    frozen: tuple[str, ...] = ()
    x_is_frozen = False

    def freeze(self, case: str) -> None:
        self.x_is_frozen = case in ("x", "everything")
        if case in ("all weights", "everything"):
            self.requires_grad_(False)
        for name in {"queries": "q", "keys": "k", "keys and values": "kv"}.get(case, ""):
            self.weights[name].requires_grad_(False)
        self.frozen = tuple(name for name, weight in self.weights.items() if not weight.requires_grad)

    def weight(self, name: str) -> Tensor:
        return Forbidden.apply(self.weights[name]) if name in self.frozen else self.weights[name]

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        return super().project(name, Forbidden.apply(x) if self.x_is_frozen else x, heads)


def partly_frozen(case: Case, frozen: str) -> Result:
    """Returns the results of `on_rank` for frozen weights, by `backward`."""
    attend = USP.build(case.heads.stage)
    layout = attend.layout(case.length)
    x, dout = (layout.take(tensor, attend.shard) for tensor in inputs(case))
    positions = layout.positions(attend.shard)
    weights = Guarded(*case.heads[:2], positions, case.options)
    weights.freeze(frozen)
    x.requires_grad_(not weights.x_is_frozen)
    out = attend.projected(x, weights, mask=case.mask, layout=layout)
    assert out.requires_grad == (frozen != "everything")
    if out.requires_grad:
        out.backward(dout)
    tensors = {"x": x, **dict(weights.named_parameters())}
    assert all((tensor.grad is not None) == tensor.requires_grad for tensor in tensors.values())
    gradients = {f"d{name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    return {"positions": positions, "out": out.detach(), **gradients}


FROZEN = {
    "base": GROUPED._replace(options=("lora", "rope")),
    **dict.fromkeys(
        ("queries", "keys", "keys and values", "all weights", "x", "everything"),
        GROUPED._replace(options=("bias", "norm", "rope")),
    ),
}


def each_partly_frozen() -> list[Result]:
    return [partly_frozen(case, frozen) for frozen, case in FROZEN.items()]


def test_only_unfrozen_gradients_are_computed(worlds):
    for (frozen, case), *ranks in zip(FROZEN.items(), *worlds(4).run(each_partly_frozen), strict=True):
        result, exact = joined(ranks), expected(case)
        assert all(relative_error(result[name], exact[name]) < 1e-10 for name in result), (frozen, result.keys())
        assert frozen != "base" or result.keys() == exact.keys()


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with projections that FSDP gathers, casts and frees."""

    def __init__(self, attend: Method, layout: SequenceLayout, options: tuple[str, ...], seed: int) -> None:
        super().__init__()
        self.attend, self.layout = attend, layout
        self.projections = Projected(8, 4, layout.positions(attend.shard), options, seed)
        self.back = nn.Linear(8 * DIM, WIDTH, bias=False, dtype=torch.float64)
        nn.init.normal_(self.back.weight, std=0.1, generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend.projected(x, self.projections, mask=AttentionMask(), layout=self.layout)
        return x + self.back(heads.flatten(2))


def trained(model: nn.Module, x: Tensor, dout: Tensor) -> Result:
    """Returns dx and each parameter's gradient summed over ranks, all summed over two batches."""
    x, total = x.clone().requires_grad_(), Result()
    for scale in (1.0, 0.5):
        model.zero_grad()
        model(x * scale).backward(dout)
        gradients = {name: full_gradient(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        total = {name: total.get(name, 0) + gradient for name, gradient in gradients.items()}
    return {"x": x.grad, **total}


def full_gradient(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    dist.all_reduce(gradient)
    return gradient


def sharded(model: nn.Module, reshard: bool, precision: MixedPrecisionPolicy) -> nn.Module:
    """Applies FSDP2 over all ranks, with summed gradients."""
    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.children(), model):
        fully_shard(part, mesh=ranks, reshard_after_forward=reshard, mp_policy=precision)
    sum_gradients(model)
    return model


def errors_under_fsdp(reshard: bool, mixed: bool, options: tuple[str, ...]) -> dict[str, float]:
    """Returns each gradient's error against the one without FSDP, in the same precision."""
    attend = USP.build(2, prefetch=reshard)
    layout = attend.layout(EVEN.length)
    x, dout = layout.take(inputs(EVEN)[0], attend.shard), layout.take(inputs(EVEN)[0].roll(1), attend.shard)
    plain, model = (nn.Sequential(*(Block(attend, layout, options, seed) for seed in (1, 2))) for _ in range(2))
    precision = MixedPrecisionPolicy()
    if mixed:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        x, dout, plain, model = x.bfloat16(), dout.bfloat16(), plain.bfloat16(), model.float()
    exact = trained(plain, x, dout)
    model = sharded(model, reshard, precision)
    result = trained(model, x, dout)
    assert result.keys() == exact.keys()
    return {name: relative_error(result[name], exact[name]) for name in exact}


UNDER_FSDP = {
    "reshard": (True, False, ("bias", "norm", "rope")),
    "lora": (False, False, ("lora", "rope")),
    "mixed precision": (True, True, ("norm", "rope")),
    "mixed precision, no reshard": (False, True, ("norm", "rope")),
}


def each_under_fsdp() -> list[dict[str, float]]:
    return [errors_under_fsdp(*way) for way in UNDER_FSDP.values()]


@pytest.mark.long
def test_gradients_under_fsdp_equal_those_without(worlds):
    for rank in worlds(4).run(each_under_fsdp):
        for (name, (_, mixed, _)), errors in zip(UNDER_FSDP.items(), rank, strict=True):
            # Under FSDP, gradients may reach autograd without rounding to bfloat16.
            assert max(errors.values()) < (1e-2 if mixed else 1e-10), (name, errors)


# -- recomputation ----------------------------------------------------------------------------------------------------


def keep_attention(_, op, *args, **kwargs) -> CheckpointPolicy:
    is_ours = op.namespace == "armillary"
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(composition: Composition, policy: str) -> tuple[list[Tensor], int, int]:
    """Returns gradients, and bytes sent in each phase. Bytes of a recomputation count as forward."""
    attend = composition.build(2)
    layout = attend.layout(EVEN.length)
    block = Block(attend, layout, ("norm", "rope"), seed=1)
    x = layout.take(inputs(EVEN)[0], attend.shard).requires_grad_()
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)} if policy == "keep" else {}
    with CommLedger() as ledger:
        out = block(x) if policy == "plain" else checkpoint(block, x, use_reentrant=False, **contexts)
        gradients = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    return list(gradients), ledger.bytes(phase="forward"), ledger.bytes(phase="backward")


def every_way(composition: Composition) -> list[tuple[list[Tensor], int, int]]:
    return [checkpointed(composition, policy) for policy in ("plain", "keep", "recompute")]


@pytest.mark.long
@pytest.mark.parametrize("composition", [Composition(1, 2), USP], ids=str)
def test_checkpoint_that_saves_attention_does_not_recompute_it(worlds, composition):
    actual = worlds(composition.ring * composition.ulysses).run(every_way, composition)
    for (exact, forward, backward), (kept_got, *kept_sent), (again_got, *again_sent) in actual:
        assert kept_sent == [forward, backward] and forward > 0 and backward > 0
        assert again_sent == [2 * forward, backward]
        assert all(map(torch.equal, kept_got, exact)) and all(map(torch.equal, again_got, exact))


class Dropping(Projected):
    """Dropout before the projections, as in LoRA."""

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        return super().project(name, F.dropout(x, 0.5), heads)


def dropped() -> tuple[float, float]:
    """Returns <dout, out> and <dweight, weight> of the values. Out is the values, and so linear in their weight."""
    attend = Composition(1, 2).build(2)
    layout = attend.layout(EVEN.length)
    x, dout = (layout.take(tensor, attend.shard) for tensor in inputs(EVEN))
    weights = Dropping(8, 4, layout.positions(attend.shard))
    out = attend.projected(x, weights, mask=AttentionMask(window=(0, 0)), layout=layout)
    (gradient,) = torch.autograd.grad(out, [weights.weights["v"]], dout)
    return (out * dout).sum().item(), (gradient * weights.weights["v"]).sum().item()


def test_recomputation_repeats_dropout(worlds):
    forward, backward = (sum(values) for values in zip(*worlds(2).run(dropped), strict=True))
    assert abs(forward - backward) < 1e-9 * abs(forward)


# -- saved tensors ----------------------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Returns the bytes of each storage that Python's garbage collector tracks; frozen objects are left out."""
    gc.collect()
    actual = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in actual}


def eventually_new(known_storages: set[int]) -> dict[int, int]:
    """Returns the storages that are not known, after gloo's threads have released their send buffers."""
    for _ in range(20):
        new = {at: n for at, n in storages().items() if at not in known_storages}
        if not any(new.values()):
            break
        time.sleep(0.05)
    return new


def saved_bytes(composition: Composition, case: Case) -> tuple[int, int, int]:
    """Returns bytes saved by the graph without parameters, bytes of x, out and lse, and bytes kept alive elsewhere."""
    attend = composition.build(case.heads.stage)
    layout = attend.layout(case.length)
    x = layout.take(inputs(case)[0], attend.shard).requires_grad_()
    weights = Projected(*case.heads[:2], layout.positions(attend.shard), case.options)
    attend.projected(x, weights, mask=case.mask, layout=layout)  # fills the caches
    before, saved = storages(), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend.projected(x, weights, mask=case.mask, layout=layout)
    elsewhere = sum(eventually_new({*before, *saved, out.data_ptr()}).values())
    parameters = {p.data_ptr() for p in weights.parameters()}
    total = sum(n for at, n in saved.items() if at not in parameters)
    return total, x.nbytes + out.nbytes + out[..., 0].nbytes, elsewhere


def all_saved_bytes(composition: Composition, heads: list[Heads]) -> list[tuple[int, int, int]]:
    gc.freeze()  # so that collections skip the imported objects
    return [saved_bytes(composition, EVEN._replace(heads=some)) for some in heads]


def test_only_x_out_and_lse_are_saved(worlds):
    heads = [Heads(8, 8, None), Heads(8, 1, 4)]
    for rank in worlds(4).run(all_saved_bytes, USP, heads):
        assert [(total, elsewhere) for total, _, elsewhere in rank] == [(allowed, 0) for _, allowed, _ in rank]


class Watched(Projected):
    """Records the number of live heads of earlier stages when the next stage is projected."""

    def watch(self) -> None:
        self.alive: dict[str, list[tuple[int, StorageWeakRef]]] = {"q": [], "k": [], "v": []}
        self.most = dict.fromkeys(self.alive, 0)

    def project(self, name: str, x: Tensor, heads: list[int]) -> Tensor:
        alive_bytes = sum(n for n, storage in self.alive[name] if not storage.expired())
        self.most[name] = max(self.most[name], alive_bytes)
        y = super().project(name, x, heads)
        self.alive[name].append((len(heads), StorageWeakRef(y.untyped_storage())))
        return y


def max_alive(heads: Heads, prefetch: bool) -> list[dict[str, int]]:
    """Returns the maxima of forward, and of both phases."""
    attend = Composition(1, 2).build(heads.stage, prefetch=prefetch)
    layout = attend.layout(EVEN.length)
    x, dout = layout.take(inputs(EVEN)[0], attend.shard), torch.ones(BATCH, 16, heads.queries, DIM, dtype=torch.float64)
    weights = Watched(*heads[:2], layout.positions(attend.shard), ("rope",))
    weights.watch()
    out = attend.projected(x.requires_grad_(), weights, mask=AttentionMask(), layout=layout)
    forward = dict(weights.most)
    out.backward(dout)
    return [forward, weights.most]


ALIVE = list(product((Heads(16, 16, 2), Heads(16, 8, 2), Heads(16, 4, 4)), (False, True)))


def all_max_alive() -> list[list[dict[str, int]]]:
    return [max_alive(*case) for case in ALIVE]


def test_at_most_one_stage_of_heads_is_alive_during_the_next_projection(worlds):
    for rank in worlds(2).run(all_max_alive):
        for (heads, prefetch), phases in zip(ALIVE, rank, strict=True):
            for maxima in phases:
                assert all(n <= (1 + prefetch) * heads.stage for n in maxima.values()), (heads, prefetch, phases)


def twice_backward() -> bool:
    """Returns whether a second backward with retain_graph gives equal gradients."""
    attend = USP.build(2)
    layout = attend.layout(EVEN.length)
    block = Block(attend, layout, ("norm", "rope"), seed=1)
    x = layout.take(inputs(EVEN)[0], attend.shard).requires_grad_()
    loss = block(block(x)).square().sum()  # two layers with shared weights
    first = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=True)
    return all(map(torch.equal, first, torch.autograd.grad(loss, [x, *block.parameters()])))


@pytest.mark.long
def test_retained_graph_runs_backward_twice(worlds):
    assert all(worlds(4).run(twice_backward))


# -- sent bytes -------------------------------------------------------------------------------------------------------


def bytes_sent(attend: Method, heads: Heads) -> tuple[int, int]:
    """Returns all-to-all bytes in forward and backward for 8 tokens per rank; asserts that there are no others."""
    layout = attend.layout(8 * attend.shards)
    weights = Projected(heads.queries, heads.keys, layout.positions(attend.shard))
    x = torch.randn(BATCH, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    with CommLedger() as ledger:
        attend.projected(x, weights, mask=AttentionMask(), layout=layout).sum().backward()
    forward, backward = (ledger.bytes(kind="all_to_all", phase=phase) for phase in ("forward", "backward"))
    assert forward + backward == ledger.bytes()
    return forward, backward


def bytes_of_both(ranks: int, todo: list[Heads]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the bytes of UPipe and of Ulysses."""
    axis = mesh(ulysses=ranks)["ulysses"]
    methods = [(UPipe(axis, heads_per_stage=heads.stage), Ulysses(axis), heads) for heads in todo]
    return [(bytes_sent(upipe, heads), bytes_sent(ulysses, heads)) for upipe, ulysses, heads in methods]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_forward_sends_as_much_as_ulysses_and_backward_at_most_both_of_its_phases(worlds, ranks):
    """A key/value head arrives once for all stages of its round, also if there are fewer than query heads per stage."""
    todo = [
        *(Heads(8, 8, 4), Heads(8, 4, 4), Heads(16, 8, 4), Heads(8, 8, 8), Heads(16, 4, 4), Heads(8, 4, None)),
        *(Heads(8, 2, 4), Heads(16, 2, 8), Heads(8, 1, 4), *([Heads(8, 8, 2), Heads(8, 4, 2)] if ranks == 2 else [])),
    ]
    unit = (ranks - 1) * BATCH * 8 * DIM * 8 // ranks
    for answers in worlds(ranks).run(bytes_of_both, ranks, todo):
        for heads, ((forward, backward), (ulysses_forward, ulysses_backward)) in zip(todo, answers, strict=True):
            assert forward == ulysses_forward == unit * (2 * heads.queries + 2 * max(heads.keys, ranks)), heads
            assert 0 < backward <= ulysses_forward + ulysses_backward, heads
