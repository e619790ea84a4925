"""Sums of gradients over many shares."""

import pytest
import torch

from armillary.attention.call.gradient_sums import GradientSums


def test_totals_round_once_and_leave_addends_unchanged():
    weights = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(3)]
    totals, share = GradientSums(weights), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    for _ in range(1000):
        totals.add([share * 1.001, None, None])
    totals.add([None, share, None])
    first, second, third = totals.result()
    assert torch.equal(first, ((share * 1.001).float() * 1000).bfloat16()) and third is None
    assert second is share and torch.equal(share, torch.tensor([1.0, 2.0, 3.0]).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_that_is_wide_already_is_not_added_to_in_place(dtype):
    share = torch.ones(3, dtype=dtype)
    totals = GradientSums([torch.zeros_like(share), torch.zeros_like(share)])
    for _ in range(3):
        totals.add([share, share])  # one tensor, as autograd gives for two parameters that are added
    assert all(torch.equal(total, 3 * torch.ones(3, dtype=dtype)) for total in totals.result())
    assert torch.equal(share, torch.ones(3, dtype=dtype))
