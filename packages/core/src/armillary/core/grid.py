"""Whether two axes span a grid of ranks, one with rows and one with columns, as compositions need it."""

from __future__ import annotations

from collections.abc import Iterator

from armillary.core.mesh import Axis


def check_grid(outer: Axis, inner: Axis) -> None:
    """Refuses two axes that do not span a grid of ranks, one of them outside the other, with its rank for a row.

    From any rank, one step along either axis and then one along the other must lead to the same rank, whichever comes
    first. As far as the axes' meshes say, this is asked about all ranks, so that all give the same answer.

    Raises:
        ValueError: one axis twice, axes that share other ranks, or axes that run across each other.
    """
    if outer.size == 1 or inner.size == 1:
        return
    pair = f"axis {outer.name!r} over ranks {outer.ranks()} and axis {inner.name!r} inside of it over {inner.ranks()}"
    rows, columns = outer.everywhere(), inner.everywhere()
    if any(len({*row} & {*column}) > 1 for row, column in _met(rows, columns)):
        raise ValueError(f"{pair} share ranks; two axes of one mesh are needed, as mesh['ulysses'] and mesh['ring']")
    place = {rank: (number, at) for number, row in enumerate(rows) for at, rank in enumerate(row)}
    known = [column for column in columns if all(rank in place for rank in column)]
    lines = {rank: tuple(place[other][0] for other in column) for column in known for rank in column}
    across = any(len({place[rank][1] for rank in column}) > 1 for column in known)
    if across or any(len({lines[rank] for rank in row if rank in lines}) > 1 for row in rows):
        raise ValueError(f"{pair} run across each other; take both from one mesh, as mesh['ulysses'] and mesh['ring']")


def _met(rows: list[list[int]], columns: list[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Each column with each row that it meets."""
    row_of = {rank: row for row in rows for rank in row}
    for column in columns:
        yield from ((row_of[rank], column) for rank in column if rank in row_of)
