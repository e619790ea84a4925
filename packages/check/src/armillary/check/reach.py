"""How far attention reaches in a run: inputs of layers change at some tokens, and outputs at those that see them.

Each layer is probed by itself, because its output is replaced by its output without the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from armillary.check.diagnose import Mistake, list_names
from armillary.check.facts import Fact, Verdict
from armillary.check.forwards import Forward, Runner
from armillary.check.layers import LayerKind
from armillary.check.step import CheckBatch

NEAR = 2
"""Tokens before an edge that keep their input: if they do not change either, the layer does not mix tokens."""
ROUNDINGS, ROUNDINGS_16_BIT = 64, 4
"""Changes up to this multiple of an output's rounding error count as none."""
CROSSING = "attention across shards"
HIDDEN = {
    "documents": (Mistake.DOCUMENTS, "rows have one document"),
    "no look-ahead": ("tokens see later ones", "rows have several documents, or the model is not causal"),
    "windows": (Mistake.WINDOW, "no layer has a window that ends inside the document"),
}
"""Facts about tokens that a layer must not see: the mistake, and the reason why none was observed."""


def attention_facts(
    runner: Runner,
    batch: CheckBatch,
    kinds: dict[str, LayerKind],
    base: Forward,
    noise: Forward,
    causal: bool,
    coarse: bool,
) -> tuple[Fact, ...]:
    """Returns whether attention crosses shards, and stays within documents, the past and windows; two forwards.

    Args:
        base: the forward without a change; noise: the same again.
        coarse: True if anything is computed in 16 bits.
    """
    local, length, edges = base.positions, batch.ids.shape[1], None
    groups = runner.of_peers((None if local is None else local.tolist(), batch.documents, len(base.outputs)))
    # Ranks with other rows must come to the same decision, because all run the same forwards.
    if any(len(ranks) == 1 for ranks in groups.values()):
        reason = "one rank has the whole sequence"
    elif any(positions is None or not outputs for ranks in groups.values() for positions, _, outputs in ranks):
        reason = "no layer was observed, or the positions of its tokens are unknown"
    else:
        reason = "no document has two tokens before an edge of a shard"
        edges_of = {
            peers: _edges([positions for positions, *_ in ranks], length, ranks[0][1])
            for peers, ranks in groups.items()
        }
        edges = None if None in edges_of.values() else edges_of[runner.peers]
    if edges is None or local is None:
        return tuple(Fact(name, Verdict.NOT_OBSERVED, reason) for name in (CROSSING, *HIDDEN))
    start, first, last, end = edges
    inside, several = (local >= start) & (local < end), end - start < length
    cut = first - min(NEAR, (first - start) // 2)
    # 1. The document's tokens before its first edge change, but for the last ones before it.
    first_part = runner.run(batch, changed=inside & (local < cut), originals=base.outputs, positions=local)
    # 2. All other documents change, and in causal models this one after its last edge.
    later = local >= last if causal else torch.zeros_like(inside)
    other_part = runner.run(batch, changed=~inside | later, originals=base.outputs, positions=local)
    reaches = dict[str, dict[str, Any]]()
    for name, original in base.outputs.items():
        ahead, back = (changed_tokens(x.outputs[name], original, noise.outputs[name]) for x in (first_part, other_part))
        window = kinds[name].window or length
        beyond = inside & (local >= first) & (local >= cut + window)
        # By fact, the tokens that see none of the changed ones: of the forward with the first tokens, and of the other.
        none = torch.zeros_like(inside)
        hidden = {
            "documents": (~inside & (local >= end if causal else ~none), inside & ~later) if several else (none, none),
            "no look-ahead": (none, inside & ~later) if causal and not several else (none, none),
            "windows": (beyond, none),
        }
        visible = inside & (local >= first) & ~beyond & (local < cut + window - 1)
        near = inside & (local >= cut) & (local < first)
        reaches[name] = {
            "near": [bool(ahead[near].any())] if near.any() else [],
            "pieces": [(int(local[run[0]]), bool(ahead[run].any())) for run in runs_of(visible, local)],
        } | {
            key: int((ahead & x).sum() + (back & y).sum()) if (x | y).any() else None for key, (x, y) in hidden.items()
        }
    return _judge(list(runner.of_peers(reaches).values()), kinds, coarse)


def _judge(
    groups: Sequence[Sequence[dict[str, dict[str, Any]]]], kinds: dict[str, LayerKind], coarse: bool
) -> tuple[Fact, ...]:
    crossed, broken, silent = list[str](), list[str](), list[str]()
    tokens_reached: dict[str, dict[str, int]] = {key: {} for key in HIDDEN}
    for ranks in groups:
        for name, kind in kinds.items():
            reach = [x[name] for x in ranks if name in x]
            near = [moved for x in reach for moved in x["near"]]
            pieces = [moved for _, moved in sorted(piece for x in reach for piece in x["pieces"])]
            # Tokens before the edge show that the layer mixes. Where the reach is not known it may end, but not skip a
            # piece. In 16 bits only the nearest piece sees enough of the change, however long the rows are.
            required = pieces[:1] if coarse else pieces
            lost = not all(required) if kind.known else pieces != sorted(pieces, reverse=True)
            mixes = any(near) if near else any(pieces)
            (broken if pieces and mixes and lost else crossed if any(pieces) else silent).append(name)
            for key, counts in tokens_reached.items():
                if numbers := [x[key] for x in reach if x[key] is not None]:
                    counts[name] = counts.get(name, 0) + sum(numbers)
    crossing = Fact(CROSSING, Verdict.NOT_OBSERVED, f"no change reaches another token: {list_names(silent)}")
    if broken:
        crossing = Fact(CROSSING, Verdict.WRONG, f"{Mistake.OWN_SHARD}: {list_names(sorted(set(broken)))}")
    elif crossed:
        crossing = Fact(CROSSING, Verdict.RIGHT, list_names(sorted(set(crossed))))
    facts = [crossing]
    for key, (mistake, reason) in HIDDEN.items():
        wrong = [f"{name} at {count} tokens" for name, count in tokens_reached[key].items() if count]
        verdict = Verdict.WRONG if wrong else Verdict.RIGHT if tokens_reached[key] else Verdict.NOT_OBSERVED
        detail = f"{mistake}: {list_names(wrong)}" if wrong else list_names([*tokens_reached[key]]) or reason
        facts.append(Fact(key, verdict, detail))
    return tuple(facts)


def _edges(shards: Sequence[Any], length: int, documents: tuple[int, ...] | None) -> tuple[int, int, int, int] | None:
    """Returns (start, first edge, last edge, end) of the document with most edges between shards; None without any."""
    owner = torch.full((length,), -1)
    for rank, positions in enumerate(shards):
        owner[torch.tensor(positions)] = rank
    edges = ((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist()
    # At least two tokens before the first edge: one that changes and one that does not.
    documents = documents or (0, length)
    cuts = [(start, [x for x in edges if start + 1 < x < end], end) for start, end in pairwise(documents)]
    counts = [len(inner) for _, inner, _ in cuts]
    start, inner, end = cuts[counts.index(max(counts))]
    return (start, inner[0], inner[-1], end) if inner else None


def runs_of(tokens: Tensor, positions: Tensor) -> Sequence[Tensor]:
    """Returns local indices of the tokens, split into runs of neighbouring positions."""
    indices = tokens.nonzero().flatten()
    cuts = (positions[indices].diff() != 1).nonzero().flatten() + 1
    return indices.tensor_split(cuts) if len(indices) else ()


def changed_tokens(x: Tensor, original: Tensor, noise: Tensor) -> Tensor:
    """Returns True for tokens whose output changes by more than rounding, or than another order of sums, [T]."""
    # A change to NaN is one.
    return ~(_changes(x, original) <= _rounding(original) + 4 * _changes(noise, original).max())


def _changes(x: Tensor, original: Tensor) -> Tensor:
    """Returns the largest change of each token's output, [T] on the host."""
    return (x - original).abs().amax((0, 2)).double().cpu()


def _rounding(x: Tensor) -> Tensor:
    roundings = ROUNDINGS if x.dtype in (torch.float32, torch.float64) else ROUNDINGS_16_BIT
    return roundings * torch.finfo(x.dtype).eps * x.abs().amax((0, 2)).double().cpu()
