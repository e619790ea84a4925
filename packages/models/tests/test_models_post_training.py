"""Losses on packed trees: loss, metrics and gradients equal those of separate sequences, on every mesh."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
from hybrid_models import HYBRID
from torch.distributed.fsdp import fully_shard

from armillary.attention import AttentionMask, build_attention
from armillary.attention.post_training import completion_labels, dpo_loss, grpo_loss, policy_gradient_loss
from armillary.core.testing import mesh, relative_error
from armillary.models import (
    Checkpointing,
    LabelTriples,
    Llama,
    LlamaConfig,
    initialize,
    linear_token_loss,
    tensor_parallel,
    token_logprobs,
)

# A window shorter than some paths, from the second layer on.
LLAMA = LlamaConfig(vocab_size=31, dim=16, layers=3, heads=4, kv_heads=2, hidden_dim=20, window=4, window_from=1)
STATES = replace(HYBRID, vocab_size=31, dim=16, mixers=("delta_rule", "attention", "mamba2"))
N = 24
TREES = [
    ((0, 7, 9, 14, 20, N), (-1, 0, 1, 1, 0)),  # a prompt and three completions, two of which share a prefix
    ((0, 3, 9, 12, 16, N), (-1, 0, 0, -1, 3)),  # a prompt with two completions, and a packed sequence
]
ADVANTAGES = torch.tensor([0.7, -1.1, 0.4, 1.3, -0.2, 0.5], dtype=torch.float64)
WEIGHTS = torch.tensor([0.25, 1, 3.5, 1, 2, 0.5], dtype=torch.float64)
PAIRS = torch.tensor([[0, 1], [3, 4], [2, 5]])
MESHES = [
    # Loss, model, checkpoint policy, method, axes, layout.
    ("dpo", LLAMA, "none", "usp", {"ring": 2, "ulysses": 2}, "zigzag"),
    ("grpo", LLAMA, "none", "ulysses", {"ulysses": 2}, "zigzag"),
    ("policy gradient", LLAMA, "none", "ring", {"ring": 2}, "zigzag"),
    ("weighted", LLAMA, "layer", "usp", {"ring": 2, "ulysses": 2}, "striped"),
    ("weighted", STATES, "none", "ring", {"ring": 4}, "zigzag"),
    ("weighted", STATES, "layer", "usp", {"ring": 2, "ulysses": 2}, "contiguous"),
]
"""The losses get log-probabilities, which do not depend on the mesh, so each runs on one."""


def model(seed: int = 0, config: LlamaConfig = LLAMA) -> Llama:
    model = Llama(config).double()
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


def ids() -> torch.Tensor:
    return torch.randint(31, (2, N), generator=torch.Generator().manual_seed(1))


def loss_of(name, logprobs, reference, sequences, axes=(), entropy=None, **options):
    described = {"statistics": {"entropy": entropy}} | options
    if name == "weighted":
        return -(WEIGHTS[sequences] * logprobs).sum(), {}
    if name == "dpo":
        return dpo_loss(logprobs, reference, sequences, PAIRS, axes, **described)
    if name == "grpo":
        old = reference.detach() * 0.95
        return grpo_loss(
            logprobs, sequences, ADVANTAGES, axes, old_logprobs=old, reference_logprobs=reference, beta=0.1, **described
        )
    return policy_gradient_loss(logprobs, sequences, ADVANTAGES, axes, **described)


def separate(name, config=LLAMA):
    """Loss, metrics and gradients of separate sequences without padding."""
    policy, reference, tokens = model(0, config), model(1, config), ids()
    columns = []
    sequence = 0
    for row, (ends, parents) in enumerate(TREES):
        for leaf in sorted({*range(len(parents))} - {*parents}):
            path, segment = [], leaf
            while segment >= 0:
                path = [segment, *path]
                segment = parents[segment]
            at = torch.cat([torch.arange(*list(pairwise(ends))[s]) for s in path])
            prompt = ends[path[0] + 1] - ends[path[0]]
            for_labels = tokens[row, at[prompt:]]
            values = []
            for network in (policy, reference):
                distribution = network(tokens[row, at][None])[0, prompt - 1 : -1].log_softmax(-1)
                values.append(distribution.gather(1, for_labels[:, None])[:, 0])
                if network is policy:
                    values.append(-(distribution.exp() * distribution).sum(1).detach())
            columns.append((*values, torch.full_like(for_labels, sequence)))
            sequence += 1
    logprobs, entropy, reference_logprobs, sequences = map(torch.cat, zip(*columns, strict=True))
    loss, metrics = loss_of(name, logprobs, reference_logprobs.detach(), sequences, entropy=entropy)
    loss.backward()
    return loss.detach(), metrics, [p.grad for p in policy.parameters()]


def packed(name, method=None, layout=None, rows=(0, 1), axes=(), over_tp=None, fsdp=None, config=LLAMA, policy="none"):
    """Loss, metrics and gradients of packed trees, or of this rank's shard of them."""
    shard, tokens = 0 if method is None else method.shard, ids()[list(rows)]
    mask = AttentionMask.rows([AttentionMask.tree(*TREES[row]) for row in rows])
    positions = torch.stack([mask.positions(N, row) for row in range(len(rows))])
    actual = completion_labels(tokens, mask, layout, shard)
    # Sequence numbers count over the rows of all ranks.
    sequences = actual.sequences + (3 if 0 not in rows else 0)
    if layout is not None:
        tokens, positions = (layout.take(x, shard, 1) for x in (tokens, positions))

    def networks(seed):
        network = model(seed, config)
        for block in network.model.layers if method is not None else ():
            block.attention = method
        Checkpointing(policy).apply(network)
        if over_tp is not None:
            tensor_parallel(network, over_tp)
        for module in (*network.model.layers, network) if fsdp is not None else ():
            fully_shard(module, mesh=fsdp["ring"], reshard_after_forward=True)
        return network

    def logprobs_of(hidden, weight, axis=None, vocabulary=None):
        options = {"axis": axis, "vocabulary": vocabulary, "chunk": 8, "statistics": True}
        return token_logprobs(hidden, weight, actual.labels, actual.positions, **options)

    def weighted(hidden, weight):
        triples = LabelTriples(actual.positions, actual.labels, WEIGHTS[sequences], tuple(tokens.shape))
        return linear_token_loss(hidden, weight, triples)[0]

    trained, call = networks(0), {"positions": positions, "mask": mask, "layout": layout}
    if name == "weighted":
        loss, metrics = trained(tokens, **call, head=weighted), {}
    else:
        (logprobs, statistics), (reference, _) = (n(tokens, **call, head=logprobs_of) for n in (trained, networks(1)))
        options = {} if fsdp is None else {"gradients": "averaged"}
        loss, metrics = loss_of(name, logprobs, reference.detach(), sequences, axes, statistics.entropy, **options)
    loss.backward()
    return loss.detach(), metrics, [p.grad for p in trained.parameters()]


