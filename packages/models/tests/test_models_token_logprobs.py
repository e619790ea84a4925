"""Log-probabilities of labels compared with log_softmax in float64, on one rank and with a sharded vocabulary."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_models_linear_loss import Allocations
from test_models_vocabulary import axis_of, rows_of

from armillary.core import CommLedger
from armillary.core.testing import relative_error
from armillary.models import interleaved_shard, token_logprobs

E, V = 6, 13
SIZES = [(2, 8), (3, 4), (1, 12)]
"""(B, T)."""


def inputs(rows, tokens, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in ((rows, tokens, E), (V, E), (V,))
    )
    labels = torch.randint(V, (rows, tokens), generator=draw)
    labels[0, 1] = -100
    # Four labels at one position, none at most others, in random order.
    positions = torch.tensor([5, 0, 5, rows * tokens - 1, 5, 3, 5])
    return hidden, weight, bias, labels, positions, torch.randint(V, positions.shape, generator=draw)


def exact(rows, tokens, listed, temperature):
    """Log-probabilities, statistics, and gradients for a random upstream gradient."""
    hidden, weight, bias, labels, positions, listed_labels = inputs(rows, tokens)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*leaves) / temperature
    if listed:
        logits, labels = logits.flatten(0, 1)[positions], listed_labels
    log_probabilities, valid = logits.log_softmax(-1), labels != -100
    logprobs = log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(valid, 0)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    is_top = logits.argmax(-1) == labels
    gradients = torch.autograd.grad(logprobs, leaves, upstream(logprobs))
    return [logprobs.detach(), entropy.where(valid, 0), logits.mean(-1).where(valid, 0), is_top & valid], gradients


def upstream(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)


def computed(hidden, weight, bias, labels, positions, listed_labels, listed, **options):
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    chosen = (listed_labels, positions) if listed else (labels,)
    logprobs, statistics = token_logprobs(*leaves[:2], *chosen, bias=leaves[2], statistics=True, **options)
    assert not any(x.requires_grad for x in statistics)
    return [logprobs.detach(), *statistics], torch.autograd.grad(logprobs, leaves, upstream(logprobs))


def largest_error(actual, expected):
    assert torch.equal(actual[0][3], expected[0][3])
    pairs = [*zip(actual[0][:3], expected[0][:3], strict=True), *zip(actual[1], expected[1], strict=True)]
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("listed", [False, True])
def test_log_probabilities_and_gradients_match_log_softmax(listed):
    for (rows, tokens), chunk in product(SIZES, (None, 1, 5)):
        actual = computed(*inputs(rows, tokens), listed, chunk=chunk, temperature=0.7)
        assert largest_error(actual, exact(rows, tokens, listed, 0.7)) < 1e-13


def on_ranks():
    axis, size = axis_of(), dist.get_world_size()
    actual = {}
    for rows, tokens in SIZES:
        for listed in (False, True):
            hidden, weight, bias, *labels = inputs(rows, tokens)
            shards = rows_of(weight), rows_of(bias)
            with CommLedger() as ledger:
                actual[rows, tokens, listed] = computed(
                    interleaved_shard(hidden, axis).clone(), *shards, *labels, listed, chunk=4, axis=axis, vocabulary=V
                )
            if not listed:
                n, w = rows * tokens // size, 8
                gathered = (size - 1) * (n * E * w + (5 * size * n) * w)
                assert dict(ledger.entries) == {
                    ("tp", "all_gather", "forward"): gathered,
                    ("tp", "all_gather", "backward"): (size - 1) * n * E * w,
                    ("tp", "reduce_scatter", "backward"): (size - 1) * n * E * w,
                }
    return actual


def test_a_sharded_vocabulary_equals_one_rank(worlds):
    ranks = worlds(4).run(on_ranks)
    for case in ranks[0]:
        hiddens, weights, biases = zip(*(rank[case][1] for rank in ranks), strict=True)
        full = torch.stack(hiddens, 2).flatten(1, 2), torch.cat(weights), torch.cat(biases)
        for rank in ranks:
            assert all(torch.equal(a, b) for a, b in zip(rank[case][0], ranks[0][case][0], strict=True))
            assert largest_error((rank[case][0], full), exact(*case, 1.0)) < 1e-13


def test_bfloat16_is_summed_in_float32():
    hidden, weight, bias, labels, *_ = inputs(2, 512)
    leaves = [x.bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    logprobs = token_logprobs(*leaves[:2], labels, bias=leaves[2], chunk=64)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = F.linear(*wide).log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0].where(labels >= 0, 0)
    assert logprobs.dtype == torch.float32 and relative_error(logprobs, expected) < 4e-3
    actual, exact = (torch.autograd.grad(x, y, upstream(x)) for x, y in ((logprobs, leaves), (expected, wide)))
    assert all(x.dtype == torch.bfloat16 for x in actual)
    assert max(relative_error(a, b) for a, b in zip(actual, exact, strict=True)) < 8e-3


def test_full_logits_are_never_allocated():
    hidden, weight, labels = torch.randn(1, 256, 8), torch.randn(50, 8), torch.randint(50, (1, 256))
    hidden.requires_grad_()
    with Allocations() as allocations:
        token_logprobs(hidden, weight, labels, chunk=16).sum().backward()
    assert allocations.largest == 256 * 8 > 16 * 50
    positions = torch.tensor([200, 201, 200])
    with Allocations() as allocations:
        logprobs = token_logprobs(hidden, weight.requires_grad_(), labels[0, :3], positions, chunk=1)
        torch.autograd.grad(logprobs.sum(), weight)
    assert "addmm_" in allocations.names and allocations.largest == 256 * 8


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_out_of_range_raises(label):
    hidden, weight, *_ = inputs(2, 8)
    with pytest.raises(RuntimeError, match="index"):
        token_logprobs(hidden, weight, torch.full((2, 8), label))
