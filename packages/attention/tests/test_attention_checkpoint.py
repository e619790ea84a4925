"""Attention is an op, so selective checkpointing can save its result: backward neither computes nor sends it again."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.attention import AttentionMask, Local, Method, build_attention
from armillary.attention.call.calls import GraphCall
from armillary.attention.internal import AttentionOptions
from armillary.core import CommLedger
from armillary.core.internal import pack
from armillary.core.testing import mesh, relative_error

TOKENS, HEADS, DIM = 6, 4, 8


def test_the_ops_pass_torchs_checks():
    """Checks the schema and the fake kernels. Other tests trace the gradient: `opcheck` would give lse one."""
    attend, *(q, k, v) = Local(), *(torch.randn(1, TOKENS, HEADS, DIM, requires_grad=True) for _ in range(3))
    packed = pack(*GraphCall.of(attend, AttentionOptions(AttentionMask()), TOKENS, TOKENS).objects)
    test_names = ("test_schema", "test_autograd_registration", "test_faketensor")
    for sinks in (None, torch.randn(HEADS, requires_grad=True)):
        attention = torch.ops.armillary.attention.default
        torch.library.opcheck(attention, ([q, k, v], sinks, *packed), test_utils=test_names)
    saved = [x.detach() for x in (q, k, v)]
    saved += torch.ops.armillary.attention.default(saved, None, *packed)
    shape = [TOKENS, HEADS]
    torch.library.opcheck(torch.ops.armillary.attention_backward.default, (saved[3], saved, shape, *packed))


def keep_attention(_, op, *args, **kwargs) -> CheckpointPolicy:
    is_attention = op is torch.ops.armillary.attention.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def build(name: str) -> Method:
    return build_attention(name, mesh(ulysses=2) if name in ("ulysses", "upipe") else mesh(ring=2))


def block(attend: Method, x: Tensor) -> Tensor:
    q, k, v = (x.sin().unflatten(-1, (HEADS, DIM)) * n for n in (1.0, 2.0, 3.0))
    return attend(q, k, v, mask=AttentionMask(), layout=attend.layout(2 * TOKENS)).flatten(2).cos()


def step(name: str, policy: str) -> tuple[Tensor, int, int]:
    """Returns dx, and the bytes sent in each phase. Bytes of a recomputation count as forward."""
    attend = build(name)
    x = torch.randn(2, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(attend.shard)).requires_grad_()
    contexts = (
        {} if policy == "recompute" else {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}
    )
    with CommLedger() as ledger:
        if policy == "plain":
            out = block(attend, x)
        else:
            out = checkpoint(partial(block, attend), x, use_reentrant=False, **contexts)
        (dx,) = torch.autograd.grad(out.square().sum(), x)
    return dx, ledger.bytes(phase="forward"), ledger.bytes(phase="backward")


def every_step() -> list[list[tuple[Tensor, int, int]]]:
    return [[step(name, policy) for policy in ("plain", "keep", "recompute")] for name in ("ring", "ulysses")]


def test_saved_tensors_are_not_sent_again(worlds):
    for rank in worlds(2).run(every_step):
        for (dx, forward, backward), (saved_dx, *saved_bytes), (recomputed_dx, *recomputed_bytes) in rank:
            assert saved_bytes == [forward, backward] and forward > 0
            assert recomputed_bytes == [2 * forward, backward]
            assert relative_error(saved_dx, dx) == relative_error(recomputed_dx, dx) == 0
