"""What a model written for one device cannot see from its shard: how the sequence is sharded and packed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from armillary.attention.checks import check_layout
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]


class Sharding:
    """What `sequence` holds; `layout` and `documents` None: not told. `asked`: whether attention has asked for it."""

    def __init__(
        self, layout: SequenceLayout | None = None, documents: Documents | None = None, padded: bool = False
    ) -> None:
        self.layout, self.documents, self.padded, self.asked = layout, documents, padded, False

    def layout_for(self, attend: Method, tokens: int) -> SequenceLayout:
        """The layout over all ranks of `attend`; where there is one, it holds `tokens` tokens.

        Raises:
            ValueError: there is no layout, or it is for another number of ranks.
        """
        self.asked = True
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
        return self.layout if within == 1 else self.layout.refine(within)


def check_method(attend: Method) -> None:
    """Refuses what is no method, and does not stand for one either."""
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

    Raises:
        ValueError: boundaries that do not rise, or do not end where the layout does; when the block ends, if no
            attention in it has asked for what it holds: the model attended within each shard.
    """
    known = AttentionMask(documents=documents)
    check_layout("layout", layout)
    if layout is not None:
        known.check(layout.length, layout.length, known.batch or 1)
    held, around = Sharding(layout, known.documents, padded), current()
    token = _current.set(held)
    try:
        yield
    finally:
        _current.reset(token)
        if around is not None:
            around.asked |= held.asked
    if not held.asked and (layout is not None or documents is not None):
        raise ValueError(UNUSED)


UNUSED = (
    "nothing inside `with sequence(...)` asked how the sequence is sharded, so that each rank attended to its own "
    "tokens alone, if at all. A model that calls F.scaled_dot_product_attention needs `sdpa_parallel(attend)` around "
    "it, one of Hugging Face transformers `register_transformers(attend)` and "
    'attn_implementation="armillary"; a model without attention, or that computes it by itself, cannot be sharded so. '
    "Backward alone needs no block"
)
