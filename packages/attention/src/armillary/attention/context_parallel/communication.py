"""Communication between the ranks of a sequence, and the check that FSDP2 and DDP average gradients over these ranks.

`TensorCache` keeps what ranks have exchanged about a tensor, such as position ids, for all layers and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, Self, TypeVar, cast
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.attention.call.validation import over_all_ranks
from armillary.attention.methods.base import Method
from armillary.core import Axis, SequenceLayout, all_reduce, start_all_gather
from armillary.core.internal import check_tensor, compat, mesh_ranks, parameters_outside_fsdp

Value = TypeVar("Value")


class TensorCache:
    """Values computed from a tensor, kept until the tensor is changed in place or deleted."""

    def __init__(self) -> None:
        self.entries: Any = WeakTensorKeyDictionary()
        """Tensor -> ((version, key), value)."""

    def get(self, x: Tensor, key: object, compute: Callable[[], Value]) -> Value:
        if x.is_inference():  # without a version counter, a change in place cannot be noticed
            return compute()
        entry = self.entries.get(x)
        if entry is None or entry[0] != (x._version, key):
            entry = self.entries[x] = (x._version, key), compute()
        return entry[1]


def find_axes(method: Method) -> list[Axis] | None:
    """Returns the axes of more than one rank that a method runs on, innermost first; None if they are unknown."""
    declared_axes: Sequence[Axis] = getattr(method, "axes", ())
    axes = [axis for axis in reversed(declared_axes) if axis.size > 1]
    # A user's method may not declare all of its axes. Then their sizes do not multiply to its number of shards.
    return axes if prod(axis.size for axis in axes) == method.shards else None


def method_axes(method: Method) -> list[Axis]:
    """As `find_axes`; raises ValueError if the axes are unknown."""
    axes = find_axes(method)
    if axes is None:
        raise ValueError(
            f"{type(method).__name__} does not say which axes its {method.shards} ranks are on, so that they cannot "
            "communicate: give it an `axis`, and `inner` if it contains another method"
        )
    return axes


def sequence_axis(method: Method) -> Axis:
    """Returns one axis with all ranks of a method: for ring x ulysses, both axes flattened into one.

    The first call for a method on several axes creates a process group.

    Raises:
        ValueError: the axes are unknown, belong to no mesh, or order the ranks otherwise than the shards.
    """
    if method.flat_axis is not None:
        return method.flat_axis
    axes, name = method_axes(method), type(method).__name__
    if len(axes) < 2:
        flat = axes[0] if axes else Axis.alone("sequence")
    else:
        meshes = [axis.mesh for axis in axes if axis.mesh is not None]
        if len(meshes) < len(axes):
            raise ValueError(f"{name}: layers with a state need the mesh of its axes; give it axes of one DeviceMesh")
        flat = Axis.of(compat.flatten_axes(meshes))
        if flat.rank != method.shard:
            raise ValueError(
                f"{name}: shard {method.shard} is on rank {flat.rank} of its axes together; layers with a state need "
                "shards in the order of the mesh, with ring outside of ulysses"
            )
    method.flat_axis = flat
    return flat


def gather_integers(rows: Sequence[Sequence[int]], method: Method) -> list[list[int]]:
    """Gathers rows of integers from all ranks of a method. All rows have one length; every rank must call this.

    Bytes sent to each other rank of an axis, axis by axis: 8 for the number of rows, and 8 for each integer so far, in
    as many rows as the rank with most has.
    """
    gathered = [list(row) for row in rows]
    for axis in method_axes(method):
        local = torch.tensor(gathered, dtype=torch.int64, device=axis_device(axis))
        # Ranks may have different numbers of rows, which are exchanged first.
        count = torch.tensor([len(gathered)], device=local.device)
        counts = start_all_gather(count, axis, [1] * axis.size, 0).wait().tolist()
        gathered = start_all_gather(local, axis, counts, 0).wait().tolist()
    return gathered


def sum_over_axes(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Returns the sum of a tensor over all ranks of the axes, the same bits on each. Backward sums the gradient too.

    Bytes sent: an `all_reduce` of x on each axis, and in backward of its gradient. Every rank must call it.
    """
    device = x.device
    # One axis after another, so that all ranks add the same numbers in the same order.
    for axis in axes:
        x = all_reduce(x.to(axis_device(axis)), axis)
    return x.to(device)