def check(actual, exact):
    assert relative_error(actual[0], exact[0]) < 1e-11
    assert actual[1].keys() == exact[1].keys()
    for name, metric in actual[1].items():
        assert float(metric) == pytest.approx(float(exact[1][name]), rel=1e-9, abs=1e-12), name
    assert max(relative_error(a, b) for a, b in zip(actual[2], exact[2], strict=True)) < 1e-9


@pytest.mark.parametrize(
    ("name", "config", "policy"),
    [
        *(("dpo", LLAMA, "none"), ("grpo", LLAMA, "none"), ("policy gradient", LLAMA, "none")),
        *(("weighted", config, policy) for config in (LLAMA, STATES) for policy in ("none", "layer")),
    ],
    ids=lambda x: x if isinstance(x, str) else "attention" if x == LLAMA else "hybrid",
)
def test_packed_trees_equal_separate_sequences(name, config, policy):
    check(packed(name, config=config, policy=policy), separate(name, config))


def on_meshes():
    """Loss, metrics and gradients, summed over ranks with other tokens or rows."""
    actual = []
    for name, config, policy, method_name, sizes, kind in MESHES:
        ranks = prod(sizes.values())
        over = mesh(shard=4 // ranks, **{"ring": 1, "ulysses": 1} | sizes)
        method = build_attention(method_name, over)
        rows = [dist.get_rank() // ranks] if ranks < 4 else [0, 1]
        axes = method if ranks == 4 else [over["shard"], over["ring"], over["ulysses"]]
        layout = method.layout(N, kind)
        loss, metrics, gradients = packed(name, method, layout, rows, axes, config=config, policy=policy)
        for x in (*gradients, *([loss] if name == "weighted" else [])):
            dist.all_reduce(x)
        actual.append((loss, metrics, gradients))
    return actual


def under_fsdp():
    """FSDP2 shards blocks and head and reshards them after forward, so backward gathers again."""
    over = mesh(ring=4)
    method = build_attention("ring", over)
    loss, metrics, gradients = packed("grpo", method, method.layout(N), axes=method, fsdp=over)
    return loss, metrics, [x.full_tensor() for x in gradients]


def with_tensor_parallelism():
    over = mesh(ring=2, tp=2)
    method = build_attention("ring", over)
    loss, metrics, gradients = packed("grpo", method, method.layout(N), (0, 1), method, over["tp"])
    full = []
    for x in gradients:
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        dist.all_reduce(x, group=over["ring"].get_group())
        full.append(x)
    return loss, metrics, full


def on_ranks():
    return on_meshes(), under_fsdp(), with_tensor_parallelism()


def test_every_mesh_equals_one_rank(worlds):
    exact = [separate(name, config) for name, config, *_ in MESHES]
    for meshes, *sharded in worlds(4).run(on_ranks):
        for actual, expected in zip(meshes, exact, strict=True):
            check(actual, expected)
        for actual in sharded:
            check(actual, exact[1])
