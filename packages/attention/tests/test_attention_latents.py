"""Multi-head latent attention: latents are sent and expanded where they are used, under every method."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from fake_ranks import differences, on_fake_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from armillary.attention import (
    AttentionMask,
    AttentionShape,
    Local,
    Method,
    Ring,
    TokenRing,
    Ulysses,
    UPipe,
    WallFacer,
    reference_attention,
)
from armillary.attention.call.calls import AttentionCall
from armillary.attention.call.spec import AttentionSpec
from armillary.attention.internal import MethodOptions, named_method, names
from armillary.attention.kernels import CpuFlash, Scores
from armillary.attention.tiling.latents import TokenSizes
from armillary.core import CommLedger, SequenceLayout
from armillary.core.testing import mesh
from conformance import METHODS, Case, Composition, compositions, drawn
from conformance.draw import Trial, with_latents
from conformance.run import judge
from conformance.tensors import inputs, project_qkv

FULL, CAUSAL = AttentionMask(causal=False), AttentionMask()


def test_random_cases_conform(worlds):
    """Every mask, layout, stride and dtype, on sub-meshes of four ranks; latents sent, expanded before, or chosen."""
    trials = [with_latents(drawn(0, index)) for index in range(40)]
    trials = [trial for trial in trials if trial.composition.ranks <= 4 and not trial.case.compiled]
    verdicts = worlds(4).run(judge, trials)[-1]
    assert not [(trial, verdict) for trial, verdict in zip(trials, verdicts, strict=True) if verdict.failure]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_composition_conforms_with_latents_on_the_wire(worlds, ranks):
    every = [one for one in compositions(list(METHODS), [ranks]) if dict(one.axes).get("ulysses", 1) <= 8]
    documents = AttentionMask(documents=(0, 5, 20, 37))
    sizes = {"head_dim": 12, "value_dim": 8, "latent": (4, 10), "send_latents": True}
    cases = [
        Case(heads=8, kv_heads=4, mask=CAUSAL, seed=0, **sizes),
        Case(heads=9, kv_heads=3, mask=documents, seed=1, **sizes),  # in the last stage, a rank may have no head
    ]
    trials = [Trial(one, cases[1 - i % 2]) for i, one in enumerate(every)]
    verdicts = worlds(ranks).run(judge, trials)[-1]
    assert not [(trial, verdict) for trial, verdict in zip(trials, verdicts, strict=True) if verdict.failure]


def test_compiled_calls_conform(worlds):
    """A method that saves local tensors, and one that saves tensors after an all-to-all."""
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": 12, "value_dim": 8, "latent": (4, 10), "dtype": torch.float32}
    every = Composition.of("ring", ring=2), Composition.of("ulysses", ulysses=2)
    trials = [Trial(one, Case(**sizes, send_latents=True, compiled=True)) for one in every]
    assert [verdict.failure for verdict in worlds(2).run(judge, trials)[-1]] == ["", ""]


class SharedMemory(TorchDispatchMode):
    """Collects our ops that return memory of an input, or the same memory twice."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.namespace == "armillary":
            self.ops += 1
            inputs, outputs = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (args, results))
            addresses = [x.untyped_storage().data_ptr() for x in outputs if x.numel()]
            inputs = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
            if len(set(addresses) - inputs) < len(addresses):
                self.names.append(str(func))
        return results


def shared_results(ranks: int) -> list[str]:
    wrong, forms = list[str](), ("latents", "expanded", "sinks")
    for i, (composition, form) in enumerate(product(compositions(list(METHODS), [ranks]), forms)):
        if (i + torch.distributed.get_rank()) % 2:  # each on two of four ranks, to save time
            continue
        method = composition.build()
        method.send_latents = form == "latents"
        layout = method.sequence_method.layout(61)
        within = method.shards // method.sequence_shards
        tokens = layout.refine(within).sizes[method.shard]
        shapes = (2, tokens, 8, 12), (2, tokens, 1, 4), (2, tokens, 1, 16), (8, 16, 16)
        q, k, v, expansion = (torch.randn(shape, requires_grad=True) for shape in shapes)
        options = {"expansion": expansion}
        if form == "sinks":  # finished keys and values, of which q serves as both
            k, v, options = q, q, {"sinks": torch.zeros(8, requires_grad=True)}
        with SharedMemory() as ops:
            method(q, k, v, mask=CAUSAL, layout=layout, **options).sum().backward()
        wrong += [f"{composition} {form}: {name}" for name in ops.names] + [f"{composition}: no op"] * (ops.ops < 2)
    return wrong


