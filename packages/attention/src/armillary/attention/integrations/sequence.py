"""What a model written for one device cannot see from its shard: how the sequence is sharded and packed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from armillary.attention.mask import AttentionMask
from armillary.attention.method import Method
from armillary.core import SequenceLayout

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sharding:
    """What `sequence` holds; `layout` and `documents` None: not told."""

    layout: SequenceLayout | None = None
    documents: Documents | None = None

    def layout_for(self, attend: Method, tokens: int) -> SequenceLayout:
        """The layout over all ranks of `attend`, each of which holds about `tokens` tokens.

        Raises:
            ValueError: there is no layout, or it is for another number of ranks or tokens.
        """
        if self.layout is None:
            if attend.shards == 1:
                return SequenceLayout.contiguous(tokens, 1)
            raise ValueError(
                f"{attend.shards} ranks hold the sequence, and a shard does not tell how: call the model inside "
                "`with sequence(layout=attend.layout(length)):`, and its backward too where it recomputes activations"
            )
        if self.layout.shards not in (attend.shards, attend.sequence_shards):
            wanted = " or ".join(str(n) for n in sorted({attend.shards, attend.sequence_shards}))
            raise ValueError(f"the layout has {self.layout.shards} shards; this method needs one over {wanted}")
        within = attend.shards // self.layout.shards
        layout = self.layout if within == 1 else self.layout.refine(within)
        if layout.sizes[attend.shard] != tokens:
            raise ValueError(
                f"shard {attend.shard} of {layout} has {layout.sizes[attend.shard]} tokens; the model was given "
                f"{tokens}: pass layout.take(ids, attend.shard)"
            )
        return layout


_current: ContextVar[Sharding | None] = ContextVar("armillary_sequence", default=None)


def current() -> Sharding | None:
    """What the innermost `sequence` around this call holds, as far as this thread knows."""
    return _current.get()


@contextmanager
def sequence(
    *,
    layout: SequenceLayout | None = None,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Generator[None]:
    """Tells `sdpa_parallel` and `register_transformers` what cannot be seen from a shard.

    Holds for this thread (and asyncio task) until the block ends; of nested ones the innermost holds. A thread started
    inside does not inherit it. Whether backward needs it too is said where it is used.

    Args:
        layout: how the sequence is sharded, as `attend` takes it. May be left out where there is one shard.
        documents: boundaries of the documents in global positions, as `AttentionMask` takes them. [0, length] says
            that there is only one.

    Raises:
        ValueError: boundaries that do not rise, or do not end where the layout does.
    """
    known = AttentionMask(documents=documents)
    if layout is not None:
        known.check(layout.length, len(known.documents or ()) if known.per_row else 1)
    token = _current.set(Sharding(layout, known.documents))
    try:
        yield
    finally:
        _current.reset(token)
