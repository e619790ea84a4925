"""What blocks keep for their backward pass: checkpoint policies, applied to a plain model from outside.

    policy              kept of each block      computed again in backward
    none                all that autograd wants nothing
    layer               x                       all of it
    attention_output    x, out, lse             all but attention (DistFlashAttention, arXiv 2310.03294)

Under the last two a block is one `autograd.Function`. What surrounds attention is run on a few tokens at a time, q, k
and v come in stages of heads where the method has some (UPipe), and residuals and gradients are added in place. So of
tensors as large as x [B, T, E] there are, at a time: in forward x and out, which becomes the result (under
"attention_output", or where it does not fit, the result beside them); in backward x, out, dy = dx and dout. In 16 bits
dx is rounded each time that a stage of heads adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.attention import AttentionSpec, Method, Projected, UPipe
from armillary.core import compat, label
from armillary.core.accumulate import Totals
from armillary.core.observe.ledger import phase
from armillary.core.recompute import RNGReplay, capture_autocast
from armillary.models.activation_checkpoint.gradient_buffer import writable
from armillary.models.activation_checkpoint.offload import OffloadedTensors
from armillary.models.block import Block, Context, Decoder, attend, plainly
from armillary.models.layers import chunked
from armillary.models.layers.chunked import trained

Policy = Literal["none", "layer", "attention_output"]
POLICIES: tuple[Policy, ...] = ("none", "layer", "attention_output")


@dataclass(frozen=True)
class Checkpointing:
    """Activation checkpointing: what each block keeps for backward.

    Args:
        policy: what each block keeps.
        offload: keep it in the host's memory.
        prefetch: bring it back while the block above is differentiated; otherwise after that, which takes one [B, T, E]
            less and leaves less to hide the copying behind.
        tiled: also under policy "none", run what follows attention in chunks that backward computes again.
        chunk: tokens that norms, projections and MLPs are run on at once; by default as `armillary.core.chunks` has it.

    Raises:
        ValueError: an unknown policy, or offload where nothing is kept to be offloaded.
    """

    policy: Policy = "none"
    offload: bool = False
    prefetch: bool = True
    tiled: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"checkpoint policy {self.policy!r}; known: {', '.join(POLICIES)}")
        if self.offload and self.policy == "none":
            raise ValueError("offload keeps checkpoints in the host's memory, and policy 'none' has none to keep")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunks of {self.chunk} tokens: at least 1 is needed")

    def apply(self, model: nn.Module) -> None:
        """Sets how the blocks of `Llama` or `GPT` are run, in place; before FSDP or after it, once or again. Before
        torch.compile, which replaces what is set here.

        Raises:
            ValueError: a model of other blocks, or a policy other than "none" on attention that is no armillary method.
        """
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if not blocks and (self.policy != "none" or self.tiled):
            raise ValueError(f"{type(model).__name__} has no blocks of armillary's to be run otherwise")
        for block in blocks:
            if self.policy != "none" and not isinstance(block.attention, Method):
                kind = type(block.attention).__name__
                raise ValueError(f"policy {self.policy!r} runs attention in parts; {kind} is no armillary method")
        for block in blocks:
            block.run = self.runner()
        for module in model.modules():
            if isinstance(module, Decoder):
                module.norm_in_chunks = self.tiled or self.policy != "none"
                module.chunk = self.chunk

    def runner(self) -> Callable[[Block, Tensor, Context], Tensor]:
        """How to run a block."""
        if self.policy == "none":
            return partial(run_tiled, self.chunk) if self.tiled else plainly
        return partial(run_checkpointed, self)


def run_tiled(chunk: int | None, block: Block, x: Tensor, context: Context) -> Tensor:
    """As `plainly`, but of what follows attention, only x and out are kept."""
    out = attend(block, x, context)
    with label("mlp"):
        return chunked.in_chunks(block.rest, (x, out), block, chunk, block.gathered_ranks)


def run_checkpointed(options: Checkpointing, block: Block, x: Tensor, context: Context) -> Tensor:
    """Keeps what the policy says."""
    upipe = UPipe.around(cast(Method, block.attention))
    call = upipe.call_for(
        like_inside(block, x, context), block.projections(context, True), mask=context.mask, layout=context.layout
    )
    params = trained(block)
    if not torch.is_grad_enabled() or not (x.requires_grad or params):
        options = replace(options, offload=False)  # nothing will be differentiated
    work = CheckpointedRun(options, block, context, upipe, call)
    return cast(Tensor, cast(Any, CheckpointedBlock).apply(work, x, *params))


def like_inside(block: Block, x: Tensor, context: Context) -> Tensor:
    """A tensor shaped as what `x` is within attention. Takes no memory."""
    return x[:, :1].expand(-1, context.tokens, -1) if block.gathered_ranks > 1 else x


@dataclass
class CheckpointedRun:
    """One run of a block."""

    options: Checkpointing
    block: Block
    context: Context
    upipe: UPipe
    call: AttentionSpec
    draws: RNGReplay = field(default_factory=RNGReplay)

    @property
    def keeps_attention(self) -> bool:
        return self.options.policy == "attention_output"

    @property
    def gathered_ranks(self) -> int:
        return self.block.gathered_ranks

    def source(self, x: Tensor, dx: Tensor | None = None, totals: Totals | None = None) -> Projected:
        """q, k and v, a few heads at a time, made of x, or of what is `inside`."""
        projections = self.block.projections(self.context, normed=self.gathered_ranks > 1)
        totals = Totals() if totals is None else totals
        return Projected(x, projections, self.options.chunk, dx, totals, self.draws)

    def inside(self, x: Tensor) -> Tensor:
        """What q, k and v are made of: x, to be normed for each stage of heads; or all ranks' x, normed."""
        if self.gathered_ranks == 1:
            return x
        normed = chunked.forward(
            self.block.norm, (x,), RNGReplay(), self.options.chunk, gathered_ranks=self.gathered_ranks
        )
        return normed[:, : self.context.tokens]

    def attend(self, x: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out and lse, without autograd."""
        with label("attention"):
            return self.upipe.attend(self.source(self.inside(x)), self.call, into)

    def rest(self, x: Tensor, out: Tensor, into: Tensor | None) -> Tensor:
        """The block's result."""
        with label("mlp"):
            return chunked.forward(self.block.rest, (x, out), self.draws, self.options.chunk, into, self.gathered_ranks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the block's result, out, lse). If out need not be kept, the result takes its place, chunk by chunk."""
        heads, tokens = len(self.call.key_heads), x.shape[1] * self.gathered_ranks
        if self.keeps_attention or x.shape[2] % (heads * self.gathered_ranks) or tokens != self.context.tokens:
            out, lse = self.attend(x)
            return self.rest(x, out, None), out, lse
        with label("checkpoints"):  # what the next block keeps
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
        room = y.view(len(y), tokens, heads, -1)
        out, lse = self.attend(x, room)
        return self.rest(x, out, y if out is room else None), out, lse

    def keep(self, tensors: Sequence[Tensor]) -> OffloadedTensors | None:
        """Puts them into the host's memory, if asked to."""
        if not self.options.offload:
            return None
        below = self.context.below
        kept = OffloadedTensors(tensors, below[0]() if below else None)
        below[:] = [ref(kept)]
        return kept

    def differentiate(self, x: Tensor, out: Tensor, lse: Tensor, dx: Tensor, totals: Totals, wants_dx: bool) -> None:
        """Turns dx, which holds dy at first, into the gradient of x."""
        projections = self.block.projections(self.context, normed=False)
        attention_too = wants_dx or any(p.requires_grad for p in projections.parameters())
        with label("attention"):
            dout = torch.empty_like(out) if attention_too else None
        with label("mlp"):
            grads = (dx if wants_dx else None, dout)
            cut = self.options.chunk, self.gathered_ranks
            chunked.backward(self.block.rest, (x, out), dx, grads, totals, self.draws, *cut)
        if dout is None:
            return
        with label("attention"):
            if self.gathered_ranks == 1:
                source = self.source(x, dx if wants_dx else None, totals)
                self.upipe.differentiate(dout, source, out, lse, self.call)
            else:
                self.differentiate_inside(x, out, lse, dout, dx, totals)

    def differentiate_inside(
        self, x: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dx: Tensor, totals: Totals
    ) -> None:
        """Adds to dx what comes by attention, where all ranks' x was brought in for it."""
        dinside = x.new_zeros((len(x), x.shape[1] * self.gathered_ranks, x.shape[2]))
        source = self.source(self.inside(x), dinside[:, : self.context.tokens], totals)
        self.upipe.differentiate(dout, source, out, lse, self.call)
        del dout
        share, cut = torch.empty_like(dx), (self.options.chunk, self.gathered_ranks)
        chunked.backward(self.block.norm, (x,), dinside, (share,), totals, RNGReplay(), *cut)
        dx += share


class CheckpointedBlock(torch.autograd.Function):
    """A block as one step of autograd's."""

    @staticmethod
    def forward(ctx: Any, work: CheckpointedRun, x: Tensor, *params: Tensor) -> Tensor:
        ctx.work, ctx.autocast = work, capture_autocast(x.device.type)
        with ctx.autocast():
            y, out, lse = work.forward(x)
        kept = (x, out, lse) if work.keeps_attention else (x,)
        ctx.kept = work.keep(kept)
        # Parameters are not used from here, but autograd then notices if somebody has changed them meanwhile.
        ctx.save_for_backward(*params, *(() if ctx.kept else kept))
        ctx.params = len(params)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        work: CheckpointedRun = replace(ctx.work, draws=ctx.work.draws.again())
        with label("gradients"):
            dx = writable(grad_outputs)
        totals = Totals(trained(work.block))
        with phase("backward"), ctx.autocast():
            x, *attended = take(ctx)
            out, lse = attended or work.attend(x)
            work.differentiate(x, out, lse, dx, totals, ctx.needs_input_grad[1])
        finish(ctx)
        return None, dx if ctx.needs_input_grad[1] else None, *totals.result()


def take(ctx: Any) -> Sequence[Tensor]:
    """What the block has kept, on the device."""
    saved: Sequence[Tensor] = ctx.saved_tensors[ctx.params :]
    kept: OffloadedTensors | None = ctx.kept
    if kept is None:
        return saved
    tensors = kept.take()
    if ctx.work.options.prefetch:
        kept.fetch_below()
    return tensors


def finish(ctx: Any) -> None:
    """The block has been differentiated."""
    kept: OffloadedTensors | None = ctx.kept
    if kept is not None:
        kept.fetch_below()
        if not compat.keeps_graph():
            kept.release()
