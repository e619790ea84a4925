"""The scan over all ranks: local chunks, one all-gather of states, and the states that enter from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.call.recompute import outside_autocast
from armillary.attention.states.chunks import Operands, StateKernel, apply_map
from armillary.attention.states.plan import Forest, ScanPlan, StateExchange
from armillary.core import Axis, start_all_gather, start_reduce_scatter
from armillary.core.observe.ledger import phase

MakeOperands = Callable[..., Operands]
"""Makes a layer's operands of its inputs."""
Gather = Callable[[Tensor, Sequence[int]], Tensor]
"""Gathers the elements [n] of all ranks, of which each rank has as many as the sizes say."""


class ScanCall(NamedTuple):
    """A checked call.

    Args:
        make_operands: called with the inputs, in forward and again in backward.
        axis: of the ranks; None for one rank.
    """

    make_operands: MakeOperands
    kernel: StateKernel
    plan: ScanPlan
    axis: Axis | None

    def forward(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns (outputs [B, T, H, Dv], states after each row's last token [B, H, Dk, Dv], gathered elements)."""
        gathered: Tensor | None = None

        def gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
            nonlocal gathered
            assert self.axis is not None
            gathered = start_all_gather(x, self.axis, sizes, 0).wait()
            return gathered

        with outside_autocast(_device_type(inputs)):
            out, final = _run(self.make_operands(*inputs), self.kernel, self.plan, gather)
        return out, final, gathered

    def backward(
        self, grads: Sequence[Tensor], inputs: Sequence[Tensor | None], gathered: Tensor | None
    ) -> list[Tensor | None]:
        """Returns the gradients of the inputs from those of outputs and states. Recomputes the chunks."""
        # All leaves need a gradient, whichever the caller asked for: the states depend on some of them on every rank.
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]

        def gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
            return cast(Tensor, _Regathered.apply(x, gathered, self.axis, sizes))

        with torch.enable_grad(), outside_autocast(_device_type(inputs)), phase("backward"):
            results = _run(self.make_operands(*leaves), self.kernel, self.plan, gather)
            tensors = [x for x in leaves if x is not None]
            leaf_grads = iter(torch.autograd.grad(results, tensors, grads, allow_unused=True))
        return [None if x is None else next(leaf_grads) for x in leaves]


def scan(call: ScanCall, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (outputs [B, T, H, Dv], states after each row's last token [B, H, Dk, Dv]), differentiable."""
    return cast("tuple[Tensor, Tensor]", _Scan.apply(call, *inputs))


class _Scan(torch.autograd.Function):
    """The scan as one function. Keeps its inputs and the gathered states, and recomputes everything else in backward.

    One function, so that the backward collective runs on every rank, also on one whose loss needs no state of another.
    """

    @staticmethod
    def forward(ctx: Any, call: ScanCall, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final, gathered = call.forward(inputs)
        ctx.call = call
        ctx.save_for_backward(gathered, *inputs)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gathered, *inputs = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
        return None, *ctx.call.backward(grads, inputs, gathered)


class _Regathered(torch.autograd.Function):
    """The gathered elements once more, without communication. The gradient is summed over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
        ctx.call = axis, sizes
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with phase("backward"):
            axis, sizes = ctx.call
            return start_reduce_scatter(grads[0], axis, sizes, 0).wait(), None, None, None


def _run(operands: Operands, kernel: StateKernel, plan: ScanPlan, gather: Gather) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (_cut(x, plan) for x in operands[:5])
    chunks = kernel.maps(operands._replace(q=q, k=k, v=v, g=g, beta=beta))

    # First as if no state of another rank entered.
    roots = plan.forest.sizes[0]
    entering_roots = chunks.state.new_zeros(roots, *chunks.state.shape[1:])
    if operands.initial_state is not None:
        initial = operands.initial_state.index_select(0, plan.first_rows)
        entering_roots = entering_roots.index_add(0, plan.first_chunks, initial)
    leaving_roots = apply_map(chunks.state_map[:roots], entering_roots) + chunks.state[:roots]
    leaving = _follow(leaving_roots, chunks.state_map, chunks.state, plan.forest)
    entering = torch.cat([entering_roots, leaving.index_select(0, plan.forest.parents)])
    if plan.exchange is None:
        final = leaving.index_select(0, plan.last_chunks)
    else:
        # The maps from the state that enters a tree to those that leave its chunks.
        maps = chunks.state_map.index_select(0, plan.entered)
        roots = plan.entered_forest.sizes[0]
        leaving_maps = _follow(maps[:roots], maps, None, plan.entered_forest)
        states, final = _exchange_states(leaving, leaving_maps, plan.exchange, gather)
        identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device).expand(roots, maps.shape[1], -1, -1)
        entering_maps = torch.cat([identity, leaving_maps.index_select(0, plan.entered_forest.parents)])
        entering = entering.index_add(0, plan.entered, apply_map(entering_maps, states))
    out = chunks.output_map @ entering + chunks.output
    return _join(out, plan, operands.v.shape), final


def _exchange_states(
    leaving: Tensor, leaving_maps: Tensor, exchange: StateExchange, gather: Gather
) -> tuple[Tensor, Tensor]:
    """Returns the states that enter the trees of the plan's `entered` chunks, and the final states."""
    own_tensors = [leaving.index_select(0, exchange.own_states), leaving_maps.index_select(0, exchange.own_maps)]
    shapes = [x.shape[1:] for x in own_tensors]
    state_sizes, map_sizes = (
        [count * shape.numel() for count in counts]
        for counts, shape in zip((exchange.states, exchange.maps), shapes, strict=True)
    )
    sizes = [a + b for a, b in zip(state_sizes, map_sizes, strict=True)]
    gathered = gather(torch.cat([x.flatten() for x in own_tensors]), sizes)
    # Each rank's states and then its maps.
    both = gathered.split([size for pair in zip(state_sizes, map_sizes, strict=True) for size in pair])
    states, maps = (torch.cat(both[i::2]).view(-1, *shapes[i]) for i in (0, 1))
    states, maps = states.index_select(0, exchange.state_order), maps.index_select(0, exchange.map_order)
    roots = exchange.forest.sizes[0]
    complete = _follow(
        states[:roots], torch.cat([maps.new_empty(roots, *maps.shape[1:]), maps]), states, exchange.forest
    )
    return complete.index_select(0, exchange.entering), complete.index_select(0, exchange.last)


def _follow(roots: Tensor, maps: Tensor, states: Tensor | None, forest: Forest) -> Tensor:
    """Returns x with x at a node = its map applied to x at its parent, plus its state: depth by depth, in order.

    Args:
        roots: x at the roots.
        maps, states: of all nodes; those of roots are not read.
    """
    depths = [roots]
    # Split at once: backward of a slice for each depth would fill as many tensors of all nodes.
    maps_by_depth = maps.split(forest.sizes)[1:]
    states_by_depth = [None] * len(maps_by_depth) if states is None else states.split(forest.sizes)[1:]
    for state_map, state, parents in zip(maps_by_depth, states_by_depth, forest.parents_by_depth, strict=True):
        x = apply_map(state_map, depths[-1].index_select(0, parents))
        depths.append(x if state is None else x + state)
    return torch.cat(depths)


def _cut(x: Tensor, plan: ScanPlan) -> Tensor:
    """Returns the chunks of [B, T, heads, D] as [n, heads, C, D], zeros where there is no token."""
    tokens = x.flatten(0, 1).index_select(0, plan.tokens)
    chunks = tokens.unflatten(0, (-1, plan.chunk)).transpose(1, 2)
    return chunks.contiguous() if plan.padding is None else chunks.masked_fill(plan.padding, 0)


def _join(chunks: Tensor, plan: ScanPlan, shape: Sequence[int]) -> Tensor:
    """Returns [B, T, H, D] of this rank's tokens: the inverse of `_cut`."""
    return chunks.transpose(1, 2).flatten(0, 1).index_select(0, plan.places).view(*shape[:-1], chunks.shape[-1])


def _device_type(inputs: Sequence[Tensor | None]) -> str:
    return next(x.device.type for x in inputs if x is not None)
