"""The cases of every method: a pairwise-covering sample, and a full product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

import torch

from conformance.case import CAUSAL, GRADIENTS, KINDS, SINKS, Case
from conformance.sample_masks import ANY_KEYS, MASKS, some_masks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HEADS = ((8, 8), (8, 2), (8, 1), (12, 4), (9, 3))
"""(H, K): equal, grouped, a single key/value head, and two that eight ranks cannot divide evenly."""
LENGTHS = (24, 37, 53, 64)
HEAD_DIMS = (8, 16, 40)
LARGE_HEAD_DIMS = (64, 128, 256)
KEYS = ("own", "fewer", "more")
"""Keys of the queries' tokens, or cross-attention to fewer or more keys. "more" has another layout, too. A mask that
needs as many keys as queries gets only another layout."""
SOFTCAPS = (None, 1.5)
STRETCH = (None, 1.5)
"""Factor of the default scale 1 / sqrt(D)."""
MEMORIES = ("plain", "permuted", "packed")


def cases(
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    masks: Sequence[str] = tuple(MASKS),
    heads: Sequence[tuple[int, int]] = HEADS,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = KINDS,
    head_dims: Sequence[int] = HEAD_DIMS,
    large_head_dims: Sequence[int] = LARGE_HEAD_DIMS,
    value_dims: Sequence[int] = (0, -4, 8),
    keys: Sequence[str] = KEYS,
    sinks: Sequence[int] = SINKS,
    softcaps: Sequence[float | None] = SOFTCAPS,
    brief: int | None = None,
) -> list[Case]:
    """Returns about 80 fixed cases in which any two settings of any two factors occur together.

    Args:
        brief: a number: about a dozen cases instead, in which each setting occurs at least once. Other numbers give
            other cases. Three numbers in a row have all masks with patterns, a third each.
        masks: names in `MASKS`.
        heads: pairs (H, K).
        large_head_dims: head dims of further cases, one for each.
        value_dims: differences Dv - D.
        keys: names in `KEYS`.
    """
    masks = masks if brief is None else some_masks(masks, brief)
    factors = [masks, heads, lengths, dtypes, kinds, keys, head_dims, value_dims, (1, 2, 3), MEMORIES]
    # Each pair of settings occurs in some row; with `brief`, each single setting.
    rows = _covering([*factors, sinks, softcaps, STRETCH], 2 if brief is None else 1, brief or 0)
    sample = [_case(seed, *row) for seed, row in enumerate(rows, 1000 * (brief or 0))]
    # Further cases: gradients of some tensors only, large head dims, and an lse that overflows or vanishes in exp.
    subsets = [replace(case, needs=needs) for case, needs in zip(sample, ("q", "k", "v", "kv", "s", ""), strict=False)]
    large = [
        replace(case, head_dim=dim, value_dim=dim, scale=None, length=min(lengths), mask=CAUSAL, key_length=None)
        for case, dim in zip(sample, large_head_dims, strict=False)
    ]
    far = 1000.0 if dtypes[0] == torch.float64 else 120.0  # exp(far) overflows, exp(-far) vanishes
    causal_case = next((case for case in sample if case.mask.causal), sample[0])
    causal_case = replace(causal_case, dtype=dtypes[0], sinks=0, softcap=None)
    shifted = [replace(causal_case, shift=shift) for shift in (far, -far)]
    if brief is None:
        return sample + subsets + large + shifted
    return sample + [extra[brief % len(extra)] for extra in (subsets, large, shifted) if extra]


def product_cases(seed: int = 0, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    """Yields every mask x layout x (H, K) x dtype, with all other settings drawn from `seed`."""
    random = Random(seed)
    for index, (mask, kind, heads, dtype) in enumerate(product(MASKS, KINDS, HEADS, dtypes)):
        yield _drawn(random, seed * 100_000 + index, mask, kind, heads, dtype)


def _drawn(random: Random, seed: int, mask: str, kind: str, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    """Draws the other settings of a case. At least half have no sinks, no softcap and no cross-attention."""
    plain = random.random() < 0.5
    keys, sinks, softcap = (("own",), (0,), (None,)) if plain else (KEYS, SINKS, SOFTCAPS)
    head_dims = HEAD_DIMS if random.random() < 0.9 else LARGE_HEAD_DIMS
    dim, extra_value_dim, batch = random.choice(head_dims), random.choice((0, 0, -4, 8)), random.choice((1, 2, 3))
    row = (
        random.choice((*LENGTHS, 96, 131)),
        dtype,
        kind,
        random.choice(keys),
        dim,
        extra_value_dim,
        batch,
        random.choice(MEMORIES),
    )
    return _case(seed, mask, heads, *row, random.choice(sinks), random.choice(softcap), random.choice(STRETCH))


def _case(
    seed: int,
    mask: str,
    heads: tuple[int, int],
    length: int,
    dtype: torch.dtype,
    kind: str,
    keys: str,
    dim: int,
    extra_value_dim: int,
    batch: int,
    memory: str,
    sinks: int,
    softcap: float | None,
    stretch: float | None,
) -> Case:
    # Keys of cross-attention with a layout of their own have the next kind of layout.
    other = KINDS[(KINDS.index(kind) + 1) % len(KINDS)] if kind in KINDS else kind
    any_keys = mask in ANY_KEYS
    key_length = {"own": None, "fewer": max(2 * length // 3, 16), "more": length + 13}[keys] if any_keys else None
    return Case(
        batch=batch,
        length=length,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=dim,
        value_dim=dim + extra_value_dim,
        dtype=dtype,
        mask=MASKS[mask](length, batch, key_length or length),
        kind=kind,
        scale=None if stretch is None else round(stretch * dim**-0.5, 3),
        key_length=key_length,
        key_kind=other if keys == "more" or (keys == "fewer" and not any_keys) else None,
        sinks=sinks,
        softcap=softcap,
        memory=memory,
        gradient=GRADIENTS[seed % len(GRADIENTS)],
        seed=seed,
    )


def _covering(factors: Sequence[Sequence[Any]], strength: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Returns rows with one level of each factor. Any levels of any `strength` factors occur together in some row.

    A greedy algorithm: each row is the best of 50 random rows that contain a missing combination.
    """
    random = Random(seed)
    sizes = [range(len(levels)) for levels in factors]
    chosen = list(combinations(range(len(factors)), strength))
    missing = {tuple(zip(few, levels, strict=True)) for few in chosen for levels in product(*(sizes[f] for f in few))}
    rows: list[tuple[Any, ...]] = []
    while missing:
        fixed = dict(min(missing))  # {factor: level} of a combination that no row has
        tries = [tuple(fixed.get(f, random.choice(size)) for f, size in enumerate(sizes)) for _ in range(50)]
        best = max(tries, key=lambda row: len(missing.intersection(combinations(enumerate(row), strength))))
        missing.difference_update(combinations(enumerate(best), strength))
        rows.append(tuple(levels[level] for levels, level in zip(factors, best, strict=True)))
    return rows