def gather_tokens(x: Tensor, method: Method, layout: SequenceLayout) -> Tensor:
    """Gathers the shards of all ranks in sequence order: [B, T, ...] -> [B, N, ...], without a gradient.

    Args:
        x: [B, T, ...], the shard of this rank.
        layout: layout of the sequence, over all ranks of the method or over its sequence axis.

    Bytes sent, kind "all_gather": on the first axis, of C ranks, C - 1 times the bytes of a shard padded to the longest
    one; on each further axis, of C ranks, C - 1 times the bytes of all shards gathered so far; and a `gather_integers`
    of one integer. Every rank must call it.

    Raises:
        ValueError: x has another number of tokens than this rank's shard.
    """
    check_tensor("x", x)
    layout = over_all_ranks(layout, method)
    if x.ndim < 2 or x.shape[1] != layout.sizes[method.shard]:
        raise ValueError(
            f"x {tuple(x.shape)}: shard {method.shard} of the layout is [B, {layout.sizes[method.shard]}, ...]"
        )
    if method.shards == 1:
        return layout.join([x.detach()])
    # Shards differ in length, and torch gathers tensors of one shape.
    padded = x.new_zeros((x.shape[0], max(layout.sizes), *x.shape[2:]))
    padded[:, : x.shape[1]] = x.detach()
    gathered = padded.unsqueeze(0)
    for axis in method_axes(method):
        gathered = start_all_gather(gathered.to(axis_device(axis)), axis, [len(gathered)] * axis.size, 0).wait()
    # The gathered order is that of the ranks on the axes; a method may number its shards differently.
    order = [shard for (shard,) in gather_integers([[method.shard]], method)]
    shards = {shard: tokens.to(x.device) for shard, tokens in zip(order, gathered, strict=True)}
    return layout.join([shards[i][:, :size] for i, size in enumerate(layout.sizes)])


