"""Post-training losses on packed trees: loss, metrics and gradients equal those of separate sequences on every mesh."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from armillary.attention import AttentionMask, build_attention
from armillary.attention.post_training import completion_labels, dpo_loss, grpo_loss, policy_gradient_loss
from armillary.core.testing import mesh, relative_error
from armillary.models import Llama, LlamaConfig, initialize, tensor_parallel, token_logprobs

LLAMA = LlamaConfig(vocab_size=31, dim=16, layers=2, heads=4, kv_heads=2, hidden_dim=20)
N = 24
TREES = [
    ((0, 7, 9, 14, 20, N), (-1, 0, 1, 1, 0)),  # a prompt and three completions, two of which share a prefix
    ((0, 3, 9, 12, 16, N), (-1, 0, 0, -1, 3)),  # a prompt with two completions, and a packed sequence
]
SEQUENCES = 6
METHODS = {"ring": {"ring": 4}, "ulysses": {"ulysses": 2}, "usp": {"ring": 2, "ulysses": 2}, "two": {"ring": 2}}
ADVANTAGES = torch.tensor([0.7, -1.1, 0.4, 1.3, -0.2, 0.5], dtype=torch.float64)
PAIRS = torch.tensor([[0, 1], [3, 4], [2, 5]])
LOSSES = ["dpo", "grpo", "policy gradient"]


def model(seed: int = 0) -> Llama:
    model = Llama(LLAMA).double()
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def ids() -> torch.Tensor:
    return torch.randint(31, (2, N), generator=torch.Generator().manual_seed(1))


def loss_of(name, logprobs, reference, sequences, axes=(), entropy=None, **options):
    described = {"statistics": {"entropy": entropy}} | options
    if name == "dpo":
        return dpo_loss(logprobs, reference, sequences, PAIRS, axes, **described)
    if name == "grpo":
        old = reference.detach() * 0.95
        return grpo_loss(
            logprobs,
            sequences,
            ADVANTAGES,
            axes,
            old_logprobs=old,
            reference_logprobs=reference,
            beta=0.1,
            **described,
        )
    return policy_gradient_loss(logprobs, sequences, ADVANTAGES, axes, **described)


def separate(name):
    """Loss, metrics and gradients of separate sequences without padding."""
    policy, reference, tokens = model(), model(1), ids()
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


def packed(name, method=None, layout=None, rows=(0, 1), axes=(), over_tp=None, fsdp=None, **options):
    """Loss, metrics and gradients of packed trees, or of this rank's shard of them."""
    shard, tokens = 0 if method is None else method.shard, ids()[list(rows)]
    mask = AttentionMask.rows([AttentionMask.tree(*TREES[row]) for row in rows])
    positions = torch.stack([mask.positions(N, row) for row in range(len(rows))])
    actual = completion_labels(tokens, mask, layout, shard)
    # Sequence numbers count over the rows of all ranks.
    sequences = actual.sequences + (3 if 0 not in rows else 0)
    if layout is not None:
        tokens, positions = (layout.take(x, shard, 1) for x in (tokens, positions))
    values = []
    policies = model(), model(1)
    for network in policies:
        if method is not None:
            for block in network.model.layers:
                block.attention = method
        if over_tp is not None:
            tensor_parallel(network, over_tp)
        if fsdp is not None:
            for block in network.model.layers:
                fully_shard(block, mesh=fsdp["ring"])
            fully_shard(network, mesh=fsdp["ring"], reshard_after_forward=True)

        def head(hidden, weight, axis=None, vocabulary=None):
            return token_logprobs(
                hidden,
                weight,
                actual.labels,
                actual.positions,
                axis=axis,
                vocabulary=vocabulary,
                chunk=8,
                statistics=True,
            )

        values.append(network(tokens, positions=positions, mask=mask, layout=layout, head=head))
    (logprobs, statistics), (reference, _) = values
    loss, metrics = loss_of(name, logprobs, reference.detach(), sequences, axes, statistics.entropy, **options)
    loss.backward()
    return loss.detach(), metrics, [p.grad for p in policies[0].parameters()]


def check(actual, exact):
    assert relative_error(actual[0], exact[0]) < 1e-11
    assert actual[1].keys() == exact[1].keys()
    for name, metric in actual[1].items():
        assert float(metric) == pytest.approx(float(exact[1][name]), rel=1e-9, abs=1e-12), name
    assert max(relative_error(a, b) for a, b in zip(actual[2], exact[2], strict=True)) < 1e-9


@pytest.mark.parametrize("name", LOSSES)
def test_packed_trees_equal_separate_sequences(name):
    check(packed(name), separate(name))


def on_meshes():
    """Loss, metrics and gradients by (loss, mesh), summed over ranks with other tokens or rows.

    Each loss runs on two of the four meshes: it gets log-probabilities, which do not depend on the mesh.
    """
    actual = {}
    for i, name in enumerate(LOSSES):
        for method_name, sizes in list(METHODS.items())[i % 2 :: 2]:
            ranks = sizes.get("ring", 1) * sizes.get("ulysses", 1)
            over = mesh(shard=4 // ranks, **{"ring": 1, "ulysses": 1} | sizes)
            method = build_attention("ring" if method_name == "two" else method_name, over)
            layout = method.layout(N, "zigzag")
            rows = [dist.get_rank() // ranks] if ranks < 4 else [0, 1]
            axes = method if ranks == 4 else [over["shard"], over["ring"], over["ulysses"]]
            loss, metrics, gradients = packed(name, method, layout, rows, axes)
            for x in gradients:
                dist.all_reduce(x)
            actual[name, method_name] = loss, metrics, gradients
    return actual


def test_every_mesh_equals_one_rank(worlds):
    exact = {name: separate(name) for name in LOSSES}
    for actual in worlds(4).run(on_meshes):
        assert {method for _, method in actual} == set(METHODS)
        for (name, _), result in actual.items():
            check(result, exact[name])


def under_fsdp():
    """FSDP2 shards blocks and head and reshards them after forward, so backward gathers again."""
    over = mesh(ring=4)
    method = build_attention("ring", over)
    loss, metrics, gradients = packed("grpo", method, method.layout(N), axes=method, fsdp=over, gradients="averaged")
    return loss, metrics, [x.full_tensor() for x in gradients]


def test_fsdp2_equals_one_rank(worlds):
    exact = separate("grpo")
    for actual in worlds(4).run(under_fsdp):
        check(actual, exact)


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


def test_tensor_parallelism_equals_one_rank(worlds):
    exact = separate("grpo")
    for actual in worlds(4).run(with_tensor_parallelism):
        check(actual, exact)
