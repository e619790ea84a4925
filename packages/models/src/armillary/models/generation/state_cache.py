"""Cache of a layer with a state for decoding: its last state and the convolution's last inputs, equal on all ranks."""

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
    """Takes the place of a state layer's attention method: runs the prompt over its ranks, then token by token.

    A call with a layout gets the prompt; one without gets the newest token, equal on all ranks. Completions start from
    the state of their prompt. It has no gradient.

    Bytes of the cache on every rank: B n (H Dk Dv a + (W - 1) C e), with `a` bytes of a state's element.

    Bytes sent for the prompt: those of the layer, and (P - 1) B (W - 1) C e at most. None for a new token.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state: Tensor | None = None
        """[B, H, Dk, Dv], or [B, H, D, Ns]."""
        self.tail: Tensor | None = None
        """The convolution's last W - 1 inputs [B, W - 1, C]."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mask: AttentionMask, layout: SequenceLayout | None
    ) -> Tensor:
        """Computes the convolution of x [B, T, C], or of a new token [B n, 1, C]."""
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
        """Computes the outputs [B, T, H, Dv] of the prompt, or of a new token [B n, 1, H, Dv]."""
        if layout is not None:
            out, self.state = sharded_recurrence(self.method, recurrence, inputs, mask, layout)
            return out
        state = None if self.state is None else repeat_rows(self.state, len(inputs[0]))
        out, self.state = recurrence(*inputs, initial_state=state)
        return out


def repeat_rows(x: Tensor, rows: int) -> Tensor:
    """Returns x [B, ...] with `rows` rows, the copies of each next to each other."""
    return x if len(x) == rows else x.repeat_interleave(rows // len(x), 0)


def last_tokens(x: Tensor, count: int, layout: SequenceLayout, method: Method) -> Tensor:
    """Returns the last tokens [B, count, C] of a sequence, on every rank, after zeros if it is shorter.

    Args:
        x: [B, T, C], this rank's tokens.
        layout: over all ranks of the method.
    """
    # 1. On the host: which of the last tokens each rank has, and their indices on this rank.
    first = layout.length - count
    positions: list[list[int]] = [[] for _ in range(layout.shards)]
    own_indices: list[int] = []
    for shard in range(layout.shards):
        spans = layout.spans(shard)
        for start, span in zip(accumulate(map(len, spans), initial=0), spans, strict=False):
            for index in range(max(0, len(span) - count), len(span)):  # earlier tokens of a span are too early
                if span[index] >= first:
                    positions[shard].append(span[index])
                    own_indices += [start + index] if shard == method.shard else []
    # 2. Gather them from all ranks, and sort them by position.
    tail = x[:, own_indices]
    axis = sequence_axis(method)
    if axis.size > 1:
        tail = start_all_gather(tail, axis, list(map(len, positions))).wait()
    gathered = list(chain.from_iterable(positions))
    order = sorted(range(len(gathered)), key=gathered.__getitem__)
    missing = x.new_zeros(len(x), count - tail.shape[1], x.shape[2])
    return torch.cat([missing, tail[:, order]], 1)
