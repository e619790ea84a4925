"""The engine that rotates queries past keys that stay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from armillary.attention.comm_plan import Steps, Work
from armillary.attention.rotation.returns import Along, Direct
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.steps import walk as walk_of
from armillary.attention.rotation.topology import Circle
from armillary.attention.spec import Call, Saved
from armillary.attention.tiling.merge import ALL, Merge, Sum


def forward(q: Tensor, k: Tensor, v: Tensor, walk: Rotation, call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, Dv], lse [B, T, H]) of the traveller that set out from here, over the keys of all residents.

    Each rank returns its partial result straight to the owner of the queries.

    Bytes sent: B H D e for each token and hop, B H (Dv e + a) for each token and rank whose keys it sees any of.
    """
    walk, merged = walk.shorter_way(call), Merge.of(q, v)
    returns = Direct(walk, call, lambda tokens, share: merged.add((ALL, slice(tokens.start, tokens.stop), ALL), *share))
    for step, hand in walk.walk((q,), call):
        tokens, share = returns.tokens(step), ()
        if tokens:
            (queries,) = hand.tokens_of(tokens)
            into = Merge.of(queries, v) if step else merged
            walk.cell(call, step, tokens.start).forward(queries, k, v, into)
            share = into.result()
            del queries, into
        del hand
        returns.give(step, share)
    returns.home()
    return merged.result()


def backward(dout: Tensor, saved: Saved, walk: Rotation, call: Call, *, direct: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the traveller that set out from here, dk and dv of the residents), in the accumulation dtype.

    Args:
        direct: return each rank's share of dq straight to its owner, instead of letting the sum follow the queries.

    Bytes sent: B H ((D + 2 Dv) e + a) for each token and hop, and B H D a for each token and hop, or with `direct` for
    each token and rank whose keys it sees any of.
    """
    walk = walk.shorter_way(call)
    dk, dv = Sum.like(saved.k), Sum.like(saved.v)
    returns = Direct(walk, call) if direct else Along(walk, call)
    for step, hand in walk.walk((saved.q, saved.out, dout, saved.lse), call):
        tokens, dq = returns.tokens(step), ()
        if tokens:
            q, out, dout_, lse = hand.tokens_of(tokens)
            share = Sum.like(q)
            walk.cell(call, step, tokens.start).backward(dout_, Saved(q, saved.k, saved.v, out, lse), share, dk, dv)
            dq = (share.value(),)
            del q, out, dout_, lse
        del hand  # so that it is gone before the one after the next has room made for it
        returns.give(step, dq)
    return returns.home()[0], dk.value(), dv.value()


def forward_steps(work: Work, circles: Sequence[Circle]) -> Steps:
    """What `forward` sends and computes on all ranks of some circles."""
    return walk_of(work, circles, work.q * work.e, work.out * work.e + work.lse * work.a, Direct.sends)


def backward_steps(work: Work, circles: Sequence[Circle], *, direct: bool) -> Steps:
    """What `backward` sends and computes on all ranks of some circles."""
    hop = (work.q + 2 * work.out) * work.e + work.lse * work.a
    return walk_of(work, circles, hop, work.q * work.a, Direct.sends if direct else Along.sends)
