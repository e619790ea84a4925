"""The engine that rotates queries past keys that stay."""

from __future__ import annotations

from torch import Tensor

from armillary.attention.call import Call, Saved
from armillary.attention.merge import EVERYTHING, Merge, Sum
from armillary.attention.returns import Along, Direct
from armillary.attention.rotation import Rotation


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of the traveller that set out from here, over the keys of all residents.

    Each rank returns its partial result straight to the owner of the queries.

    Bytes sent: B T H D e for each hop of a traveller, B T H (Dv e + 4) for each rank that sees any of its keys.
    """
    merged = Merge.of(q, v)
    parts = Direct(walk, call, lambda _, part: merged.add(EVERYTHING, part[0], part[1]))
    for step, hand in walk.walk((q,), call):
        part = Merge.of(hand[0] if hand else q, v)
        if hand:
            walk.cell(call, walk.place, walk.origin(step)).forward(hand[0], k, v, part)
        if step == 0:
            merged = part
        parts.give(step, part.result() if hand else ())
    parts.home()
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call, *, direct: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the traveller that set out from here, dk and dv of the residents), in the accumulation dtype.

    Args:
        direct: return each rank's share of dq straight to its owner, instead of letting the sum follow the queries.

    Bytes sent: B T H ((2 D' + D) e + 4) for each hop of a traveller, with D' = Dv for out and dout, and B T H D a for
    each hop, or for each rank that sees any of its keys.
    """
    dk, dv = Sum.like(saved.k), Sum.like(saved.v)
    shares = Direct(walk, call) if direct else Along(walk, call)
    for step, hand in walk.walk((saved.q, saved.out, dout, saved.lse), call):
        dq = Sum.like(hand[0] if hand else saved.q)
        if hand:
            q, out, dout_, lse = hand
            local = Saved(q, saved.k, saved.v, out, lse)
            walk.cell(call, walk.place, walk.origin(step)).backward(dout_, local, dq, dk, dv)
        shares.give(step, (dq.value(),) if hand else ())
    return shares.home()[0], dk.value(), dv.value()