def test_results_of_ops_are_no_inputs():
    assert on_fake_ranks(4, shared_results, 4) == [[]] * 4


# -- bytes ------------------------------------------------------------------------------------------------------------


def tensors_of(method: Method, work: AttentionShape, latent: tuple[int, int]) -> list[Tensor]:
    """Returns random q, rotary keys and latents of this rank's tokens, and the weight of their expansion."""
    within = method.shards // method.sequence_shards
    tokens, keys = (layout.refine(within).sizes[method.shard] for layout in (work.layout, work.key_layout))
    rows = work.head_dim - latent[0] + work.value_dim
    shapes = (
        *((work.batch, tokens, len(work.key_heads), work.head_dim), (work.batch, keys, 1, latent[0])),
        *((work.batch, keys, 1, latent[1]), (work.kv_heads, rows, latent[1])),
    )
    return [torch.randn(shape, dtype=work.dtype, requires_grad=True) for shape in shapes]


def ledger_of(method: Method, work: AttentionShape, latent: tuple[int, int]) -> CommLedger:
    """Runs forward and backward on this rank, and returns the bytes that it sent."""
    *qkv, expansion = tensors_of(method, work, latent)
    options = {"mask": work.mask, "layout": work.layout, "key_layout": work.key_layout}
    with CommLedger() as ledger:
        method(*qkv, **options, expansion=expansion).sum().backward()
    return ledger


def works(ranks: int, dtype: torch.dtype) -> Iterator[tuple[Composition, Method, AttentionShape]]:
    """Yields each composition with its method and a call of latents of 16 numbers, under masks and layouts in turn."""
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 12, "value_dim": 8, "batch": 2, "latent": (4, 16)}
    for i, composition in enumerate(compositions(list(METHODS), [ranks])):
        method, mask = composition.build(), (FULL, CAUSAL, AttentionMask(documents=(0, 7, 30, 61)))[i % 3]
        layout = method.sequence_method.layout(61, ("zigzag", "contiguous", "striped")[i % 3])
        method.send_latents = True
        yield composition, method, AttentionShape.of(layout, mask, **sizes, dtype=dtype, projected=False)


def wrong_bytes(ranks: int) -> list[str]:
    wrong = list[str]()
    for composition, method, work in works(ranks, torch.bfloat16):
        lines = differences(ledger_of(method, work, (4, 16)), composition.comm_plan(work), method.shard)
        wrong += [f"{composition} {line}" for line in lines]
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_composition_sends_the_bytes_of_its_plan(ranks):
    assert on_fake_ranks(ranks, wrong_bytes, ranks) == [[]] * ranks


DEEPSEEK = {"heads": 128, "kv_heads": 128, "head_dim": 192, "value_dim": 128}


def sent_by(name: str, axes: dict[str, int], latent: tuple[int, int] | None, heads: dict[str, int]) -> dict[str, int]:
    """Returns the bytes of rank 0 by axis, forward and backward, with 64 tokens a rank under a full mask."""
    layout = SequenceLayout.zigzag(prod(axes.values()) * 64, axes.get("ring", 1))
    work = AttentionShape.of(layout, FULL, **heads, dtype=torch.bfloat16, latent=latent)
    plan = Composition.of(name, **axes).comm_plan(work)
    return {axis: plan.bytes(0, axis=axis) for axis in ("ring", "ulysses")}


