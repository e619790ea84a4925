"""Models and losses that accept DTensors of tokens. They compute on local tensors; results are placed like the tokens.

A DTensor of tokens [B, N, ...] has the rows and tokens of all ranks. The decorators below check placements when a model
or loss is called, on every rank alike, and convert; no module inside of a model gets such a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from armillary.attention import Method
from armillary.attention.parts import check_sharded_tokens, over_all_ranks
from armillary.core import Axis, LabelTriples, SequenceLayout, sequence_from_local
from armillary.core.parts import (
    SEQUENCE_AXES,
    check_placement,
    describe,
    dtensor_like,
    is_cut_by_dtensor,
    local_of,
    mesh_dim,
    nested_sizes,
)
from armillary.models.block import Block

F = TypeVar("F", bound=Callable[..., Any])

ROW_AXES = ("replicate", "shard")
"""Axes of `build_mesh` over which batch rows are sharded."""


def tokens_dtensor(x: Tensor, layout: SequenceLayout, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's shard x [B, T] of a batch as a DTensor of all rows and N tokens, placed as models accept it.

    Returns x itself if no DTensor has shards of these lengths. Shards of balanced layouts differ in length. And of 250
    tokens on 4 ranks, zigzag layouts give two ranks 62 each, a DTensor 63 and 61.
    """
    names = mesh.mesh_dim_names or ()
    axes = [name for name in SEQUENCE_AXES if name in names]
    if not is_cut_by_dtensor(layout, mesh, axes):
        return x
    return sequence_from_local(x, layout, mesh, axes=axes, rows=[name for name in ROW_AXES if name in names])


