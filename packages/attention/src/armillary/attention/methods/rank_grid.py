"""The grid of ranks that the two axes of a composed method span."""

from __future__ import annotations

from armillary.attention.call.interface import AttentionMethod
from armillary.core import Axis


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
    """Raises ValueError unless two axes span a grid of ranks.

    The groups of ranks along `outer` are the rows of the grid, those along `inner` its columns. From any rank, one step
    along a row and then one along a column must lead to the same rank as in the other order. The check covers all ranks
    that the axes' meshes have, not only this rank's row and column, so every rank raises the same error.

    Raises:
        ValueError: a row and a column share more than one rank (as if both axes are the same), a column has different
            indices in its rows, or the columns of a row cross different rows.
    """
    if outer.size == 1 or inner.size == 1:
        return
    pair = f"axis {outer.name!r} over ranks {outer.ranks()} and axis {inner.name!r} inside of it over {inner.ranks()}"
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
