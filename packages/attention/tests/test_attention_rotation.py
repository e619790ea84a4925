"""Receive buffers of a rotation, and results of other ranks alone."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.attention import AttentionMask, Ring, TokenRing, reference_attention
from armillary.core import SequenceLayout, build_mesh, start_exchange
from armillary.core.testing import mesh, relative_error


def blocks(buffers: list[torch.Tensor]) -> int:
    """Counts the memory blocks of live tensors."""
    return len({x.untyped_storage().data_ptr() for x in buffers})


@pytest.mark.parametrize(("name", "direct"), [("ring", 0), ("ring, queries", 0), ("token_ring", 1)])
def test_rings_reuse_receive_buffers(monkeypatch, name, direct):
    """Rotating shards use two blocks; direct returns, or their sums and the rank's, use one block each."""
    rotated, returned = list[torch.Tensor](), list[torch.Tensor]()
    for module, buffers in (("rotate", rotated), ("reduce", returned)):

        def start(axis, send, receive, buffers=buffers):
            send_buffers, receive_buffers = ([flat.buffer for flat in flats.values()] for flats in (send, receive))
            count = blocks(send_buffers) + len(receive_buffers)
            assert blocks([*send_buffers, *receive_buffers]) == count, "a receive buffer overlaps a send buffer"
            buffers.extend(receive_buffers)
            return start_exchange(axis, send, receive)

        monkeypatch.setattr(f"armillary.attention.rings.{module}.start_exchange", start)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    eight = build_mesh("cpu", ring=8)
    method = TokenRing(eight["ring"]) if direct else Ring(eight["ring"], "queries" if "queries" in name else "keys")
    q, k, v = (torch.zeros(1, 16, 2, 8, requires_grad=True) for _ in range(3))
    out = method(q, k, v, mask=AttentionMask(causal=False), layout=method.layout(128))
    assert (len(rotated), blocks(rotated), blocks(returned)) == (7, 2, direct)
    out.sum().backward()
    assert (len(rotated), blocks(rotated[7:])) == (14, 2)
    assert blocks(returned[7 * direct :]) == (1 if direct else 3)
    for mask, batch in product((AttentionMask(), AttentionMask(window=(40, 0))), (1, 2)):
        q, k, v = (torch.zeros(batch, 16, 2, 8, requires_grad=True) for _ in range(3))
        method(q, k, v, mask=mask, layout=method.layout(128)).sum().backward()


def attends_to_other_ranks_alone() -> list[float]:
    """Errors of out and gradients for a mask under which each rank sees only keys of two other ranks."""
    axis = mesh(ring=4)["ring"]
    layout = SequenceLayout.contiguous(16, 4)
    key_layout = SequenceLayout([layout.spans(rank) for rank in (2, 3, 0, 1)])
    mask, method, shard = AttentionMask(causal=False, documents=(0, 8, 16)), TokenRing(axis), axis.get_local_rank()
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 16, 2, 8, dtype=torch.float64).unbind(0)
    wholes, places = [x.clone().requires_grad_() for x in (q, k, v)], (layout, key_layout, key_layout)
    shards = [place.take(x, shard).requires_grad_() for x, place in zip((q, k, v), places, strict=True)]
    out = method(*shards, mask=mask, layout=layout, key_layout=key_layout)
    exact = reference_attention(*wholes, mask=mask)
    actual = [out, *torch.autograd.grad(out, shards, layout.take(dout, shard))]
    expected = zip((layout, *places), (exact, *torch.autograd.grad(exact, wholes, dout)), strict=True)
    return [relative_error(x, place.take(full, shard)) for x, (place, full) in zip(actual, expected, strict=True)]


def test_results_of_only_other_ranks_are_merged(worlds):
    assert all(max(errors) < 1e-12 for errors in worlds(4).run(attends_to_other_ranks_alone))
