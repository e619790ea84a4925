"""Kernels of other packages for layers with a state: stubs with their signatures that compute token by token."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from states_oracle import naive_delta_rule, naive_ssd, worst_errors
from torch import Tensor

from armillary.states.chunks import FlashLinearAttention, MambaSsm

TOLERANCE = 1e-10


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale=None, initial_state=None, output_final_state=False
) -> tuple[Tensor, Tensor]:
    """Stub of flash-linear-attention's kernel.

    q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV], states [B, HV, K, V].
    """
    assert output_final_state and initial_state.is_contiguous() and beta.ndim == 3 and not g.isinf().any()
    assert initial_state.shape == (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    previous = [*range(-1, v.shape[1] - 1)]
    rows = zip(q, k, v, g, beta, initial_state, strict=True)
    results = [naive_delta_rule(*row, scale, previous) for row in rows]
    return torch.stack([out for out, _ in results]), torch.stack([final for _, final in results])


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    assert g.shape == (*v.shape[:3], k.shape[3])
    return chunk_gated_delta_rule(q, k, v, g, *args, **kwargs)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    initial_states=None,
    return_final_states=False,
) -> tuple[Tensor, Tensor]:
    """Stub of mamba-ssm's kernel: x [B, T, H, D], dt [B, T, H], B, C [B, T, G, N], states [B, H, D, N]."""
    assert return_final_states and initial_states is None and dt.ndim == 3
    previous = [*range(-1, x.shape[1] - 1)]
    results = [
        naive_ssd(*row, A, *groups, None, previous) for *row, groups in zip(x, dt, zip(B, C, strict=True), strict=True)
    ]
    return torch.stack([out for out, _ in results]), torch.stack([final for _, final in results])


def module(name: str, *functions) -> dict[str, ModuleType]:
    """Returns modules by name: a module with these functions, and its parent packages."""
    modules = {name.rsplit(".", depth)[0]: ModuleType(name) for depth in range(name.count(".") + 1)}
    for function in functions:
        setattr(modules[name], function.__name__, function)
    return modules


STAND_INS = {
    **module("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    **module("fla.ops.kda", chunk_kda),
    **module("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
}


class AnyFla(FlashLinearAttention):
    """The kernel for every device and dtype."""

    max_chunk = 8

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> None:
        return None


class AnyMamba(MambaSsm):
    max_chunk = 8

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> None:
        return None


def kernel_errors(seeds: list[int]) -> dict[int, tuple[float, str]]:
    with patch.dict(sys.modules, STAND_INS):
        return worst_errors(seeds, lambda case: AnyMamba() if case.kind == "ssd" else AnyFla())


@pytest.mark.parametrize(("ranks", "count"), [(1, 5), (2, 6)])
def test_random_cases_with_kernels_of_other_packages_equal_the_recurrence(worlds, ranks, count):
    for actual in worlds(ranks).run(kernel_errors, [*range(500 * ranks, 500 * ranks + count)]):
        assert not {seed: worst for seed, worst in actual.items() if not worst[0] < TOLERANCE}
