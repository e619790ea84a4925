"""Errors of tensors, as tests compare them."""

import torch

from armillary.core.testing import relative_error


def test_nan_and_infinities_are_infinite_errors():
    exact = torch.tensor([1.0, -torch.inf])
    assert relative_error(exact, exact) == 0
    for wrong in ([torch.nan, -torch.inf], [1.0, 0.0], [-torch.inf, -torch.inf], [torch.inf, -torch.inf]):
        assert relative_error(torch.tensor(wrong), exact) == float("inf")


def test_errors_are_relative_to_the_norm_or_the_floor():
    exact, x = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.1])
    assert abs(relative_error(x, exact) - 0.02) < 1e-6
    assert abs(relative_error(x, exact, floor=50**0.5) - 0.01) < 1e-6
    assert relative_error(x, torch.zeros(2)) == float("inf") and relative_error(torch.zeros(0), torch.zeros(0)) == 0
