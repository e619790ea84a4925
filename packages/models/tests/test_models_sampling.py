"""Sampling: filters, frequencies of draws, and transformers' filters as reference."""

import pytest
import torch

from armillary.models import Sampling

LOGITS = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]).log()


def probabilities(logits=LOGITS, **options) -> torch.Tensor:
    return Sampling(**{"temperature": 1.0} | options).probabilities(logits)


def close(actual: torch.Tensor, expected) -> bool:
    return torch.allclose(actual, torch.tensor(expected, dtype=actual.dtype), atol=1e-6)


def test_unfiltered_probabilities_are_the_softmax_at_the_temperature():
    assert close(probabilities(), LOGITS.exp().tolist())
    assert torch.allclose(probabilities(temperature=0.5), (2 * LOGITS).softmax(-1))


def test_top_k_keeps_exactly_k():
    assert close(probabilities(top_k=2)[0], [4 / 7, 0, 3 / 7, 0])
    assert close(probabilities(top_k=3)[1], [1 / 3, 1 / 3, 1 / 3, 0])  # ties: the smallest id
    assert close(probabilities(top_k=9), LOGITS.exp().tolist())


@pytest.mark.parametrize(
    "top_p, expected",
    [
        (0.1, [1, 0, 0, 0]),
        (0.39, [1, 0, 0, 0]),
        (0.5, [4 / 7, 0, 3 / 7, 0]),
        (0.8, [4 / 9, 0, 3 / 9, 2 / 9]),
        (1.0, [0.4, 0.1, 0.3, 0.2]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, expected):
    assert close(probabilities(top_p=top_p)[0], expected)


def test_top_p_renormalizes_over_the_top_k():
    assert close(probabilities(top_k=2, top_p=0.55)[0], [1, 0, 0, 0])
    assert close(probabilities(top_k=2, top_p=0.58)[0], [4 / 7, 0, 3 / 7, 0])


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.6, "temperature": 1.7}])
def test_filters_match_transformers(options):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = logits
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
    ):
        scores = warper(options[name])(None, scores) if name in options else scores
    assert torch.allclose(probabilities(logits, **options), scores.softmax(-1), atol=1e-12)


def test_frequencies_of_draws_match_probabilities():
    count = 40_000
    draws = Sampling(1.0, top_k=3).choose(LOGITS[:1].expand(count, -1), [torch.Generator().manual_seed(0)])
    actual = draws.bincount(minlength=4) / count
    expected = torch.tensor([4 / 9, 0, 3 / 9, 2 / 9])
    deviation = (expected * (1 - expected) / count).sqrt()
    assert actual[1] == 0
    assert ((actual - expected).abs() <= 4 * deviation).all()


def test_temperature_zero_is_argmax_and_tiny_ones_nearly():
    generator = torch.Generator().manual_seed(0)
    assert Sampling().choose(LOGITS, [generator]).tolist() == [0, 0]
    assert Sampling(1e-30).choose(LOGITS[:1], [generator]).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_filtered_in_float32(dtype):
    actual = probabilities(LOGITS.to(dtype), top_p=0.8)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.sum(-1), torch.ones(2))
