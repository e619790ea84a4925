"""Positions of tokens in shards: the rank of each token, and its distance from the boundaries between shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def owners(shards: Sequence[Tensor]) -> Tensor:
    """Returns the rank that has each token, [N]; the first one if several have it, -1 if none has."""
    owner = torch.full((1 + max(int(x.max()) for x in shards),), -1)
    for rank in reversed(range(len(shards))):
        owner[shards[rank]] = rank
    return owner


def shard_ends(shards: Sequence[Tensor]) -> Tensor:
    """Returns True for tokens whose next token is on another rank, bool [N]."""
    owner = owners(shards)
    return torch.cat([owner[1:] != owner[:-1], torch.tensor([False])])


def distance_from_ends(shards: Sequence[Tensor]) -> Tensor:
    """Returns the distance of each token from the nearest boundary between shards, [N]: 1 for the tokens next to it.

    N if there is no boundary.
    """
    tokens, ends = torch.arange(len(owners(shards))), shard_ends(shards).nonzero().flatten()
    if not len(ends):
        return torch.full_like(tokens, len(tokens))
    # Each boundary is after a token in `ends`. `before` is positive for tokens before it, `after` for tokens after it.
    before, after = ends[:, None] - tokens + 1, tokens - ends[:, None]
    return torch.where(before > 0, before, after).amin(0)


def moved_tokens(shards: Sequence[Tensor]) -> Tensor:
    """Returns True for tokens whose position is not their index in the shard, bool [N]."""
    moved = torch.zeros(len(owners(shards)), dtype=torch.bool)
    for positions in shards:
        moved[positions] |= positions != torch.arange(len(positions))
    return moved
