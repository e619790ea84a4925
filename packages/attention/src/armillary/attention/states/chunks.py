"""Chunks of tokens as affine maps of the state that enters them: matrix products instead of a loop over tokens.

With u_t the value that the token t writes, the recurrences are

    S_t = a_t S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

where u_t = dt_t x_t for state space duality (Mamba-2, arXiv 2405.21060), and
u_t = beta_t (v_t - (a_t S_{t-1})^T k_t) for the delta rule. With D_tj the decay a_{j+1} ... a_t, a chunk that the
state S enters has

    U + tril(beta K K^T o D, -1) U = beta V - beta D_t0 K S                      (UT transform, arXiv 2412.06464)

so that U = V' - W S, and the leaving state and the outputs are affine in S. Decays are exponentials of differences of
cumulative sums: nothing is divided by a cumulative decay, which may be 0.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Operands(NamedTuple):
    """The inputs of a recurrence in the dtype of its states, as tokens [B, T, ...] or cut into n chunks of C tokens.

    Args:
        q, k: [B, T, K, Dk], or [n, K, C, Dk].
        v: [B, T, H, Dv], or [n, H, C, Dv].
        g: [B, T, H, 1 or Dk], or [n, H, C, 1 or Dk]: logarithms of decays, -inf for 0.
        beta: [B, T, H, 1], or [n, H, C, 1]: the delta rule's, or the dt of state space duality.
        rates: [H], the A of state space duality, where g = dt A; None for the delta rule.
        initial_state: [B, H, Dk, Dv], or None for zeros.
        dtype: of the layer's values, before they were cast to the dtype of the states.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    rates: Tensor | None
    initial_state: Tensor | None
    dtype: torch.dtype

    def repeat_key_heads(self) -> Operands:
        """Returns these chunks with H heads of q and k: value head h uses key head h // (H / K)."""
        count = self.v.shape[1] // self.k.shape[1]
        if count == 1:
            return self
        return self._replace(q=self.q.repeat_interleave(count, 1), k=self.k.repeat_interleave(count, 1))


class ChunkMaps(NamedTuple):
    """Chunks as affine maps of the states S [n, H, Dk, Dv] that enter them.

    Args:
        state_map: [n, H, Dk, Dk], or [n, H, 1, 1] for one number a head.
        state: [n, H, Dk, Dv]; the leaving state is state_map S + state.
        output_map: [n, H, C, Dk].
        output: [n, H, C, Dv]; the outputs are output_map S + output.
    """

    state_map: Tensor
    state: Tensor
    output_map: Tensor
    output: Tensor


def apply_map(state_map: Tensor, state: Tensor) -> Tensor:
    """Returns state_map S, of maps that are matrices or one number a head."""
    return state_map * state if state_map.shape[-1] == 1 else state_map @ state


class StateKernel(Protocol):
    """Computes chunks of tokens on one device. Stateless, and differentiable by torch's autograd.

    Args:
        name: in the layers' `kernel` argument.
        max_chunk: tokens of a chunk. Between the chunks of a run, states are passed on by products of matrices.
    """

    name: str
    max_chunk: int

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> str | None:
        """Returns the reason why the kernel cannot compute a layer, or None.

        Args:
            v: the layer's values [B, T, H, Dv], in the caller's dtype.
            channels: Dk.
            delta_rule: False for state space duality.
        """
        ...

    def maps(self, chunks: Operands) -> ChunkMaps:
        """Computes the maps of n chunks of C tokens. Padding is 0 in all operands, and does not change the state."""
        ...


class TorchChunks:
    """Operations of torch, on any device and in every floating-point dtype."""

    name = "torch"
    max_chunk = 64  # within a chunk matrices of chunk x chunk are computed

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> str | None:
        return None

    def maps(self, chunks: Operands) -> ChunkMaps:
        q, k, v, g, beta, rates, *_ = chunks.repeat_key_heads()
        decays = CumulativeDecay.of(g)
        last = decays.at(slice(-1, None))
        from_start = decays.since_start()
        pairs: PairDecay = HeadDecay(decays) if g.shape[-1] == 1 else ChannelDecay(decays)
        read, write = q * from_start, (k * decays.until_end()).mT
        within, chunk_decay = pairs.products(q, k), last.since_start()
        if rates is not None:
            return ChunkMaps(chunk_decay.mT, write @ (beta * v), read, within @ (beta * v))
        # The solver reads what is below the diagonal alone.
        system = beta * pairs.products(k, k)
        right_sides = torch.cat([beta * v, beta * from_start * k], -1)
        solution = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
        widths = [v.shape[-1], k.shape[-1]]
        state, erased = (write @ solution).split(widths, -1)
        output, unread = (within @ solution).split(widths, -1)
        decay = torch.diag_embed(chunk_decay.expand(*k.shape[:2], 1, k.shape[-1]).squeeze(-2))
        return ChunkMaps(decay - erased, state, read - unread, output)


