"""Random cases. Each is a pure function of seed and number, so that a single case can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from random import Random
from typing import Any, NamedTuple

import torch

from armillary.attention.mask import layout_of
from armillary.core.internal import dtensor
from conformance.case import (
    EVERYTHING,
    GRADIENTS,
    KINDS,
    LAYOUTS,
    MEMORY,
    PATTERNS,
    SAVING,
    SINKS,
    Case,
    mask_kinds,
)
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw_masks import drawn_mask
from conformance.tensors import drawn_layout

RANKS = (1, 2, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8)
"""Numbers of ranks to draw from. Numbers that more methods support occur more often."""
COMPILED = 100
"""One case in this many is compiled: it takes longer than all others together."""


class Trial(NamedTuple):
    """A case on a composition, drawn from `seed` and `number`."""

    composition: Composition
    case: Case
    seed: int = 0
    number: int = 0


def _has_mask(name: str, trial: Trial) -> bool:
    return name in mask_kinds(trial.case.mask)


KINDS_OF_CASES: Mapping[str, Callable[[Trial], bool]] = {
    "strided": lambda trial: trial.case.memory != "plain",
    "strided-dout": lambda trial: trial.case.gradient != "plain",
    "autocast": lambda trial: trial.case.autocast is not None,
    "checkpointed": lambda trial: trial.case.saving != "autograd",
    "compiled": lambda trial: trial.case.compiled,
    "dtensors": lambda trial: trial.case.dtensor,
    "dtensors-uneven": lambda trial: trial.case.dtensor and trial.case.length % trial.composition.shards != 0,
    "dtensors-batch": lambda trial: "b" in trial.case.beside,
    "dtensors-heads": lambda trial: "h" in trial.case.beside,
    "dtensors-weights": lambda trial: trial.case.dtensor and trial.case.projected and trial.case.weights,
    "projected": lambda trial: trial.case.projected,
    "latents": lambda trial: trial.case.latent is not None,
    "cross-attention": lambda trial: trial.case.is_cross_attention,
    "documents": lambda trial: trial.case.mask.documents is not None,
    "patterns": lambda trial: trial.case.mask.pattern is not None,
    **{name: partial(_has_mask, name) for name in PATTERNS.values()},
    "sinks": lambda trial: trial.case.sinks > 0,
    "sinks-several": lambda trial: trial.case.sinks > 1,
    "softcap": lambda trial: trial.case.softcap is not None,
    "scale<=0": lambda trial: trial.case.softmax_scale <= 0,
}
"""Kinds of cases by name, for the table and for `--kind`."""


def drawn(seed: int, index: int) -> Trial:
    """Returns the case of this seed and number."""
    # All draws come from one generator, in this order: an additional draw would change all that follow it, and so the
    # case that a recorded seed and number name.
    random = Random(f"{seed} {index}")
    composition = _composition(random)
    options = _call_options(random, compiled=index % COMPILED == COMPILED - 1)
    if options["dtensor"]:
        composition, placed = _add_axes(random, composition, options["projected"])
        options |= placed
    sizes = dict(composition.axes)
    parts = sizes.get("tp", 1) if "h" in options["beside"] else 1
    tokens = _tokens(random, composition, options)
    fields = options | _heads(random, sizes.get("ulysses", 1), parts) | tokens | _scores(random, options["projected"])
    case = Case(**fields, memory=random.choice(MEMORY), gradient=random.choice(GRADIENTS), seed=random.getrandbits(31))
    return Trial(composition, case, seed, index)


def with_latents(trial: Trial) -> Trial:
    """Returns the trial with multi-head latent attention instead of finished keys and values, or of projections."""
    composition, case, seed, number = trial
    random = Random(f"{seed} {number} latents")
    latent = (random.randint(1, case.head_dim), random.randint(1, 24))
    needs = case.needs if case.needs != EVERYTHING or random.random() < 0.8 else random.choice(("w", "v", "qk", "kvw"))
    memory = "sliced" if case.memory == "packed" else case.memory
    return Trial(
        composition,
        replace(
            case,
            latent=latent,
            send_latents=random.choice((None, True, True, False)),
            projected=False,
            weights=case.weights or "h" in case.beside,
            shift=0.0,
            needs=needs if case.saving != "reentrant" else EVERYTHING,
            memory=memory,
        ),
        seed,
        number,
    )


def _composition(random: Random) -> Composition:
    """Draws a number of ranks, a method that supports it, and one of its meshes."""
    ranks = random.choice(RANKS)
    fitting = [method for method in METHODS if list(METHODS[method].meshes(ranks))]
    return random.choice(compositions([random.choice(fitting)], [ranks]))


def _call_options(random: Random, compiled: bool) -> dict[str, Any]:
    """Draws the kind of call and its dtype."""
    projected, dtensor = random.random() < 0.25, random.random() < (0.4 if compiled else 0.2)
    needs = EVERYTHING if random.random() < 0.8 else "".join(x for x in EVERYTHING if random.random() < 0.5)
    saving = random.choice(SAVING) if random.random() < 0.5 else "autograd"
    if compiled or (saving == "reentrant" and needs != EVERYTHING):  # reentrant gives its inputs' gradients only
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


def _add_axes(random: Random, composition: Composition, projected: bool) -> tuple[Composition, dict[str, Any]]:
    """Adds axes `shard` and `tp` of random sizes, up to max(RANKS) ranks, and draws the dims that they shard."""
    pairs = [(shard, tp) for shard in (1, 2, 3) for tp in (1, 2, 3, 4)]
    shard, tp = random.choice([pair for pair in pairs if prod(pair) * composition.ranks <= max(RANKS)])
    rows, heads = (ranks > 1 and random.random() < 0.75 for ranks in (shard, tp))
    axes = (*(("shard", shard),) * (shard > 1), *composition.axes, *(("tp", tp),) * (tp > 1))
    weights = random.random() < 0.5 or (projected and heads)
    return Composition(composition.method, axes), {"beside": "b" * rows + "h" * heads, "weights": weights}


def _heads(random: Random, ulysses: int, parts: int) -> dict[str, Any]:
    """Draws head dims and head counts.

    Each of `parts` parts of the heads has at least one query head for each of the `ulysses` ranks of the head axis.
    """
    # H = group x K. `group`, the query heads per key/value head, is raised until H is at least the ranks of the head
    # axis.
    kv_heads = random.choice((1, 1, 2, 2, 3, 4, 5))
    group = max(random.choice((1, 1, 2, 3, 4)), -(-ulysses // kv_heads))
    dims = [random.choice((random.randint(1, 20), 8, 16, 32, 40, 64)) for _ in range(2)]
    value_dim = dims[1] if random.random() < 0.3 else dims[0]
    counts = {"heads": group * kv_heads * parts, "kv_heads": kv_heads * parts}
    return counts | {"head_dim": dims[0], "value_dim": value_dim}


def _tokens(random: Random, composition: Composition, options: Mapping[str, Any]) -> dict[str, Any]:
    """Draws lengths, layouts and the mask. DTensors fix the sizes of shards, so not every length fits."""
    batch, cross_attention = random.randint(1, 3), not options["projected"] and random.random() < 0.3
    kind, key_kind = (random.choice(LAYOUTS) for _ in range(2))
    if options["dtensor"]:  # shards of a balanced layout have not the sizes of DTensor's chunks
        kind, key_kind = ("zigzag" if each == "balanced" else each for each in (kind, key_kind))

    def draw_length(*kinds: str) -> int:
        tokens = random.choice((random.randint(1, 40), random.randint(20, 80), random.randint(60, 140)))
        tokens = max(tokens, composition.shards)
        return _fitting(random, tokens, kinds, composition) if options["dtensor"] else tokens

    # Some cross-attention has as many keys as queries, so that length must fit both layouts.
    tokens = draw_length(kind, key_kind) if cross_attention else draw_length(kind)
    keys = draw_length(key_kind) if cross_attention and random.random() < 0.7 else tokens
    parts = dict(composition.axes).get("shard", 1) if "b" in options["beside"] else 1
    all_have_rows = min(dtensor.chunk_sizes(batch, parts)) > 0  # a mask cannot have masks for 0 rows
    return {
        "batch": batch,
        "length": tokens,
        "kind": kind,
        "key_length": keys if keys != tokens else None,
        "key_kind": key_kind if cross_attention else None,
        "mask": drawn_mask(random, tokens, keys, batch if all_have_rows else 0),
    }


def _fitting(random: Random, length: int, kinds: Sequence[str], composition: Composition) -> int:
    """Returns a length of at least `length` at which shards in layouts of these kinds have DTensor's chunk sizes.

    Mostly the shards have several sizes. In WallFacer's own layouts they have one size.
    """
    wallfacer = "wallfacer" in composition.method and any(kind in KINDS for kind in kinds)
    lengths = range(length, length + 4 * composition.shards)
    uneven = [n for n in lengths if n % composition.shards and all(_has_chunk_sizes(x, n, composition) for x in kinds)]
    prefer_uneven = random.random() < 0.8
    if uneven and prefer_uneven and not wallfacer:
        return uneven[0]
    return next(n for n in lengths if n % (2 * composition.shards) == 0)


def _has_chunk_sizes(kind: str, length: int, composition: Composition) -> bool:
    """Returns True if the shards of a layout have the sizes of DTensor's chunks."""
    sizes = dict(composition.axes)
    *sequence, ulysses = (sizes.get(axis, 1) for axis in dtensor.SEQUENCE_AXES)
    chunk_sizes_of_ranks = dtensor.chunk_sizes(length, *sequence, ulysses)
    if min(chunk_sizes_of_ranks) == 0:
        return False
    # The layout over the sequence axes, whose shards `refine` cuts for the ranks of the head axis.
    if kind in ("uneven", "spans"):
        layout = drawn_layout(Random(0), dtensor.chunk_sizes(length, *sequence), "uneven")
    else:
        layout = layout_of(kind, length, prod(sequence))
    return layout.refine(ulysses).sizes == chunk_sizes_of_ranks


def _scores(random: Random, projected: bool) -> dict[str, Any]:
    """Draws scale, shift, softcap and sinks. A shift makes exp overflow or vanish in float32."""
    scale = random.choice((None, None, None, random.uniform(0, 1), random.uniform(-1, 0), 1e-3, 0.0))
    shift = random.choice((-100.0, 100.0)) if scale is None and not projected and random.random() < 0.05 else 0.0
    softcap = round(random.uniform(0.5, 8), 2) if not shift and random.random() < 0.15 else None
    sinks = SINKS[max(0, 2 - int(8 * random.random()))]  # one eighth of cases has one per head, one eighth several
    return {
        "scale": None if scale is None else round(scale, 3),
        "shift": shift,
        "softcap": softcap,
        "sinks": 0 if shift else sinks,
    }
