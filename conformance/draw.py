"""Cases without end, each drawn from two numbers and nothing else, so that any one of them can be tried alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from random import Random
from typing import Any, NamedTuple

import torch

from armillary.attention.mask.layouts import layout_of
from armillary.core.placements import chunk_sizes
from armillary.core.sequence import SEQUENCE_AXES, nested_sizes
from conformance.case import EVERYTHING, GRADIENTS, KINDS, LAYOUTS, MEMORY, SAVING, SINKS, Case
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw_masks import drawn_mask
from conformance.tensors import drawn_layout

RANKS = (1, 2, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8)
"""Sizes of worlds, those of most methods more often."""
COMPILED = 100
"""Every so many cases one is compiled: that takes longer than all others together."""


class Trial(NamedTuple):
    """A case on a composition. `seed` and `number` are what it was drawn from."""

    composition: Composition
    case: Case
    seed: int = 0
    number: int = 0


def drawn(seed: int, index: int) -> Trial:
    """The case of this number: a pure function of both."""
    random = Random(f"{seed} {index}")
    composition = _composition(random)
    way = _way(random, compiled=index % COMPILED == COMPILED - 1)
    if way["dtensor"]:
        composition, placed = _beside(random, composition, way["projected"])
        way |= placed
    sizes = dict(composition.axes)
    parts = sizes.get("tp", 1) if "h" in way["beside"] else 1
    tokens = _tokens(random, composition, way)
    fields = way | _heads(random, sizes.get("ulysses", 1), parts) | tokens | _scores(random, way["projected"])
    case = Case(**fields, memory=random.choice(MEMORY), gradient=random.choice(GRADIENTS), seed=random.getrandbits(31))
    return Trial(composition, case, seed, index)


def _composition(random: Random) -> Composition:
    """A number of ranks, a method that can have so many, and one of its meshes."""
    ranks = random.choice(RANKS)
    fitting = [method for method in METHODS if list(METHODS[method].meshes(ranks))]
    return random.choice(compositions([random.choice(fitting)], [ranks]))


def _way(random: Random, compiled: bool) -> dict[str, Any]:
    """How the call is made, and in which dtype."""
    projected, dtensor = random.random() < 0.25, random.random() < (0.4 if compiled else 0.2)
    needs = EVERYTHING if random.random() < 0.8 else "".join(x for x in EVERYTHING if random.random() < 0.5)
    saving = random.choice(SAVING) if random.random() < 0.5 else "autograd"
    if compiled or (saving == "reentrant" and needs != EVERYTHING):  # the latter sees gradients of its inputs alone
        saving = "autograd"
    return {
        "projected": projected,
        "dtensor": dtensor,
        "beside": "",
        "compiled": compiled,
        "dtype": random.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16)),
        "autocast": random.choice((torch.bfloat16, torch.float16)) if random.random() < 0.25 else None,
        "saving": saving,
        "needs": needs,
        "kernel": "dense" if random.random() < 0.15 else None,
    }


def _beside(random: Random, composition: Composition, projected: bool) -> tuple[Composition, dict[str, Any]]:
    """Axes besides those of the method, as far as there are ranks, and what is sharded over them."""
    pairs = [(shard, tp) for shard in (1, 2, 3) for tp in (1, 2, 3, 4)]
    shard, tp = random.choice([pair for pair in pairs if prod(pair) * composition.ranks <= max(RANKS)])
    rows, heads = (ranks > 1 and random.random() < 0.75 for ranks in (shard, tp))
    axes = (*(("shard", shard),) * (shard > 1), *composition.axes, *(("tp", tp),) * (tp > 1))
    weights = random.random() < 0.5 or (projected and heads)
    return Composition(composition.method, axes), {"beside": "b" * rows + "h" * heads, "weights": weights}


def _heads(random: Random, ulysses: int, parts: int) -> dict[str, Any]:
    """Heads that a head axis can share: in each of the parts as many as it has ranks, at least; and their dims."""
    kv_heads = random.choice((1, 1, 2, 2, 3, 4, 5))
    group = max(random.choice((1, 1, 2, 3, 4)), -(-ulysses // kv_heads))
    dims = [random.choice((random.randint(1, 20), 8, 16, 32, 40, 64)) for _ in range(2)]
    value_dim = dims[1] if random.random() < 0.3 else dims[0]
    counts = {"heads": group * kv_heads * parts, "kv_heads": kv_heads * parts}
    return counts | {"head_dim": dims[0], "value_dim": value_dim}


def _tokens(random: Random, composition: Composition, way: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths, layouts and the mask. A DTensor's shards are as long as DTensor cuts them: not every length will do."""
    batch, crosses = random.randint(1, 3), not way["projected"] and random.random() < 0.3
    kind, key_kind = (random.choice(LAYOUTS) for _ in range(2))

    def length(*kinds: str) -> int:
        drawn = random.choice((random.randint(1, 40), random.randint(20, 80), random.randint(60, 140)))
        least = max(drawn, composition.shards)
        return _fitting(random, least, kinds, composition) if way["dtensor"] else least

    tokens = length(kind, key_kind) if crosses else length(kind)
    other = length(key_kind) if crosses and random.random() < 0.7 else tokens
    parts = dict(composition.axes).get("shard", 1) if "b" in way["beside"] else 1
    some = min(chunk_sizes(batch, parts)) > 0  # no mask has masks of no rows
    return {
        "batch": batch,
        "length": tokens,
        "kind": kind,
        "key_length": other if other != tokens else None,
        "key_kind": key_kind if crosses else None,
        "mask": drawn_mask(random, tokens, other, batch if some else 0),
    }