def test_a_ring_sends_one_latent_instead_of_the_keys_of_128_heads():
    expanded, latents = (sent_by("ring-keys", {"ring": 8}, latent, DEEPSEEK)["ring"] for latent in (None, (64, 512)))
    assert latents == 7 * 64 * 576 * (2 + 2 + 4) and expanded * 576 == latents * 128 * 320


def test_latents_cross_between_nodes_once_and_not_for_each_rank_of_the_head_axis():
    axes = {"ring": 2, "ulysses": 4}
    sent = sent_by("usp", axes, (64, 512), DEEPSEEK)
    assert sent["ring"] == 64 * 576 * (2 + 2 + 4)  # this rank's 64 tokens, one hop
    queries = 3 * 64 // 4 * (192 + 128) * 2 * 128  # q and dq, out and dout
    assert sent["ulysses"] == 2 * 3 * 64 * 576 * (2 + 2 + 4) + queries * 2


def test_upipe_sends_latents_once_for_all_stages():
    axes, sizes = {"ring": 4, "ulysses": 4}, {**DEEPSEEK, "heads": 16, "kv_heads": 16}  # 4 stages of 4 heads
    sent, latents = sent_by("upipe+ring", axes, (64, 512), sizes), 64 * 576 * (2 + 2 + 4)
    queries = 3 * 64 // 4 * 16 * 2 * (192 + 128 + 2 * (192 + 128))  # q and out, then also dq and dout
    assert sent == {"ring": 3 * latents, "ulysses": 4 * 3 * latents + queries}


