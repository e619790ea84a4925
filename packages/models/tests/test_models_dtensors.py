"""Models and losses on DTensors of tokens: placements are kept, values equal one rank's."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from armillary.attention import Local, build_attention
from armillary.core import SequenceLayout, distribute_sequence, gather_sequence
from armillary.core.testing import Dispatched, mesh, relative_error
from armillary.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    initialize,
    linear_argmax,
    linear_token_loss,
    parallelize,
    token_loss,
)

ROWS, N, EXACT = 3, 13, 1e-10
"""Uneven shards: 2 and 1 rows, and 4, 3, 3 and 3 tokens over ring x ulysses."""
LLAMA = LlamaConfig(vocab_size=15, dim=16, layers=2, heads=4, kv_heads=4, hidden_dim=24)
LEARNED = GPTConfig(vocab_size=15, dim=16, layers=2, heads=4, max_positions=N)

CASES: dict[str, tuple[dict[str, int], str, LlamaConfig | GPTConfig, bool]] = {
    "ring x ulysses": ({"ring": 2, "ulysses": 2}, "usp", LLAMA, False),
    "ring x tp": ({"ring": 2, "tp": 2}, "ring", LEARNED, False),
    "ring x tp with FSDP2": ({"ring": 2, "tp": 2}, "ring", LLAMA, True),
    "ring x shard with FSDP2": ({"ring": 2, "shard": 2}, "ring", replace(LLAMA, tied_embeddings=True), True),
}
"""(axes, attention, model, True if FSDP2 shards parameters)."""


def model_of(config: LlamaConfig | GPTConfig) -> Llama | GPT:
    model = (Llama(config) if isinstance(config, LlamaConfig) else GPT(config)).double()
    initialize(model, 0)
    return model


def ids_and_labels() -> tuple[Tensor, Tensor]:
    """ids and labels [ROWS, N]"""
    ids = torch.randint(15, (ROWS, N + 1), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, :4] = -100
    return ids[:, :-1], labels


def axes_of(over: DeviceMesh) -> DeviceMesh:
    """The axes of more than one rank: with all five, torch takes seconds to place a quotient of two DTensors."""
    return over[tuple(name for place, name in enumerate(over.mesh_dim_names) if over.size(place) > 1)]


def placed(x: Tensor, layout: SequenceLayout, over: DeviceMesh, dim: int = 1) -> DTensor:
    """Shards tokens over the sequence axes and rows over `shard`."""
    over = axes_of(over)
    x, rows = distribute_sequence(x, layout, over, dim), Shard(0) if dim == 1 else Replicate()
    names = zip(over.mesh_dim_names, x.placements, strict=True)
    return x.redistribute(placements=[rows if name == "shard" else old for name, old in names])


def with_head(model: nn.Module, ids: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return model(ids, head=partial(linear_token_loss, labels=labels), **options)


def with_logits(model: nn.Module, ids: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return token_loss(model(ids, **options), labels)


def with_whole_logits(model: nn.Module, ids: Tensor, labels: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """The loss of logits and labels gathered over the sequence."""
    logits, layout = model(ids, **options), options.get("layout")
    return token_loss(*(x if layout is None else gather_sequence(x, layout) for x in (logits, labels)))


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: nn.Module, loss: Tensor, over: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Returns the loss and all gradients, summed over `over` (None: FSDP2 has summed them)."""
    loss.backward()
    actual = {"loss": whole(loss.detach())}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if over is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=over.get_group())
        actual[name] = whole(grad)
    model.zero_grad()
    return actual


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Relative error, or absolute for gradients that are only rounding: key biases do not change attention."""
    return relative_error(actual, expected) if expected.norm() > 1e-12 else float(actual.norm())


def errors_of_case(name: str) -> dict[str, float]:
    """Relative errors of logits, losses and gradients."""
    axes, attention, config, sharded = CASES[name]
    over, alone = mesh(**axes), model_of(config)
    attend, model = build_attention(attention, over), model_of(config)
    parallelize(model, over, attention=attend, precision=torch.float64 if sharded else None)
    layout = attend.layout(N)
    ids, labels = (placed(x, layout, over) for x in ids_and_labels())
    positions = placed(torch.arange(N), layout, over, 0) if sharded else None
    summing = None if sharded else over["ring", "ulysses"]._flatten("tokens")
    logits = model(ids, positions=positions, layout=layout)
    assert logits.placements == ids.placements and logits.shape == (ROWS, N, 15)
    errors = {"logits": relative_error(gather_sequence(logits.detach(), layout), alone(ids_and_labels()[0]).detach())}
    sums = tuple(Partial() if isinstance(actual, Shard) else actual for actual in ids.placements)
    for way in (with_head, with_logits, with_whole_logits):
        total, count = way(model, ids, labels, positions=positions, layout=layout)
        if way is not with_whole_logits:
            assert total.placements == count.placements == sums and total.shape == count.shape == ()
        actual = step(model, total / count, summing)
        expected = step(alone, torch.div(*way(alone, *ids_and_labels())))
        assert actual.keys() == expected.keys()
        errors |= {f"{way.__name__}: {key}": error_of(actual[key], expected[key]) for key in expected}
    return errors


def errors_of_cases() -> dict[str, dict[str, float]]:
    return {name: errors_of_case(name) for name in CASES}


def test_losses_and_gradients_equal_one_rank(worlds):
    for rank in worlds(4).run(errors_of_cases):
        for name, errors in rank.items():
            assert max(errors.values()) < EXACT, (name, {key: error for key, error in errors.items() if error > EXACT})


def errors_of_other_inputs() -> list[float]:
    """Errors with positions in other forms, with local labels, and of predictions."""
    over, (ids, labels) = mesh(ring=2, tp=2), ids_and_labels()
    alone, model = model_of(LLAMA), model_of(LLAMA)
    attend = build_attention("ring", over)
    parallelize(model, over, attention=attend, precision=None)
    layout = attend.layout(N)
    rows = torch.arange(N).expand(ROWS, N)
    everyone = torch.arange(N)
    expected, x = alone(ids), placed(ids, layout, over)
    errors = [
        relative_error(gather_sequence(model(x, positions=positions, layout=layout), layout), expected)
        for positions in (placed(rows, layout, over), placed(everyone, layout, over, 0), layout.positions(attend.shard))
    ]
    local_head = partial(linear_token_loss, labels=layout.take(labels, attend.shard))
    actual = model(x, layout=layout, head=local_head)
    errors += [relative_error(*pair) for pair in zip(map(whole, actual), token_loss(expected, labels), strict=True)]
    head = partial(linear_argmax, labels=placed(labels, layout, over))
    chosen = gather_sequence(model(x, layout=layout, head=head), layout)
    return [*errors, float((chosen != expected.argmax(2).where(labels != -100, -100)).sum())]


def test_positions_and_labels_may_be_dtensors_or_local(worlds):
    for errors in worlds(4).run(errors_of_other_inputs):
        assert max(errors) < EXACT, errors


def errors_of_sharded_logits() -> list[float]:
    """Errors of the loss and gradient of logits sharded by vocabulary."""
    over, (_, labels) = mesh(ring=2, tp=2), ids_and_labels()
    layout = SequenceLayout.zigzag(N, 2)
    logits = torch.randn(ROWS, N, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, x = logits.clone().requires_grad_(), placed(logits, layout, over)
    x = x.redistribute(placements=[*x.placements[:-1], Shard(2)]).detach().requires_grad_()
    total, _ = token_loss(x, placed(labels, layout, over), axis=over["tp"])
    total.full_tensor().backward()
    expected_loss, _ = token_loss(expected, labels)
    expected_loss.backward()
    return [
        relative_error(total.full_tensor(), expected_loss),
        relative_error(gather_sequence(x.grad, layout), expected.grad),
    ]


def test_the_vocabulary_may_be_sharded(worlds):
    for errors in worlds(4).run(errors_of_sharded_logits):
        assert max(errors) < EXACT, errors


def refusals() -> list[str]:
    cut, rows, usp = mesh(ring=2, tp=2), mesh(ring=2, shard=2), mesh(ring=2, ulysses=2)
    ids, labels = ids_and_labels()
    layout = SequenceLayout.zigzag(N, 2)
    tensor, plain, heads, opaque = (Llama(LLAMA).double() for _ in range(4))
    parallelize(tensor, cut, attention=build_attention("ring", cut), precision=None)
    parallelize(plain, rows, attention=build_attention("ring", rows), precision=None)
    parallelize(heads, usp, attention=build_attention("usp", usp), precision=None)
    for layer in opaque.model.layers:
        layer.attention = lambda q, k, v, **options: Local()(q, k, v, **options)
    x, positions = placed(ids, layout, cut), placed(torch.arange(N), layout, cut, 0)
    local_ids = layout.take(ids, cut["ring"].get_local_rank())
    logits = placed(torch.zeros(ROWS, N, 15), layout, cut)
    hidden = placed(torch.zeros(ROWS, N, 16), layout, cut)

    def distributed(over: DeviceMesh, ids: Tensor = ids, **changed: object) -> DTensor:
        over = axes_of(over)
        placements = [changed.get(name, Replicate()) for name in over.mesh_dim_names]
        return distribute_tensor(ids, over, placements, src_data_rank=None)

    calls: list[Callable[[], object]] = [
        lambda: plain(distributed(rows, shard=Shard(0)), layout=layout),
        lambda: tensor(distributed(cut, ring=Shard(1), tp=Shard(0)), layout=layout),
        lambda: plain(distributed(rows, ring=Shard(1)), layout=layout),
        lambda: plain(distributed(rows, ring=Shard(1), shard=Shard(1)), layout=layout),
        lambda: heads(distributed(usp, ring=Shard(1), ulysses=Shard(0))),
        lambda: tensor(local_ids, positions=positions, layout=layout),
        lambda: tensor(x, positions=distributed(cut), layout=layout),
        lambda: tensor(distribute_tensor(ids, cut["tp"], [Replicate()], src_data_rank=None), layout=layout),
        lambda: plain(distributed(rows, ids[:1], ring=Shard(1), shard=Shard(0)), layout=layout),
        lambda: heads(
            distributed(usp, ids[:, :10], ring=Shard(1), ulysses=Shard(1)), layout=SequenceLayout.zigzag(10, 4)
        ),
        lambda: opaque(x),
        lambda: tensor(x.unsqueeze(0), layout=layout),
        lambda: token_loss(logits, placed(labels, layout, rows)),
        lambda: token_loss(logits, layout.take(labels, 0)),
        lambda: token_loss(logits, x, axis=cut["tp"]),
        lambda: linear_token_loss(hidden, torch.zeros(8, 16), x, axis=cut["tp"], vocabulary=15),
        lambda: tensor.model(x, layout=layout),
        lambda: tensor(x),
    ]
    messages: list[str] = []
    for call in calls:
        with Dispatched() as dispatched, pytest.raises(ValueError) as refused:
            call()
        assert not dispatched.sent
        messages.append(str(refused.value))
    return messages


WANTED = [
    r"ids is Replicate\(\) on axis 'ring' .*Shard\(dim=1\)",
    r"ids is Shard\(dim=0\) on axis 'tp' .*Replicate\(\)",
    r"ids is Replicate\(\) on axis 'shard' .*Shard\(dim=0\)",
    r"ids is Shard\(dim=1\) on axis 'shard' .*Shard\(dim=0\).*Replicate\(\)",
    r"ids is Shard\(dim=0\) on axis 'ulysses' .*Shard\(dim=1\)",
    r"positions .*DTensor.*ids",
    r"positions .*DTensor.*Shard\(dim=1\).*mesh",
    r"axis 'ring'",
    r"1 rows of .*\(1, 0\)",
    r"\(3, 3, 2, 2\).* 10 .* \(3, 2, 3, 2\)",
    r"attention .*function",
    r"ids .*\[B, N\].*\[1, 3, 13\]",
    r"logits .*DTensor.*mesh",
    r"labels .*DTensors",
    r"logits .*DTensor.*Shard\(dim=2\)",
    r"hidden .*DTensor.*'tp'",
    r"ids or positions .*DTensor",
    r"2 .*layout=",
]


def test_other_placements_are_refused_on_every_rank_before_communication(worlds):
    for messages in worlds(4).run(refusals):
        assert len(messages) == len(WANTED)
        for message, expected in zip(messages, WANTED, strict=True):
            assert re.search(expected, message), (expected, message)


def labels_on_another_mesh() -> str:
    """Only the head sees its labels, so the model checks the loss that the head returns."""
    over, (ids, labels) = mesh(ring=2, tp=2), ids_and_labels()
    model, attend = model_of(LLAMA), build_attention("ring", over)
    parallelize(model, over, attention=attend, precision=None)
    layout = attend.layout(N)
    head = partial(linear_token_loss, labels=distribute_sequence(labels, layout, over["ring"]))
    with pytest.raises(ValueError) as refused:
        model(placed(ids, layout, over), layout=layout, head=head)
    return str(refused.value)


def test_labels_of_a_head_are_placed_like_ids(worlds):
    for messages in worlds(4).run(labels_on_another_mesh):
        assert re.search(r"the result is DTensor \[\] over \(ring .* it must be .* on the same mesh", messages), (
            messages
        )
