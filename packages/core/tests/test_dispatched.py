"""The ledger counts all bytes of ops, DTensors and exchanges; `test_primitives.py` counts those of local tensors."""

from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from armillary.core import (
    Axis,
    CommLedger,
    FlatBuffer,
    all_gather,
    head_to_seq,
    reduce_scatter,
    seq_to_head,
    start_exchange,
)
from armillary.core.testing import Dispatched, mesh

B, T, H, D, P = 2, 6, 8, 4, 4


def axis() -> Axis:
    return Axis.of(mesh(ring=P)["ring"])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def both_ways(*results: torch.Tensor) -> None:
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def compiled_ops() -> None:
    # torch.compile traces nothing under a dispatch mode, so the ops that it would put into a graph are called directly.
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        results = all_gather(leaf(B, T, D), axis()), reduce_scatter(leaf(B, P * T), axis())
    both_ways(*results)


def dtensors() -> None:
    ring = mesh(ring=P)["ring"]
    x = DTensor.from_local(leaf(B, T, H, D), ring, [Shard(1)])
    for y in (all_gather(x, ring), head_to_seq(seq_to_head(x, ring), ring)):
        grad = DTensor.from_local(torch.ones_like(y.to_local()), ring, y.placements)
        torch.autograd.backward([y], [grad], retain_graph=True)


def exchanges() -> None:
    ring = axis()
    flats = [FlatBuffer.of([torch.randn(n + 1, 3), torch.randn(2, dtype=torch.bfloat16)]) for n in range(P)]
    target, source = (ring.rank + 1) % P, (ring.rank - 1) % P
    receive_buffer = FlatBuffer.like(flats[source].tensors)
    start_exchange(ring.duplicate(), {target: flats[ring.rank]}, {source: receive_buffer}).wait()
    send, receive = ({peer: flats[1]} if ring.rank == me else {} for me, peer in ((0, 2), (2, 0)))
    start_exchange(ring, send, receive).wait()


EVERY = [compiled_ops, dtensors, exchanges]


def counts() -> list[tuple[dict, dict]]:
    return [counted(work) for work in EVERY]


def counted(work: Callable[[], None]) -> tuple[dict, dict]:
    axis().duplicate()  # created before the counting, because creating it communicates
    with Dispatched() as dispatched, CommLedger() as ledger:
        work()
    return dispatched.sent, Dispatched.of(ledger)


def test_the_dispatcher_and_the_ledger_count_the_same_bytes(worlds):
    for rank in worlds(P).run(counts):
        for work, (dispatched, booked) in zip(EVERY, rank, strict=True):
            assert dispatched == booked != {}, work.__name__


def all_reduce_directly() -> None:
    dist.all_reduce(torch.ones(3))


def test_the_dispatcher_sees_traffic_outside_the_ledger(worlds):
    assert worlds(P).run(counted, all_reduce_directly) == [({"all_reduce": (18, 6)}, {})] * P
