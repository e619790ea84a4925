"""Streams of tokens, the image's and the text's: which piece of each this rank has, while a model of diffusers runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from armillary.attention.context_parallel.packing import axes
from armillary.attention.context_parallel.sdpa import Routing
from armillary.attention.context_parallel.sequence import Sharding
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout, all_gather
from armillary.core.layout import cut
from armillary.integrations.diffusers.plans import Split


class Streams:
    """The streams of one forward of a model. All that its modules ask is found beforehand: compiled graphs read it.

    Args:
        image, text: how many tokens each has.
        orders: in which modules hold them; see `Plan.attention`.
        text_mask: [B, text], which text is to be seen; the rest is padding.

    Raises:
        ValueError: an image with fewer tokens than there are ranks; a mask of another length, or with holes.
    """

    def __init__(
        self, attend: Method, image: int, text: int, orders: Iterable[tuple[str, ...]], text_mask: Tensor | None = None
    ) -> None:
        if image < attend.shards:
            raise ValueError(f"{image} tokens of the image on {attend.shards} ranks: each needs at least one")
        if text_mask is not None and text_mask.shape[-1] != text:
            raise ValueError(f"a mask {tuple(text_mask.shape)} for {text} tokens of the text: both must have as many")
        self.attend, self.lengths = attend, {"image": image, "text": text}
        self.sizes = [len(piece) for piece in pieces(image, text, attend.shards)["image"]]
        self.mine = {stream: held[attend.shard] for stream, held in pieces(image, text, attend.shards).items()}
        seen = None if text_mask is None else seen_text(text_mask)
        self.shardings = {order: self._sharding(order, seen) for order in orders}

    def _sharding(self, order: tuple[str, ...], seen: list[int] | None) -> Sharding:
        """Returns the sharding of the tokens of these streams, in the order in which each rank holds them.

        Text comes last in positions, so that padding is one more document, at the end, which nothing else sees.
        """
        image, text = self.lengths["image"], self.lengths["text"] if "text" in order else 0
        layout = joint_layout(image, text, order, self.attend.shards)
        if seen is None or not text:
            return Sharding(layout)
        rows = [(0, image + shown, image + text) if shown < text else (0, image + text) for shown in seen]
        return Sharding(layout, AttentionMask(documents=rows).documents)

    def take(self, split: Split, whole: Any) -> Any:
        """This rank's piece of a tensor, or of each tensor of a list."""
        return pytree.tree_map_only(Tensor, lambda x: self._piece(split, x), whole)

    def _piece(self, split: Split, x: Tensor) -> Tensor:
        if not -x.ndim <= split.dim < x.ndim:
            return x
        if x.shape[split.dim] != self.lengths[split.stream]:
            raise ValueError(
                f"a tensor {tuple(x.shape)} with {x.shape[split.dim]} tokens of the {split.stream}, which has "
                f"{self.lengths[split.stream]}: all must have as many, whole on every rank"
            )
        piece = self.mine[split.stream]
        return x.narrow(split.dim, piece.start, len(piece)).clone()  # a view would keep all of it

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """The whole image, on every rank, of its tokens. A rank's gradient is that of its own tokens: a share."""
        sizes, shard = self.sizes, self.attend.shard
        if x.shape[dim] != sizes[shard]:
            raise ValueError(f"{x.shape[dim]} tokens of the image have come out of {sizes[shard]}")
        for axis in axes(self.attend) or []:  # innermost first
            ranks = sizes[shard // axis.size * axis.size :][: axis.size]
            parts = list(all_gather(x.detach(), axis, sizes=ranks, dim=dim % x.ndim).split(ranks, dim))
            parts[shard % axis.size] = x
            x = torch.cat(parts, dim)
            sizes = [sum(sizes[i : i + axis.size]) for i in range(0, len(sizes), axis.size)]
            shard //= axis.size
        return x


@lru_cache(maxsize=256)
def pieces(image: int, text: int, shards: int) -> dict[str, list[range]]:
    """Which tokens of an image and of a text each rank has: of the image, and of both together, as evenly as possible.

    So no rank has two more than another, and methods that divide heads find the sizes that they cut. Text may be
    shorter than there are ranks.
    """
    of_image = cut(range(image), shards)
    sizes = [len(both) - len(own) for both, own in zip(cut(range(image + text), shards), of_image, strict=True)]
    ends = list(accumulate(sizes, initial=0))
    return {"image": of_image, "text": [range(*ends[shard : shard + 2]) for shard in range(shards)]}


@lru_cache(maxsize=256)
def joint_layout(image: int, text: int, order: tuple[str, ...], shards: int) -> SequenceLayout:
    """Positions are those of the image and then of the text; each rank has its piece of each, in this order."""
    found, start = pieces(image, text, shards), {"image": 0, "text": image}
    runs = ([(start[stream], found[stream][shard]) for stream in order] for shard in range(shards))
    return SequenceLayout([[range(at + run.start, at + run.stop) for at, run in shard] for shard in runs])


def seen_text(mask: Tensor) -> list[int] | None:
    """How many tokens of each row of a mask [B, N] are to be seen, which must be the first ones; None if all are.

    Raises:
        ValueError: hidden tokens before others that are seen.
    """
    seen = mask.bool().long()
    counts = seen.sum(-1)
    first = torch.arange(mask.shape[-1], device=mask.device) < counts[:, None]
    if not bool((first == mask.bool()).all()):
        raise ValueError(
            f"a mask {tuple(mask.shape)} that hides text before text that is to be seen: pad on the right, so that "
            "each row is ones and then zeros"
        )
    return None if bool(seen.all()) else counts.tolist()


class Running:
    """What the modules of one model share: the streams of the forward that runs, or is run again in backward."""

    def __init__(self, attend: Method) -> None:
        self.attend, self.begun = attend, False
        self.streams: Streams | None = None

    @contextmanager
    def within(self, streams: Streams | None) -> Generator[None]:
        """Has a forward's modules find its streams."""
        before, self.streams = self.streams, streams
        try:
            yield
        finally:
            self.streams = before

    def now(self) -> Streams:
        """The streams of the forward that runs.

        Raises:
            ValueError: none does.
        """
        if self.streams is None:
            raise ValueError(
                "a part of the model runs while its forward does not, so that it is not known how tokens are sharded; "
                "call the whole model, and recompute activations by model.enable_gradient_checkpointing()"
            )
        return self.streams


class JointRouting(Routing):
    """Routes the attention of one module to all tokens of its streams."""

    def __init__(self, running: Running, order: tuple[str, ...]) -> None:
        super().__init__(running.attend)
        self.running, self.order = running, order

    def block(self) -> Sharding:
        return self.running.now().shardings[self.order]


def recomputing(checkpoint: Callable[..., Any], running: Running) -> Callable[..., Any]:
    """A checkpointing function of diffusers whose recomputation, in backward, finds the streams of its forward."""

    def checkpointed(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(_Within(block, running, running.now()), *args, **kwargs)

    setattr(checkpointed, FINDS_STREAMS, True)
    return checkpointed


FINDS_STREAMS = "armillary_finds_streams"


class _Within:
    """A block that is called as itself, or by its `__call__`, as diffusers does."""

    def __init__(self, block: Callable[..., Any], running: Running, streams: Streams) -> None:
        self.block, self.running, self.streams = block, running, streams

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.running.within(self.streams):
            return self.block(*args, **kwargs)
