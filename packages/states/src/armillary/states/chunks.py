"""Chunks of tokens as affine maps of the state that enters them: matrix products instead of a loop over tokens.

With a_t = exp(g_t) the decay of token t and u_t the value that it writes, the recurrences are

    S_t = a_t S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

where u_t = dt_t x_t for state space duality (Mamba-2, arXiv 2405.21060), and
u_t = beta_t (v_t - (a_t S_{t-1})^T k_t) for the delta rule. In a chunk of tokens 1 .. C, let Q, K, V and U have the
rows q_t, k_t, v_t and u_t, let S be the state that enters, and D_tj = a_{j+1} ... a_t the decay from token j to token
t. The delta rule is then a triangular system for U (UT transform, arXiv 2412.06464), with elementwise products by beta
and D:

    U + tril(beta (K K^T) D, -1) U = beta V - beta D_t0 K S

Its solution is U = V' - W S, so the leaving state and the outputs are affine in S. Decays are computed as exponentials
of differences of cumulative sums of g. Nothing is divided by a cumulative decay, which may be 0.

A `StateKernel` computes the maps of many chunks: `TorchChunks` by these formulas, on any device; others are kernels of
installed packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from armillary.attention.internal import is_installed


class Operands(NamedTuple):
    """The inputs of a recurrence in the dtype of its states, as tokens [B, T, ...] or cut into n chunks of C tokens.

    Args:
        q, k: [B, T, K, Dk], or [n, K, C, Dk].
        v: [B, T, H, Dv], or [n, H, C, Dv].
        g: [B, T, H, 1 or Dk], or [n, H, C, 1 or Dk]: logarithms of decays, -inf for 0.
        beta: [B, T, H, 1], or [n, H, C, 1]: beta of the delta rule, or dt of state space duality.
        rates: [H], the A of state space duality, where g = dt A; None for the delta rule.
        initial_state: [B, H, Dk, Dv], or None for zeros.
        dtype: dtype of the layer's values before they were cast to the dtype of the states.
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
        # Value head h uses key head h // (H / K).
        count = self.v.shape[1] // self.k.shape[1]
        if count == 1:
            return self
        return self._replace(q=self.q.repeat_interleave(count, 1), k=self.k.repeat_interleave(count, 1))


class ChunkMaps(NamedTuple):
    """Chunks as affine maps of the states S [n, H, Dk, Dv] that enter them.

    Args:
        state_map: [n, H, Dk, Dk], or [n, H, 1, 1] if it is one number per head.
        state: [n, H, Dk, Dv]; the leaving state is state_map S + state.
        output_map: [n, H, C, Dk].
        output: [n, H, C, Dv]; the outputs are output_map S + output.
    """

    state_map: Tensor
    state: Tensor
    output_map: Tensor
    output: Tensor


def apply_map(state_map: Tensor, state: Tensor) -> Tensor:
    # Maps are matrices [..., Dk, Dk] or numbers [..., 1, 1].
    return state_map * state if state_map.shape[-1] == 1 else state_map @ state