def batch_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh without axes of one rank, except `ring`.

    On a mesh of more axes, torch 2.15 takes seconds to choose the placements of an op.
    """
    return mesh[tuple(name for i, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1 or name == "ring")]


def takes_dtensors(forward: F) -> F:
    """Returns a model's `forward` that also takes `ids` and `positions` as DTensors.

    Placements of `ids` [B, N], as `distribute_sequence` returns them: `Shard(1)` on the axes of the attention method,
    `Shard(0)` on `replicate` and `shard`, `Replicate` on the axis of tensor parallelism, and `Shard(0)` or `Replicate`
    on other axes.

    `positions` may be local. Or they are DTensors on the same mesh: [B, N] placed like `ids`, or [N] with `Shard(0)` on
    the axes that shard tokens. By default they are the layout's positions, counted from the start of the sequence.

    In the result, tensors of tokens [B, T, ...] become DTensors placed like `ids`. Scalars, which are each rank's share
    of a sum, become `Partial` on the axes that shard `ids`. Other values are returned unchanged.

    Raises:
        ValueError: a placement is not accepted; the error names the accepted ones. Raised before any communication.
    """

    @wraps(forward)
    def forward_local(
        model: Any,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        layout: SequenceLayout | None = None,
        **options: Any,
    ) -> Any:
        if not isinstance(ids, DTensor):
            if isinstance(positions, DTensor):
                raise ValueError(f"positions are {describe(positions)} and ids local; pass both as local tensors")
            return forward(model, ids, positions=positions, layout=layout, **options)
        # DTensors: check placements, compute on local tensors, place the results like `ids`.
        method = check_ids(model, ids, layout)
        if positions is None and layout is not None:
            positions = over_all_ranks(layout, method).positions(method.shard)
        if isinstance(positions, DTensor):
            check_positions(positions, ids)
            positions = local_of(positions)
        return place_like(ids, forward(model, local_of(ids), positions=positions, layout=layout, **options))

    return cast(F, forward_local)


def sums_dtensors(loss: F) -> F:
    """Returns a loss that also takes DTensors: `labels` [B, N], and hidden states or logits on the same mesh.

    The loss's first argument is hidden states or logits. It may be local, as when a model passes hidden states to a
    `head`. A DTensor must be placed like `labels`, and logits must be `Shard(2)` on `axis`. Labels are `Shard(0)`,
    `Shard(1)` or `Replicate` on each axis, and `Replicate` on `axis`.

    `LabelTriples` describe this rank's tokens and are never DTensors. With a local first argument, results are then
    local; with a DTensor, its placements decide which sums are `Partial`.

    In the result, tensors of tokens are placed like `labels`, and sums are `Partial` on the axes that shard labels.
    Errors as in `takes_dtensors`.
    """
    parameters = signature(loss)

    @wraps(loss)
    def loss_of_local(*args: Any, **options: Any) -> Any:
        if not any(isinstance(x, DTensor) for x in (*args, *options.values())):
            return loss(*args, **options)
        arguments = parameters.bind(*args, **options).arguments
        first, labels = next(iter(parameters.parameters)), arguments["labels"]
        if not isinstance(arguments[first], DTensor) and not isinstance(labels, DTensor):
            return loss(*args, **options)  # only the weight is a DTensor
        # Triples have no placements of their own: those of the hidden states or logits count.
        like = tokens_of(arguments[first]) if isinstance(labels, LabelTriples) else labels
        if not isinstance(like, DTensor):
            raise ValueError(f"{first} is {describe(arguments[first])} and labels are local; pass both as DTensors")
        check_loss(first, arguments[first], like, None if arguments.get("axis") is None else Axis.of(arguments["axis"]))
        if isinstance(arguments[first], DTensor):
            # V cannot be seen from local logits [B, T, V_r], but from the DTensor's global shape.
            if first == "logits" and arguments.get("axis") is not None:
                arguments.setdefault("vocabulary", arguments[first].shape[2])
            arguments[first] = local_of(arguments[first])
        return place_like(like, loss(**arguments | {"labels": labels if labels is not like else local_of(like)}))

    return cast(F, loss_of_local)


# -- inputs ----------------------------------------------------------------------------------------------------------


def check_ids(model: Any, ids: DTensor, layout: SequenceLayout | None) -> Method:
    """Checks the placements of ids, and returns the first layer's attention method.

    Raises:
        ValueError: ids are not sharded over the axes of each method, or some ranks would have no rows.
    """
    if ids.ndim != 2:
        raise ValueError(f"ids must be [B, N]; got {describe(ids)}")
    names, methods, tensor_axis = axis_names("ids", ids), list(methods_of(model)), cast(Axis | None, model.tensor_axis)
    for method in methods:
        check_sharded_tokens("ids", ids, method, layout, (Shard(0), Replicate()))
        if layout is None and method.shards > 1:
            raise ValueError(f"ids {describe(ids)} on {method.shards} sequence ranks need layout=")
    for dim, name in enumerate(names):
        if ids.placements[dim] == Shard(1):
            continue  # a sequence axis, checked by `check_sharded_tokens`
        if tensor_axis is not None and name == tensor_axis.name:
            check_placement("ids", ids, mesh_dim(ids, tensor_axis), Replicate())
        elif name in ROW_AXES:
            check_placement("ids", ids, dim, Shard(0))
    rows = nested_sizes(ids.shape[0], [ids.device_mesh.size(i) for i, p in enumerate(ids.placements) if p == Shard(0)])
    if 0 in rows:
        raise ValueError(f"{ids.shape[0]} rows of {describe(ids)} leave some ranks without rows: {rows}")
    return methods[0]


def axis_names(name: str, x: DTensor) -> tuple[str, ...]:
    """Returns the names of the axes of a DTensor's mesh, outermost first."""
    if not x.device_mesh.mesh_dim_names:
        raise ValueError(f"{name} is {describe(x)}, whose mesh has no names of axes")
    return x.device_mesh.mesh_dim_names


