"""Peak memory of attention in live bytes: UPipe against Ulysses, WallFacer against Ring."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import Projected, Ulysses, UPipe, WallFacer
from armillary.attention.internal import GradientSums
from armillary.models import LlamaConfig
from armillary.models.internal import HeadProjections
from armillary.plan.memory import LiveBytes

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from attention_memory import attention_intermediates, memory_before_attention


def upipe(heads: int, key_heads: int, stage: int, prefetch: bool = False) -> float:
    def build(mesh):
        return UPipe(mesh["ulysses"], heads_per_stage=stage, prefetch=prefetch)

    return attention_intermediates(build, {"ulysses": 8}, heads, key_heads)


@pytest.mark.parametrize(
    ("heads", "key_heads", "stage", "saved"),
    [(64, 64, 8, 0.875), (64, 8, 8, 0.778), (64, 8, 16, 0.667), (32, 8, 8, 0.6), (64, 64, 64, 0)],
)
def test_stages_need_a_fraction_of_the_memory_of_ulysses_heads(heads, key_heads, stage, saved):
    """(2 S + 2 min(K, S)) / (2 H + 2 K), within the half percent of a kernel's lse and rows of weights."""
    closed, ulysses = 2 * stage + 2 * min(key_heads, stage), 2 * heads + 2 * key_heads
    assert closed <= upipe(heads, key_heads, stage) < closed * 1.01
    assert 1 - closed / ulysses == pytest.approx(saved, abs=1e-3)
    assert attention_intermediates(lambda mesh: Ulysses(mesh["ulysses"]), {"ulysses": 8}, heads, key_heads) >= ulysses


def test_memory_of_prefetched_stages():
    assert 48 <= upipe(64, 8, 8, prefetch=True) < 48.5  # 4 S + 2 min(K, S): all keys are in one round
    assert 80 <= upipe(64, 64, 8, prefetch=True) < 80.5  # 4 S + 6 min(K, S): every stage has new keys


def teams_of_four(mesh):
    return WallFacer(mesh["ring"], team=4)


def test_checkpoints_and_gathered_qkv_match_the_wallfacer_paper():
    """Model M of arXiv 2407.00611: 64 checkpoints, the incoming gradient, 3 C for q, k and v; tested with 3 blocks."""
    layers = 3
    model = LlamaConfig(vocab_size=256, dim=6656, layers=layers, heads=52, kv_heads=52, hidden_dim=256)
    memory = memory_before_attention(model, {"ring": 64}, teams_of_four, 65_536)
    assert memory.qkv == 3 * 4 and round(memory.checkpoints) == layers
    assert 64 + 1 + memory.qkv == 77


def test_stages_accumulate_weight_gradients_in_one_buffer():
    """32 heads, 4 per stage, 64 tokens: only the float32 sum is as large as the weight."""
    with FakeTensorMode():
        query, key, value = (nn.Linear(2048, heads * 64, bias=False, dtype=torch.bfloat16) for heads in (32, 8, 8))
        projections = HeadProjections(query, key, value, 32, 8, 64)
        x, dq = torch.empty(1, 256, 2048, dtype=torch.bfloat16), torch.empty(1, 256, 4, 64, dtype=torch.bfloat16)
        source = Projected(x, projections, 64, torch.zeros_like(x), GradientSums([query.weight]))
        with LiveBytes() as live:
            for start in range(0, 32, 4):
                source.add_q(range(start, start + 4), [dq])
    total, weight = 4 * query.weight.numel(), query.weight.nbytes
    assert total <= live.device.peak < total + weight / 4
