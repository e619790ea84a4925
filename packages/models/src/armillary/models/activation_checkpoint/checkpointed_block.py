"""A block under a checkpoint policy: one `autograd.Function` that stores some tensors and recomputes the others.

`run_checkpointed` is a block's `run` under a policy. A `BlockRun` computes forward, backward and recomputation of a
block, with two to four tensors of the size of x [B, T, E] alive at once. Its `Checkpoint` has the stored tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention import AttentionSpec, Method, Projected, UPipe
from armillary.attention.internal import GradientSums, RNGReplay, capture_autocast, sent_projections
from armillary.core import label
from armillary.core.internal import compat, phase
from armillary.models.activation_checkpoint.gradient_buffer import writable
from armillary.models.activation_checkpoint.offload import OffloadedTensors, finish_latest_copy
from armillary.models.block import Block, Context, attend
from armillary.models.layers.projections import ProjectionModule
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.layers.token_functions import (
    backward_in_chunks,
    forward_in_chunks,
    in_chunks,
    trained_parameters,
)

# A block's input x, or its attention's output: the two tensors out and lse.
TensorName = Literal["x", "attention_output"]


@dataclass(frozen=True)
class Keep:
    """Selects the tensors that a block stores from forward to backward."""

    x: bool  # the block's input [B, T, E]
    attention_output: bool  # out [B, T, H, D] and lse [B, T, H]
    host: bool  # True stores them in the host's memory


def run_tiled(chunk: int | None, block: Block, x: Tensor, context: Context) -> Tensor:
    """Runs a block under autograd. The token-wise part saves only its inputs x and out; backward recomputes it."""
    out = attend(block, x, context)
    with label("mlp"):
        return in_chunks(block.after_attention, (x, out), block, chunk, block.gathered_ranks)


def run_checkpointed(
    chunk: int | None, prefetch: bool, keep: Keep, block: Block, x: Tensor, context: Context
) -> Tensor:
    """Runs a block as one `autograd.Function` under a checkpoint policy. `Checkpointing.apply` binds the options."""
    params = trained_parameters(block)
    previous: Checkpoint | None = context.previous_checkpoint[0]() if context.previous_checkpoint else None
    if previous is None or not previous.is_result(x):
        keep = replace(keep, x=True)  # x must be stored: it is not the previous block's result, or was changed
    context.previous_checkpoint.clear()
    if not torch.is_grad_enabled() or not (x.requires_grad or params):
        keep = replace(keep, host=False)  # without a backward, nothing needs to be copied to the host
    if isinstance(block.mixer, StateMixer):
        block_run = StateRun(block, context, replace(keep, attention_output=False), chunk, prefetch)
    else:
        block_run = AttentionRun.of(x, block, context, keep, chunk, prefetch)
    return cast(Tensor, cast(Any, CheckpointedBlock).apply(block_run, previous, x, *params))


class CheckpointedBlock(torch.autograd.Function):
    """A block as one autograd function. Stores those of x, out and lse that `Keep` selects; recomputes the others."""

    @staticmethod
    def forward(ctx: Any, block_run: BlockRun, previous: Checkpoint | None, x: Tensor, *params: Tensor) -> Tensor:
        checkpoint = Checkpoint(block_run, capture_autocast(x.device.type), previous)
        with checkpoint.autocast():
            y, *attention_output = block_run.forward(x)
        checkpoint.store(ctx, params, x, y, attention_output)
        ctx.checkpoint = checkpoint
        block_run.context.previous_checkpoint[:] = [ref(checkpoint)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with label("gradients"):
            dx = writable(grad_outputs)  # this is dy; `differentiate` overwrites it by the gradient of x
        checkpoint: Checkpoint = ctx.checkpoint
        block_run = checkpoint.block_run.replay()
        totals = GradientSums(trained_parameters(block_run.block))
        with phase("backward"), checkpoint.autocast():
            x, output = checkpoint.recall()
            if block_run.prefetch:  # the previous block's copies to the device overlap with this block's backward
                checkpoint.fetch_previous()
            block_run.differentiate(x, output, dx, totals, ctx.needs_input_grad[2])
        checkpoint.finish()
        return None, None, dx if ctx.needs_input_grad[2] else None, *totals.result()


# -- stored tensors ---------------------------------------------------------------------------------------------------


class StoredTensors(Protocol):
    """Tensors stored on the device, on the host, or by autograd. `take` returns them on the device."""

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """A slice of an autograd node's saved tensors. Autograd raises if they were changed in place."""

    def __init__(self, ctx: Any, indices: slice) -> None:
        # A weak reference: the node refers to the `Checkpoint`, which would keep it alive in a cycle.
        self.ctx, self.indices = ref(ctx), indices

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.indices]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """The tensors that one run of a block stores for its backward, and their recomputation.

    A block that does not store its input x recomputes it from the previous block, whose result is x.
    """

    def __init__(
        self,
        block_run: BlockRun,
        autocast: Callable[[], AbstractContextManager[Any]],  # restores the autocast state of forward
        previous: Checkpoint | None,
    ) -> None:
        self.block_run, self.keep, self.autocast, self.previous = block_run, block_run.keep, autocast, previous
        self.stored_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        self.recomputed_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        # A weak reference to the result, which is thus freed as soon as nothing else uses it, and its version, which
        # changes when the result is changed in place.
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def is_result(self, x: Tensor) -> bool:
        """Returns True if x is this block's result, unchanged. False if a hook replaced or changed it."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(
        self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, y: Tensor, attention_output: Sequence[Tensor]
    ) -> None:
        """Stores those of x and (out, lse) that `keep` selects, on the host or as saved tensors of the node `ctx`."""
        names: list[TensorName] = []
        tensors: list[Tensor] = []
        if self.keep.x:
            names.append("x")
            tensors.append(x)
        if self.keep.attention_output:
            names.append("attention_output")
            tensors += attention_output
        finish_latest_copy(x.device)  # the previous block's copies overlapped with this block's forward
        if names and self.keep.host:
            self.stored_tensors[tuple(names)] = OffloadedTensors(tensors)
        elif names:
            self.stored_tensors[tuple(names)] = SavedByAutograd(ctx, slice(len(parameters), None))
        ctx.save_for_backward(*parameters, *([] if self.keep.host else tensors))
        self._result = ref(y.untyped_storage()), y._version

    # -- backward -----------------------------------------------------------------------------------------------------

    def recall(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns (x, (out, lse)), stored or recomputed. Without out and lse if backward does not need them."""
        # If the previous block is recomputed for x, its parameters stay gathered: its backward comes next.
        x = None if self._has("x") else self._previous_result(keep_gathered=True)
        tensors = self._take()
        x = tensors["x"][0] if x is None else x
        if not self.block_run.needs_output:
            return x, ()
        return x, tensors.get("attention_output") or self.block_run.replay().attend(x)

    def result(self, keep_gathered: bool) -> Tensor:
        """Recomputes the block's result. Stores recomputed inputs and attention outputs for its own backward."""
        # 1. x: stored, or the previous block's result. This recurses to the first block of the segment, which stored x.
        new_tensors: dict[TensorName, Sequence[Tensor]] = (
            {} if self._has("x") else {"x": (self._previous_result(keep_gathered=False),)}
        )
        tensors_by_name = {**self._take(), **new_tensors}
        (x,) = tensors_by_name["x"]
        with unsharded_parameters(self.block_run.block, keep_gathered), self.autocast():
            # 2. Attention. Its output is stored if backward needs it, so that attention is recomputed only once.
            if "attention_output" not in tensors_by_name:
                tensors_by_name["attention_output"] = self.block_run.replay().attend(x)
                if self.block_run.needs_output:
                    new_tensors["attention_output"] = tensors_by_name["attention_output"]
            if new_tensors:
                tensors = [tensor for group in new_tensors.values() for tensor in group]
                self.recomputed_tensors[tuple(new_tensors)] = (
                    OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)
                )
            # 3. The token-wise part.
            y = self.block_run.replay().after_attention(x, tensors_by_name["attention_output"][0], None)
        for group in self.recomputed_tensors.values():
            if isinstance(group, OffloadedTensors):
                group.finish_copy()  # frees the device's tensors before the next block's backward, where memory peaks
        return y

    def fetch_previous(self) -> None:
        """Starts to copy the previous block's offloaded tensors back to the device, unless that was started before."""
        if self.previous is not None:
            for group in (*self.previous.stored_tensors.values(), *self.previous.recomputed_tensors.values()):
                if isinstance(group, OffloadedTensors):
                    group.fetch()

    def finish(self) -> None:
        """Called after the block's backward: prefetches the previous block's tensors, and releases this block's."""
        self.fetch_previous()
        self.recomputed_tensors.clear()
        if not compat.keeps_graph():  # under retain_graph the next backward needs them again
            self.stored_tensors.clear()
            self.previous = None

    def _previous_result(self, keep_gathered: bool) -> Tensor:
        assert self.previous is not None  # a block without a previous checkpoint stores x
        return self.previous.result(keep_gathered)

    def _has(self, name: TensorName) -> bool:
        return any(name in names for names in (*self.stored_tensors, *self.recomputed_tensors))

    def _take(self) -> dict[TensorName, Sequence[Tensor]]:
        """Returns all stored and recomputed tensors, on the device: (x,) and (out, lse) by name."""
        # A group of names has the tensors (x,), (out, lse) or (x, out, lse).
        tensors_by_name: dict[TensorName, Sequence[Tensor]] = {}
        for names, group in (self.stored_tensors | self.recomputed_tensors).items():
            tensors = group.take()
            tensors_by_name |= {name: tensors[:1] if name == "x" else tensors[-2:] for name in names}
        return tensors_by_name


