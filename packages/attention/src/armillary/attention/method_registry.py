"""Attention methods by name: lookup, construction and plans. To add a method, name it in a line of the tables below.

A name is that of a sequence method, such as "ring"; of a head method, such as "ulysses"; or of a head method around a
sequence method, joined by "+": "upipe+wallfacer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, get_args

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.mask import AttentionMask
from armillary.attention.methods.all_gather import AllGatherKV
from armillary.attention.methods.base import Method
from armillary.attention.methods.head_shards import KeyTransfers, split_heads
from armillary.attention.methods.local import Local
from armillary.attention.methods.ring import Backward, Ring
from armillary.attention.methods.token_ring import TokenRing
from armillary.attention.methods.ulysses import Ulysses
from armillary.attention.methods.upipe import UPipe
from armillary.attention.methods.wallfacer import Placement, WallFacer, fitting_teams
from armillary.attention.plans.comm_plan import AttentionShape, CommPlan, Role
from armillary.attention.plans.head_plans import UlyssesPlan, UPipePlan, head_stages
from armillary.attention.plans.method_plan import HeadPlan, HeadStages, MethodPlan, SequencePlan
from armillary.attention.plans.node_ring_plans import DoubleRingPlan, TokenRingOverNodesPlan
from armillary.attention.plans.ring_plans import AllGatherPlan, LocalPlan, RingPlan, TokenRingPlan, WallFacerPlan
from armillary.attention.tiling.latents import TokenSizes
from armillary.core import Axis, SequenceLayout
from armillary.core.internal import divide_axis


class MethodOptions(NamedTuple):
    """The options that may accompany the name of a method. A method uses some of them."""

    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    backward: Backward = "auto"
    nodes: int | None = None


DEFAULT_OPTIONS = MethodOptions()


def build_attention(
    name: str,
    mesh: DeviceMesh,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
    ulysses: int | None = None,
) -> Method:
    """Constructs the method `name` on the axes of `mesh`: those of `build_mesh`, or one axis with any name.

        build_attention("upipe+wallfacer", build_mesh("cuda", ring=4, ulysses=2))
        build_attention("usp", mesh["cp"], ulysses=2)  # the one axis that another trainer has

    Args:
        name: "local"; on the sequence axis `ring`: "ring", "token_ring", "wallfacer" or "all_gather"; on the axes
            `nodes` and `devices` instead of `ring`: "ring+ring" or "ring+token_ring"; on the head axis `ulysses`:
            "ulysses" or "upipe"; or a head method around a sequence method, such as "upipe+wallfacer" or
            "ulysses+ring+token_ring". "usp" is "ulysses+ring". On a sequence axis of one rank the sequence method is
            `Local`; on a head axis of one rank "ulysses" is left out.
        heads_per_stage: query heads per stage of UPipe, over all ranks of the head axis. By default one per rank, which
            takes the least memory.
        team, placement: arguments of WallFacer. By default the largest team that fits.
        backward: the side that rotates in backward of Ring and WallFacer.
        ulysses: number of ranks on the head axis, if `mesh` is one axis that a head method and a sequence method
            divide: its neighbouring ranks share tokens.

    Raises:
        ValueError: the name is unknown, an axis with more than one rank is not used, an option belongs to another
            method or has a wrong value, or the mesh lacks `ulysses` or an axis of the method; `ulysses` that does not
            divide the ranks of the one axis, is missing, or is given beside several axes.
    """
    return named_method(name, MethodOptions(heads_per_stage, team, placement, backward)).build(mesh, ulysses)


def build_comm_plan(
    name: str,
    work: AttentionShape,
    ring: int = 1,
    ulysses: int = 1,
    heads_per_stage: int | None = None,
    team: int | None = None,
    placement: Placement = "collect_intra",
    backward: Backward = "auto",
    nodes: int | None = None,
) -> CommPlan:
    """Returns the communication plan of the method that `build_attention` constructs from these arguments.

    Args:
        work: the shape of a call, with a layout of `ring` shards.
        ring, ulysses: number of ranks on the sequence axis and on the head axis.
        nodes: number of nodes into which "ring+ring" and "ring+token_ring" divide the `ring` ranks. By default the
            smallest divisor above 1.

    Raises:
        ValueError: as `build_attention`; or `work` has another number of shards, there are fewer query heads than
            `ulysses`, or the method has no communication plan.
    """
    options = MethodOptions(heads_per_stage, team, placement, backward, nodes)
    return named_method(name, options).comm_plan(work, ring, ulysses)


@dataclass(frozen=True)
class NamedMethod:
    """An attention method by name: its entries in the registry, with options.

    Args:
        head: entry of the method on the head axis; None if there is none.
        sequence: entry of the method on the sequence axis; `LOCAL` if there is none.
    """

    name: str
    head: HeadEntry | None
    sequence: SequenceEntry
    options: MethodOptions = DEFAULT_OPTIONS

    def __str__(self) -> str:
        """Returns the name and options that differ from the default, without `backward`: "wallfacer C=2 p2p_intra"."""
        options = self.options
        team = "" if options.team is None else f" C={options.team}"
        placement = "" if options.placement == "collect_intra" else f" {options.placement}"
        groups = "" if options.nodes is None else f" {options.nodes} groups"  # often more than the cluster's machines
        stage = "" if options.heads_per_stage is None else f", {options.heads_per_stage} heads a stage"
        return f"{self.name}{team}{placement}{groups}{stage}"

    @property
    def axes(self) -> tuple[Role, ...]:
        """The axes over which work is divided. "ring" stands also for the two axes `nodes` and `devices`."""
        return (*(["ring"] if self.sequence is not LOCAL else []), *(["ulysses"] if self.head else []))

    def mesh_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of mesh axes, with `ring` split into `nodes` and `devices` if the method works on these.

        Raises:
            ValueError: the nodes do not divide the ranks of `ring`.
        """
        ring = axes.get("ring", 1)
        if "nodes" not in self.sequence.axes:
            return dict(axes)
        nodes = self.sequence.arguments(self.options, ring, plan=True)["nodes"]
        if ring % nodes:
            raise ValueError(f"nodes={nodes} must divide the {ring} ranks of ring")
        return {**axes, "ring": 1, "nodes": nodes, "devices": ring // nodes}

    def build(self, mesh: DeviceMesh, ulysses: int | None = None) -> Method:
        """Constructs the method on the axes of `mesh`, as `build_attention` does."""
        if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            raise ValueError(f"mesh is a {type(mesh).__name__}; a DeviceMesh is needed, such as build_mesh makes")
        if mesh.ndim == 1 and self.axes and "nodes" not in self.sequence.axes:
            return self._build_on_one_axis(mesh, ulysses)
        if ulysses is not None:
            raise ValueError(f"ulysses={ulysses}: the mesh has axes {mesh.mesh_dim_names}; give {self.name} one axis")
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        if absent := [axis for axis in (*self.sequence.axes, "ulysses") if axis not in sizes]:
            raise ValueError(
                f"the mesh has axes {tuple(sizes)} and no {' and '.join(absent)}; use build_mesh, or construct the "
                "method on an axis, such as Ring(mesh[...])"
            )
        self.check_used(sizes)
        ring, ulysses = prod(sizes[axis] for axis in self.sequence.axes), sizes["ulysses"]
        # On a sequence axis of one rank, `Local` spares the rotation and a second communicator.
        sequence = self.sequence if ring > 1 else LOCAL
        inner = sequence.method(*[mesh[axis] for axis in sequence.axes], **sequence.arguments(self.options, ring))
        if self.head is None:
            return inner
        return self.head.method(mesh["ulysses"], inner, **self.head.arguments(self.options, ulysses))

    def _build_on_one_axis(self, mesh: DeviceMesh, ulysses: int | None) -> Method:
        if self.head is None or self.sequence is LOCAL:
            if ulysses not in (None, 1 if self.head is None else mesh.size()):
                raise ValueError(f"ulysses={ulysses}: {self.name} runs on all {mesh.size()} ranks of the one axis")
            if self.head is None:
                return self.sequence.method(mesh, **self.sequence.arguments(self.options, mesh.size()))
            return self.head.method(mesh, Local(), **self.head.arguments(self.options, mesh.size()))
        if ulysses is None or ulysses < 1 or mesh.size() % ulysses:
            raise ValueError(
                f"ulysses={ulysses}: {self.name} divides the one axis of {mesh.size()} ranks; give the number of ranks "
                f"on the head axis, a divisor of it, as in build_attention({self.name!r}, mesh, ulysses=2)"
            )
        sizes = {"ring": mesh.size() // ulysses, "ulysses": ulysses}
        method = self.build(divide_axis(mesh, sizes))
        method.flat_axis = Axis.of(mesh)
        return method

    # -- plans --------------------------------------------------------------------------------------------------------

    def missing(self, *functions: str) -> tuple[str, ...]:
        """Returns those of `functions`, such as "comm_plan", which the plans of the method do not define."""
        plans: list[tuple[type[MethodPlan], type[MethodPlan]]] = [(self.sequence.plan, SequencePlan)]
        if self.head is not None:
            plans.append((self.head.plan, HeadPlan))
        return tuple(f for f in functions if any(getattr(plan, f) is getattr(base, f) for plan, base in plans))

    def sequence_plan(self, ring: int) -> SequencePlan:
        """Returns the plan of the sequence method on `ring` ranks."""
        return self.sequence.plan(**self.sequence.arguments(self.options, ring, plan=True), method=self.name)

    def head_plan(self, ulysses: int) -> HeadPlan | None:
        """Returns the plan of the head method on `ulysses` ranks; None if there is no head method."""
        if self.head is None:
            return None
        return self.head.plan(**self.head.arguments(self.options, ulysses, plan=True), method=self.name)

    def comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan:
        """Returns the communication plan, as `build_comm_plan` does."""
        self.check_used(self.mesh_axes({"ring": ring, "ulysses": ulysses}))
        if work.layout.shards != ring:
            raise ValueError(
                f"the layout has {work.layout.shards} shards; {ring} are needed, one for each rank of ring"
            )
        sequence, head = self.sequence_plan(ring), self.head_plan(ulysses)
        inner = partial(sequence_comm_plan, sequence)
        rotates_latents = sequence.rotates_latents and ring > 1
        return inner(work) if head is None else head.comm_plan(work, ulysses, inner, rotates_latents)

    def checkpointed_comm_plan(self, work: AttentionShape, ring: int, ulysses: int) -> CommPlan | None:
        """Returns the plan in a block under a checkpoint policy; None if it is `comm_plan`."""
        head, sequence = self.checkpointed_head_plan(ulysses), self.sequence_plan(ring)
        inner, rotates_latents = partial(sequence_comm_plan, sequence), sequence.rotates_latents and ring > 1
        return None if head is None else head.comm_plan(work, ulysses, inner, rotates_latents)

    def checkpointed_head_plan(self, ulysses: int) -> HeadPlan | None:
        """Returns the plan of the head method in a block under a checkpoint policy; None if it is `head_plan`.

        There Ulysses runs as UPipe with all heads in one stage, so backward sends q, k, v and out again.
        """
        head = self.head_plan(ulysses)
        return None if head is None or head.projects_in_stages or ulysses == 1 else UPipePlan(method=self.name)

    def as_sent(self, work: AttentionShape, ring: int, ulysses: int, checkpointed: bool = False) -> AttentionShape:
        """Returns a call with latents as the method sends it: with latents, or with keys that are expanded before.

        Chooses as `Method.sends_latents`; `checkpointed`: as the method does in a block under a checkpoint policy.
        """
        if work.latent is None:
            return work
        sequence, head = self.sequence_plan(ring), self.head_plan(ulysses) or HeadPlan()
        head = (self.checkpointed_head_plan(ulysses) if checkpointed else None) or head
        rotates_latents = sequence.rotates_latents and ring > 1 and (ulysses > 1 or head.projects_in_stages)
        heads, stage_keys = split_heads(work.key_heads, ulysses), head.stage_keys(work.key_heads, ulysses)
        nodes = ring if sequence.sends_keys else 1
        transfers = KeyTransfers(heads, nodes, stage_keys, head.key_sends, rotates_latents)
        sizes = TokenSizes(work.head_dim + work.value_dim, sum(work.latent), work.e, work.a)
        return work if sequence.takes_latents and transfers.latents_pay(sizes) else replace(work, latent=None)

    def layout(
        self, length: int, ring: int, kind: str = "zigzag", mask: AttentionMask | None = None, states: bool = False
    ) -> SequenceLayout:
        """Returns the layout over `ring` ranks that `Method.layout` refines for the head axis."""
        return self.sequence_plan(ring).layout(length, ring, kind, mask, states)

    def stages(self, heads: int, key_heads: int, ulysses: int) -> HeadStages:
        """Returns the stages of the first of `ulysses` ranks on the head axis. No rank has more heads."""
        arguments = {} if self.head is None else self.head.arguments(self.options, ulysses)
        return head_stages(heads, key_heads, ulysses, arguments.get("heads_per_stage"))

    def check_used(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError if the method does not divide attention over an axis of several ranks.

        Args:
            sizes: sizes of mesh axes. Axes that no attention method uses, such as "shard", are ignored.
        """
        used_axes = (*self.sequence.axes, *(["ulysses"] if self.head else []))
        for axis in get_args(Role):
            if sizes.get(axis, 1) > 1 and axis not in used_axes:
                other = "usp" if axis in ("ring", "ulysses") else "ring+token_ring"
                raise ValueError(
                    f"{self.name} would leave axis {axis!r} with {sizes[axis]} ranks unused; use {other}, or {axis}=1"
                )


@lru_cache(maxsize=512)
def sequence_comm_plan(plan: SequencePlan, work: AttentionShape) -> CommPlan:
    """Returns `plan.comm_plan(work)`. In a search, most candidates share it with others on the head axis."""
    return plan.comm_plan(work)


def named_method(name: str, options: MethodOptions = DEFAULT_OPTIONS) -> NamedMethod:
    """Returns the method of a name.

    Raises:
        ValueError: the name is unknown, or an option belongs to another method.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(f"{name!r} is no name of an attention method; known: {', '.join(names())}")
    # "ulysses+ring+token_ring" is a head method and the sequence method "ring+token_ring", whose own name has a "+".
    head, _, sequence = ALIASES.get(name, name).partition("+")
    if head not in HEAD_METHODS:
        head, sequence = "", ALIASES.get(name, name)
    elif not sequence:
        sequence = "local"
    if sequence != "local" and sequence not in SEQUENCE_METHODS:
        raise ValueError(f"no attention method {name!r}; known: {', '.join(names())}")
    method = NamedMethod(name, HEAD_METHODS.get(head), SEQUENCE_METHODS.get(sequence, LOCAL), options)
    entries = [method.sequence, *([method.head] if method.head else [])]
    option_names = [option for entry in entries for option in entry.all_options]
    for option, value in options._asdict().items():
        if value != getattr(DEFAULT_OPTIONS, option) and option not in option_names:
            all_entries = {**SEQUENCE_METHODS, **HEAD_METHODS}
            owners = ", ".join(owner for owner, entry in all_entries.items() if option in entry.all_options)
            raise ValueError(f"{name} takes no {option}={value!r}; that is for {owners}")
    return method


def names() -> list[str]:
    """Returns the names of `build_attention` and `build_comm_plan`."""
    pairs = [f"{head}+{sequence}" for head in HEAD_METHODS for sequence in SEQUENCE_METHODS]
    return ["local", *SEQUENCE_METHODS, *HEAD_METHODS, *ALIASES, *pairs]


def methods_without_plan(*functions: str) -> dict[str, tuple[str, ...]]:
    """Returns the methods that lack some of `functions` in their plans: {name: the functions that it lacks}."""
    return {
        name: missing_functions for name in names() if (missing_functions := named_method(name).missing(*functions))
    }


def variants(ring: int, ulysses: int, heads: int) -> Iterator[NamedMethod]:
    """Yields each method that divides work over all ranks of both axes, with all options that a search tries."""
    sequences = SEQUENCE_METHODS if ring > 1 else {"local": LOCAL}
    for name, sequence in sequences.items():
        for options in sequence.variants(ring, heads):
            if ulysses == 1:
                yield NamedMethod(name, None, sequence, options)
                continue
            for head_name, head in HEAD_METHODS.items():
                pair = head_name if sequence is LOCAL else f"{head_name}+{name}"
                for head_options in head.variants(ulysses, heads):
                    values = {option: getattr(head_options, option) for option in head.options}
                    yield NamedMethod(pair, head, sequence, options._replace(**values))


# -- entries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Entry of a method on the sequence axis or on the head axis.

    Args:
        method: the class, or a function that constructs the method. Called with its mesh axes, on the head axis also
            with the inner method, and with the options as keyword arguments.
        plan: class of the plan. Called with the options and the method's name as keyword arguments.
        options: names of the fields of `MethodOptions` that method and plan take.
        mesh_options: names of the fields that only the plan takes, because the method reads them from its mesh.
        variants: function of (ranks on the method's axis, query heads), which yields the options that a search tries.
            It yields none where the method would do the same as another one.
    """

    method: Callable[..., Method]
    plan: type[MethodPlan]
    options: tuple[str, ...] = ()
    mesh_options: tuple[str, ...] = ()
    variants: Callable[[int, int], Iterable[MethodOptions]] = lambda ranks, heads: (DEFAULT_OPTIONS,)

    @property
    def all_options(self) -> tuple[str, ...]:
        return (*self.options, *self.mesh_options)

    def arguments(self, options: MethodOptions, ranks: int, plan: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments of `method` for an axis of `ranks` ranks, or of `plan` if `plan` is True."""
        values = {name: getattr(options, name) for name in (self.all_options if plan else self.options)}
        defaults = default_options(ranks)
        return {name: getattr(defaults, name) if value is None else value for name, value in values.items()}


@dataclass(frozen=True)
class SequenceEntry(Entry):
    """Entry of a method on the sequence axis.

    Args:
        axes: names of the mesh axes that `method` takes: the sequence axis, or the two axes that replace it.
    """

    plan: type[SequencePlan] = SequencePlan
    axes: tuple[Role, ...] = ("ring",)


@dataclass(frozen=True)
class HeadEntry(Entry):
    """Entry of a method on the head axis, which takes an inner method on the sequence axis."""

    plan: type[HeadPlan] = HeadPlan


@lru_cache
def default_options(ranks: int) -> MethodOptions:
    """Returns the options of methods on an axis of `ranks` ranks that were given none."""
    return MethodOptions(
        heads_per_stage=ranks,  # one query head per rank and stage: the least memory
        team=fitting_teams(ranks)[-1],  # the largest
        nodes=next((n for n in range(2, ranks + 1) if ranks % n == 0), 1),  # as few as there can be, above 1
    )


def wallfacer_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields each team size from 2, in both placements. With teams of 1 rank the method is Ring."""
    for team in fitting_teams(ranks)[1:]:
        for placement in get_args(Placement):
            yield MethodOptions(team=team, placement=placement)


def node_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields each number of nodes that leaves at least 2 nodes of at least 2 devices.

    With one node the method is the inner one, and with one device it is Ring.
    """
    return (MethodOptions(nodes=nodes) for nodes in range(2, ranks // 2 + 1) if ranks % nodes == 0)


def upipe_variants(ranks: int, heads: int) -> Iterator[MethodOptions]:
    """Yields one and two query heads per rank and stage, as far as that makes several stages."""
    return (MethodOptions(heads_per_stage=count) for count in (ranks, 2 * ranks) if count < heads)


# -- tables -----------------------------------------------------------------------------------------------------------


def double_ring(nodes: DeviceMesh, devices: DeviceMesh, backward: Backward) -> Method:
    """Returns a ring of keys between nodes around a ring within each node (LoongTrain's double ring)."""
    return Ring(nodes, backward, inner=Ring(devices, backward))


def token_ring_over_nodes(nodes: DeviceMesh, devices: DeviceMesh, backward: Backward) -> Method:
    """Returns a ring of keys between nodes around TokenRing within each node."""
    return Ring(nodes, backward, inner=TokenRing(devices))


def ulysses(axis: DeviceMesh, inner: Method) -> Method:
    """Returns Ulysses around the inner method; the inner method itself on a head axis of one rank."""
    return Ulysses(axis, inner) if axis.size() > 1 else inner


ON_NODES: Any = {
    "options": ("backward",),
    "mesh_options": ("nodes",),
    "variants": node_variants,
    "axes": ("nodes", "devices"),
}
"""Fields of a ring between nodes around another method within each node."""
SEQUENCE_METHODS: dict[str, SequenceEntry] = {
    "ring": SequenceEntry(Ring, RingPlan, options=("backward",)),
    "token_ring": SequenceEntry(TokenRing, TokenRingPlan),
    "wallfacer": SequenceEntry(
        WallFacer, WallFacerPlan, options=("team", "placement", "backward"), variants=wallfacer_variants
    ),
    "all_gather": SequenceEntry(AllGatherKV, AllGatherPlan),
    "ring+ring": SequenceEntry(double_ring, DoubleRingPlan, **ON_NODES),
    "ring+token_ring": SequenceEntry(token_ring_over_nodes, TokenRingOverNodesPlan, **ON_NODES),
}
HEAD_METHODS: dict[str, HeadEntry] = {
    "ulysses": HeadEntry(ulysses, UlyssesPlan),
    "upipe": HeadEntry(UPipe, UPipePlan, options=("heads_per_stage",), variants=upipe_variants),
}
LOCAL = SequenceEntry(Local, LocalPlan, axes=())
"""The sequence method on one rank. Also the inner method of a head method if there is no sequence axis."""
ALIASES = {"usp": "ulysses+ring"}
