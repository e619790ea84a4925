"""The search space: meshes with attention methods and layouts, and the checkpoint policies that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal

from armillary.attention.plans import ALIASES, variants
from armillary.models import Checkpointing
from armillary.models.parts import best_input_count
from armillary.plan.memory.estimate import AttentionChoice, Estimate
from armillary.plan.memory.room import Room
from armillary.train import Config

Layout = Literal["zigzag", "contiguous", "striped", "balanced"]
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "balanced")
"""Layouts to compare for packed documents. Striped layouts send the most bytes, and are left out."""
STATE_LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous")
"""Layouts to compare for hybrids. Contiguous shards exchange fewer states; zigzag shards balance attention. The search
also tries attention on zigzag shards with states on contiguous shards (`Candidate.contiguous_states`)."""


def layouts_of(hybrid: bool, documents: bool) -> tuple[Layout, ...]:
    """Returns the layouts to compare. There are none for a plain causal mask, for which zigzag is the best."""
    return LAYOUTS if documents else STATE_LAYOUTS if hybrid else ()


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes."""

    shard: int
    ring: int
    ulysses: int
    replicate: int = 1
    tp: int = 1

    def __str__(self) -> str:
        order = ("replicate", "shard", "ring", "ulysses", "tp")
        return " x ".join(f"{name} {self.axes[name]}" for name in order if self.axes[name] > 1) or "1 rank"

    @property
    def replicas(self) -> int:
        """Number of data-parallel groups. Each trains on different rows."""
        return self.replicate * self.shard

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, as `Job` takes them."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """A mesh, an attention method on it, and the layout of sequences over the ring.

    Args:
        contiguous_states: True if layers with a state have contiguous shards, whatever the layout. Hidden states then
            move from the layout to these shards and back.
    """

    mesh: Mesh
    attention: AttentionChoice
    layout: Layout = "zigzag"
    contiguous_states: bool = False

    def __str__(self) -> str:
        layout = "" if self.layout_name == "zigzag" else f", {self.layout_name}"
        return f"{self.attention} on {self.mesh}{layout}"

    @property
    def layout_name(self) -> str:
        """The layout as text, such as "zigzag" or "zigzag, relaid for states"."""
        return f"{self.layout}, relaid for states" if self.contiguous_states else self.layout

    def apply_to(self, config: Config) -> Config:
        """Returns the trainer's configuration with this mesh (except `replicate` and `tp`), method and layout."""
        parallel = replace(config.parallel, **self.parallel)
        return replace(config, parallel=parallel, data=replace(config.data, layout=self.layout))

    @property
    def parallel(self) -> dict[str, Any]:
        """Mesh and method as fields of the trainer's `ParallelConfig`, except `replicate` and `tp`."""
        # AttentionChoice's options have the names of the trainer's fields; its `name` is the trainer's `attention`.
        options, mesh = asdict(self.attention), self.mesh
        axes = {"shard": mesh.shard, "ring": mesh.ring, "ulysses": mesh.ulysses}
        states = {"contiguous_states": self.contiguous_states}
        return {**axes, "cp": None, "attention": options.pop("name"), **options, **states}


