"""Sends that test the bandwidth of wires: one alone, both directions at once, and several over one port."""

from __future__ import annotations

from armillary.attention.plans import Send
from armillary.plan import Cluster

LARGE, SMALL = 500_000, 1_000
"""Bytes of sends that measure bandwidth, and of sends that measure latency."""


def patterns(cluster: Cluster) -> dict[str, list[Send]]:
    """Lists of sends by name; every rank runs them in this order."""
    ranks, inside = range(cluster.ranks), cluster.ranks_per_node
    within = {
        "within a node, one way": [(0, 1)],
        "within a node, both ways": [(0, 1), (1, 0)],
        "within a node, one to all": [(0, r) for r in range(1, inside)],
        "within nodes, all round": [(r, r - r % inside + (r + 1) % inside) for r in ranks],
    }
    between = {
        "between nodes, one way": [(0, inside)],
        "between nodes, both ways": [(0, inside), (inside, 0)],
        "between nodes, each rank of one to another": [(r, inside + r) for r in range(inside)],
        "between nodes, all to the next node": [(r, (r + inside) % len(ranks)) for r in ranks],
    }
    chosen = {
        **within,
        **(between if cluster.nodes > 1 else {}),
        "all round": [(r, (r + 1) % len(ranks)) for r in ranks],
    }
    small = {f"{name}, small": chosen[name] for name in chosen if "one way" in name or name == "all round"}
    small["all to all, small"] = [(a, b) for a in ranks for b in ranks if a != b]
    return {
        name: [Send(a, b, size) for a, b in pairs]
        for size, patterns in ((LARGE, chosen), (SMALL, small))
        for name, pairs in patterns.items()
    }
