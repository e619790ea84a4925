"""Multi-head latent attention, MLA (arXiv 2405.04434): latents are sent, and expanded to keys and values where they
are used.

Each token has a latent [L] and a rotary key [Dr], which all heads share. From these any rank computes, for head h,

    k[h] = [W_k[h] latent, rotary key]      v[h] = W_v[h] latent

So L + Dr numbers a token travel instead of K (D + Dv). In the functions of a method, k [B, S, 1, Dr] is then the rotary
key and v [B, S, 1, L] the latent, as one head that every query head uses; their gradients are sums over heads. Expanded
keys exist for one block at a time, and are computed again in backward. Without an `Expansion`, k and v are finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.attention.tiling.accumulators import EVERYTHING, Merge, Sum
from armillary.attention.tiling.block_attention import BlockAttention, RingBlock
from armillary.core import Axis, accumulation_dtype, start_all_gather, start_reduce_scatter


@dataclass(frozen=True, eq=False)
class Expansion:
    """The map from latents and rotary keys to the keys and values of some heads.

    Args:
        weight: [K, D - Dr + Dv, L]: for each head the rows of W_k, then those of W_v.
        key_rows: D - Dr, the number of rows of W_k.
        weight_grad: [K, D - Dr + Dv, L] in the accumulation dtype, to which backward adds; None in forward.
    """

    weight: Tensor
    key_rows: int
    weight_grad: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, weight: Tensor, in_backward: bool = False) -> Expansion:
        """Returns the expansion of a call on queries q [B, T, H, D] and rotary keys k [B, S, 1, Dr]."""
        grad = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if in_backward else None
        return cls(weight, q.shape[3] - k.shape[3], grad)

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.weight.shape[1] - self.key_rows

    def of_heads(self, heads: range) -> Expansion:
        """Returns the expansion to some heads. Its `weight_grad` is a view of this one's."""
        grad, part = self.weight_grad, slice(heads.start, heads.stop)
        return Expansion(self.weight[part], self.key_rows, None if grad is None else grad[part])

    def expand(self, rotary: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k [B, S, K, D] and v [B, S, K, Dv] of rotary keys [B, S, 1, Dr] and latents [B, S, 1, L]."""
        expanded = torch.matmul(latents.squeeze(2), self.weight.flatten(0, 1).mT).unflatten(2, self.weight.shape[:2])
        k, v = expanded.split((self.key_rows, self.value_dim), dim=3)
        return torch.cat((k, rotary.expand(-1, -1, len(self.weight), -1)), dim=3), v

    def collapse(self, latents: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of the rotary keys and latents, and adds that of the weight to `weight_grad`.

        All are in the accumulation dtype, because they are added up over blocks and over ranks.

        Args:
            dk, dv: gradients of the results of `expand`.
        """
        assert self.weight_grad is not None
        # Products in the dtype of the call, as in the backward of a linear layer.
        grads = torch.cat((dk[..., : self.key_rows], dv), dim=3).to(latents.dtype).flatten(2)
        self.weight_grad.add_(torch.matmul(grads.flatten(0, 1).mT, latents.flatten(0, 2)).view(self.weight.shape))
        dtype = accumulation_dtype(latents.dtype)
        drotary = dk[..., self.key_rows :].sum(2, keepdim=True, dtype=dtype)
        return drotary, torch.matmul(grads, self.weight.flatten(0, 1)).unsqueeze(2).to(dtype)


class TokenSizes(NamedTuple):
    """Numbers that travel for a token, by which a method chooses what it sends.

    Args:
        head: D + Dv, the expanded key and value of one head.
        sent: Dr + L.
        element, accumulated: bytes of a number, and of a number of a sum of gradients.
    """

    head: int
    sent: int
    element: int
    accumulated: int

    @classmethod
    def of(cls, weight: torch.Size, rotary_dim: int, dtype: torch.dtype) -> TokenSizes:
        """Returns the numbers for an expansion with a weight of shape [K, D - Dr + Dv, L], and rotary keys of Dr."""
        _, rows, rank = weight
        return cls(rows + rotary_dim, rank + rotary_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize)


def value_dim(v: Tensor, expansion: Expansion | None) -> int:
    """Returns Dv of values v [B, S, K, Dv], or of the expanded latents v [B, S, 1, L]."""
    return v.shape[3] if expansion is None else expansion.value_dim


class ExpandedBlock(NamedTuple):
    """A `RingBlock` on rotary keys and latents, which expands them."""

    block: BlockAttention
    expansion: Expansion

    def forward(self, q: Tensor, k: Tensor, v: Tensor, accumulator: Merge) -> None:
        if self.block.calls:
            self.block.forward(q, *self.expansion.expand(k, v), accumulator)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        if not self.block.calls:
            return
        expanded_k, expanded_v = self.expansion.expand(k, v)
        expanded_dk, expanded_dv = Sum.like(expanded_k), Sum.like(expanded_v)
        self.block.backward(dout, q, expanded_k, expanded_v, out, lse, dq, expanded_dk, expanded_dv)
        del expanded_k, expanded_v
        drotary, dlatents = self.expansion.collapse(v, expanded_dk.result(), expanded_dv.result())
        dk.add(EVERYTHING, drotary)
        dv.add(EVERYTHING, dlatents)


def block_of(block: BlockAttention, expansion: Expansion | None) -> RingBlock:
    """Returns a block as it attends with what was sent: with finished k and v, or with latents."""
    return block if expansion is None else ExpandedBlock(block, expansion)


class GatheredBlock(NamedTuple):
    """A `RingBlock` of which each device of a node has some of the keys: gathers them over `axis`.

    Args:
        block: on the keys of all devices.
        sizes: number of keys of each device.
    """

    block: RingBlock
    axis: Axis
    sizes: tuple[int, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, accumulator: Merge) -> None:
        self.block.forward(q, *self.gather(k, v), accumulator)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Sum, dk: Sum, dv: Sum
    ) -> None:
        all_k, all_v = self.gather(k, v)
        all_dk, all_dv = Sum.like(all_k), Sum.like(all_v)
        self.block.backward(dout, q, all_k, all_v, out, lse, dq, all_dk, all_dv)
        own_grads = self.scatter(all_dk.value(), all_dv.value())
        for total, grad in zip((dk, dv), own_grads, strict=True):
            total.add(EVERYTHING, grad)

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all devices."""
        pending = [start_all_gather(x, self.axis, self.sizes) for x in (k, v)]
        k, v = (transfer.wait() for transfer in pending)
        return k, v

    def scatter(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this device's keys and values, from those of all keys on each device."""
        pending = [start_reduce_scatter(grad, self.axis, self.sizes) for grad in (dk, dv)]
        dk, dv = (transfer.wait() for transfer in pending)
        return dk, dv