def choice(method: Method, heads: int) -> int:
    layout = method.layout(64, "contiguous")
    layout = layout.coarsen(method.shards // method.sequence_shards)
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": 12, "value_dim": 8}
    work = AttentionShape.of(layout, FULL, **sizes, dtype=torch.float32, projected=False)
    return ledger_of(method, work, (4, 46)).bytes()


def chosen(heads: int) -> list[list[int]]:
    axes = mesh(ring=2, ulysses=2)
    results = []
    ring = Ring(axes["ring"], "keys")
    methods = ring, WallFacer(axes["ring"], 1, backward="keys"), Ulysses(axes["ulysses"]), UPipe(axes["ulysses"])
    around_rings = Ulysses(axes["ulysses"], ring), UPipe(axes["ulysses"], ring, 2), UPipe(axes["tp"], ring, 1)
    for method in (*methods, *around_rings, Ulysses(axes["ulysses"], TokenRing(axes["ring"]))):
        results.append([])
        for method.send_latents in (None, False, True):
            results[-1].append(choice(method, heads))
    return results


@pytest.mark.parametrize("heads", [2, 4, 8, 16])
def test_methods_send_what_is_fewer_bytes(heads):
    """One latent of 46 numbers and a rotary key of 4 weigh as much as 2.5 expanded heads of 12 + 8 numbers."""
    for by_method in on_fake_ranks(4, chosen, heads):
        assert all(automatic == min(expanded, latents) for automatic, expanded, latents in by_method), by_method
        assert heads > 2 or all(expanded <= latents for _, expanded, latents in by_method)


HEADS = 4, 6, 8, 16


def wrong_choices() -> list[str]:
    """Returns the choices of plans that differ from those of methods, in blocks with and without checkpoints."""
    wrong = list[str]()
    for composition, heads in product(compositions([name for name in names() if name in METHODS], [4]), HEADS):
        method, axes = composition.build(), dict(composition.axes)
        choice = named_method(composition.method, MethodOptions(nodes=axes.get("nodes")))
        layout = method.sequence_method.layout(64, "contiguous")
        for latent, dtype in product((10, 30, 46, 80, 120), (torch.float32, torch.bfloat16)):
            sizes = {"heads": heads, "kv_heads": heads // 2, "head_dim": 12, "value_dim": 8, "latent": (4, latent)}
            work = AttentionShape.of(layout, FULL, **sizes, dtype=dtype)
            numbers = TokenSizes(12 + 8, 4 + latent, work.e, work.a)
            for in_block in (method, UPipe.for_method(method)):
                arguments = layout.shards, axes.get("ulysses", 1), in_block is not method
                is_sent = choice.as_sent(work, *arguments).latent is not None
                if is_sent != in_block.sends_latents(work.key_heads, numbers):
                    wrong.append(f"{composition}, {heads} heads, {latent}, {dtype}, {in_block}: plan {is_sent}")
    return wrong


def test_plans_choose_as_methods_do():
    assert not on_fake_ranks(4, wrong_choices)[0]


# -- expansion ---------------------------------------------------------------------------------------------------------


def counted_flops(method: Method, work: AttentionShape, latent: tuple[int, int]) -> tuple[int, int]:
    """Runs a call on this rank, and returns the FLOPs of expansions and their gradients in forward and in backward."""
    q, k, v, weight = (tensor.detach() for tensor in tensors_of(method, work, latent))
    # The call itself, because a counter does not see the products within an op. The kernel is an op of its own.
    spec = AttentionSpec(work.mask, work.layout, work.key_layout, Scores(0.5), work.key_heads, CpuFlash())
    call, products = AttentionCall(method, spec), (torch.ops.aten.mm, torch.ops.aten.bmm)
    with FlopCounterMode(display=False) as forward:
        out, lse, *saved = call.forward((q, k, v, weight), None)
    saved = (*saved, k, v) if saved else (q, k, v, out, lse)
    with FlopCounterMode(display=False) as backward:
        call.backward(torch.randn_like(out), (*saved, weight))
    by_op = (counter.get_flop_counts().get("Global", {}) for counter in (forward, backward))
    forward_flops, backward_flops = (sum(counts.get(product, 0) for product in products) for counts in by_op)
    return forward_flops, backward_flops


def wrong_expansions(ranks: int) -> list[str]:
    wrong = list[str]()
    for i, (composition, method, work) in enumerate(works(ranks, torch.float32)):
        if ranks == 4 and (i + torch.distributed.get_rank()) % 2:  # each on two of four ranks, to save time
            continue
        if ranks < 4:  # expanded before the call: this rank's keys, again in backward unless a method has saved them
            method.send_latents = False
            own_keys = work.layout.refine(method.shards // method.sequence_shards).sizes[method.shard] * 2 * 4
            before = 512 * own_keys, 512 * own_keys * (2 if method.redistributes_inputs else 3)
            wrong += [str(composition)] * (counted_flops(method, work, (4, 16)) != before)
        method.send_latents = True
        plan, counted = composition.comm_plan(work), counted_flops(method, work, (4, 16))
        product = 512  # the FLOPs of one key: a weight of L = 16 columns, and D - Dr + Dv = 16 rows a head
        passes = plan.forward, plan.backward
        expanded = [sum(step.expanded[method.shard] for step in steps if step.expanded) for steps in passes]
        if counted != (planned := (product * expanded[0], 3 * product * expanded[1])):
            wrong.append(f"{composition}: {counted} counted, plan {planned}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_composition_expands_the_keys_of_its_plan(ranks):
    assert on_fake_ranks(ranks, wrong_expansions, ranks) == [[]] * ranks


def expanded_keys(one: Composition, is_backward: bool) -> int:
    """Returns the keys, over heads, that each of 4 ranks expands of 2 rows of 64 tokens without a mask."""
    axes, tokens = dict(one.axes), 64
    if one.method.endswith("token_ring"):  # keys stay on the devices of a node
        tokens //= axes.get("devices", axes.get("ring"))
    elif one.method == "ring-queries" and is_backward:  # keys stay on their ranks
        tokens //= 4
    elif "wallfacer" in one.method and one.method != "wallfacer-1" and axes["ring"] == 4:  # in teams of 2
        tokens //= 2
    # Of 8 query heads, which share 4 key/value heads. A stage of UPipe has one query head.
    return 2 * tokens * (8 if "upipe" in one.method else 4) // axes.get("ulysses", 1)


def wrong_closed_forms() -> list[str]:
    wrong, sizes = list[str](), {"heads": 8, "kv_heads": 4, "head_dim": 12, "value_dim": 8, "batch": 2}
    for one in compositions(list(METHODS), [4]):
        layout = one.build().sequence_method.layout(64)
        plan = one.comm_plan(AttentionShape.of(layout, FULL, **sizes, dtype=torch.float32, latent=(4, 16)))
        for passes, is_backward in ((plan.forward, False), (plan.backward, True)):
            expanded = [sum(step.expanded[rank] for step in passes if step.expanded) for rank in range(4)]
            wrong += [f"{one}: {expanded}"] * (expanded != [expanded_keys(one, is_backward)] * 4)
    return wrong


def test_plans_expand_the_tokens_and_heads_that_a_rank_attends_with():
    assert on_fake_ranks(4, wrong_closed_forms)[0] == []


# -- gradients --------------------------------------------------------------------------------------------------------


HALF = Case(heads=8, kv_heads=4, head_dim=24, value_dim=16, latent=(8, 48), length=61)


def with_gradients(attend: Callable[..., Tensor], leaves: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """Returns out and the gradients of attention with `form` "latents", or "expanded" before the call."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    dout, latents = leaves.pop("dout").detach(), (leaves["q"], leaves["k_rotary"], leaves["v_latent"])
    out = attend(*latents, expansion=leaves["wkv"]) if form == "latents" else attend(*project_qkv(HALF, leaves))
    out.backward(dout.to(out.dtype))
    return {"out": out.detach()} | {name: tensor.grad for name, tensor in leaves.items()}


def errors_in_bfloat16() -> list[tuple[str, str, float, float]]:
    """Returns each method's errors with latents and with expanded keys against float64, of each whole tensor."""
    x = {name: tensor.bfloat16() for name, tensor in inputs(HALF).items()}
    oracle = partial(reference_attention, mask=CAUSAL)
    exact = with_gradients(oracle, {name: tensor.double() for name, tensor in x.items()}, "expanded")
    axes, errors = mesh(ring=4), list[tuple[str, str, float, float]]()
    methods = {str(one): one.build() for one in compositions(list(METHODS), [4])}
    methods["stages on one rank"] = UPipe(axes["tp"], Ring(axes["ring"]), heads_per_stage=2)
    for name, method in methods.items():
        layout, method.send_latents = method.layout(HALF.length), True
        local = {name: tensor if name == "wkv" else layout.take(tensor, method.shard) for name, tensor in x.items()}
        attend = partial(method, mask=CAUSAL, layout=layout)
        results = [with_gradients(attend, local, form) for form in ("latents", "expanded")]
        for tensor, expected in exact.items():
            results_of_ranks = [result[tensor].double() for result in results]
            if tensor == "wkv":  # each rank has its share of the gradient
                for total in results_of_ranks:
                    torch.distributed.all_reduce(total)
                squares = torch.stack([(total - expected).square().sum() for total in results_of_ranks])
            else:
                own = layout.take(expected, method.shard)
                squares = torch.stack([(result - own).square().sum() for result in results_of_ranks])
                torch.distributed.all_reduce(squares)
            errors.append((name, tensor, *(squares.sqrt() / expected.norm()).tolist()))
    return errors


def test_errors_in_bfloat16_are_those_of_expanded_keys(worlds):
    errors = worlds(4).run(errors_in_bfloat16)[0]
    assert not [error for error in errors if error[2] > 1.5 * error[3]]


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_dtypes_that_differ_are_refused_and_autocast_casts_them():
    shapes = (2, 8, 8, 12), (2, 8, 1, 4), (2, 8, 1, 16), (4, 16, 16)
    q, k, v, expansion = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ValueError, match="expansion"):
        Local()(q, k, v, mask=CAUSAL, expansion=expansion.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert Local()(q.bfloat16(), k, v, mask=CAUSAL, expansion=expansion).dtype == torch.bfloat16