@runtime_checkable
class Gathers(Protocol):
    """A block whose parameters FSDP2 gathers."""

    def unshard(self) -> Any: ...

    def reshard(self) -> None: ...


@contextmanager
def unsharded_parameters(block: Any, keep_gathered: bool) -> Generator[None]:
    # FSDP's hooks gather parameters only around the block's own forward and backward, not around a recomputation.
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not keep_gathered:  # otherwise the block's backward, which comes next, reshards them
        block.reshard()


# -- forward, backward and recomputation ------------------------------------------------------------------------------


@dataclass
class BlockRun(ABC):
    """One run of a block, forward and backward, which can be repeated."""

    # True if `differentiate` needs attention's out and lse; False if it recomputes the whole block from x.
    needs_output: ClassVar[bool]

    block: Block
    context: Context
    keep: Keep
    chunk: int | None  # as `prefetch`, of `Checkpointing`
    prefetch: bool
    # The state of the random number generators, from which recomputation draws the same numbers.
    draws: RNGReplay = field(default_factory=RNGReplay, kw_only=True)

    def replay(self) -> Self:
        """Returns the same run with the random numbers of its first forward."""
        return replace(self, draws=self.draws.restart())

    @abstractmethod
    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the mixer's out [B, T, H, D], and attention's lse [B, T, H] (an empty tensor for other mixers)."""

    def after_attention(self, x: Tensor, out: Tensor, buffer: Tensor | None) -> Tensor:
        """Computes the block's result [B, T, E] in chunks of tokens. `buffer` is memory for it."""
        with label("mlp"):
            return forward_in_chunks(
                self.block.after_attention, (x, out), self.draws, self.chunk, buffer, self.block.gathered_ranks
            )

    def differentiate_after_attention(
        self, x: Tensor, out: Tensor, dx: Tensor, dout: Tensor | None, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Backward of `after_attention`, chunk by chunk. Writes the gradient of out to `dout`, if it is needed.

        `dx` is dy on entry. If `needs_dx`, it is overwritten by the gradient of x through the residual and the MLP.
        """
        with label("mlp"):
            grads, chunking = (dx if needs_dx else None, dout), (self.chunk, self.block.gathered_ranks)
            backward_in_chunks(self.block.after_attention, (x, out), dx, grads, totals, self.draws, *chunking)

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (the block's result, out, lse)."""

    @abstractmethod
    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        """Runs the block's backward. Adds the gradients of parameters to `totals`.

        Args:
            output: (out, lse), or empty unless `needs_output`.
            dx: on entry the gradient dy of the block's result. Overwritten by the gradient of x, if `needs_dx`.
        """


@dataclass
class AttentionRun(BlockRun):
    needs_output = True

    upipe: UPipe
    call: AttentionSpec

    @classmethod
    def of(
        cls, x: Tensor, block: Block, context: Context, keep: Keep, chunk: int | None, prefetch: bool
    ) -> AttentionRun:
        """Returns the run of a block on x [B, T, E]. Raises ValueError if attention does not accept the call."""
        method = cast(Method, block.attention)
        # Attention gets the tokens of all tensor-parallel ranks. The check reads only shapes, so a view of x that has
        # as many tokens is enough.
        attention_x = x[:, :1].expand(-1, context.tokens, -1) if block.gathered_ranks > 1 else x
        # `method` checks the call, and not the UPipe below: all blocks share the method, so its cache has the result
        # from the first block. The UPipe is a new object with an empty cache.
        call = method.check_projected(
            attention_x,
            block.projections(context, True),
            mask=context.mask,
            layout=context.layout,
        )
        return cls(block, context, keep, chunk, prefetch, UPipe.for_method(method), call)

    def source(self, x: Tensor, dx: Tensor | None = None, totals: GradientSums | None = None) -> Projected:
        """Returns the source of q, k and v from `attention_input`. Backward adds to `dx` and `totals`."""
        projections = self.block.projections(self.context, normed=self.block.gathered_ranks > 1)
        projections = sent_projections(self.upipe, x, projections, self.call.key_heads)
        totals = GradientSums() if totals is None else totals
        return Projected(x, projections, self.chunk, dx, totals, self.draws)

    def attention_input(self, x: Tensor) -> Tensor:
        """Returns the input of the projections."""
        if self.block.gathered_ranks == 1:  # the projections apply the norm, again for each stage of heads
            return x
        # norm(x) of all ranks' tokens, so that the tokens are gathered only once.
        normed_x = forward_in_chunks(
            self.block.norm, (x,), RNGReplay(), self.chunk, gathered_ranks=self.block.gathered_ranks
        )
        return normed_x[:, : self.context.tokens]

    def attend(self, x: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes out and lse, without autograd. `buffer` is memory for out."""
        with label("attention"):
            source = self.source(self.attention_input(x))
            return self.upipe.attend(source, self.call, buffer, source.expansion)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # `key_heads` has an entry for each of this rank's query heads. `tokens` counts the padding of gathered tokens.
        heads, tokens = len(self.call.key_heads), x.shape[1] * self.block.gathered_ranks
        width = self.block.gathered_ranks * heads * cast(ProjectionModule, self.block.mixer).value_dim
        # Two tensors of the size of x are alive: x, and out, which the result overwrites; q, k and v are projected in
        # stages of heads, and the token-wise part runs in chunks.
        # The result [B, T, E] cannot overwrite out [B, tokens, heads, Dv] if backward needs out, or if their numbers of
        # elements differ.
        if self.keep.attention_output or x.shape[2] != width or tokens != self.context.tokens:
            out, lse = self.attend(x)
            return self.after_attention(x, out, None), out, lse
        with label("checkpoints"):  # y is the next block's x, which that block stores
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
        out_buffer = y.view(len(y), tokens, heads, -1)
        out, lse = self.attend(x, out_buffer)
        # Under autocast `attend` may return out in another dtype, and so in other memory: a third tensor.
        return self.after_attention(x, out, y), out, lse

    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        out, lse = output
        projections = self.block.projections(self.context, normed=False)
        needs_attention = needs_dx or any(p.requires_grad for p in projections.parameters())
        # Four tensors of the size of x are alive: x, out, dout, and dy, which dx overwrites.
        # 1. Backward of the token-wise part.
        with label("attention"):
            dout = torch.empty_like(out) if needs_attention else None
        self.differentiate_after_attention(x, out, dx, dout, totals, needs_dx)
        if dout is None:
            return
        # 2. Backward of attention and of the projections, one stage of heads after the other. Each stage adds to dx,
        # and so rounds it in 16 bits.
        with label("attention"):
            if self.block.gathered_ranks == 1:
                source = self.source(x, dx if needs_dx else None, totals)
                self.upipe.differentiate(dout, source, out, lse, self.call, source.expansion)
            else:
                # The input is the gathered norm(x). Its gradient goes back through the reduce-scatter and the norm.
                gathered_dx = x.new_zeros((len(x), x.shape[1] * self.block.gathered_ranks, x.shape[2]))
                source = self.source(self.attention_input(x), gathered_dx[:, : self.context.tokens], totals)
                self.upipe.differentiate(dout, source, out, lse, self.call, source.expansion)
                norm_dx, chunking = torch.empty_like(dx), (self.chunk, self.block.gathered_ranks)
                backward_in_chunks(self.block.norm, (x,), gathered_dx, (norm_dx,), totals, RNGReplay(), *chunking)
                dx += norm_dx


class StateRun(BlockRun):
    """One run of a block whose mixer has a state: stores x, and recomputes the mixer in backward."""

    needs_output = False

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with self.draws.at("mixer", x.device):
            return attend(self.block, x, self.context), x.new_empty(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self.attend(x)
        return self.after_attention(x, out, None), out, lse

    def differentiate(
        self, x: Tensor, output: Sequence[Tensor], dx: Tensor, totals: GradientSums, needs_dx: bool
    ) -> None:
        # 1. Recompute the mixer from x, under autograd, which then differentiates it in step 3.
        leaf = x.detach().requires_grad_(needs_dx)
        with torch.enable_grad():
            out, _ = self.attend(leaf)
        # 2. Backward of the token-wise part.
        dout = torch.empty_like(out) if out.requires_grad else None
        self.differentiate_after_attention(x, out.detach(), dx, dout, totals, needs_dx)
        if dout is None:
            return
        # 3. Backward of the norm and the mixer. Adds to dx.
        with label("attention"):
            sources = [*([leaf] if needs_dx else []), *totals.parameters]
            gradients: list[Tensor | None] = list(torch.autograd.grad(out, sources, dout, allow_unused=True))
            totals.add(gradients[len(sources) - len(totals.parameters) :])
        if needs_dx and (mixer_dx := gradients[0]) is not None:
            dx += mixer_dx
