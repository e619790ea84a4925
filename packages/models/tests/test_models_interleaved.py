"""All-gather and reduce-scatter of interleaved tokens, compared with full tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.core import Axis, CommLedger, build_mesh
from armillary.models import all_gather_interleaved, interleaved_shard, reduce_scatter_interleaved

SHAPES = [(2, 8, 3), (1, 4), (3, 12, 2, 2), (2, 7, 3), (1, 1, 2)]


def results_of_shapes() -> list[dict[str, bool]]:
    axis = build_mesh("cpu", tp=dist.get_world_size())["tp"]
    return [gather_and_sum(shape, axis) for shape in SHAPES]


def gather_and_sum(shape: tuple[int, ...], axis: DeviceMesh) -> dict[str, bool]:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(axis.size(), *shape, generator=generator, dtype=torch.float64)
    local = interleaved_shard(tensor, axis).requires_grad_()
    with CommLedger() as ledger:
        gathered = all_gather_interleaved(local, axis)
        sent_bytes = ledger.bytes()
        gathered[:, : shape[1]].backward(weights[axis.get_local_rank()])
    full = (tensor * weights[axis.get_local_rank()]).requires_grad_()
    summed = reduce_scatter_interleaved(full, axis)
    summed.backward(interleaved_shard(weights.sum(0), axis))
    return {
        "gathered": torch.equal(gathered[:, : shape[1]], tensor) and not gathered[:, shape[1] :].any(),
        "bytes": sent_bytes == (axis.size() - 1) * local.nbytes,
        "gradient of gathering": torch.allclose(local.grad, interleaved_shard(weights.sum(0), axis)),
        "summed": torch.allclose(summed, interleaved_shard(tensor * weights.sum(0), axis)),
        "gradient of summing": torch.equal(full.grad, weights.sum(0)),
    }


@pytest.mark.parametrize("ranks", [1, 4])
def test_all_gather_and_reduce_scatter(worlds, ranks):
    for actual in worlds(ranks).run(results_of_shapes):
        for shape, facts in zip(SHAPES, actual, strict=True):
            assert all(facts.values()), (shape, facts)


def gather_and_scatter(x, axis):
    return reduce_scatter_interleaved(all_gather_interleaved(x.sin(), axis) * (1 + axis.rank), axis).cos()


def results_compiled_and_eager() -> dict[str, bool]:
    torch._dynamo.reset()
    axis = Axis.of(build_mesh("cpu", tp=dist.get_world_size())["tp"])
    compiled = torch.compile(gather_and_scatter, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(axis.rank)).requires_grad_()
    actual = []
    for function in (gather_and_scatter, compiled, compiled):
        with CommLedger() as ledger:
            y = function(x, axis)
            actual.append((y, *torch.autograd.grad(y.square().sum(), x), dict(ledger.entries)))
    return {
        "result": torch.equal(actual[0][0], actual[2][0]),
        "gradient": torch.equal(actual[0][1], actual[2][1]),
        "bytes": actual[0][2] == actual[2][2] and len(actual[2][2]) == 4,
    }


def test_compiled_graphs_contain_both_collectives(worlds):
    for rank in worlds(2).run(results_compiled_and_eager):
        assert all(rank.values()), rank
