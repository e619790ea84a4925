"""Argmax of the logits without full logits, also with a sharded vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from test_models_linear_loss import Allocations
from test_models_vocabulary import axis_of, rows_of

from armillary.models import interleaved_shard, linear_argmax


def inputs(tokens, vocabulary, dtype=torch.float32):
    """Hidden states, weight, labels (two thirds ignored) and the expected argmax."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(2, tokens, 8, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, 8, generator=generator).to(dtype)
    labels = torch.randint(vocabulary, (2, tokens), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.66] = -100
    return hidden, weight, labels, F.linear(hidden, weight).argmax(2).where(labels != -100, -100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tokens_at_labels_match_full_logits(dtype):
    hidden, weight, labels, expected = inputs(50, 31, dtype)
    actual = linear_argmax(hidden, weight, labels)
    assert torch.equal(actual, expected) and actual.dtype == torch.int64
    assert 0 < (actual != -100).sum() < actual.numel()


def test_no_tensor_is_as_large_as_the_logits():
    hidden, weight, labels, expected = inputs(1000, 20_000)
    with Allocations() as allocations:
        actual = linear_argmax(hidden, weight, labels)
    assert torch.equal(actual, expected)
    assert allocations.largest < 2 * 1000 * 20_000 / 5


def test_without_labels_nothing_is_predicted():
    hidden, weight, labels, _ = inputs(5, 7)
    assert linear_argmax(hidden, weight, labels.fill_(-1), ignore=-1).tolist() == [[-1] * 5] * 2


def over_ranks(tokens, vocabulary, ties):
    hidden, weight, labels, expected = inputs(tokens, vocabulary)
    if ties:  # all logits are equal: the smallest id counts, on whichever rank
        weight, expected = torch.ones_like(weight), torch.zeros_like(labels).where(labels != -100, -100)
    axis = axis_of()
    actual = linear_argmax(interleaved_shard(hidden, axis), rows_of(weight), labels, axis=axis, vocabulary=vocabulary)
    return torch.equal(actual, expected)


def cases_over_ranks():
    return [over_ranks(*case) for case in ((9, 31, False), (8, 3, False), (7, 31, True))]


def test_every_rank_gets_the_argmax_over_the_full_vocabulary(worlds):
    assert worlds(4).run(cases_over_ranks) == [[True] * 3] * 4  # the vocabulary of 3 leaves one rank empty