class CumulativeDecay(NamedTuple):
    """Decays from a chunk's start to each token, the token's own included.

    Args:
        log: [..., C, channels], sums of the logarithms of decays above 0.
        resets: the number of decays that are 0: differences of infinite logarithms would be undefined.
    """

    log: Tensor
    resets: Tensor

    @classmethod
    def of(cls, g: Tensor) -> CumulativeDecay:
        reset = g.detach().exp() == 0
        return cls(g.masked_fill(reset, 0).cumsum(-2), reset.cumsum(-2))

    def at(self, tokens: slice) -> CumulativeDecay:
        return CumulativeDecay(self.log[..., tokens, :], self.resets[..., tokens, :])

    def since_start(self) -> Tensor:
        """Returns the decay from the chunk's start, 0 after a reset."""
        return self.log.masked_fill(self.resets > 0, -torch.inf).exp()

    def until_end(self) -> Tensor:
        """Returns the decay from after each token to the last one."""
        before_last, last = self.at(slice(0, -1)), self.at(slice(-1, None))
        # That of the last token is 1, not exp(x - x): its gradient would be the rounding error of a difference.
        return torch.cat([last.since(before_last), torch.ones_like(last.log)], -2)

    def since(self, earlier: CumulativeDecay, absent: Tensor | None = None) -> Tensor:
        """Returns the decay from after the earlier tokens; 0 at `absent` pairs."""
        zero = self.resets != earlier.resets
        # Masked before the exponential: that of a pair in the wrong order may be infinite.
        return (self.log - earlier.log).masked_fill(zero if absent is None else zero | absent, -torch.inf).exp()


class PairDecay(Protocol):
    """Decays between the tokens of a chunk."""

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns [..., C, C] with sum_d rows[t, d] columns[j, d] D_tj[d] for j <= t; 0 elsewhere."""
        ...


class HeadDecay:
    """One decay for all channels of a head."""

    def __init__(self, decays: CumulativeDecay) -> None:
        count = decays.log.shape[-2]
        ones = torch.ones(count, count, dtype=torch.bool, device=decays.log.device)
        columns = CumulativeDecay(decays.log.mT, decays.resets.mT)
        # The diagonal is 1, and not the exponential of a difference, as in `until_end`.
        self._decay = decays.since(columns, ones.triu()) + torch.eye(count, dtype=ones.dtype, device=ones.device)

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        return rows @ columns.mT * self._decay


class ChannelDecay:
    """A decay for each channel.

    The chunk is halved again and again. In the block of a later half's rows and an earlier half's columns, D_tj is the
    decay from j to the middle times that from the middle to t: a product of matrices whose factors do not overflow.
    """

    def __init__(self, decays: CumulativeDecay) -> None:
        self._factors = list[tuple[Tensor, Tensor]]()
        size = 2
        while size <= decays.log.shape[-2]:
            blocks = CumulativeDecay(*(x.unflatten(-2, (-1, size)) for x in decays))
            early, late = blocks.at(slice(0, size // 2)), blocks.at(slice(size // 2, None))
            self._factors.append((late.since(early.at(slice(-1, None))), early.until_end()))
            size *= 2

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        result = (rows * columns).sum(-1)[..., None, None]  # blocks of one token
        for late_decay, early_decay in self._factors:
            half = late_decay.shape[-2]
            late_rows = rows.unflatten(-2, (-1, 2, half)).select(-3, 1) * late_decay
            early_columns = columns.unflatten(-2, (-1, 2, half)).select(-3, 0) * early_decay
            lower = late_rows @ early_columns.mT
            first, second = result.unflatten(-3, (-1, 2)).unbind(-3)
            upper_rows = torch.cat([first, torch.zeros_like(lower)], -1)
            result = torch.cat([upper_rows, torch.cat([lower, second], -1)], -2)
        return result.squeeze(-3)
