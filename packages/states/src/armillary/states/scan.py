"""The scan over all ranks: local chunks, one all-gather of states, and the effect of other ranks' states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.attention.internal import outside_autocast
from armillary.core import Axis, start_all_gather, start_reduce_scatter
from armillary.core.internal import phase
from armillary.states.chunks import Operands, StateKernel, apply_map
from armillary.states.scan_plan import Forest, ScanPlan, StateExchange

MakeOperands = Callable[..., Operands]
"""Computes the operands of a layer from its inputs."""
Gather = Callable[[Tensor, Sequence[int]], Tensor]
"""All-gather of flat tensors: (this rank's elements, number of elements of each rank) -> elements of all ranks."""


class ScanCall(NamedTuple):
    """A checked call of a layer with a state; `axis` is None on one rank."""

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
        # All leaves require gradients, even if the caller needs none: the backward collective must run on every rank,
        # and autograd runs it only if the gathered states depend on a leaf that requires a gradient.
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]

        def gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
            return cast(Tensor, _Regathered.apply(x, gathered, self.axis, sizes))

        with torch.enable_grad(), outside_autocast(_device_type(inputs)), phase("backward"):
            results = _run(self.make_operands(*leaves), self.kernel, self.plan, gather)
            tensors = [x for x in leaves if x is not None]
            leaf_grads = iter(torch.autograd.grad(results, tensors, grads, allow_unused=True))
        return [None if x is None else next(leaf_grads) for x in leaves]


class Scan(torch.autograd.Function):
    """The scan as one function: (outputs [B, T, H, Dv], states after each row's last token [B, H, Dk, Dv]).

    Saves its inputs and the gathered states, and recomputes everything else in backward.
    """

    # Because it is one function, every rank runs the backward collective, even if its loss depends on no other rank.

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
    # All-gather in the recomputation: returns the elements that forward gathered; backward is a reduce-scatter.
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
    """Returns (outputs [B, T, H, Dv], final states [B, H, Dk, Dv]), differentiable by plain autograd."""
    # 1. All chunks at once, as maps of the states that enter them.
    q, k, v, g, beta = (_cut(x, plan) for x in operands[:5])
    chunks = kernel.maps(operands._replace(q=q, k=k, v=v, g=g, beta=beta))

    # 2. The states after local chunks, as if no state of another rank entered.
    root_count = plan.forest.sizes[0]
    entering_roots = chunks.state.new_zeros(root_count, *chunks.state.shape[1:])
    if operands.initial_state is not None:
        initial = operands.initial_state.index_select(0, plan.first_rows)
        entering_roots = entering_roots.index_add(0, plan.first_chunks, initial)
    leaving_roots = apply_map(chunks.state_map[:root_count], entering_roots) + chunks.state[:root_count]
    leaving = _follow(leaving_roots, chunks.state_map, chunks.state, plan.forest)
    entering = torch.cat([entering_roots, leaving.index_select(0, plan.forest.parents)])
    if plan.exchange is None:
        final = leaving.index_select(0, plan.last_chunks)
    else:
        # 3. Products of maps along dependent trees: from the state that enters a tree to the state after each chunk.
        maps = chunks.state_map.index_select(0, plan.dependent_chunks)
        root_count = plan.dependent_forest.sizes[0]
        leaving_maps = _follow(maps[:root_count], maps, None, plan.dependent_forest)
        # 4. The exchange. The states that enter dependent trees are mapped to each chunk, and added to the states
        # there: chunks are affine maps, so the effect of an entering state is a separate term.
        states, final = _exchange_states(leaving, leaving_maps, plan.exchange, gather)
        identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
        identity = identity.expand(root_count, maps.shape[1], -1, -1)
        entering_maps = torch.cat([identity, leaving_maps.index_select(0, plan.dependent_forest.parents)])
        entering = entering.index_add(0, plan.dependent_chunks, apply_map(entering_maps, states))
    # 5. Outputs of all chunks, [n, H, C, Dv], and from these the outputs of this rank's tokens: the inverse of `_cut`.
    out = (chunks.output_map @ entering + chunks.output).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, plan.slots).view(*operands.v.shape[:-1], out.shape[-1]), final


def _exchange_states(
    leaving: Tensor, leaving_maps: Tensor, exchange: StateExchange, gather: Gather
) -> tuple[Tensor, Tensor]:
    """Returns (for each dependent chunk the state that enters its tree, final states of all rows)."""
    # `leaving` has the states after this rank's chunks, as if no state of another rank entered; `leaving_maps`, for
    # each dependent chunk, the map from the state that enters its tree to the one after the chunk.
    # This rank sends its boundary states, and then the maps of those that depend on other ranks, as one flat tensor.
    own_tensors = [
        leaving.index_select(0, exchange.own_state_chunks),
        leaving_maps.index_select(0, exchange.own_map_chunks),
    ]
    shapes = [x.shape[1:] for x in own_tensors]
    state_sizes, map_sizes = (
        [count * shape.numel() for count in counts]
        for counts, shape in zip((exchange.state_counts, exchange.map_counts), shapes, strict=True)
    )
    sizes = [a + b for a, b in zip(state_sizes, map_sizes, strict=True)]
    gathered = gather(torch.cat([x.flatten() for x in own_tensors]), sizes)
    # From each rank come its states, followed by its maps.
    by_rank = gathered.split([size for pair in zip(state_sizes, map_sizes, strict=True) for size in pair])
    states, maps = (torch.cat(by_rank[i::2]).view(-1, *shapes[i]) for i in (0, 1))
    states, maps = states.index_select(0, exchange.state_order), maps.index_select(0, exchange.map_order)
    # Every rank completes all boundary states, roots first. Roots depend on no other rank and have no maps: the entries
    # for them are not read.
    root_count = exchange.forest.sizes[0]
    maps = torch.cat([maps.new_empty(root_count, *maps.shape[1:]), maps])
    boundary_states = _follow(states[:root_count], maps, states, exchange.forest)
    return (
        boundary_states.index_select(0, exchange.entering_states),
        boundary_states.index_select(0, exchange.final_states),
    )


def _follow(roots: Tensor, maps: Tensor, states: Tensor | None, forest: Forest) -> Tensor:
    """Returns x [nodes, H, ...] with x[node] = maps[node] x[parent] + states[node], from the x of roots."""
    # Maps and states of roots are not read.
    depths = [roots]
    # One `split` instead of a slice for each depth: backward of each slice would allocate a gradient of all nodes.
    maps_by_depth = maps.split(forest.sizes)[1:]
    states_by_depth = [None] * len(maps_by_depth) if states is None else states.split(forest.sizes)[1:]
    for state_map, state, parents in zip(maps_by_depth, states_by_depth, forest.parents_by_depth, strict=True):
        x = apply_map(state_map, depths[-1].index_select(0, parents))
        depths.append(x if state is None else x + state)
    return torch.cat(depths)


def _cut(x: Tensor, plan: ScanPlan) -> Tensor:
    """Returns [n, heads, C, D], the chunks of x [B, T, heads, D]; zeros in slots of padding."""
    tokens = x.flatten(0, 1).index_select(0, plan.tokens)
    chunks = tokens.unflatten(0, (-1, plan.chunk_size)).transpose(1, 2)
    return chunks.contiguous() if plan.padding is None else chunks.masked_fill(plan.padding, 0)


def _device_type(inputs: Sequence[Tensor | None]) -> str:
    return next(x.device.type for x in inputs if x is not None)
