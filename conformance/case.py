"""A test case: every property of an attention call except the method and the values of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from armillary.attention import AttentionMask
from armillary.attention.mask import Blocks, Chunked, ImageSpans, Pattern, Prefix, RowMasks, SliceList, Tree

KINDS = ("contiguous", "zigzag", "striped")
LAYOUTS = (*KINDS, "balanced", "uneven", "spans")
"""Layouts of every method, and two that are drawn from the case's seed: "uneven", contiguous shards of any sizes, and
"spans", any spans."""
MEMORY = ("plain", "transposed", "permuted", "packed", "sliced", "expanded", "mixed")
"""Memory layouts, in this order: contiguous; views of [B, H, T, D]; another order of dims, the head dim not innermost;
slices of one [B, T, (H + 2K) D] projection; every other element of a larger buffer, with an offset; stride 0 in the
batch, the heads or both, in dout also in all dims; or for each tensor another one of these except "packed"."""
SINKS = (0, 1, 3)
"""Sink logits per head."""
GRADIENTS = ("plain", "transposed", "permuted", "sliced", "expanded")
SAVING = ("autograd", "checkpoint", "reentrant", "selective")
"""Plain autograd; activation checkpointing, non-reentrant or reentrant; selective checkpointing that saves attention.
"""
EVERYTHING = "qkvsxw"
"""First letters of all tensors that may require a gradient; see `Case.needs`."""
CAUSAL = AttentionMask()
PATTERNS: dict[type[Pattern], str] = {
    SliceList: "slices",
    Tree: "tree",
    Prefix: "prefix",
    Chunked: "chunked",
    ImageSpans: "image-spans",
    Blocks: "blocks",
    RowMasks: "rows",
}
"""Names of patterns. Masks that have only causality, windows and documents have no pattern."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case. `str(case)` names it.

    Args:
        mask: in global positions.
        kind: kind of layout, one of `LAYOUTS`.
        key_length: number of keys, for cross-attention; by default that of queries.
        key_kind: kind of the keys' layout; by default that of the queries'.
        sinks: sink logits per head: 0 is none, 1 a tensor [H], n a tensor [n, H].
        shift: added to every logit, approximately. Softmax does not change, but exp(lse) overflows or vanishes.
        kernel: name of a kernel; by default the preferred one.
        memory: memory layout of the inputs, one of `MEMORY`.
        gradient: memory layout of dout, one of `GRADIENTS`.
        needs: tensors that require a gradient: of q, k, v and sinks ("s"), or of x, weights ("w") and sinks.
        autocast: dtype of the surrounding autocast region, if any.
        saving: one of `SAVING`.
        compiled: True if torch.compile traces the call.
        dtensor: True if q, k and v, or x, are DTensors, `Shard(1)` over the method's axes.
        beside: dims that are sharded over other axes: the batch over `shard` ("b"), heads over `tp` ("h"). On an axis
            of several ranks without its letter, ranks have copies.
        weights: True if sinks and weights are DTensors too; required for weights where heads are sharded.
        latent: (Dr, L) if the method receives rotary keys, latents and the weight of their expansion, not k and v.
        send_latents: `Method.send_latents` of the call.
        projected: True if the method receives hidden states of `width` and projections, not q, k and v.
        seed: of tensors, memory layouts and drawn sequence layouts.
    """

    batch: int = 2
    length: int = 37
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float64
    mask: AttentionMask = CAUSAL
    kind: str = "zigzag"
    scale: float | None = None
    key_length: int | None = None
    key_kind: str | None = None
    sinks: int = 0
    softcap: float | None = None
    shift: float = 0.0
    kernel: str | None = None
    memory: str = "plain"
    gradient: str = "plain"
    needs: str = EVERYTHING
    autocast: torch.dtype | None = None
    saving: str = "autograd"
    compiled: bool = False
    dtensor: bool = False
    beside: str = ""
    weights: bool = False
    latent: tuple[int, int] | None = None
    send_latents: bool | None = None
    projected: bool = False
    width: int = 24
    seed: int = 0

    @property
    def is_cross_attention(self) -> bool:
        """True if the keys have a length or a kind of layout of their own."""
        return self.key_length is not None or self.key_kind is not None

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.length if self.key_length is None else self.key_length

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which attention gets q, k and v. Autocast casts the results of projections, except float64."""
        lowered = self.projected and self.autocast is not None and self.dtype != torch.float64
        return self.autocast if lowered and self.autocast is not None else self.dtype

    @property
    def softmax_scale(self) -> float:
        """Softmax scale."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        words = [f"B{self.batch} N{self.length} H{self.heads} K{self.kv_heads} D{self.head_dim}"]
        words += [f"Dv{self.value_dim}"] * (self.value_dim != self.head_dim)
        words += [_short(self.dtype), mask_text(self.mask)]
        words += [self.kind] + [f"keys={self.keys},{self.key_kind or self.kind}"] * self.is_cross_attention
        words += ["sinks"] * (self.sinks == 1) + [f"sinks={self.sinks}"] * (self.sinks > 1)
        words += [f"softcap={self.softcap}"] * (self.softcap is not None)
        words += [self.memory] + [f"dout={self.gradient}"] * (self.gradient != "plain")
        words += [f"scale={self.scale}"] * (self.scale is not None) + [f"shift={self.shift:g}"] * (self.shift != 0)
        words += [f"kernel={self.kernel}"] * (self.kernel is not None)
        words += [f"autocast={_short(self.autocast)}"] * (self.autocast is not None)
        words += [self.saving] * (self.saving != "autograd") + ["compiled"] * self.compiled
        words += [f"DTensor{self.beside and '+'}{self.beside}"] * self.dtensor + ["weights"] * self.weights
        if self.latent is not None:
            words += [f"latent Dr{self.latent[0]} L{self.latent[1]}"]
            words += [] if self.send_latents is None else ["sent" if self.send_latents else "expanded"]
        words += [f"projected E{self.width}"] * self.projected
        words += [f"needs={self.needs or 'nothing'}"] * (self.needs != EVERYTHING)
        return " ".join([*words, f"seed{self.seed}"])


def mask_kinds(mask: AttentionMask) -> set[str]:
    """Returns the names of the mask's pattern and of its rows' patterns; an empty set for masks without a pattern."""
    if mask.pattern is None:
        return set()
    kinds = {PATTERNS[type(mask.pattern)]}
    return kinds.union(*map(mask_kinds, mask.pattern.masks)) if isinstance(mask.pattern, RowMasks) else kinds


def mask_text(mask: AttentionMask) -> str:
    """Returns a short description of a mask, with counts."""
    match mask.pattern:
        case None:
            words = ["causal" if mask.causal else "full"]
        case RowMasks(masks=masks):
            words = [f"rows[{' | '.join(map(mask_text, masks))}]"] + ["causal"] * mask.causal
        case pattern:
            words = [f"{PATTERNS[type(pattern)]}[{_size(pattern)}]"] + ["causal"] * mask.causal
    words += [f"window{mask.window}"] * (mask.window is not None)
    return " ".join(words + [f"documents{mask.documents}"] * (mask.documents is not None))


def _size(pattern: Pattern) -> str:
    match pattern:
        case Tree(parents=parts) | Prefix(prefixes=parts) | ImageSpans(spans=parts) | SliceList(bands=parts):
            return str(len(parts))
        case Chunked(size=size, origin=origin):
            return f"{size} from {origin}"
        case Blocks(visible=visible, block=block):
            return f"{len(visible)}x{len(visible[0])} of {block}"
        case _:
            return ""


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
