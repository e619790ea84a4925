"""Attention is an op, so that checkpointing can keep its result: what is kept is not computed, or sent, again."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.attention import AttentionMask, Method, Ring, Ulysses
from armillary.core import CommLedger
from armillary.core.testing import mesh, relative_error

TOKENS, HEADS, DIM = 6, 4, 8


def keep_attention(_, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op is torch.ops.armillary.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def build(name: str) -> Method:
    return Ring(mesh(ring=2)["ring"]) if name == "ring" else Ulysses(mesh(ulysses=2)["ulysses"])


def block(attend: Method, x: Tensor) -> Tensor:
    q, k, v = (x.sin().unflatten(-1, (HEADS, DIM)) * n for n in (1.0, 2.0, 3.0))
    return attend(q, k, v, mask=AttentionMask(), layout=attend.layout(2 * TOKENS)).flatten(2).cos()


def step(name: str, how: str) -> tuple[Tensor, int, int]:
    """dx, and bytes sent in each phase. All of backward is booked as such but what a recomputation sends."""
    attend = build(name)
    x = torch.randn(2, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(attend.shard)).requires_grad_()
    contexts = (
        {} if how == "recompute" else {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
    )
    with CommLedger() as ledger:
        if how == "plain":
            out = block(attend, x)
        else:
            out = checkpoint(partial(block, attend), x, use_reentrant=False, **contexts)
        (dx,) = torch.autograd.grad(out.square().sum(), x)
    return dx, ledger.bytes(phase="forward"), ledger.bytes(phase="backward")


def every_step() -> list[list[tuple[Tensor, int, int]]]:
    return [[step(name, how) for how in ("plain", "keep", "recompute")] for name in ("ring", "ulysses")]


def test_what_is_kept_is_not_sent_again(worlds):
    for rank in worlds(2).run(every_step):
        for (dx, forward, backward), (kept_dx, *kept_bytes), (again_dx, *again_bytes) in rank:
            assert kept_bytes == [forward, backward] and forward > 0
            assert again_bytes == [2 * forward, backward]
            assert relative_error(kept_dx, dx) == relative_error(again_dx, dx) == 0
