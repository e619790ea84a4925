"""Kernels of installed packages for layers with a state, and the choice among them.

None of these kernels has run on a GPU here. Tests call stand-ins that have their signatures and conventions.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from armillary.attention.parts import is_installed
from armillary.states.chunks import ChunkMaps, Operands, StateKernel, TorchChunks

SMALLEST_LOG_DECAY = -100.0
"""Replaces lower values for "fla", which subtracts logarithms: -inf + inf is NaN. exp(-100) is below the normal numbers
of float32."""


class FlashLinearAttention:
    """The gated delta rule of `flash-linear-attention`, with a decay for each head or for each key channel.

    One call computes outputs, leaving states and both maps. For the maps, the values have Dk further columns of zeros,
    and the entering state of these columns is the identity. The results in these columns are the maps.
    """

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
    """State space duality of `mamba-ssm`."""

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
