"""Gradients of a loss that is a sum over ranks: summed, not averaged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from armillary.core import clip_gradients, sum_gradients
from armillary.core.testing import relative_error

RANKS, TOKENS = 4, 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def tokens() -> torch.Tensor:
    return torch.randn(RANKS * TOKENS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(built: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the mean over all ranks' tokens, of which this rank has x."""
    (built(x).square().sum() / (RANKS * TOKENS)).backward()
    actual = [p.grad for p in built.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in actual]


WAYS = [(wrapper, summed) for wrapper in ("FSDP2", "HSDP", "DDP") for summed in (True, False)]


def each_on_ranks() -> list[list[float]]:
    return [on_ranks(*way) for way in WAYS]


def on_ranks(wrapper: str, summed: bool) -> list[float]:
    """Relative error of each full gradient against one rank's; without `sum_gradients` against its mean over ranks."""
    built, expected = model(), gradients(model(), tokens())
    local_tokens = tokens().chunk(RANKS)[dist.get_rank()]
    if wrapper == "DDP":
        built = DistributedDataParallel(built)
    else:
        hybrid = {"mesh_shape": (2, 2), "mesh_dim_names": ("replicate", "shard")}
        ranks = init_device_mesh("cpu", **(hybrid if wrapper == "HSDP" else {"mesh_shape": (RANKS,)}))
        for part in (built[0], built):
            fully_shard(part, mesh=ranks)
    if summed:
        sum_gradients(built)
    factor = 1 if summed else 1 / RANKS
    actual = gradients(built, local_tokens)
    return [
        relative_error(result, factor * expected_gradient)
        for result, expected_gradient in zip(actual, expected, strict=True)
    ]


def test_gradients_equal_one_rank_and_are_averaged_without_the_call(worlds):
    for rank in worlds(RANKS).run(each_on_ranks):
        for way, errors in zip(WAYS, rank, strict=True):
            assert max(errors) < 1e-12, (way, errors)


def frozen_outside_of_fsdp() -> None:
    built = model()
    fully_shard(built[0], mesh=init_device_mesh("cpu", (2,)))
    built[2].requires_grad_(False)
    sum_gradients(built)


def test_frozen_parameters_may_stay_outside_of_fsdp(worlds):
    worlds(2).run(frozen_outside_of_fsdp)


PLACED = {
    "local": None,
    "copied": (Replicate(), Replicate()),
    "rows": (Shard(0), Shard(1)),
    "on one axis": (Shard(0),),
    "shares": (Shard(0), Partial()),
}


def clipped_on_meshes() -> tuple[float, list[torch.Tensor]]:
    """Returns the norm, and gradients after clipping to 1. Each parameter has other placements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))
    model = nn.ParameterDict()
    for seed, (name, placements) in enumerate(PLACED.items()):
        full = gradient_of(seed)
        if placements is not None:
            full = distribute_tensor(full, mesh if len(placements) == 2 else mesh["ring"], placements)
        model[name] = nn.Parameter(torch.zeros_like(full))
        model[name].grad = full
    clip_gradients(model, 1000.0)  # the norm is below
    norm = clip_gradients(model, 1.0).item()
    return norm, [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def gradient_of(seed: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_clipping_accepts_several_meshes_and_partial_gradients(worlds):
    expected = [gradient_of(seed) for seed in range(len(PLACED))]
    full = torch.stack(expected).norm().item()
    for norm, actual in worlds(RANKS).run(clipped_on_meshes):
        assert norm == pytest.approx(full, rel=1e-12)
        for result, expected_gradient in zip(actual, expected, strict=True):
            assert relative_error(result, expected_gradient / (full + 1e-6)) < 1e-12  # torch adds 1e-6 to the norm