def methods_of(model: nn.Module) -> Iterator[Method]:
    """Yields the distinct attention methods of a model's blocks."""
    methods = {id(block.attention): block.attention for block in model.modules() if isinstance(block, Block)}
    for attention in methods.values():
        if not isinstance(attention, Method):
            raise ValueError(
                f"ids are a DTensor and attention is a {type(attention).__name__}, which does not name the axes of its "
                "tokens; pass local tensors, or use a method of armillary.attention"
            )
        yield attention


def check_positions(positions: DTensor, ids: DTensor) -> None:
    """Raises ValueError unless positions, [N] or [B, N], are placed like the tokens."""
    flat = [Shard(0) if placement == Shard(1) else Replicate() for placement in ids.placements]
    expected = flat if positions.ndim == 1 else ids.placements
    check_alike("positions", positions, "ids", ids, expected)
    if positions.shape not in (ids.shape, ids.shape[1:]):
        raise ValueError(f"positions are {describe(positions)}; with ids {describe(ids)} they must be [N] or [B, N]")


def check_loss(first: str, x: Tensor, labels: DTensor, axis: Axis | None) -> None:
    """Raises ValueError unless labels are replicated or sharded by rows or tokens, and x is placed like the labels.

    Args:
        first: name of the loss's first argument.
        x: its value.
        axis: the axis that shards the vocabulary.
    """
    expected: list[Placement] = list(labels.placements)
    for dim, name in enumerate(axis_names("labels", labels)):
        if axis is not None and name == axis.name:
            check_placement("labels", labels, mesh_dim(labels, axis), Replicate())
            expected[dim] = Shard(2)
        elif labels.placements[dim] not in (Replicate(), Shard(0)):
            check_placement("labels", labels, dim, Shard(1))
    if not isinstance(x, DTensor):
        return
    if axis is not None and first != "logits":
        raise ValueError(f"{first} is {describe(x)}; over axis {axis.name!r} it must be local: every R-th token")
    check_alike(first, x, "labels", labels, expected)
    if x.shape[:2] != labels.shape:
        raise ValueError(f"{first} is {describe(x)} and labels are {describe(labels)}: other rows or tokens")


def tokens_of(x: DTensor) -> DTensor:
    """Returns a DTensor [B, N] of zeros with the rows, tokens and placements of x [B, N, ...]."""
    placements = [placement if placement in (Shard(0), Shard(1)) else Replicate() for placement in x.placements]
    local = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.to_local().shape[:2])  # one element of memory
    stride = (x.shape[1], 1)
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape[:2], stride=stride)


def check_alike(name: str, x: DTensor, other: str, like: DTensor, placements: Sequence[Placement]) -> None:
    """Raises ValueError unless `x` is on the mesh of `like`, with `placements` on all axes of more than one rank.

    Args:
        name: name of `x` in the error.
        other: name of `like` in the error.
    """
    sizes = like.device_mesh.shape
    if x.device_mesh != like.device_mesh or any(
        placement != expected and size > 1
        for placement, expected, size in zip(x.placements, placements, sizes, strict=True)
    ):
        raise ValueError(
            f"{name} is {describe(x)}; with {other} {describe(like)} it must be {tuple(placements)} on the same mesh"
        )


# -- results ---------------------------------------------------------------------------------------------------------


def place_like(like: DTensor, result: Any) -> Any:
    """Returns a result with DTensors in place of local tensors.

    Tensors of this rank's tokens are placed like `like`. Scalars are `Partial`, because each rank has its share of a
    sum over tokens.
    """
    local = like.to_local().shape
    sums = {dim: Partial() for dim, placement in enumerate(like.placements) if isinstance(placement, Shard)}
    placements = [sums.get(dim, placement) for dim, placement in enumerate(like.placements)]

    def place_tensor(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            check_alike("the result", x, "tokens", like, placements if x.ndim == 0 else like.placements)
            return x
        if x.ndim == 0:
            return dtensor_like(like, x, (), dict(sums))
        return dtensor_like(like, x, (*like.shape, *x.shape[2:])) if x.shape[:2] == local else x

    return pytree.tree_map_only(Tensor, place_tensor, result)
