"""The contenders and shapes of each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, AttentionShape, CommPlan, Method
from armillary.attention.internal import Placement
from armillary.core import SequenceLayout
from armillary.plan import Cluster
from armillary.plan.memory import AttentionChoice


@dataclass(frozen=True)
class Contender:
    """A method on the axes of a mesh: `ring` x `ulysses` ranks; with `nodes` the ring is split into nodes x devices."""

    method: str
    ring: int
    ulysses: int = 1
    team: int | None = None
    placement: Placement = "collect_intra"
    nodes: int | None = None

    def __str__(self) -> str:
        team = "" if self.team is None else f" C={self.team}"
        # With C = sqrt(P) there is no ring, and both placements are equal.
        return f"{self.method}{team}" + (f" {self.placement}" if team and self.team**2 < self.ring else "")

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Sizes of the mesh axes."""
        return tuple(self.attention.mesh_axes({"ring": self.ring, "ulysses": self.ulysses}).items())

    def build(self, mesh: DeviceMesh) -> Method:
        """Builds the method on a mesh of `axes`."""
        return self.attention(mesh)

    def comm_plan(self, shapes: Shapes) -> CommPlan:
        """The communication plan over all ranks."""
        work = AttentionShape.of(
            self.layout(shapes),
            shapes.mask,
            heads=shapes.heads,
            kv_heads=shapes.key_heads,
            head_dim=shapes.head_dim,
            dtype=torch.float32,
            projected=False,
        )
        return self.attention.method.comm_plan(work, self.ring, self.ulysses)

    def layout(self, shapes: Shapes) -> SequenceLayout:
        """The layout over the sequence axis, equal to `Method.layout` of the built method."""
        return self.attention.method.layout(shapes.tokens * self.ring * self.ulysses, self.ring)

    @property
    def attention(self) -> AttentionChoice:
        """The planner's choice of this method."""
        return AttentionChoice(self.method, team=self.team, placement=self.placement, nodes=self.nodes)


@dataclass(frozen=True)
class Shapes:
    """Inputs of attention: T tokens a rank, H heads, K key/value heads, head dim D; batch 1, float32."""

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
    """A cluster with its contenders and shapes."""

    cluster: Cluster
    contenders: tuple[Contender, ...]
    shapes: tuple[Shapes, ...]


def wall_facers(ranks: int) -> tuple[Contender, ...]:
    """WallFacer with all team sizes above 1, in all distinct placements."""
    teams = [team for team in range(2, ranks) if ranks % team**2 == 0]
    default_placements = [Contender("wallfacer", ranks, team=team) for team in teams]
    p2p_placements = [Contender("wallfacer", ranks, team=t, placement="p2p_intra") for t in teams if t**2 < ranks]
    return (*default_placements, *p2p_placements)


HEADS, HEAD_DIM = 16, 64
RACES = (
    "emulated-4x4-card-per-rank",
    "emulated-4x4-card-per-node",
    "emulated-1x8-mesh",
    "emulated-2x4-card-per-node",
)


def race(name: str, tokens: int, methods: Sequence[str] = ()) -> Race:
    """The race on the emulated cluster `name`, with `tokens` per rank.

    Args:
        methods: methods of the contenders, besides the ring; by default all.

    Raises:
        ValueError: an unknown name.
    """
    full = full_race(name, tokens)
    some = (c for c in full.contenders if not methods or c.method in ("ring", *methods))
    return replace(full, contenders=tuple(some))


def full_race(name: str, tokens: int) -> Race:
    match name:
        case "emulated-4x4-card-per-rank" | "emulated-4x4-card-per-node":
            return of(name, tokens, (HEADS,), (*everyone(16), Contender("usp", 4, 4)))
        case "emulated-1x8-mesh":
            return of(name, tokens, (HEADS, HEADS // 4), everyone(8))
        case "emulated-2x4-card-per-node":
            head_methods = (Contender("usp", 2, 4), Contender("upipe", 1, 8), Contender("upipe+ring", 2, 4))
            nodes = (Contender("ring+ring", 8, nodes=2), Contender("ring+token_ring", 8, nodes=2))
            return of(name, tokens, (HEADS, HEADS // 4), (*everyone(8), *nodes, *head_methods))
        case _:
            raise ValueError(f"no race for {name!r}; known: {', '.join(RACES)}")


def everyone(ranks: int) -> tuple[Contender, ...]:
    """All methods with all ranks on one axis, the ring first."""
    other_methods = (Contender("token_ring", ranks), Contender("all_gather", ranks), Contender("ulysses", 1, ranks))
    return (Contender("ring", ranks), *other_methods, *wall_facers(ranks))


def of(name: str, tokens: int, key_heads: Sequence[int], contenders: tuple[Contender, ...]) -> Race:
    shapes = (Shapes(tokens, HEADS, heads, HEAD_DIM, causal) for heads in key_heads for causal in (False, True))
    return Race(Cluster.named(name), contenders, tuple(shapes))
