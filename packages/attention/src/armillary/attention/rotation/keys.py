"""The engine that rotates keys and values past queries that stay (Ring Attention, arXiv 2310.01889)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from armillary.attention.comm_plan import Steps, Work
from armillary.attention.rotation.returns import Along
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.steps import walk as walk_of
from armillary.attention.rotation.topology import Circle
from armillary.attention.spec import Call, Saved
from armillary.attention.tiling.merge import Merge, Sum


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of the resident queries over the keys of all travellers.

    Bytes sent: B K (D + Dv) e for each token and hop.
    """
    walk, merged = walk.shorter_way(call), Merge.of(q, v)
    for step, hand in walk.walk((k, v), call):
        if hand.tokens:
            keys, values = hand.tensors
            walk.cell(call, step, hand.tokens.start).forward(q, keys, values, merged)
            del keys, values
        del hand  # so that it is gone before the one after the next has room made for it
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the residents, dk and dv of the traveller that set out from here), in the accumulation dtype.

    Bytes sent: B K (D + Dv) (e + a) for each token and hop.
    """
    walk = walk.shorter_way(call)
    dq, grads = Sum.like(saved.q), Along(walk, call)
    for step, hand in walk.walk((saved.k, saved.v), call):
        shares = [Sum.like(x) for x in hand.tensors]
        if hand.tokens:
            here = saved._replace(k=hand.tensors[0], v=hand.tensors[1])
            walk.cell(call, step, hand.tokens.start).backward(dout, here, dq, *shares)
            del here
        del hand
        grads.give(step, [share.value() for share in shares])
    dk, dv = grads.home()
    return dq.value(), dk, dv


def forward_steps(work: Work, circles: Sequence[Circle]) -> Steps:
    """What `forward` sends and computes on all ranks of some circles."""
    return walk_of(work, circles, (work.k + work.v) * work.e)


def backward_steps(work: Work, circles: Sequence[Circle]) -> Steps:
    """What `backward` sends and computes on all ranks of some circles."""
    keys = work.k + work.v
    return walk_of(work, circles, keys * work.e, keys * work.a, Along.sends)
