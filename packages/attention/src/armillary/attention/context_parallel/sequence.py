"""How a sequence is sharded and packed, which a model cannot see from its shard."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

from torch import Tensor

from armillary.attention.call.validation import check_layout
from armillary.attention.mask import AttentionMask, RowMasks, Tree
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]


class Sharding:
    """What `sequence` holds; `layout`, `documents` and `mask` None: not told.

    `documents` are those of the mask too, and the segments of a tree: where position ids may start anew. `asked`:
    whether attention has asked for it.
    """

    def __init__(
        self,
        layout: SequenceLayout | None = None,
        documents: Documents | None = None,
        padded: bool = False,
        mask: AttentionMask | None = None,
    ) -> None:
        self.layout, self.documents, self.padded, self.mask, self.asked = layout, documents, padded, mask, False

    def layout_for(self, attend: Method, tokens: int, layout: SequenceLayout | None = None) -> SequenceLayout:
        """Returns the layout over all ranks of `attend`.

        Args:
            tokens: of this rank; they make the layout where one rank needs none.
            layout: of a style around the module (`ContextParallelStyle`), which must agree with the block's.

        Raises:
            ValueError: no layout, one for another number of ranks, or two that differ.
        """
        self.asked = True
        layouts = [_over_all_ranks(each, attend) for each in (self.layout, layout) if each is not None]
        if not layouts and attend.shards > 1:
            raise ValueError(
                f"{attend.shards} ranks hold the sequence, and a shard does not tell how: call the model inside "
                "`with sequence(layout=attend.layout(length)):`, and its backward too where it recomputes activations"
            )
        if len(layouts) == 2 and layouts[0] != layouts[1]:
            raise ValueError(
                f"sequence(layout={self.layout}) around ContextParallelStyle(layout={layout}): the two layouts must be "
                "equal; give one of them"
            )
        return layouts[0] if layouts else SequenceLayout.contiguous(tokens, 1)


def _over_all_ranks(layout: SequenceLayout, attend: Method) -> SequenceLayout:
    """Returns a layout over all ranks of `attend`, given one over these or over its sequence axis alone."""
    if layout.shards not in (attend.shards, attend.sequence_shards):
        wanted = " or ".join(str(n) for n in sorted({attend.shards, attend.sequence_shards}))
        raise ValueError(f"the layout has {layout.shards} shards; this method needs one over {wanted}")
    within = attend.shards // layout.shards
    return layout if within == 1 else layout.refine(within)


def check_method(attend: Method) -> None:
    """Raises ValueError if `attend` is no method."""
    if isinstance(attend, type) or not callable(attend) or not hasattr(attend, "sequence_shards"):
        found = attend.__name__ if isinstance(attend, type) else type(attend).__name__
        raise ValueError(f"attend={found} is no method; give one that is made already, such as Ring(mesh['ring'])")


def check_tokens(shard: int, tokens: int, layout: SequenceLayout) -> None:
    """Refuses a shard with another number of tokens than its layout has there."""
    if layout.sizes[shard] != tokens:
        raise ValueError(
            f"shard {shard} of {layout} has {layout.sizes[shard]} tokens; the model was given {tokens}: "
            "pass layout.take(ids, attend.shard)"
        )


_current: ContextVar[Sharding | None] = ContextVar("armillary_sequence", default=None)


def current() -> Sharding | None:
    """What the innermost `sequence` around this call holds, as far as this thread knows."""
    return _current.get()


@contextmanager
def sequence(
    *,
    layout: SequenceLayout | None = None,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    padded: bool = False,
    mask: AttentionMask | None = None,
) -> Generator[None]:
    """Tells `sdpa_parallel` and `register_transformers` what cannot be seen from a shard.

    Holds for this thread (and asyncio task) until the block ends; of nested ones the innermost holds. A thread started
    inside does not inherit it. Whether backward needs it too is said where it is used.

    Args:
        layout: how the sequence is sharded, as `attend` takes it. May be left out where there is one shard.
        documents: boundaries of the documents in global positions, as `AttentionMask` takes them. [0, length] says
            that there is only one.
        padded: tokens that a model's attention_mask hides are in documents of their own, as `shard_batch` makes them;
            otherwise such a mask is refused.
        mask: who sees whom, instead of what the model says; a layer with a window narrows it. Documents are its own;
            beside slices and blocks, which have none, `documents` says where position ids start anew.

    Raises:
        ValueError: boundaries that do not rise, or do not end where the layout does; a mask that does not fit the
            layout, or has other documents; when the block ends, if no attention in it has asked for what it holds: the
            model attended within each shard.
    """
    known = AttentionMask(documents=documents)
    check_layout("layout", layout)
    restarts = known.documents if mask is None else position_restarts(mask, known.documents)
    if layout is not None:
        for each in (known, mask):
            if each is not None:
                each.check(layout.length, layout.length, each.batch or 1)
    held, around = Sharding(layout, restarts, padded, mask), current()
    token = _current.set(held)
    try:
        yield
    finally:
        _current.reset(token)
        if around is not None:
            around.asked |= held.asked
    if not held.asked and not (layout is None and documents is None and mask is None):
        raise ValueError(UNUSED)


def position_restarts(mask: AttentionMask, documents: Documents | None) -> Documents | None:
    """Returns the boundaries at which position ids may start anew under a mask.

    They are the mask's documents or the segments of its tree; `documents` for a pattern that has neither.

    Raises:
        ValueError: `mask` is no mask, or `documents` are not those of the mask.
    """
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed")
    if isinstance(mask.pattern, RowMasks):
        rows = [cast(tuple[int, ...] | None, position_restarts(row, None)) for row in mask.pattern.masks]
        length = next((ends[-1] for ends in rows if ends), None)
        own = None if length is None else tuple(ends or (0, length) for ends in rows)
    else:
        own = mask.pattern.ends if isinstance(mask.pattern, Tree) else mask.documents
    if documents is not None and own not in (None, documents):
        raise ValueError(f"documents={documents!s:.80} beside a mask whose documents are {own!s:.80}; leave them out")
    if documents is not None and own is None and takes_documents(mask):
        raise ValueError(f"documents={documents!s:.80} beside a mask without them; give them to AttentionMask")
    return documents if own is None else own


def takes_documents(mask: AttentionMask) -> bool:
    """Returns whether a mask of this kind can have documents."""
    return mask.pattern is None or mask.pattern.takes_documents


UNUSED = (
    "nothing inside `with sequence(...)` asked how the sequence is sharded, so that each rank attended to its own "
    "tokens alone, if at all. A model that calls F.scaled_dot_product_attention needs `sdpa_parallel(attend)` around "
    "it, one of Hugging Face transformers `register_transformers(attend)` and "
    'attn_implementation="armillary"; a model without attention, or that computes it by itself, cannot be sharded so. '
    "Backward alone needs no block"
)
