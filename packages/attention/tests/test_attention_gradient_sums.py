"""Sums of gradients over many addends."""

import pytest
import torch

from armillary.attention.internal import GradientSums


def test_totals_round_once_and_leave_addends_unchanged():
    weights = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(3)]
    totals, addend = GradientSums(weights), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    for _ in range(1000):
        totals.add([addend * 1.001, None, None])
    totals.add([None, addend, None])
    first, second, third = totals.result()
    assert torch.equal(first, ((addend * 1.001).float() * 1000).bfloat16()) and third is None
    assert second is addend and torch.equal(addend, torch.tensor([1.0, 2.0, 3.0]).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_addends_are_not_modified_in_place(dtype):
    addend = torch.ones(3, dtype=dtype)
    totals = GradientSums([torch.zeros_like(addend), torch.zeros_like(addend)])
    for _ in range(3):
        totals.add([addend, addend])  # autograd returns one tensor for two parameters that are added
    assert all(torch.equal(total, 3 * torch.ones(3, dtype=dtype)) for total in totals.result())
    assert torch.equal(addend, torch.ones(3, dtype=dtype))