def _fitting(random: Random, length: int, kinds: Sequence[str], composition: Composition) -> int:
    """A length not far above whose shards, in layouts of all these kinds, are DTensor's own; mostly of several sizes.

    WallFacer has layouts of its own: where one of them is asked for, shards are of one size.
    """
    own = "wallfacer" in composition.method and any(kind in (*KINDS, "balanced") for kind in kinds)
    every = range(length, length + 4 * composition.shards)
    fits = [n for n in every if n % composition.shards and all(_cut_alike(kind, n, composition) for kind in kinds)]
    uneven = random.random() < 0.8
    return fits[0] if fits and uneven and not own else next(n for n in every if n % (2 * composition.shards) == 0)


def _cut_alike(kind: str, length: int, composition: Composition) -> bool:
    """Whether a layout's shards are those of a DTensor."""
    sizes = dict(composition.axes)
    *sequence, ulysses = (sizes.get(axis, 1) for axis in SEQUENCE_AXES)
    cut = nested_sizes(length, [*sequence, ulysses])
    if min(cut) == 0:
        return False
    if kind in ("uneven", "spans"):
        coarse = drawn_layout(Random(0), nested_sizes(length, sequence), "uneven")
    else:
        coarse = layout_of("contiguous" if kind == "balanced" else kind, length, prod(sequence))
    return coarse.refine(ulysses).sizes == cut


def _scores(random: Random, projected: bool) -> dict[str, Any]:
    """From dot products to weights. A shift makes exp overflow, or vanish."""
    scale = random.choice((None, None, None, random.uniform(0, 1), random.uniform(-1, 0), 1e-3, 0.0))
    shift = random.choice((-100.0, 100.0)) if scale is None and not projected and random.random() < 0.05 else 0.0
    softcap = round(random.uniform(0.5, 8), 2) if not shift and random.random() < 0.15 else None
    sinks = SINKS[max(0, 2 - int(8 * random.random()))]  # an eighth has one per head, an eighth several
    return {
        "scale": None if scale is None else round(scale, 3),
        "shift": shift,
        "softcap": softcap,
        "sinks": 0 if shift else sinks,
    }
