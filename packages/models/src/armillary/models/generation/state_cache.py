"""Cache of a layer with a state, for decoding: the latest state and the convolution's last inputs, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from armillary.attention import AttentionMask, Method
from armillary.attention.call.validation import over_all_ranks
from armillary.attention.context_parallel.communication import sequence_axis
from armillary.core import SequenceLayout, start_all_gather
from armillary.models.layers.state_mixers import Recurrence, convolve, sharded_recurrence


class CachedStates:
    """`StateOperations` with a cache: over the ranks of `method` for the prompt, then on each rank for new tokens.

    A call with a layout is for this rank's tokens of the prompt. A call without a layout is for the newest token, equal
    on all ranks. The n completions of a prompt start from the prompt's state. There is no gradient.

    Bytes of the cache on every rank: B n (H Dk Dv a + (W - 1) C e), with `a` bytes of a state's element.

    Bytes sent for the prompt: those of the layer without a cache, and at most (P - 1) B (W - 1) C e. Nothing is sent
    for a new token.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state: Tensor | None = None
        """The latest state: [B, H, Dk, Dv], or [B, H, D, Ns] of Mamba-2. B n instead of B after the first new token."""
        self.tail: Tensor | None = None
        """The convolution's last W - 1 inputs: [B, W - 1, C], or B n as `state`."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        """Computes the convolution of the prompt's x [B, T, C], or of a new token's [B n, 1, C]."""
        tail_length = weight.shape[1] - 1
        if layout is not None:
            self.tail = last_tokens(x, tail_length, over_all_ranks(layout, self.method), self.method)
            return convolve(self.method, x, weight, bias, mask, layout)
        tail = x.new_zeros(len(x), tail_length, x.shape[2]) if self.tail is None else repeat_rows(self.tail, len(x))
        window = torch.cat([tail, x], 1)
        self.tail = window[:, 1:]
        out = (window * weight.T).sum(1, keepdim=True)
        return out if bias is None else out + bias

    def recur(
        self, recurrence: Recurrence, inputs: Sequence[Tensor], mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        """Computes the recurrence's outputs: [B, T, H, Dv] for the prompt, [B n, 1, H, Dv] for a new token."""
        if layout is not None:
            out, self.state = sharded_recurrence(self.method, recurrence, inputs, mask, layout)
            return out
        state = None if self.state is None else repeat_rows(self.state, len(inputs[0]))
        out, self.state = recurrence(*inputs, initial_state=state)
        return out


def repeat_rows(x: Tensor, rows: int) -> Tensor:
    """Returns x [B, ...] with `rows` rows, a multiple of B. The copies of a row are adjacent."""
    return x if len(x) == rows else x.repeat_interleave(rows // len(x), 0)


def last_tokens(x: Tensor, count: int, layout: SequenceLayout, method: Method) -> Tensor:
    """Returns the last `count` tokens of a sequence on every rank: [B, count, C]. A shorter sequence begins with zeros.

    Args:
        x: [B, T, C], this rank's tokens.
        layout: layout of the sequence over all ranks of the method.
    """
    # 1. On the host: the positions of the last tokens on each rank, and their indices in this rank's x.
    first = layout.length - count
    positions: list[list[int]] = [[] for _ in range(layout.shards)]
    own_indices: list[int] = []
    for shard in range(layout.shards):
        spans = layout.spans(shard)
        for start, span in zip(accumulate(map(len, spans), initial=0), spans, strict=False):
            for index in range(max(0, len(span) - count), len(span)):  # no earlier token is among the last
                if span[index] >= first:
                    positions[shard].append(span[index])
                    own_indices += [start + index] if shard == method.shard else []
    # 2. Gather these tokens from all ranks, and sort them by position.
    tail = x[:, own_indices]
    axis = sequence_axis(method)
    if axis.size > 1:
        tail = start_all_gather(tail, axis, list(map(len, positions))).wait()
    gathered_positions = list(chain.from_iterable(positions))
    order = sorted(range(len(gathered_positions)), key=gathered_positions.__getitem__)
    padding = x.new_zeros(len(x), count - tail.shape[1], x.shape[2])
    return torch.cat([padding, tail[:, order]], 1)