class StateKernel(Protocol):
    """Computes chunks of tokens on one device. Stateless, and differentiable by torch's autograd.

    Args:
        name: the value of the layers' `kernel` argument that selects this kernel.
        max_chunk: largest number of tokens of a chunk. The scan passes states from chunk to chunk by matrix products.
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
        """Computes the maps of n chunks of C tokens. Padding is 0 in all operands, so it changes no state."""
        ...


class TorchChunks:
    name = "torch"
    max_chunk = 64  # a chunk of C tokens takes matrices [C, C]

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> str | None:
        return None

    def maps(self, chunks: Operands) -> ChunkMaps:
        q, k, v, g, beta, rates, *_ = chunks.repeat_key_heads()
        decays = CumulativeDecay.of(g)
        last = decays.at(slice(-1, None))
        from_start = decays.since_start()
        pairs: PairDecay = HeadDecay(decays) if g.shape[-1] == 1 else ChannelDecay(decays)
        # Without writes, the outputs are `read` S and the leaving state is `chunk_decay` S. The written values add
        # `within` U to the outputs, and `write` U to the leaving state.
        read, chunk_decay = q * from_start, last.since_start()
        within, write = pairs.products(q, k), (k * decays.until_end()).mT
        if rates is not None:  # U = dt x does not depend on S
            return ChunkMaps(chunk_decay.mT, write @ (beta * v), read, within @ (beta * v))
        # Solves for [V', W] at once. The solver reads only what is below the diagonal of `system`.
        system = beta * pairs.products(k, k)
        right_sides = torch.cat([beta * v, beta * from_start * k], -1)
        solution = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
        # U = V' - W S: V' gives the constant terms, W the terms that are subtracted from the maps of S.
        widths = [v.shape[-1], k.shape[-1]]
        state, state_map_change = (write @ solution).split(widths, -1)
        output, output_map_change = (within @ solution).split(widths, -1)
        decay = torch.diag_embed(chunk_decay.expand(*k.shape[:2], 1, k.shape[-1]).squeeze(-2))
        return ChunkMaps(decay - state_map_change, state, read - output_map_change, output)


class CumulativeDecay(NamedTuple):
    """The decay from a chunk's start to each token: the product of the decays up to and including the token's.

    Args:
        log: [..., C, channels], the sum of the logarithms of these decays, without decays that are 0.
        resets: the number of decays that are 0. They are counted separately, because their logarithms are -inf, and
            differences of these would be NaN.
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
        # D_t0, and 0 from a reset on.
        return self.log.masked_fill(self.resets > 0, -torch.inf).exp()

    def until_end(self) -> Tensor:
        # D_Ct from each token to the last one: the product of the decays after the token.
        before_last, last = self.at(slice(0, -1)), self.at(slice(-1, None))
        # For the last token 1, and not exp(x - x), whose gradient would be a rounding error instead of 0.
        return torch.cat([last.since(before_last), torch.ones_like(last.log)], -2)

    def since(self, earlier: CumulativeDecay, excluded: Tensor | None = None) -> Tensor:
        """Returns the decay from each earlier token to each of these tokens, broadcast; 0 for `excluded` pairs."""
        zero = self.resets != earlier.resets  # a decay between the two tokens is 0
        # The mask comes before the exponential, which would overflow for a pair in the wrong order.
        return (self.log - earlier.log).masked_fill(zero if excluded is None else zero | excluded, -torch.inf).exp()


