"""The backend for ranks that share a GPU, on CPU tensors: it equals gloo, and gloo only sees copies."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

from armillary.core import Axis, FlatBuffer, start_exchange
from armillary.core.compat import host_timeout, priority_options
from armillary.core.testing import World, mesh, relative_error

RANKS = 4


@pytest.fixture(scope="module")
def staged():
    with World(RANKS, timeout=60, backend="staged") as world:
        yield world


def rank_numbers(*shape: int) -> Tensor:
    """Returns random numbers seeded by the rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def empty(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def exchanged() -> Tensor:
    axis = Axis.of(mesh(ring=RANKS)["ring"]).duplicate()
    send_buffer, receive_buffer = FlatBuffer.of([rank_numbers(2, 3, 1, 2)]), FlatBuffer.like([rank_numbers(2, 3, 1, 2)])
    start_exchange(axis, {(axis.rank + 1) % RANKS: send_buffer}, {(axis.rank - 1) % RANKS: receive_buffer}).wait()
    return receive_buffer.tensors[0]


def objects() -> list[int]:
    """Gathers objects on all ranks and on one, then runs a barrier."""
    every, one = [None] * RANKS, [None] * RANKS
    dist.all_gather_object(every, dist.get_rank())
    dist.gather_object(dist.get_rank() + 1, one if dist.get_rank() == 0 else None)
    dist.barrier()
    return [each or 0 for each in (*every, *one)]


def everything() -> dict[str, Tensor]:
    """Returns the result of each operation."""
    x, sizes = rank_numbers(4, 6), [1, 0, 2, 1]
    own_size = sizes[dist.get_rank()]
    dist.all_reduce(transposed := x.clone().mT)  # a view, into which the result must be copied
    dist.broadcast(sent := x.clone(), 2)
    dist.all_gather(parts := [empty(4, 6) for _ in range(RANKS)], x)
    dist.all_gather_into_tensor(joined := empty(16, 6), x)
    dist.reduce_scatter_tensor(scattered := empty(1, 6), x)
    dist.all_to_all_single(turned := empty(RANKS * own_size, 6), x, [own_size] * RANKS, sizes)
    return {
        "all_reduce": transposed,
        "broadcast": sent,
        "all_gather": torch.cat(parts),
        "all_gather_into_tensor": joined,
        "reduce_scatter_tensor": scattered,
        "all_to_all_single": turned,
        "exchange": exchanged(),
        "functional": torch.cat(
            [
                functional.all_gather_tensor(x, 0, dist.group.WORLD),
                functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
                functional.all_reduce(x, "sum", dist.group.WORLD),
                functional.all_to_all_single(x, None, None, dist.group.WORLD),
            ]
        ),
        "objects": torch.tensor(objects()),
    }


def test_results_match_gloo(staged, worlds):
    for result, expected in zip(staged.run(everything), worlds(RANKS).run(everything), strict=True):
        # gloo adds rows, the staged backend columns
        torch.testing.assert_close(result.pop("all_reduce"), expected.pop("all_reduce"))
        assert [name for name, x in expected.items() if not torch.equal(x, result[name])] == []


class Recording:
    """A wrapper of gloo that records the addresses of tensors."""

    def __init__(self, host: Any, addresses: list[int]) -> None:
        self.host, self.addresses = host, addresses

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.addresses.extend(x.data_ptr() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor))
            return getattr(self.host, name)(*args, **options)

        return call


def sends() -> tuple[bool, bool, bool, bool]:
    """Returns whether gloo sends copies, whether a message arrives only by `wait`, whether it has the values at isend,
    and whether the host's time-out is the group's."""
    group, addresses = dist.group.WORLD, list[int]()
    group.host = Recording(group.host, addresses)
    rank, x, y = dist.get_rank(), rank_numbers(8), empty(8)
    expected = torch.randn(8, generator=torch.Generator().manual_seed((rank - 1) % RANKS))
    receive = dist.irecv(y, (rank - 1) % RANKS)
    send = dist.isend(x, (rank + 1) % RANKS)
    x.zero_()
    dist.barrier()
    early = bool(y.isnan().all()) and not receive.is_completed()
    receive.wait(timedelta(seconds=30))
    send.wait()
    group.host = group.host.host
    copies = len(addresses) == 2 and not {x.data_ptr(), y.data_ptr()} & set(addresses)
    return copies, early, torch.equal(y, expected), host_timeout(group, "cpu") == group.longest


def test_staged_messages_are_copies_and_arrive_by_wait(staged):
    assert staged.run(sends) == [(True,) * 4] * RANKS


def sharded_gradients() -> float:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 8), torch.randn(RANKS, 6)
    (expected,) = torch.autograd.grad(model(x).square().mean(), model.weight)
    fully_shard(model, mesh=mesh(ring=RANKS)["ring"])
    model(x[dist.get_rank()]).square().mean().backward()
    return relative_error(model.weight.grad.full_tensor(), expected)


def test_fsdp2_and_dtensors_run_on_the_staged_backend(staged):
    assert max(staged.run(sharded_gradients)) < 1e-6


def on_cuda() -> tuple[bool, Tensor]:
    """Returns whether an axis of a mesh of GPUs has no host time-out and no priority, and gathered ranks."""
    axis = Axis.of(mesh(ring=RANKS, device="cuda")["ring"])
    dist.all_gather_into_tensor(into := empty(RANKS), torch.ones(1) * axis.rank, group=axis.group)
    return axis.timeout is None and axis.device == "cuda" and priority_options(axis.group, "cuda") is None, into


def test_meshes_of_gpus_use_the_staged_backend(staged):
    for plain, result in staged.run(on_cuda):
        assert plain and result.tolist() == [0, 1, 2, 3]


def receive_without_sender() -> str:
    if dist.get_rank():
        return ""
    try:
        dist.irecv(empty(2), 1).wait(timedelta(milliseconds=50))
    except RuntimeError as error:
        return str(error)
    return "received"


def test_receive_without_sender_times_out():
    with World(2, timeout=60, backend="staged") as world:
        messages = world.run(receive_without_sender)
    assert "imed out" in messages[0], messages
