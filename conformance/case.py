"""One thing to try: everything about an attention call but the method and the values of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from armillary.attention.mask import (
    AttentionMask,
    Blocks,
    Chunked,
    ImageSpans,
    Pattern,
    Prefix,
    RowMasks,
    SliceList,
    Tree,
)

KINDS = ("contiguous", "zigzag", "striped")
LAYOUTS = (*KINDS, "balanced", "uneven", "spans")
"""Those of every method, and two drawn from the case's seed: contiguous shards of any sizes; any spans at all."""
MEMORY = ("plain", "transposed", "permuted", "packed", "sliced", "expanded", "mixed")
"""How tensors lie: as they are; as views of [B, H, T, D]; in any other order of dims, the head dim not innermost; as
slices of one [B, T, (H + 2K) D] projection; every other element of larger memory, and not from its start; with stride 0
over the batch, heads or all of it; or each tensor in another one of these ways."""
SINKS = (0, 1, 3)
"""Sink logits per head."""
GRADIENTS = ("plain", "transposed", "permuted", "sliced", "expanded")
SAVING = ("autograd", "checkpoint", "reentrant", "selective")
"""Who keeps what for backward: autograd; activation checkpointing, of either kind; or a selective one that must save
attention's results."""
EVERYTHING = "qkvsxw"
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
"""What kinds of masks are called, those apart that are only causal, windows and documents."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to try. `str(case)` names it.

    Args:
        mask: in global positions.
        kind: of the layout, one of `LAYOUTS`.
        key_length: how many keys there are, for cross-attention; as many as queries unless given.
        key_kind: of the layout of the keys; that of the queries unless given.
        sinks: sink logits per head: 0 is none, 1 a tensor [H], S a tensor [S, H].
        shift: about what every logit is raised by; softmax does not feel it, a careless exp(lse) does.
        kernel: by name; the one that is preferred unless given.
        memory: how the inputs lie, one of `MEMORY`.
        gradient: how dout lies, one of `GRADIENTS`.
        needs: what requires a gradient: of q, k, v and the sinks ("s"), or of x, the weights ("w") and the sinks.
        autocast: the dtype of the autocast region that the call is made in, if it is.
        saving: one of `SAVING`.
        compiled: whether the call is traced by torch.compile.
        dtensor: whether q, k and v, or x, are DTensors, `Shard(1)` over the method's axes.
        beside: what DTensors are sharded by on other axes: the batch over `shard` ("b"), heads over `tp` ("h"). Where
            such an axis has ranks and they are not, ranks have copies.
        weights: whether sinks and weights are DTensors too; weights must be where heads are sharded.
        projected: whether the method is given hidden states of `width` and projections, not q, k and v.
        seed: of tensors, of memory, and of layouts that are drawn.
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
    projected: bool = False
    width: int = 24
    seed: int = 0

    @property
    def crosses(self) -> bool:
        """Whether the keys have a layout of their own."""
        return self.key_length is not None or self.key_kind is not None

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.length if self.key_length is None else self.key_length

    @property
    def computed(self) -> torch.dtype:
        """The dtype that attention is computed in: autocast narrows what projections give, float64 apart."""
        lowered = self.projected and self.autocast is not None and self.dtype != torch.float64
        return self.autocast if lowered and self.autocast is not None else self.dtype

    @property
    def scaled(self) -> float:
        """What logits are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        words = [f"B{self.batch} N{self.length} H{self.heads} K{self.kv_heads} D{self.head_dim}"]
        words += [f"Dv{self.value_dim}"] * (self.value_dim != self.head_dim)
        words += [_short(self.dtype), mask_text(self.mask)]
        words += [self.kind] + [f"keys={self.keys},{self.key_kind or self.kind}"] * self.crosses
        words += ["sinks"] * (self.sinks == 1) + [f"sinks={self.sinks}"] * (self.sinks > 1)
        words += [f"softcap={self.softcap}"] * (self.softcap is not None)
        words += [self.memory] + [f"dout={self.gradient}"] * (self.gradient != "plain")
        words += [f"scale={self.scale}"] * (self.scale is not None) + [f"shift={self.shift:g}"] * (self.shift != 0)
        words += [f"kernel={self.kernel}"] * (self.kernel is not None)
        words += [f"autocast={_short(self.autocast)}"] * (self.autocast is not None)
        words += [self.saving] * (self.saving != "autograd") + ["compiled"] * self.compiled
        words += [f"DTensor{self.beside and '+'}{self.beside}"] * self.dtensor + ["weights"] * self.weights
        words += [f"projected E{self.width}"] * self.projected
        words += [f"needs={self.needs or 'nothing'}"] * (self.needs != EVERYTHING)
        return " ".join([*words, f"seed{self.seed}"])


def mask_kinds(mask: AttentionMask) -> set[str]:
    """The names of its kind and, if its rows have masks of their own, of theirs; none for plain masks."""
    if mask.pattern is None:
        return set()
    found = {PATTERNS[type(mask.pattern)]}
    return found.union(*map(mask_kinds, mask.pattern.masks)) if isinstance(mask.pattern, RowMasks) else found


def mask_text(mask: AttentionMask) -> str:
    """A mask in a few words: of what, and of how many."""
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