def candidates(
    heads: int,
    ranks: int,
    rows: int,
    names: Sequence[str] = (),
    tensor_parallel: Sequence[int] = (1,),
    replicate: Sequence[int] = (1,),
    layouts: Sequence[Layout] = ("zigzag",),
    relaid: bool = False,
) -> Iterator[Candidate]:
    """Yields all meshes over all ranks, with all methods that use the mesh's axes.

    Args:
        heads: query heads.
        rows: sequences per step. replicate x shard must divide them.
        names: methods to yield; empty: all. "usp" is ulysses+ring.
        tensor_parallel, replicate: sizes of these axes to try; those that do not divide the ranks are left out.
        layouts: layouts to try on meshes with a ring. Without a ring all layouts are equal, and the first one is used.
        relaid: True also tries the first layout with states on contiguous shards, on meshes with a ring and without tp.
    """
    allowed = [ALIASES.get(name, name) for name in names]
    for tp, replicas in product(tensor_parallel, replicate):
        if ranks % (tp * replicas):
            continue
        for shard, ulysses in product(divisors(ranks // (tp * replicas)), repeat=2):
            mesh = Mesh(shard, ranks // (tp * replicas * shard * ulysses), ulysses, replicas, tp)
            # Skip meshes with another number of ranks, replicas without rows, and head axes with more ranks than heads.
            if prod(mesh.axes.values()) != ranks or rows % mesh.replicas or ulysses > heads // tp:
                continue
            for method in variants(mesh.ring, mesh.ulysses, heads // tp):
                if not allowed or method.name in allowed:
                    for layout in layouts if mesh.ring > 1 else layouts[:1]:
                        yield Candidate(mesh, AttentionChoice.of(method), layout)
                    if relaid and mesh.ring > 1 and tp == 1:
                        yield Candidate(mesh, AttentionChoice.of(method), layouts[0], contiguous_states=True)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


POLICIES = (
    Checkpointing("none"),
    Checkpointing("none", tiled=True),
    Checkpointing("attention_output"),
    Checkpointing("layer"),
    Checkpointing("attention_output", offload=True),
    Checkpointing("layer", offload=True),
    Checkpointing("attention_output", offload=True, prefetch=False),
    Checkpointing("layer", offload=True, prefetch=False),
)
"""First without offload, then with offload and prefetch, then without prefetch. Each of these groups is ordered from
the fastest policy, which needs the most memory, to the slowest."""


def fit_policy(
    policy: Checkpointing, layers: int, memory: Callable[[Checkpointing], Estimate], room: Room
) -> Iterator[Checkpointing]:
    """Yields the policy itself, then variants that store as many checkpoints as fit.

    With `offload`, one variant keeps the checkpoints of as many of the last blocks as fit on the device. If memory
    still does not suffice, two variants drop checkpoints: the first keeps all inputs and drops attention outputs, the
    second drops inputs first. A dropped output costs a recomputation of attention, a dropped input only one of the part
    after attention in the previous block.

    Args:
        memory: estimates the memory of a step under a policy.
    """

    def fits(candidate: Checkpointing) -> bool:
        return room.share(memory(candidate)) <= 1

    # 1. All checkpoints, on the device or on the host.
    yield policy
    if policy.policy == "none" or (not policy.offload and fits(policy)):
        return
    # 2. With offload: keep the checkpoints of as many of the last blocks as fit on the device. A host of unlimited size
    # leaves the device's memory as the only limit.
    if policy.offload:
        unlimited_host = replace(room, host=1 << 62)
        on_device = largest(0, layers, lambda n: unlimited_host.share(memory(replace(policy, on_device=n))) <= 1)
        if on_device == layers:
            return  # all blocks keep their checkpoints on the device: the policy without offload is the same
        policy = replace(policy, on_device=on_device or 0)
        yield policy
    # 3. Fewer checkpoints.
    if not fits(policy):
        yield from _with_counts(policy, layers, True, fits)
        yield from _with_counts(policy, layers, False, fits)


def _with_counts(
    policy: Checkpointing, layers: int, all_inputs: bool, fits: Callable[[Checkpointing], bool]
) -> Iterator[Checkpointing]:
    """Yields the policy with the most attention outputs that fit, and then the most inputs that fit beside them.

    Yields nothing if no number of outputs fits.

    Args:
        all_inputs: True keeps all inputs. False chooses the number of outputs with the number of inputs whose peak is
            lowest (`best_input_count`).
    """
    on_device, has_outputs = policy.on_device, policy.policy == "attention_output"

    def variant(outputs: int, inputs: int | None = None) -> Checkpointing:
        if all_inputs:
            inputs = layers
        elif inputs is None:
            # Blocks with checkpoints on the device always keep their inputs.
            inputs = on_device + best_input_count(layers - on_device, max(0, outputs - on_device))
        counts = {"outputs": None if outputs == layers else outputs} if has_outputs else {}
        return replace(policy, inputs=None if inputs == layers else inputs, **counts)

    # First choose the number of outputs, which is 0 under policy "layer", then of inputs, in the remaining memory.
    first, last = (1, layers) if has_outputs else (0, 0)
    outputs = largest(first, last, lambda n: fits(variant(n)))
    if outputs is None:
        return
    inputs = variant(outputs).inputs
    if inputs is not None:
        inputs = largest(inputs, layers, lambda n: fits(variant(outputs, n)))
    yield variant(outputs, inputs)


def largest(first: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest number from `first` to `last` that fits, by bisection; None if even `first` does not."""
    if not fits(first):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if fits(middle) else (first, middle - 1)
    return first
