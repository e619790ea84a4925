"""Matching of queries with (key, value) pairs on other shards."""

from __future__ import annotations

import numpy as np

from armillary.data.shuffle import Index


def match_pairs(query_shards: Index, pair_shards: Index) -> Index:
    """Returns for each query a pair without a token on the query's shard, or -1: int64 [q].

    No pair belongs to two queries. As many queries as possible get a pair. Work is O(shards * (q + c)), unless pairs
    are scarce.

    Args:
        query_shards: int64 [q], the shard of each query.
        pair_shards: int64 [2, c], the shards of each pair's key and value. Pairs with lower numbers are preferred.
    """
    pairs: Index = np.full(len(query_shards), -1, np.int64)
    free = np.ones(pair_shards.shape[1], bool)

    def free_elsewhere(shard: int) -> Index:
        """Returns the free pairs without a token on `shard`."""
        return np.flatnonzero(free & (pair_shards != shard).all(0))

    def augment(shard: int, visited_shards: set[int]) -> int:
        """Returns a pair for a query on `shard`, or -1, by an augmenting path of bipartite matching.

        If no suitable pair is free, a query on another shard releases its pair and gets another one instead, by the
        same search. All queries of a shard accept the same pairs, so each shard is visited once.
        """
        visited_shards.add(shard)
        if len(candidates := free_elsewhere(shard)):
            free[candidates[0]] = False
            return int(candidates[0])
        usable = (pairs >= 0) & (pair_shards[:, pairs] != shard).all(0)
        for donor_shard in np.unique(query_shards[usable]).tolist():
            if donor_shard not in visited_shards and (replacement := augment(donor_shard, visited_shards)) >= 0:
                donor = np.flatnonzero(usable & (query_shards == donor_shard))[0]
                released_pair, pairs[donor] = int(pairs[donor]), replacement
                return released_pair
        return -1

    # 1. Greedy: the queries of each shard take suitable pairs as long as any are free.
    for shard in np.unique(query_shards):
        queries = np.flatnonzero(query_shards == shard)
        chosen_pairs = free_elsewhere(shard)[: len(queries)]
        pairs[queries[: len(chosen_pairs)]] = chosen_pairs
        free[chosen_pairs] = False
    # 2. For the remaining queries, pairs are exchanged.
    for shard in np.unique(query_shards[pairs < 0]):
        for query in np.flatnonzero((query_shards == shard) & (pairs < 0)):
            pairs[query] = augment(shard, set())
            if pairs[query] < 0:
                break  # other queries of this shard would fail too
    return pairs
