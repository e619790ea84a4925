"""Cases without end, each drawn from two numbers and nothing else, so that any one of them can be tried alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from armillary.attention.conformance.case import EVERYTHING, GRADIENTS, KINDS, LAYOUTS, MEMORY, SAVING, Case
from armillary.attention.conformance.compositions import METHODS, Composition, compositions
from armillary.attention.mask import AttentionMask

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
    axes = dict(composition.axes)
    ring, ulysses = axes.get("ring", 1), axes.get("ulysses", 1)
    way = _way(random, compiled=index % COMPILED == COMPILED - 1)
    tokens = _tokens(random, 2 * ring * ulysses if way["dtensor"] else 0, ring * ulysses, way["projected"])
    fields = way | _heads(random, ulysses) | tokens | _scores(random, way["projected"])
    case = Case(**fields, memory=random.choice(MEMORY), gradient=random.choice(GRADIENTS), seed=random.getrandbits(31))
    return Trial(composition, case, seed, index)


def _composition(random: Random) -> Composition:
    """A number of ranks, a method that can have so many, and one of its meshes."""
    ranks = random.choice(RANKS)
    fitting = [method for method in METHODS if list(METHODS[method].meshes(ranks))]
    return random.choice(compositions([random.choice(fitting)], [ranks]))


def _way(random: Random, compiled: bool) -> dict[str, Any]:
    """How the call is made, and in which dtype."""
    form = random.choices(("local", "projected", "dtensor"), (65, 20, 15))[0]
    form = "local" if compiled and form == "dtensor" else form
    needs = EVERYTHING if random.random() < 0.8 else "".join(x for x in EVERYTHING if random.random() < 0.5)
    saving = random.choice(SAVING) if random.random() < 0.5 else "autograd"
    if compiled or (saving == "reentrant" and needs != EVERYTHING):  # the latter sees gradients of its inputs alone
        saving = "autograd"
    return {
        "projected": form == "projected",
        "dtensor": form == "dtensor",
        "compiled": compiled,
        "dtype": random.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16)),
        "autocast": random.choice((torch.bfloat16, torch.float16)) if random.random() < 0.25 else None,
        "saving": saving,
        "needs": needs,
        "kernel": "dense" if random.random() < 0.15 else None,
    }


def _heads(random: Random, ulysses: int) -> dict[str, Any]:
    """Heads that a head axis can share: as many as it has ranks, at least; and their dims."""
    kv_heads = random.choice((1, 1, 2, 2, 3, 4, 5))
    group = max(random.choice((1, 1, 2, 3, 4)), -(-ulysses // kv_heads))
    dims = [random.choice((random.randint(1, 20), 8, 16, 32, 40, 64)) for _ in range(2)]
    value_dim = dims[1] if random.random() < 0.3 else dims[0]
    return {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": dims[0], "value_dim": value_dim}


def _tokens(random: Random, multiple: int, least: int, projected: bool) -> dict[str, Any]:
    """Lengths, layouts and the mask. A DTensor's shards are of one size, so lengths are multiples of something."""

    def length() -> int:
        drawn = random.choice((random.randint(1, 40), random.randint(20, 80), random.randint(60, 140)))
        return max(drawn, least) if not multiple else multiple * max(1, drawn // multiple)

    kinds = KINDS if multiple else LAYOUTS
    tokens, batch, crosses = length(), random.randint(1, 3), not projected and random.random() < 0.3
    other = length() if crosses and random.random() < 0.7 else tokens
    return {
        "batch": batch,
        "length": tokens,
        "kind": random.choice(kinds),
        "key_length": other if other != tokens else None,
        "key_kind": random.choice(kinds) if crosses else None,
        "mask": _mask(random, tokens, batch, documents=other == tokens and random.random() < 0.4),
    }


def _mask(random: Random, length: int, batch: int, documents: bool) -> AttentionMask:
    window = tuple(_edge(random, length) for _ in range(2)) if random.random() < 0.4 else None
    rows = [_documents(random, length) for _ in range(batch)] if documents else None
    together = rows is not None and random.random() < 0.5
    return AttentionMask(random.random() < 0.6, window, rows[0] if rows and together else rows)


def _edge(random: Random, length: int) -> int | None:
    return random.choice((None, random.randint(0, 3), random.randint(0, length)))


def _documents(random: Random, length: int) -> Sequence[int]:
    cuts = {random.randint(1, length - 1) for _ in range(random.randint(0, 8))} if length > 1 else set[int]()
    return [0, *sorted(cuts), length]


def _scores(random: Random, projected: bool) -> dict[str, Any]:
    """From dot products to weights. A shift makes exp overflow, or vanish."""
    scale = random.choice((None, None, None, random.uniform(0, 1), random.uniform(-1, 0), 1e-3, 0.0))
    shift = random.choice((-100.0, 100.0)) if scale is None and not projected and random.random() < 0.05 else 0.0
    softcap = round(random.uniform(0.5, 8), 2) if not shift and random.random() < 0.15 else None
    return {
        "scale": None if scale is None else round(scale, 3),
        "shift": shift,
        "softcap": softcap,
        "sinks": random.random() < 0.25 and not shift,
    }
