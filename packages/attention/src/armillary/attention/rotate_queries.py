"""The engine that rotates queries past keys that stay."""

from __future__ import annotations

from torch import Tensor

from armillary.attention import along_dout
from armillary.attention.call import Call, Saved
from armillary.attention.merge import ALL, Merge, Sum
from armillary.attention.returns import Along, Direct
from armillary.attention.rotation import Rotation


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of the traveller that set out from here, over the keys of all residents.

    Each rank returns its partial result straight to the owner of the queries.

    Bytes sent: B H D e for each token and hop, B H (Dv e + 4) for each token and rank whose keys it sees any of.
    """
    walk, merged = walk.shorter_way(call), Merge.of(q, v)
    parts = Direct(walk, call, lambda tokens, part: merged.add((ALL, slice(tokens.start, tokens.stop), ALL), *part))
    for step, hand in walk.walk((q,), call):
        tokens, part = parts.tokens(step), ()
        if tokens:
            (q_part,) = hand.part(tokens)
            into = Merge.of(q_part, v) if step else merged
            walk.cell(call, step, tokens.start).forward(q_part, k, v, into)
            part = into.result()
        parts.give(step, part)
    parts.home()
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call, *, direct: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the traveller that set out from here, dk and dv of the residents), in the accumulation dtype.

    Args:
        direct: return each rank's share of dq straight to its owner, instead of letting the sum follow the queries.

    Bytes sent: B H ((D + Dv) e + 8) for each token and hop, and B H D a for each token and hop, or with `direct` for
    each token and rank whose keys it sees any of.
    """
    walk = walk.shorter_way(call)
    dk, dv = Sum.like(saved.k), Sum.like(saved.v)
    shares = Direct(walk, call) if direct else Along(walk, call)
    travellers = (saved.q, dout, saved.lse, along_dout.ratio(dout, saved.out))
    for step, hand in walk.walk(travellers, call):
        tokens, dq = shares.tokens(step), ()
        if tokens:
            q, dout_, lse, ratio = hand.part(tokens)
            out = along_dout.rows(dout_, ratio) if step else saved.out
            share = Sum.like(q)
            walk.cell(call, step, tokens.start).backward(dout_, Saved(q, saved.k, saved.v, out, lse), share, dk, dv)
            dq = (share.value(),)
        shares.give(step, dq)
    return shares.home()[0], dk.value(), dv.value()
