"""The ledger counts all bytes that primitives send: torch's dispatcher sees the same ones."""

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
    all_reduce,
    head_to_seq,
    merge_scatter,
    reduce_scatter,
    seq_to_head,
    start_exchange,
    start_scatter_parts,
)
from armillary.core.testing import Dispatched, mesh

B, T, H, D, P = 2, 6, 8, 4, 4
UNEVEN = (5, 0, 7, 4)


def axis() -> Axis:
    return Axis.of(mesh(ring=P)["ring"])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def both_ways(*results: torch.Tensor) -> None:
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def all_to_alls() -> None:
    tokens = UNEVEN[axis().rank]
    both_ways(head_to_seq(seq_to_head(leaf(B, T, H, D), axis()), axis()))
    both_ways(seq_to_head(leaf(B, tokens, H, D), axis(), sizes=UNEVEN))
    both_ways(seq_to_head(leaf(1, T, 2, D), axis(), heads=[range(1), range(1), range(1, 2), range(1, 2)]))
    both_ways(head_to_seq(leaf(B, P * T, axis().rank, D), axis(), heads=[range(0), range(1), range(1, 3), range(3, 6)]))


def gathers() -> None:
    tokens = UNEVEN[axis().rank]
    both_ways(
        all_gather(leaf(B, T, D), axis()), all_gather(leaf(B, tokens, dtype=torch.bfloat16), axis(), sizes=UNEVEN)
    )
    both_ways(
        reduce_scatter(leaf(B, sum(UNEVEN), D), axis(), sizes=UNEVEN), all_gather(leaf(B, T, 1, D), axis(), dim=2)
    )
    both_ways(reduce_scatter(leaf(B, 4, P, D), axis(), dim=2))
    start_scatter_parts(torch.randn(B, P * T), axis(), [T] * P).wait()


def all_reduces() -> None:
    both_ways(all_reduce(leaf(B, T), axis()), all_reduce(leaf(1, dtype=torch.float64), axis()))


def merges() -> None:
    both_ways(
        *merge_scatter(leaf(B, sum(UNEVEN), H, D, dtype=torch.bfloat16), leaf(B, sum(UNEVEN), H), axis(), sizes=UNEVEN)
    )


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


EVERY = [all_to_alls, gathers, all_reduces, merges, compiled_ops, dtensors, exchanges]


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