class PairDecay(Protocol):
    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns [..., C, C] with sum_d rows[t, d] columns[j, d] D_tj[d] for j <= t; 0 elsewhere."""
        ...


class HeadDecay:
    def __init__(self, decays: CumulativeDecay) -> None:
        count = decays.log.shape[-2]
        ones = torch.ones(count, count, dtype=torch.bool, device=decays.log.device)
        columns = CumulativeDecay(decays.log.mT, decays.resets.mT)
        # `since` is 0 on and above the diagonal; then the diagonal is set to 1, for the reason given in `until_end`.
        self._decay = decays.since(columns, ones.triu()) + torch.eye(count, dtype=ones.dtype, device=ones.device)

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        return rows @ columns.mT * self._decay


class ChannelDecay:
    # D_tj is [C, C, channels], too large to compute. So the chunk is halved again and again. For a token j of the first
    # half and a token t of the second, D_tj is the decay from j to the end of the first half, times the decay from
    # there to t. Neither factor overflows, and the sums over channels are one matrix product.
    def __init__(self, decays: CumulativeDecay) -> None:
        self._factors = list[tuple[Tensor, Tensor]]()
        size = 2  # of pieces, whose halves are `early` and `late`: 2, 4, ..., C tokens
        while size <= decays.log.shape[-2]:
            pieces = CumulativeDecay(*(x.unflatten(-2, (-1, size)) for x in decays))
            early, late = pieces.at(slice(0, size // 2)), pieces.at(slice(size // 2, None))
            self._factors.append((late.since(early.at(slice(-1, None))), early.until_end()))
            size *= 2

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        # Starts with the diagonal, C matrices [1, 1], and joins pairs of adjacent matrices until one [C, C] is left.
        result = (rows * columns).sum(-1)[..., None, None]
        for late_decay, early_decay in self._factors:
            half = late_decay.shape[-2]
            late_rows = rows.unflatten(-2, (-1, 2, half)).select(-3, 1) * late_decay
            early_columns = columns.unflatten(-2, (-1, 2, half)).select(-3, 0) * early_decay
            lower = late_rows @ early_columns.mT
            first, second = result.unflatten(-3, (-1, 2)).unbind(-3)
            upper_rows = torch.cat([first, torch.zeros_like(lower)], -1)
            result = torch.cat([upper_rows, torch.cat([lower, second], -1)], -2)
        return result.squeeze(-3)


# -- kernels of installed packages ------------------------------------------------------------------------------------

# None of them has run on a GPU here: tests call stand-ins that have their signatures and conventions.

SMALLEST_LOG_DECAY = -100.0
"""Replaces lower values for "fla", which subtracts logarithms: -inf + inf is NaN. exp(-100) is below the normal numbers
of float32."""


class FlashLinearAttention:
    # One call computes outputs, leaving states and both maps. For the maps, the values have Dk further columns of
    # zeros, and the entering state of these columns is the identity. The results in these columns are the maps.
    name = "fla"
    max_chunk = 512  # a compromise: larger chunks pad short documents more, smaller ones need more state passing

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> str | None:
        if not delta_rule:
            return "computes the delta rule only"
        if channels > 256:
            return f"supports up to 256 key channels, not {channels}"
        return _needs("fla.ops.gated_delta_rule", v)

    def maps(self, chunks: Operands) -> ChunkMaps:
        # [n, C, heads, D]; decays and states keep the dtype of the states.
        q, k, v, g, beta = (x.transpose(1, 2) for x in chunks.repeat_key_heads()[:5])
        channels = k.shape[-1]
        widths = [v.shape[-1], channels]
        q, k, values, beta = (x.to(chunks.dtype) for x in (q, k, F.pad(v, (0, channels)), beta.squeeze(-1)))
        identity = torch.eye(channels, dtype=g.dtype, device=g.device)
        entering = F.pad(identity, (v.shape[-1], 0)).expand(*chunks.v.shape[:2], -1, -1).contiguous()
        g = g.clamp(min=SMALLEST_LOG_DECAY)
        if g.shape[-1] == 1:
            rule, decays = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule, g.squeeze(-1)
        else:
            rule, decays = import_module("fla.ops.kda").chunk_kda, g
        # q is scaled already.
        results = rule(q, k, values, decays, beta, scale=1.0, initial_state=entering, output_final_state=True)
        out, leaving = (x.to(g.dtype) for x in results)
        output, output_map = out.transpose(1, 2).split(widths, -1)
        state, state_map = leaving.split(widths, -1)
        return ChunkMaps(state_map, state, output_map, output)


class MambaSsm:
    name = "mamba_ssm"
    max_chunk = 512  # as for `FlashLinearAttention`

    def refuses(self, v: Tensor, channels: int, delta_rule: bool) -> str | None:
        if delta_rule:
            return "computes state space duality only"
        return _needs("mamba_ssm.ops.triton.ssd_combined", v)

    def maps(self, chunks: Operands) -> ChunkMaps:
        assert chunks.rates is not None
        # [n, C, heads, D]; dt and the rates keep the dtype of the states.
        Cm, Bm, x = (operand.transpose(1, 2).to(chunks.dtype) for operand in chunks[:3])
        dt = chunks.beta.transpose(1, 2).squeeze(-1)
        chunk_scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        results = chunk_scan(x, dt, chunks.rates, Bm, Cm, chunk_size=256, return_final_states=True)
        out, leaving = (result.to(dt.dtype) for result in results)
        # The decay since the chunk's start, [n, H, C, 1]: dt A is finite, and so are differences of its sums.
        decay = chunks.g.cumsum(-2).exp()
        return ChunkMaps(decay[..., -1:, :], leaving.mT, chunks.repeat_key_heads().q * decay, out.transpose(1, 2))


KERNELS: tuple[StateKernel, ...] = (FlashLinearAttention(), MambaSsm(), TorchChunks())
"""All kernels, preferred ones first."""


def choose_kernel(requested: str | StateKernel | None, v: Tensor, channels: int, delta_rule: bool) -> StateKernel:
    """Returns the first kernel that supports a layer, or the requested one if it does.

    Raises:
        ValueError: `requested` is neither a kernel nor the name of one, or it does not support the layer.
    """
    if requested is not None and not isinstance(requested, str):
        candidates = [requested] if hasattr(requested, "maps") else []
    else:
        candidates = [kernel for kernel in KERNELS if requested in (None, kernel.name)]
    if not candidates:
        raise ValueError(f"kernel={requested!r}: known are {', '.join(kernel.name for kernel in KERNELS)}")
    refusals = [kernel.refuses(v, channels, delta_rule) for kernel in candidates]
    for kernel, refusal in zip(candidates, refusals, strict=True):
        if refusal is None:
            return kernel
    raise ValueError(f"kernel {candidates[0].name!r} {refusals[0]}")


def _needs(module: str, v: Tensor) -> str | None:
    """Returns the reason why a package's kernel cannot run on values like v, or None."""
    if v.device.type != "cuda":
        return f"runs on cuda, not {v.device.type}"
    if v.dtype not in (torch.float16, torch.bfloat16):
        return f"is for 16 bits, not {v.dtype}: it rounds products of float32 to fewer bits"
    if not is_installed(module):
        return f"needs {module.partition('.')[0]}, which is not installed"
    return None
