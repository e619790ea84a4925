"""A move of `neighbours.moves` as arguments of an op, whose schema allows only tensors, numbers and strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast

from torch import Tensor

from armillary.core.collectives.compiled import TracedAxis, axis_of
from armillary.core.layout import SequenceLayout
from armillary.core.neighbours.tables import TokenMove, halo_table, relayout_table, shift_table
from armillary.core.segments import Segmented, Segments, check_lookahead, segments_of

KEY_SCHEMA = (
    "Tensor? mask_numbers, str move, str axis, str group, str layout, str target, str documents, str mask, "
    "SymInt[] sides, SymInt[] numbers, float fill"
)


class TraceableMask(Segmented, Protocol):
    """A mask that is passed into a compiled graph as its fields, and constructed again when the graph runs."""

    reference: ClassVar[str]
    """The class, as "module:name"."""
    numbers: Tensor | None
    """Fields of any length, as int64; None if there are none."""

    @property
    def sides(self) -> Sequence[int]:
        """All fields that are not in `numbers`."""
        ...

    @classmethod
    def read(cls, sides: Sequence[int], numbers: Tensor | None) -> Self:
        """Returns the mask with these `sides` and `numbers`. Equal arguments give the same object."""
        ...


class MoveKey(NamedTuple):
    """A move without its tokens: `KEY_SCHEMA`.

    Args:
        mask_numbers: `TraceableMask.numbers`; None without a mask.
        move: "relayout", "shift" or "halo".
        axis, group: names of the axis and of its process group.
        layout, target: texts of layouts. Only "relayout" has a target; "" otherwise.
        documents: boundaries for all rows, "0,10,24", or for each row, "0,10,24;0,24;"; "" for None.
        mask: `TraceableMask.reference`; "" for None.
        sides: `TraceableMask.sides`; empty without a mask.
        numbers: (offset,) of "shift", (left, right) of "halo"; empty for "relayout".
        fill: value of the tokens that do not exist.
    """

    mask_numbers: Tensor | None
    move: str
    axis: str
    group: str
    layout: str
    target: str
    documents: str
    mask: str
    sides: Sequence[int]
    numbers: Sequence[int]
    fill: float

    @classmethod
    def of(
        cls,
        move: str,
        axis: TracedAxis,
        layout: SequenceLayout,
        documents: object,
        mask: Segmented | None,
        numbers: Sequence[int] = (),
        fill: float = 0,
        target: SequenceLayout | None = None,
    ) -> MoveKey:
        """Returns the key of a call while a graph is traced.

        Raises:
            ValueError: both documents and a mask; documents that are a tensor, whose values are unknown while tracing;
                a mask that is not traceable.
        """
        reference, mask_numbers, sides = "", None, ()
        if documents is not None and mask is not None:
            raise ValueError(f"documents={documents!r} beside mask={mask!r}: pass one of them")
        if isinstance(documents, Tensor):
            raise ValueError("documents is a tensor; torch.compile takes boundaries as integers, or an attention mask")
        if mask is not None:
            if not hasattr(mask, "reference"):
                raise ValueError(f"mask is a {type(mask).__name__}; torch.compile takes an attention mask")
            traceable = cast(TraceableMask, mask)
            reference, mask_numbers, sides = traceable.reference, traceable.numbers, traceable.sides
        return cls(
            mask_numbers,
            move,
            axis.name,
            axis.group,
            layout.text,
            "" if target is None else target.text,
            "" if documents is None else _documents_text(cast("Sequence[Any]", documents)),
            reference,
            list(sides),
            list(numbers),
            float(fill),
        )

    def segments(self, length: int) -> tuple[Segments, ...]:
        """Returns the segments of each row, or one entry for all rows."""
        if not self.mask:
            return documents_segments(self.documents, length)
        module, _, name = self.mask.partition(":")
        mask_class: type[TraceableMask] = getattr(import_module(module), name)
        return _mask_segments(mask_class.read(self.sides, self.mask_numbers), length)

    def token_move(self, x: Tensor) -> TokenMove:
        """Returns the move for tokens on the device of x."""
        axis, layout = axis_of(self.axis, self.group, x), layout_of_text(self.layout)
        numbers = [int(value) for value in self.numbers]
        if self.move == "relayout":
            return TokenMove(axis, relayout_table(layout, layout_of_text(self.target), axis.rank))
        segments = self.segments(layout.length)
        if self.move == "shift":
            check_lookahead("offset", numbers[0], segments)
            table = shift_table(layout, segments, numbers[0], axis.rank)
            return TokenMove(axis, table, len(segments), fill=self.fill)
        table, lengths = halo_table(layout, segments, numbers[0], numbers[1], axis.rank)
        return TokenMove(axis, table, len(segments), lengths)


def _documents_text(documents: Sequence[Any]) -> str:
    """Returns `MoveKey.documents`."""
    rows = [documents] if isinstance(documents[0], int) else documents
    # The text of a row ends with ";" if boundaries are given for each row. So [[0, 24]], for a batch of one row,
    # differs from [0, 24], for all rows.
    return "".join([",".join([str(end) for end in row]) + ("" if row is documents else ";") for row in rows])


def documents_segments(text: str, length: int) -> tuple[Segments, ...]:
    """Returns the segments of each row, or one entry for all rows, from `MoveKey.documents`."""
    rows = [[int(end) for end in row.split(",")] for row in text.split(";") if row]
    return segments_of(length, (rows if ";" in text else rows[0]) if rows else None)


@lru_cache(maxsize=256)
def layout_of_text(text: str) -> SequenceLayout:
    return SequenceLayout.read(text)


@lru_cache(maxsize=16)
def _mask_segments(mask: TraceableMask, length: int) -> tuple[Segments, ...]:
    return segments_of(length, mask=mask)
