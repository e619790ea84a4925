"""Packed trees of sequences with shared prefixes: losses and gradients equal those of separate sequences."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from armillary.attention import AttentionMask, build_attention
from armillary.core.testing import mesh, relative_error
from armillary.models import Checkpointing, LabelTriples, Llama, LlamaConfig, StateConfig, initialize, linear_token_loss

# A window shorter than some paths, from the second layer on.
LLAMA = LlamaConfig(vocab_size=31, dim=16, layers=3, heads=4, kv_heads=2, hidden_dim=20, window=4, window_from=1)
N = 29
ROWS = [
    ((0, 7, 9, 14, 15, 20, 26, N), (-1, 0, 0, 2, 2, 0, -1)),  # a tree followed by a document
    ((0, 3, 5, 12, 16, 27, N), (-1, 0, 1, 1, -1, 4)),
]
WEIGHTS = [(3.5, 1, 1.5, 0.5, 1, 1, 1), (2, 2, 1, 1, 0.25, 0.25)]
"""Weights of the labels in each segment: the sums of the weights of the sequences that share it."""
METHODS = {
    "ring": {"ring": 4},
    "token_ring": {"ring": 4},
    "ulysses": {"ulysses": 2, "ring": 1},
    "usp": {"ring": 2, "ulysses": 2},
}


HYBRID = LlamaConfig(
    vocab_size=31,
    dim=16,
    layers=3,
    heads=4,
    kv_heads=2,
    hidden_dim=20,
    mixers=("delta_rule", "attention", "mamba2"),
    states=StateConfig(heads=4, key_heads=2, key_dim=6, value_dim=5),
)


def model(config: LlamaConfig = LLAMA) -> Llama:
    llama = Llama(config).double()
    initialize(llama, 0)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return llama


def ids() -> torch.Tensor:
    return torch.randint(31, (2, N), generator=torch.Generator().manual_seed(1))


def mask() -> AttentionMask:
    return AttentionMask.rows([AttentionMask.tree(*row) for row in ROWS])


def labels_of(row: int) -> dict[tuple[int, int], float]:
    """Weights by (predicting position, label position)."""
    ends, parents = ROWS[row]
    actual = {}
    for s, (start, stop) in enumerate(pairwise(ends)):
        actual |= {(at - 1, at): WEIGHTS[row][s] for at in range(start + 1, stop)}
        if parents[s] >= 0:
            actual[ends[parents[s] + 1] - 1, start] = WEIGHTS[row][s]
    return actual


def triples(layout=None, shard=0) -> LabelTriples:
    positions = list(range(N)) if layout is None else layout.positions(shard).tolist()
    place, tokens = {position: i for i, position in enumerate(positions)}, ids()
    actual = [
        (row * len(positions) + place[at], int(tokens[row, label]), weight)
        for row in range(2)
        for (at, label), weight in labels_of(row).items()
        if at in place
    ]
    return LabelTriples(*(torch.tensor(column) for column in zip(*actual, strict=True)), (2, len(positions)))


def separate(config: LlamaConfig = LLAMA) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of separate sequences: one forward for the path to each segment."""
    llama, tokens, total = model(config), ids(), torch.zeros((), dtype=torch.float64)
    for row, (ends, parents) in enumerate(ROWS):
        for s in range(len(parents)):
            path, at = [], s
            while at >= 0:
                path = [*range(ends[at], ends[at + 1]), *path]
                at = parents[at]
            logits = llama(tokens[row, path][None])[0]
            first = len(path) - (ends[s + 1] - ends[s])  # first token of this segment
            predicted = range(max(first, 1), len(path))
            losses = F.cross_entropy(
                logits[[i - 1 for i in predicted]], tokens[row, path][list(predicted)], reduction="sum"
            )
            total = total + WEIGHTS[row][s] * losses
    total.backward()
    return total.detach(), [p.grad for p in llama.parameters()]


def packed(method=None, layout=None, policy="none", config=LLAMA) -> tuple[torch.Tensor, list[torch.Tensor]]:
    llama = model(config)
    if method is not None:
        for block in llama.model.layers:
            block.attention = method
    Checkpointing(policy).apply(llama)
    shard = 0 if method is None else method.shard
    actual, tokens = triples(layout, shard), ids()
    positions = torch.stack([mask().positions(N, row) for row in range(2)])
    if layout is not None:
        tokens, positions = (layout.take(x, shard, 1) for x in (tokens, positions))
    total, count = llama(
        tokens,
        positions=positions,
        mask=mask(),
        layout=layout,
        head=lambda hidden, weight: linear_token_loss(hidden, weight, actual),
    )
    total.backward()
    assert count > 0
    return total.detach(), [p.grad for p in llama.parameters()]


def error(actual, exact) -> float:
    return max(relative_error(a, b) for a, b in zip([actual[0], *actual[1]], [exact[0], *exact[1]], strict=True))


def errors_by_method(config: LlamaConfig, second_layout: str, exact) -> dict[str, float]:
    """Errors by method, with one of two layouts and policies in turn; losses and gradients are summed over ranks."""
    errors = {}
    for i, (name, axes) in enumerate(METHODS.items()):
        ranks = axes["ring"] * axes.get("ulysses", 1)
        over = mesh(**axes | {"replicate": 4 // ranks})
        method = build_attention(name, over)
        kind, policy = (("zigzag", "none"), (second_layout, "layer"))[i % 2]
        total, grads = packed(method, method.layout(N, kind), policy, config)
        for x in (total, *grads):
            dist.all_reduce(x)
        scale = ranks / 4
        errors[f"{name} {kind} {policy}"] = error((total * scale, [x * scale for x in grads]), exact)
    return errors


@pytest.mark.parametrize("config", [LLAMA, HYBRID], ids=["attention", "hybrid"])
def test_trees_equal_separate_sequences(config):
    exact = separate(config)
    for policy in ("none", "layer"):
        assert error(packed(policy=policy, config=config), exact) < 1e-12


@pytest.mark.parametrize(
    "config, second_layout", [(LLAMA, "striped"), (HYBRID, "contiguous")], ids=["attention", "hybrid"]
)
def test_trees_equal_separate_sequences_under_every_method(worlds, config, second_layout):
    for errors in worlds(4).run(errors_by_method, config, second_layout, separate(config)):
        assert len(errors) == len(METHODS) and max(errors.values()) < 1e-9, errors