def axis_device(axis: Axis) -> torch.device:
    """Device of tensors that the group of an axis accepts: the host for gloo, the GPU for NCCL."""
    # On CPU meshes `get_backend` is not called: it fails for the groups with several backends that `init_device_mesh`
    # creates.
    if axis.device == "cpu" or dist.get_backend(axis.group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# -- averages of gradients ---------------------------------------------------------------------------------------------


class AveragingCheck:
    """Refuses a loss whose gradients FSDP2 or DDP would average over other ranks than those of the axes.

    Ranks of the mesh that are on none of the axes must not take part, because their rows are unknown to the loss. Ranks
    outside of the mesh may: their average is data parallelism of the caller.

    Args:
        axes: the axes over which the loss is summed.
        mesh: the mesh that `ContextParallel` was given.

    Attributes:
        models: prepared models. Their parameters are checked even if autograd's graph does not show them, and have
            names in errors.
    """

    def __init__(self, axes: Sequence[Axis], mesh: DeviceMesh | None) -> None:
        self.axes, self.mesh = axes, mesh
        self.models: WeakSet[nn.Module] = WeakSet()
        self._checked: dict[int, ref[Tensor]] = {}  # by id; tensors cannot be keys of a WeakKeyDictionary

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied ContextParallel has the same axes

    def check(self, loss: Tensor, ddp_modules: Iterable[DistributedDataParallel]) -> None:
        """Checks the parameters of a loss; those under FSDP2 only the first time that a loss of a model is checked.

        Communicates nothing. Ranks come to the same result, because they have the same meshes and process groups.

        Args:
            loss: a tensor with autograd's graph.
            ddp_modules: DDP modules that computed it.

        Raises:
            ValueError: FSDP2 or DDP averages the gradient of a parameter over other ranks, without a gradient divide
                factor or hook of the caller; or a parameter without a hook is not averaged, beside others under FSDP2.
        """
        if torch.compiler.is_compiling() or not loss.requires_grad:
            return
        for module in ddp_modules:
            if not compat.has_comm_hook(module):  # otherwise the hook decides over which ranks it reduces
                name = next((name for name, p in module.module.named_parameters() if p.requires_grad), "")
                ranks = frozenset(dist.get_process_group_ranks(module.process_group))
                self._check_ranks(name, "DistributedDataParallel", ranks)
        # The parameter that is used last, mostly the head's, stands for the model. FSDP2 keeps its gathered tensor.
        last = next(parameters_of(loss), None)
        checked = None if last is None else self._checked.get(id(last))
        if last is None or (checked is not None and checked() is last):
            return
        self._check_fsdp(loss)
        self._checked[id(last)] = ref(last)

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Global ranks on this rank's axes; not all of them if several axes belong to no mesh."""
        ranks = {dist.get_rank()}
        for axis in self.axes:
            ranks.update(*(line for line in axis.parallel_ranks() if not ranks.isdisjoint(line)))
        return frozenset(ranks)

    @cached_property
    def _other_ranks(self) -> frozenset[int]:
        if self.mesh is None or len(self.ranks) < prod(axis.size for axis in self.axes):
            return frozenset()
        return mesh_ranks(self.mesh) - self.ranks

    def _check_fsdp(self, loss: Tensor) -> None:
        under_fsdp = compat.fsdp_parameters()
        if not under_fsdp:  # then `reduce_gradients`, or the caller, may reduce gradients after backward
            return
        # 1. The parameters in the graph, and all others of the same FSDP2 trees and prepared models. So ranks agree
        # even if an expert without tokens is not in this rank's graph, and reentrant checkpointing hides nothing.
        parameters: dict[int, Tensor] = {id(p): p for p in parameters_of(loss)}
        trees = {p.tree for p in under_fsdp if not p.forms.isdisjoint(parameters)}
        reached = set(parameters).union(*(p.forms for p in under_fsdp if p.tree in trees))
        names: dict[int, str] = {}
        for model in self.models:
            named = list(model.named_parameters())
            if any(id(p) in reached for _, p in named):
                parameters |= {id(p): p for _, p in named}
                names |= {id(p): name for name, p in named}
        reached |= parameters.keys()
        # 2. Those under FSDP2 are averaged over the right ranks.
        averaged = [p for p in under_fsdp if p.parameter.requires_grad and not p.forms.isdisjoint(reached)]
        for p in averaged:
            if not p.custom_reduction:
                name = next((names[form] for form in p.forms if form in names), p.name)
                self._check_ranks(name or _unnamed(p.parameter), "FSDP2", mesh_ranks(p.mesh))
        # 3. The others are frozen, or a hook averages them. Without any under FSDP2 the caller may reduce all alike.
        if averaged and len(self.ranks) > 1:
            without_hook = [p for p in parameters.values() if not compat.has_gradient_hook(p)]
            labelled = [(names.get(id(p)) or _unnamed(p), p) for p in without_hook]
            for name in parameters_outside_fsdp(labelled, self.ranks):
                raise ValueError(
                    f"nothing averages the gradient of {name}, beside those of parameters under FSDP2, over "
                    f"{self._needed()}: call fully_shard on the whole model too, after its layers; or average it in a "
                    "hook (register_post_accumulate_grad_hook)"
                )

    def _check_ranks(self, name: str, wrapper: str, ranks: frozenset[int]) -> None:
        missing, extra = self.ranks - ranks, self._other_ranks & ranks
        if not missing and not extra:
            return
        if missing:
            remedy = (
                "give it a mesh or process group of all these ranks. If its gradients are complete over fewer (expert "
                f"parallelism), call set_gradient_divide_factor({len(self.ranks)}) on its FSDP2 module"
            )
        else:
            remedy = f"ranks {sorted(extra)!s:.80} of the mesh are on none: name their axes in data="
        raise ValueError(
            f"{wrapper} averages the gradient of {name} over ranks {sorted(ranks)!s:.80}, but the loss needs the "
            f"average over {self._needed()}: {remedy}"
        )

    def _needed(self) -> str:
        axes = ", ".join(axis.name for axis in self.axes) or "none"
        return f"ranks {sorted(self.ranks)!s:.80} (axes: {axes})"


def _unnamed(parameter: Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}"


def record_ddp(modules: set[DistributedDataParallel]) -> None:
    if (module := compat.active_ddp()) is not None:
        modules.add(module)


def parameters_of(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yields the parameters to which backward of `loss` accumulates gradients, those used last first."""
    stack, visited = [loss.grad_fn], set[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = cast(Any, node).variable
            if isinstance(leaf, nn.Parameter):
                yield leaf
        stack += [next_node for next_node, _ in node.next_functions]
