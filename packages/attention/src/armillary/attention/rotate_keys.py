"""The engine that rotates keys and values past queries that stay (Ring Attention, arXiv 2310.01889)."""

from __future__ import annotations

from torch import Tensor

from armillary.attention.call import Call, Saved
from armillary.attention.merge import Merge, Sum
from armillary.attention.returns import Along
from armillary.attention.rotation import Rotation


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of the resident queries over the keys of all travellers.

    Bytes sent: B S K (D + Dv) e for each hop of a traveller.
    """
    merged = Merge.of(q, v)
    for step, hand in walk.walk((k, v), call):
        if hand:
            walk.cell(call, walk.place, walk.origin(step)).forward(q, hand[0], hand[1], merged)
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the residents, dk and dv of the traveller that set out from here), in the accumulation dtype.

    Bytes sent: B S K (D + Dv) (e + a) for each hop of a traveller.
    """
    dq, grads = Sum.like(saved.q), Along(walk, call)
    for step, hand in walk.walk((saved.k, saved.v), call):
        dk, dv = (Sum.like(x) for x in hand or (saved.k, saved.v))
        if hand:
            local = saved._replace(k=hand[0], v=hand[1])
            walk.cell(call, walk.place, walk.origin(step)).backward(dout, local, dq, dk, dv)
        grads.give(step, (dk.value(), dv.value()) if hand else ())
    dk, dv = grads.home()
    return dq.value(), dk, dv
