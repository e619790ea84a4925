"""The tensors of a case, and the part of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import copysign, sqrt
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.core import SequenceLayout
from armillary.core.internal import dtensor
from conformance.case import CAUSAL, Case
from conformance.memory import Memory

SHARED = ("sinks", "wq", "wk", "wv", "wkv")
"""Tensors without tokens and rows. Ranks with other tokens or rows use the same values, and their gradients are summed.
"""


HEAD_DIMS = {"q": 2, "k": 2, "v": 2, "out": 2, "lse": 2, "sinks": -1, "wq": 0, "wk": 0, "wv": 0, "wkv": 0}
"""The dim of the heads, by tensor. Rotary keys and latents have none."""
KEYS = ("k", "v", "k_rotary", "v_latent")


class CasePart(NamedTuple):
    """A rank's part of a case: indices of its shard of the sequence, part of the batch and part of the heads."""

    shard: int
    rows: int = 0
    heads: int = 0


class CaseSharding(NamedTuple):
    """The sharding of the global tensors of a case, and of their gradients ("d" and the name).

    The batch has `rows` parts and the heads `heads` parts, with the sizes of DTensor's chunks.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    rows: int = 1
    heads: int = 1

    @classmethod
    def of(cls, attend: Any, case: Case, rows: int = 1, heads: int = 1) -> CaseSharding:
        """Returns the sharding of a case by a method's layouts."""
        return cls(
            _layout(attend, case, case.length, case.kind),
            _layout(attend, case, case.keys, case.key_kind or case.kind),
            rows,
            heads,
        )

    def take(self, name: str, tensor: Tensor, part: CasePart) -> Tensor:
        """Returns one part of a global tensor."""
        layout, dim = self._layout(name), HEAD_DIMS.get(name.removeprefix("d"))
        if layout is not None:
            sizes = dtensor.chunk_sizes(len(tensor), self.rows)
            tensor = layout.take(tensor, part.shard).split(sizes)[part.rows]
        return tensor if dim is None else tensor.chunk(self.heads, dim)[part.heads]

    def join(self, name: str, parts: Mapping[CasePart, Tensor]) -> Tensor:
        """Returns the global tensor from the parts of ranks."""
        layout, dim = self._layout(name), HEAD_DIMS.get(name.removeprefix("d"))

        # Parts of the heads are concatenated. A tensor without heads has a copy, or a share of its gradient, in each
        # part.
        def heads(shard: int, rows: int) -> Tensor:
            tensors = [parts[CasePart(shard, rows, i)] for i in range(self.heads)]
            return torch.cat(tensors, dim) if dim is not None else tensors[0] if len(tensors) == 1 else _sum(tensors)

        by_rows = [[heads(shard, rows) for shard in range(self.layout.shards)] for rows in range(self.rows)]
        if layout is None:
            return _sum([tensor for tensors in by_rows for tensor in tensors])
        return torch.cat([layout.join(shards) for shards in by_rows])

    def _layout(self, name: str) -> SequenceLayout | None:
        base = name.removeprefix("d")
        return None if base in SHARED else self.key_layout if base in KEYS else self.layout


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)


def _layout(attend: Any, case: Case, length: int, kind: str) -> SequenceLayout:
    match kind:
        case "balanced":
            fits = case.mask.pattern is None or case.keys == case.length  # a pattern is for one number of tokens
            return attend.layout(length, kind, case.mask if fits else CAUSAL)
        case "uneven" | "spans":
            # A shard of the sequence axis is cut again for the ranks of the head axis.
            within = attend.shards // attend.sequence_shards
            random = Random(f"{case.seed} {length}")
            if case.dtensor:
                sizes = dtensor.chunk_sizes(length, *[axis.size for axis in attend.sequence_method.axes])
            else:
                sizes = drawn_sizes(random, length, attend.sequence_shards, within)
            return drawn_layout(random, sizes, kind).refine(within)
        case _:
            return attend.layout(length, kind)


def drawn_sizes(random: Random, length: int, shards: int, min_size: int) -> list[int]:
    """Draws sizes of shards, each of at least `min_size` tokens."""
    # Distributes the tokens that are left after `min_size` for each shard, at random cuts.
    spare = sorted(random.randint(0, length - shards * min_size) for _ in range(shards - 1))
    ends = [0, *(cut + (i + 1) * min_size for i, cut in enumerate(spare)), length]
    return [b - a for a, b in pairwise(ends)]


def drawn_layout(random: Random, sizes: Sequence[int], kind: str) -> SequenceLayout:
    """Returns a layout with shards of these sizes: contiguous for "uneven", of any runs of positions for "spans"."""
    ends, length = [0, *accumulate(sizes)], sum(sizes)
    order = list(range(length)) if kind == "uneven" else _shuffled(random, length, 3 * len(sizes))
    return SequenceLayout([[range(p, p + 1) for p in order[a:b]] for a, b in pairwise(ends)])


