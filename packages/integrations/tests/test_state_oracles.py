"""Layers with a state compared with transformers' torch implementations as an independent oracle."""

import torch
from torch.nn.functional import normalize, softplus
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from armillary.core.testing import relative_error
from armillary.states import gated_delta_rule, ssd

B, N, H = 2, 150, 4


def test_the_delta_rule_equals_qwen3_next():
    q, k = (normalize(torch.randn(B, N, 2, 6), dim=-1) for _ in range(2))
    v, g, beta, initial = torch.randn(B, N, H, 5), -torch.rand(B, N, H), torch.rand(B, N, H), torch.randn(B, H, 6, 5)
    expected = torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial, output_final_state=True)
    for actual, oracle in zip(gated_delta_rule(q, k, v, g, beta, initial_state=initial), expected, strict=True):
        assert relative_error(actual, oracle) < 1e-5


def test_ssd_equals_mamba2():
    x, initial = torch.randn(B, N, H, 5), torch.randn(B, H, 5, 6)
    Bm, Cm = torch.randn(2, B, N, 2, 6).unbind()
    dt, rates = softplus(torch.randn(B, N, H)), -torch.rand(H)
    expected = mamba2_chunk_scan(x, dt, rates, Bm, Cm, 32, initial_states=initial, return_final_states=True)
    for actual, oracle in zip(ssd(x, dt, rates, Bm, Cm, initial_state=initial), expected, strict=True):
        assert relative_error(actual, oracle) < 1e-5
