"""Who runs against whom on which cluster, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, Ring, TokenRing, WallFacer, build_attention
from armillary.core import Cluster


@dataclass(frozen=True)
class Contender:
    """A method on the axes of a mesh: `ring` x `ulysses` ranks.

    Args:
        make: on a mesh of that shape, from `build_mesh`.
    """

    name: str
    ring: int
    ulysses: int
    make: Callable[[DeviceMesh], Method]


@dataclass(frozen=True)
class Shapes:
    """What attention is given: T tokens a rank, H heads, K key/value heads, head dim D; batch 1, float32."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    causal: bool

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(causal=self.causal)

    def __str__(self) -> str:
        return f"H {self.heads}, K {self.key_heads}, {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class Race:
    """What is measured on a cluster."""

    cluster: Cluster
    contenders: tuple[Contender, ...]
    shapes: tuple[Shapes, ...]


def named(name: str, ring: int, ulysses: int) -> Contender:
    """As `build_attention` makes it."""
    return Contender(name, ring, ulysses, lambda mesh: build_attention(name, mesh))


def ring(ranks: int) -> Contender:
    return Contender("ring", ranks, 1, lambda mesh: Ring(mesh["ring"]))


def token_ring(ranks: int) -> Contender:
    return Contender("token_ring", ranks, 1, lambda mesh: TokenRing(mesh["ring"]))


def wall_facers(ranks: int) -> tuple[Contender, ...]:
    """All team sizes; where there is no ring (C = sqrt(P)), both placements are one."""

    def of(team: int, placement: str) -> Contender:
        name = f"wallfacer C={team}" + (f" {placement}" if team**2 < ranks else "")
        return Contender(name, ranks, 1, lambda mesh: WallFacer(mesh["ring"], team, placement))

    return tuple(
        of(team, placement)
        for team in range(2, ranks)
        if ranks % team**2 == 0
        for placement in (("collect_intra", "p2p_intra") if team**2 < ranks else ("collect_intra",))
    )


def contenders(ranks: int, ulysses: int) -> tuple[Contender, ...]:
    """Every method on all ranks; USP with `ulysses` ranks on its head axis, if more than 1."""
    both = (named("usp", ranks // ulysses, ulysses), named("upipe+ring", ranks // ulysses, ulysses))
    alone = (named("all_gather", ranks, 1), named("ulysses", 1, ranks), named("upipe", 1, ranks))
    return (ring(ranks), token_ring(ranks), *wall_facers(ranks), *alone, *(both if ulysses > 1 else ()))


def races(name: str, tokens: int) -> Race:
    """On the emulated cluster of that name; `tokens` a rank."""
    cluster = Cluster.named(name)
    ulysses = cluster.ranks_per_node if cluster.nodes > 1 else 1
    shapes = (Shapes(tokens, 16, heads, 64, causal) for heads in (16, 4) for causal in (False, True))
    return Race(cluster, contenders(cluster.ranks, ulysses), tuple(shapes))