def _shuffled(random: Random, length: int, pieces: int) -> list[int]:
    """Returns positions in about `pieces` runs in random order; every third run is split into even and odd ones."""
    cuts = sorted({random.randint(1, length - 1) for _ in range(pieces)} if length > 1 else set())
    runs = [range(a, b) for a, b in pairwise([0, *cuts, length])]
    split = [part for i, run in enumerate(runs) for part in ((run[::2], run[1::2]) if i % 3 == 0 else (run,))]
    random.shuffle(split)
    return [position for run in split for position in run]


@lru_cache(maxsize=64)
def inputs(case: Case) -> dict[str, Tensor]:
    """Returns global q [B, N, H, D], k [B, S, K, D], v [B, S, K, Dv], dout [B, N, H, Dv] and the case's sinks, if any.

    Projected cases have x [B, N, E], wq [H D, E], wk [K D, E], wv [K Dv, E] instead of q, k, v; latent cases k_rotary
    [B, S, 1, Dr], v_latent [B, S, 1, L] and wkv [K, D - Dr + Dv, L] instead of k and v. Equal on every rank.
    """
    generator = torch.Generator().manual_seed(case.seed)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in _shapes(case).items()
    }
    x = {name: Memory.of(case, name, tensor.ndim).values(tensor) for name, tensor in drawn.items()}
    if case.shift and not case.projected:
        root = sqrt(abs(case.shift / case.softmax_scale))
        # Element 0 of every q and k has the product shift / scale, which adds about `shift` to each logit.
        x["q"] = _with_first(x["q"], root)
        x["k"] = _with_first(x["k"], copysign(root, case.shift) * copysign(1, case.softmax_scale))
    x |= {name: x[name] * case.width**-0.5 for name in ("wq", "wk", "wv") if name in x}
    if case.latent is not None:
        x["wkv"] = x["wkv"] * case.latent[1] ** -0.5
    return {name: tensor.to(case.dtype).contiguous() for name, tensor in x.items()}


def global_shape(case: Case, name: str) -> tuple[int, ...]:
    """Returns the shape of an input, of out [B, N, H, Dv] or of lse [B, N, H]."""
    out = (case.batch, case.length, case.heads, case.value_dim)
    return {"out": out, "lse": out[:3]}.get(name) or _shapes(case)[name]


def _with_first(x: Tensor, value: float) -> Tensor:
    """Returns x with this value as element 0 of the last dim."""
    x = x.clone()
    x[..., 0] = value
    return x


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    q, k, v = case.heads * case.head_dim, case.kv_heads * case.head_dim, case.kv_heads * case.value_dim
    if case.projected:
        shapes: dict[str, tuple[int, ...]] = {"x": (case.batch, case.length, case.width)}
        shapes |= {name: (rows, case.width) for name, rows in zip(("wq", "wk", "wv"), (q, k, v), strict=True)}
    elif case.latent is not None:
        rotary, latent = case.latent
        shapes = {
            "q": (case.batch, case.length, case.heads, case.head_dim),
            "k_rotary": (case.batch, case.keys, 1, rotary),
            "v_latent": (case.batch, case.keys, 1, latent),
            "wkv": (case.kv_heads, case.head_dim - rotary + case.value_dim, latent),
        }
    else:
        shapes = {
            "q": (case.batch, case.length, case.heads, case.head_dim),
            "k": (case.batch, case.keys, case.kv_heads, case.head_dim),
            "v": (case.batch, case.keys, case.kv_heads, case.value_dim),
        }
    shapes["dout"] = (case.batch, case.length, case.heads, case.value_dim)
    sink_count = (case.sinks,) if case.sinks > 1 else ()
    return shapes | ({"sinks": (*sink_count, case.heads)} if case.sinks else {})


def project_qkv(case: Case, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v: inputs of the case, or projections of its x, or expanded latents."""
    if case.latent is not None:
        rows, rotary = case.head_dim - case.latent[0], leaves["k_rotary"].expand(-1, -1, case.kv_heads, -1)
        expanded = torch.einsum("bsol,knl->bskn", leaves["v_latent"], leaves["wkv"])
        return leaves["q"], torch.cat((expanded[..., :rows], rotary), dim=3), expanded[..., rows:]
    if not case.projected:
        return leaves["q"], leaves["k"], leaves["v"]
    q, k, v = (F.linear(leaves["x"], leaves[name]) for name in ("wq", "wk", "wv"))
    q, k = (y.unflatten(2, (-1, case.head_dim)) for y in (q, k))
    return q, k, v.unflatten(2, (-1, case.value_dim))
