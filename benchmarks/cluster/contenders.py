"""Who runs against whom on which cluster, and with what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, WallFacer, build_attention
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


HEADS, HEAD_DIM = 16, 64
RACES = (
    "emulated-4x4-card-per-rank",
    "emulated-4x4-card-per-node",
    "emulated-1x8-mesh",
    "emulated-2x4-card-per-node",
)


def race(name: str, tokens: int) -> Race:
    """What is measured on the emulated cluster of that name, with so many tokens a rank.

    Raises:
        ValueError: another name.
    """
    match name:
        case "emulated-4x4-card-per-rank" | "emulated-4x4-card-per-node":
            return of(name, tokens, (HEADS,), (*everyone(16), named("usp", 4, 4)))
        case "emulated-1x8-mesh":
            return of(name, tokens, (HEADS, HEADS // 4), everyone(8))
        case "emulated-2x4-card-per-node":
            both = (named("usp", 2, 4), named("upipe", 1, 8), named("upipe+ring", 2, 4))
            return of(name, tokens, (HEADS, HEADS // 4), (*everyone(8), *both))
        case _:
            raise ValueError(f"no race for {name!r}; known: {', '.join(RACES)}")


def everyone(ranks: int) -> tuple[Contender, ...]:
    """Every method that puts all ranks on one axis, the ring first."""
    others = (named("token_ring", ranks, 1), named("all_gather", ranks, 1), named("ulysses", 1, ranks))
    return (named("ring", ranks, 1), *others, *wall_facers(ranks))


def of(name: str, tokens: int, key_heads: Sequence[int], contenders: tuple[Contender, ...]) -> Race:
    shapes = (Shapes(tokens, HEADS, heads, HEAD_DIM, causal) for heads in key_heads for causal in (False, True))
    return Race(Cluster.named(name), contenders, tuple(shapes))
