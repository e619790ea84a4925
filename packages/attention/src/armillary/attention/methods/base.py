"""The base class of attention methods: the public call; and the check of a method around another one.

A method is a pair of plain functions, forward and backward, over local tensors (`call/spec.py`). `__call__` checks the
arguments and runs the pair under autograd (`call/autograd.py`). To add a method, write a subclass with the members that
`AttentionMethod` requires, and name it in a line of `method_registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Unpack, overload

from torch import Tensor

from armillary.attention.call.autograd import attend, project
from armillary.attention.call.qkv_sources import Projections
from armillary.attention.call.spec import (
    AttentionMethod,
    AttentionOptions,
    AttentionSpec,
    CallArguments,
    ProjectedArguments,
)
from armillary.attention.call.validation import (
    are_plain_tensors,
    check_hidden,
    check_options,
    check_projected_call,
    over_all_ranks,
)
from armillary.attention.kernels import Kernel
from armillary.attention.mask import AttentionMask
from armillary.attention.mask.attention_mask import layout_of
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import Side, compat


class Method(AttentionMethod):
    """Exact attention over a sequence that is sharded over the ranks of the method's mesh axes; whole for `Local`."""

    observer: Callable[[AttentionOptions], object] | None = None
    """Gets the options of each call, by which a check of a running model sees its masks and softcaps."""

    @property
    def sequence_method(self) -> Method:
        """The method on the sequence axis: the inner method of a method on the head axis, otherwise this method."""
        return self

    def layout(
        self, length: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        """Returns a layout over all ranks of the method, for the loader.

        Args:
            kind: "zigzag", "contiguous", "striped" or "balanced".
            mask: the mask for which a balanced layout distributes work evenly; causal by default.
            states: True if the model has layers with a state, which "balanced" then counts (`SequenceLayout.balanced`).

        Raises:
            ValueError: an unknown kind, fewer tokens than ranks, a mask of another type, or for "balanced" of another
                length.
        """
        return layout_of(kind, length, self.sequence_shards, mask, self.balanced_by, states)

    @property
    def balanced_by(self) -> Side | None:
        """The side whose pairs a balanced layout makes even: the side that stays on its rank while the other rotates.

        None: both sides are made even, at the cost of more bytes sent (`send_cost=0` of `SequenceLayout.balanced`).
        """
        return "queries"

    def plan_ahead(self, mask: AttentionMask, layout: SequenceLayout, rows: int = 1) -> None:
        """Computes the tiles and sends of the next calls with this mask and layout, so that these calls start at once.

        Runs on the host, for example in the thread that reads batches while the device computes. Heads, kernels and the
        windows of layers come from earlier calls, so before the first call there is nothing to prepare.

        Args:
            mask: the mask of the batch, without the sliding windows that some layers add to it.
            layout: as for a call.
            rows: number of rows of the batch.
        """
        if layout.shards == self.shards:
            layout = layout.coarsen(self.shards // self.sequence_shards)
            over_all_ranks(layout, self)  # the layout caches the refined one, which the check of the call needs
        # For each cached call, not only the newest: that one may not have run its backward yet, or may be of an
        # evaluation, so that it does not tell which side of a ring rotates in backward.
        for _, previous in self.spec_cache.newest:
            if previous.key_layout == previous.layout:  # self-attention
                mask = mask if mask.window == previous.mask.window else replace(mask, window=previous.mask.window)
                spec = replace(previous, mask=mask, layout=layout, key_layout=layout)
                spec = self.planned_specs.get(spec.values) or self.planned_specs.add(spec.values, spec, mask)
                self.plan(spec, previous, rows)

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **arguments: Unpack[CallArguments]
    ) -> Tensor: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Unpack[CallArguments]
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        key_layout: SequenceLayout | None = None,
        kernel: str | Kernel | None = None,
        return_lse: bool = False,
        expansion: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns attention of this rank's queries over all visible keys of the sequence.

        Args:
            q: [B, T, H, D], this rank's tokens.
            k, v: [B, S, K, D] and [B, S, K, Dv], this rank's tokens; K divides H, and query head h uses key/value head
                h // (H / K). S = T except in cross-attention.
            mask: mask in global positions.
            layout: the layout of the sequence: over all ranks of the method, or over its sequence axis alone.
                Optional if there is one shard.
            scale: softmax scale, any finite number; 1 / sqrt(D) by default.
            sinks: [H] or [n, H], one or n learned scores per head that take part in the softmax without a value
                (gpt-oss has one, MagiAttention n). Their gradient is this rank's share, to be summed over ranks like
                any parameter's gradient.
            softcap: c of c * tanh(score / c), if a kernel supports it; finite and above 0.
            key_layout: the layout of the keys, for cross-attention, with as many shards as `layout`.
            kernel: a kernel, or the name of one, such as "dense"; by default `self.kernel`, or else the preferred one
                of those that support the inputs (`kernels/choice.py`).
            expansion: [K, D - Dr + Dv, L], the weight of multi-head latent attention (arXiv 2405.04434). Then k is a
                rotary key [B, S, 1, Dr] and v a latent [B, S, 1, L] of each token, for all heads: head h has the key
                cat(expansion[h, :D - Dr] @ latent, rotary key) and the value expansion[h, D - Dr:] @ latent. Methods
                send these instead of expanded keys and values if that is fewer bytes (`send_latents`). The gradient of
                the expansion is this rank's share, as that of sinks.
            return_lse: also return the log-sum-exp of the scores and sinks. A loss that depends on it raises in
                backward.

        Returns:
            out [B, T, H, Dv] in the inputs' dtype; with `return_lse`, also lse [B, T, H] in the accumulation dtype. A
            query that sees no key gets out = 0, and without sinks lse = -inf. DTensors in, DTensors out: see
            `call/dtensors.py`.

        Under autocast, inputs of one dtype are computed in that dtype. Inputs of different dtypes are cast to
        autocast's dtype, unless one is float64, as in `scaled_dot_product_attention`.

        Forward-mode AD and torch.func's transforms (grad, vjp, jvp, vmap) are not supported.

        Raises:
            ValueError: shapes, dtypes, layout or mask do not match, or no kernel supports them; an argument has
                another type; a tensor is under torch.func or forward-mode AD. Raised before any communication.
        """
        plain = are_plain_tensors(q, k, v, sinks, expansion)
        options = check_options(AttentionOptions(mask, layout, key_layout, scale, softcap, kernel, return_lse))
        if self.observer is not None:
            self.observer(options)
        if not plain and any(x is not None and compat.is_dtensor(x) for x in (q, k, v, sinks, expansion)):
            from armillary.attention.call.dtensors import attend_dtensors

            return attend_dtensors(self, q, k, v, sinks, options, expansion)
        out, lse = attend(self, q, k, v, sinks, options, expansion)
        return (out, lse) if return_lse else out

    def projected(
        self,
        x: Tensor,
        projections: Projections,
        *,
        mask: AttentionMask,
        layout: SequenceLayout | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        kernel: str | Kernel | None = None,
    ) -> Tensor:
        """Returns self-attention from hidden states, equal to a call on the projected q, k and v.

        In eager mode Ulysses and WallFacer send queries while keys and values are projected.

        Args:
            x: [B, T, E], this rank's tokens; or a DTensor [B, N, E], see `call/dtensors.py`.
            projections: project x to q, k and v.

        Other arguments are as in `__call__`.

        Under autocast, projections run in the caller's autocast state, and attention in the common dtype of q, k and v.

        Returns:
            out [B, T, H, Dv].

        Raises:
            ValueError: as `__call__`; x that has not 3 dims; projections without a member of `Projections`; DTensor
                parameters that do not fit x.
        """
        options = check_options(AttentionOptions(mask, layout, None, scale, softcap, kernel))
        if self.observer is not None:
            self.observer(options)
        check_hidden(x, projections, sinks)
        if compat.is_dtensor(x) or (sinks is not None and compat.is_dtensor(sinks)):
            from armillary.attention.call.dtensors import project_dtensors

            return project_dtensors(self, x, projections, sinks, options)
        return project(self, x, projections, sinks, options)

    def check_projected(
        self,
        x: Tensor,
        projections: Projections,
        *,
        sinks: Tensor | None = None,
        **arguments: Unpack[ProjectedArguments],
    ) -> AttentionSpec:
        """Returns the spec of the call that `projected` would make, without the call.

        To learn dims and dtypes it projects one head (of one token, if the projections can). Equal calls share one spec
        if the projections have a `cache_key`.

        Raises:
            ValueError: as `projected`; x is a DTensor.
        """
        options = check_options(AttentionOptions(**arguments))
        check_hidden(x, projections, sinks)
        if compat.is_dtensor(x):
            raise ValueError("x is a DTensor; a call is checked for its local part, x.to_local()")
        return check_projected_call(self, x, projections, sinks, options)


# -- methods around other methods --------------------------------------------------------------------------------------


def check_inner(axis: Axis, inner: AttentionMethod, example: str) -> None:
    """Raises ValueError unless `inner` is a method, and each of its axes spans a grid of ranks with `axis`.

    Args:
        example: an inner method, for the message.
    """
    if not isinstance(inner, AttentionMethod):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        name = inner.__name__ if isinstance(inner, type) else type(inner).__name__
        raise ValueError(f"inner={name} is not a method; pass an instance, such as {example}")
    for inner_axis in inner.axes:
        check_rank_grid(axis, inner_axis)


def check_rank_grid(outer: Axis, inner: Axis) -> None:
    """Raises ValueError unless two axes span a grid of ranks: groups along `outer` are its rows, along `inner` columns.

    Raises:
        ValueError: a row and a column share more than one rank (as if both axes are the same), a column has different
            indices in its rows, or the columns of a row cross different rows.
    """
    if outer.size == 1 or inner.size == 1:
        return
    pair = f"axis {outer.name!r} over ranks {outer.ranks()} and axis {inner.name!r} inside of it over {inner.ranks()}"
    # All rows and columns of the meshes, not only this rank's, so that every rank raises the same error.
    rows, columns = outer.parallel_ranks(), inner.parallel_ranks()
    row_of = {rank: row for row in rows for rank in row}
    crossings = [(row_of[rank], column) for column in columns for rank in column if rank in row_of]
    if any(len({*row} & {*column}) > 1 for row, column in crossings):
        raise ValueError(f"{pair} share ranks; two axes of one mesh are needed, as mesh['ulysses'] and mesh['ring']")
    # Each rank of a row has coordinates (row number, index within the row). In a grid, a column has the same index in
    # each of its rows, and all ranks of a row are in columns that cross the same rows. Columns with ranks in no row are
    # left out.
    coordinates = {rank: (number, index) for number, row in enumerate(rows) for index, rank in enumerate(row)}
    columns_in_rows = [column for column in columns if all(rank in coordinates for rank in column)]
    crossed_rows = {
        rank: tuple(coordinates[crossed][0] for crossed in column) for column in columns_in_rows for rank in column
    }
    index_differs = any(len({coordinates[rank][1] for rank in column}) > 1 for column in columns_in_rows)
    if index_differs or any(len({crossed_rows[rank] for rank in row if rank in crossed_rows}) > 1 for row in rows):
        raise ValueError(f"{pair} run across each other; take both from one mesh, as mesh['ulysses'] and mesh['ring']")
