"""Peaks of this machine."""

import torch

from armillary.train.runtime.peak import peak_flops, peak_memory


def test_memory_is_measured_and_an_unknown_peak_is_none():
    assert peak_memory(torch.device("cpu")) > 10 * 2**20
    assert peak_flops(torch.device("cpu")) is None
