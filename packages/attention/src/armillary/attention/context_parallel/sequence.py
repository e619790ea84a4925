"""The `sequence` block: gives attention inside a model the layout, documents and mask of the whole sequence."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from armillary.attention.call.validation import check_layout, over_all_ranks
from armillary.attention.context_parallel.communication import AveragingCheck, method_axes, record_ddp
from armillary.attention.mask import AttentionMask, RowMasks, Tree
from armillary.attention.mask.attention_mask import Documents
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout


class SequenceContext:
    """Arguments of a `sequence` block. None: not specified.

    Attributes:
        documents: boundaries at which position ids may restart: the documents of the block or of its mask, or the
            segments of a tree.
        padded: as in `sequence`.
        position_ids: [B or 1, T] of this rank, those of the batch that opened the block; None without a batch.
        attention_mask: [B, T], likewise; None also if the batch has none.
        inferred: True if `documents` are those that position ids of whole rows say.
        used: True once attention inside the block has asked for the layout.
        ddp_modules: DDP modules in whose forward it has.
        averaging: the check of the `ContextParallel` whose batch opened the block; None until it is needed otherwise.
    """

    def __init__(
        self,
        layout: SequenceLayout | None = None,
        documents: Documents | None = None,
        padded: bool = False,
        mask: AttentionMask | None = None,
    ) -> None:
        self.layout: SequenceLayout | None = layout
        self.documents: Documents | None = documents
        self.padded: bool = padded
        self.mask: AttentionMask | None = mask
        self.used: bool = False
        self.position_ids: Tensor | None = None
        self.attention_mask: Tensor | None = None
        self.inferred = False
        self.ddp_modules: set[DistributedDataParallel] = set()
        self.averaging: AveragingCheck | None = None

    def check_averaging(self, loss: Tensor, method: Method, model: nn.Module) -> None:
        """Checks the gradients of a loss that is no argument of `cp.loss`, or of what it is computed from.

        Without a `ContextParallel`, FSDP2 and DDP must average over the ranks of the method at least. Inside a compiled
        graph it checks nothing.

        Args:
            loss: a tensor with autograd's graph.
            model: the model that computed it, for names of parameters in errors.

        Raises:
            ValueError: as `AveragingCheck.check`.
        """
        # A graph has no parameters to check, and tracing `add` puts the model itself in the place of a weak reference.
        if torch.compiler.is_compiling():
            return
        self.averaging = self.averaging or AveragingCheck(method_axes(method), None)
        self.averaging.models.add(model)
        self.averaging.check(loss, self.ddp_modules)

    def layout_for(self, method: Method, tokens: int, style_layout: SequenceLayout | None = None) -> SequenceLayout:
        """Returns the layout over all ranks of a method, and marks the block as used.

        Args:
            tokens: number of local tokens. On one rank, the default is a layout of this length.
            style_layout: layout of a `ContextParallelStyle` around the module; must equal the block's layout.

        Raises:
            ValueError: no layout on several ranks, a layout for another number of ranks, or two different layouts.
        """
        self.used = True
        if not torch.compiler.is_compiling():  # a graph does not see the module
            record_ddp(self.ddp_modules)
        layouts = [over_all_ranks(layout, method) for layout in (self.layout, style_layout) if layout is not None]
        if not layouts and method.shards > 1:
            raise ValueError(
                f"{method.shards} ranks hold the sequence and a shard does not tell its layout: call the model inside "
                "`with cp.shard(ids):` or `with sequence(layout=attend.layout(length)):`, and its backward too if it "
                "recomputes activations"
            )
        if len(layouts) == 2 and layouts[0] != layouts[1]:
            raise ValueError(
                f"sequence(layout={self.layout}) around ContextParallelStyle(layout={style_layout}): the two layouts "
                "must be equal; give one of them"
            )
        return layouts[0] if layouts else SequenceLayout.contiguous(tokens, 1)


def check_method(method: Method) -> None:
    """Raises ValueError unless `method` is an instance of a method. A common mistake is to pass the class."""
    if isinstance(method, type) or not callable(method) or not hasattr(method, "sequence_shards"):
        name = method.__name__ if isinstance(method, type) else type(method).__name__
        raise ValueError(f"{name} is not a method; give an instance, such as Ring(mesh['ring'])")


def check_tokens(shard: int, tokens: int, layout: SequenceLayout) -> None:
    """Raises ValueError if a shard has another number of tokens than its layout gives it."""
    if layout.sizes[shard] != tokens:
        raise ValueError(
            f"shard {shard} of {layout} has {layout.sizes[shard]} tokens; the model was given {tokens}: "
            "pass layout.take(ids, attend.shard)"
        )


_current: ContextVar[SequenceContext | None] = ContextVar("armillary_sequence", default=None)


def current_sequence() -> SequenceContext | None:
    """Returns the innermost `sequence` block around the call in this thread."""
    return _current.get()


@contextmanager
def sequence(
    *,
    layout: SequenceLayout | None = None,
    documents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    padded: bool = False,
    mask: AttentionMask | None = None,
) -> Generator[None]:
    """Context manager that specifies the whole sequence for `sdpa_parallel` and models of transformers.

    `with cp.shard(ids) as batch:` opens such a block for a batch. A block holds for its thread (and asyncio task);
    threads started inside do not inherit it. In nested blocks the innermost one counts. The docstrings of
    `sdpa_parallel`, `ContextParallelStyle` and `register_transformers` say when backward must run inside the block too.

    Args:
        layout: layout of the sequence over the method's ranks. Optional on one rank.
        documents: boundaries of the documents in global positions, as `AttentionMask` takes them. [0, length] declares
            one document.
        padded: True if each run of padding is a separate document, as in batches of `ContextParallel.shard`. If False,
            a model that is called with padding in its attention_mask raises.
        mask: replaces the model's mask; in models of transformers, a layer with a sliding window narrows it to the
            window. A mask with documents needs no `documents`. Beside a mask of slices or blocks, which cannot have
            documents, `documents` are the boundaries at which position ids restart.

    Raises:
        ValueError: `layout` is no layout, or `mask` no mask; boundaries that fall, or do not end at the layout's
            length; a mask that does not fit the layout, or whose documents differ from `documents`; at the end of a
            block with layout, documents or mask, if no attention inside asked for the layout, because the model then
            attended within each shard.
    """
    document_mask = AttentionMask(documents=documents)
    check_layout("layout", layout)
    restarts = document_mask.documents if mask is None else position_restarts(mask, document_mask.documents)
    if layout is not None:
        for checked_mask in (document_mask, mask):
            if checked_mask is not None:
                checked_mask.check(layout.length, layout.length, checked_mask.batch or 1)
    # A context variable, because an unmodified model has no argument that would reach its attention layers.
    context, outer = SequenceContext(layout, restarts, padded, mask), current_sequence()
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
        if outer is not None:  # attention inside the inner block is inside the outer block too
            outer.used |= context.used
    # Not in `finally`: this error must not hide an exception of the model.
    if not context.used and not (layout is None and documents is None and mask is None):
        raise ValueError(UNUSED_ERROR)


def position_restarts(mask: AttentionMask, documents: Documents | None) -> Documents | None:
    """Returns the boundaries at which position ids may restart under a mask.

    These are the mask's documents or the segments of its tree. For a mask that can have neither, `documents`.

    Raises:
        ValueError: `mask` is no mask, or its documents differ from `documents`.
    """
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mask is a {type(mask).__name__}; an AttentionMask is needed")
    if isinstance(mask.pattern, RowMasks):
        # A row without documents is one document, of the length at which the documents of other rows end.
        rows = [cast(tuple[int, ...] | None, position_restarts(row, None)) for row in mask.pattern.masks]
        length = next((ends[-1] for ends in rows if ends), None)
        boundaries = None if length is None else tuple(ends or (0, length) for ends in rows)
    else:
        boundaries = mask.pattern.ends if isinstance(mask.pattern, Tree) else mask.documents
    if documents is not None and boundaries not in (None, documents):
        raise ValueError(
            f"documents={documents!s:.80} beside a mask whose documents are {boundaries!s:.80}; leave them out"
        )
    if documents is not None and boundaries is None and takes_documents(mask):
        raise ValueError(f"documents={documents!s:.80} beside a mask without them; give them to AttentionMask")
    return documents if boundaries is None else boundaries


def takes_documents(mask: AttentionMask) -> bool:
    return mask.pattern is None or mask.pattern.takes_documents


UNUSED_ERROR = (
    "no attention inside the `sequence` block asked for its layout, so each rank attended to its own tokens alone, or "
    "not at all. A model that calls F.scaled_dot_product_attention needs `sdpa_parallel(attend)` around the call, a "
    "model of Hugging Face transformers `cp.prepare(model)`. A model without attention, or with attention of its own, "
    "cannot be sharded. Backward alone needs no block"
)
