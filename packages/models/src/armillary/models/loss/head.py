"""The head of a model, computed a chunk of tokens at a time: the loop that losses and predictions share.

Letters: this rank has t of T tokens, c of the C tokens of a chunk, and V_r of the V rows of the head's weight. On one
rank t = T, c = C and V_r = V.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.parts import autocast_enabled
from armillary.core import Axis, LabelTriples
from armillary.core.parts import check_local
from armillary.core.parts import chunks as token_chunks
from armillary.models.layers.collected_linear import add_product
from armillary.models.loss.labels import ChunkLabels, TokenLabels
from armillary.models.loss.vocabulary_shard import VocabularyShard


@dataclass(frozen=True)
class ChunkedHead:
    """The checked arguments of a call that are no differentiable tensors.

    Args:
        labels: the labels of the tokens of all ranks.
        shard: this rank's rows of the weight.
        chunk: number of tokens of all ranks in a chunk.
        dtype: dtype of the matmuls.
    """

    labels: TokenLabels
    shard: VocabularyShard
    chunk: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor | LabelTriples,
        *,
        ignore: int,
        axis: DeviceMesh | Axis | None,
        vocabulary: int | None,
        positions: Tensor | None = None,
        chunk: int | None = None,
    ) -> ChunkedHead:
        """Checks a call, and chooses chunk and dtype. Needs no device sync, except to read `positions` on a device.

        Raises:
            ValueError: DTensors, shapes or dtypes that do not match, a chunk below 1, labels or positions that
                `TokenLabels` refuse, or a weight that `VocabularyShard` refuses.
        """
        check_local("hidden", hidden)
        ranks = 1 if axis is None else Axis.of(axis).size
        # 1. Labels. Positions count the tokens of the hidden states.
        if isinstance(labels, LabelTriples) or positions is None:
            token_labels = TokenLabels.of(labels, ignore, ranks)
        elif hidden.ndim != 3:
            raise ValueError(f"hidden must be [B, T, E]; got {tuple(hidden.shape)}")
        else:
            shape = hidden.shape[0], hidden.shape[1] * ranks
            token_labels = TokenLabels.at_positions(labels, positions, ignore, shape, ranks)
        # 2. Shapes and dtypes.
        (rows, row_tokens), dim = token_labels.shape, hidden.shape[-1]
        expected = (rows, ceil(row_tokens / ranks)), (len(weight), dim), weight.shape[:1]
        if (
            hidden.ndim != 3
            or (hidden.shape[:-1], weight.shape, weight.shape[:1] if bias is None else bias.shape) != expected
        ):
            hidden_shape = f"[B, ceil(T / {ranks}), E], with this rank's rows of V:" if ranks > 1 else "[B, T, E],"
            shapes = [hidden.shape, weight.shape, token_labels.shape, *([] if bias is None else [bias.shape])]
            raise ValueError(
                f"hidden {hidden_shape} weight [V, E], labels [B, T] and bias [V] are needed; "
                f"got {', '.join(str(tuple(shape)) for shape in shapes)}"
            )
        dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
        if not autocast_enabled(hidden) and len({*dtypes}) > 1:
            raise ValueError(f"hidden, weight and bias need one dtype outside of autocast; got {dtypes}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 token; got {chunk}")
        # 3. This rank's part of the vocabulary, the dtype and the chunk. Autocast applies to all dtypes but float64.
        shard = VocabularyShard.of(len(weight), axis, vocabulary)
        is_lowered = autocast_enabled(hidden) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(hidden.device.type) if is_lowered else hidden.dtype
        tokens = rows * hidden.shape[1] * ranks
        chunk = chunk or loss_chunk_tokens(tokens, dim, shard.total_rows, dtype.itemsize, ranks)
        return cls(token_labels, shard, chunk, dtype)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias in the dtype of matmuls."""
        return weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def chunks(self, hidden: Tensor) -> Generator[tuple[slice, ChunkLabels, Tensor]]:
        """Yields each chunk: the slice of this rank's tokens, labels and hidden states [C, E] of all ranks' tokens.

        The next chunk is gathered while the caller computes the current one. Chunks are left out if the host knows,
        without a device sync, that no rank's tokens have a label.

        Args:
            hidden: [t, E], of this rank's tokens.

        Bytes sent: as `VocabularyShard.gather`, for each chunk.
        """
        ranks = self.shard.axis.size
        slices = token_chunks(len(hidden), max(1, self.chunk // ranks)) if len(hidden) else []
        indices = map(self.labels.indices, slices)
        slices = [tokens for tokens, labels in zip(slices, indices, strict=True) if labels.stop > labels.start]
        gathers = (self.shard.gather(hidden[tokens], ranks * len(hidden[tokens]), self.dtype) for tokens in slices)
        next_gather = next(gathers, None)  # starts the first all-gather
        for tokens in slices:
            current = next_gather
            next_gather = next(gathers, None)  # in flight while the caller works on the current chunk
            assert current is not None
            yield tokens, self.labels.of_chunk(tokens, self.shard, self.wide), current.wait()


def loss_chunk_tokens(tokens: int, dim: int, vocabulary: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Returns the default number of tokens in a chunk of the loss. Chunks are as equal as possible.

    A chunk's logits and their float32 copy may take 64 MiB, or half of the bytes of `hidden` [tokens, dim] and `weight`
    [vocabulary, dim], whichever is more. For LLaMA-3-8B, 8192 tokens are in chunks of 683, and 655360 in chunks of
    4148. Smaller chunks cost time, since each one reads the weight and adds to its full gradient.

    With several ranks, the second limit is half of the bytes of a rank's part of both. The tensors in flight count too:
    the hidden states of this chunk and of the next, and the gradient of hidden states before and after its reduction.
    """
    budget = max(2**26, (tokens + vocabulary) * dim * itemsize // (2 * ranks))
    wide_itemsize = 4 if itemsize < 4 else 0  # the float32 copy of 16-bit logits
    logits_bytes = ceil(vocabulary / ranks) * (itemsize + wide_itemsize)  # per token
    exchanged_bytes = 4 * dim * itemsize if ranks > 1 else 0  # per token: four tensors in flight, each [dim]
    chunks = ceil(tokens * (logits_bytes + exchanged_bytes) / budget)
    return max(1, ceil(tokens / max(1, chunks)))


def pad_empty_shard(logits: Tensor) -> Tensor:
    """Returns logits [C, V_r]. On a rank without rows, a column [C, 1] of -inf: it adds 0 to a sum of exponentials."""
    return logits if logits.shape[1] else F.pad(logits, (0, 1), value=-torch.inf)


class Gradients(NamedTuple):
    """Gradients of hidden [t, E] in its dtype, and of weight [V_r, E] and bias [V_r] in the dtype of sums.

    A field is None if its gradient is not needed.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, wide: torch.dtype, needs_grad: Sequence[bool]) -> Gradients:
        return cls(
            torch.zeros_like(hidden) if needs_grad[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs_grad[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if needs_grad[2] else None,
        )

    def add(self, tokens: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor, shard: VocabularyShard) -> None:
        """Adds a chunk's gradients.

        Args:
            tokens: the slice of this rank's tokens.
            dlogits: [C, V_r], the gradient of the chunk's logits, in the dtype of matmuls; or [C, 1] without rows.
            hidden: [C, E], the hidden states of all ranks' tokens.
        """
        dlogits = dlogits.narrow(1, 0, len(weight))
        # The reduce-scatter over ranks is in flight while the weight's gradient is computed.
        write = None if self.hidden is None else shard.scatter(dlogits @ weight, self.hidden[tokens])
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))
        if self.weight is not None:
            add_product(self.weight, dlogits, hidden)
        if write is not None:
            write()
