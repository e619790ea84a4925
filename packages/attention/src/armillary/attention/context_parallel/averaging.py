"""Checks that FSDP2 and DDP average gradients over the ranks over which `ContextParallel.loss` sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, Self, cast
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from armillary.core import Axis
from armillary.core.parts import compat, mesh_ranks, parameters_outside_fsdp


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
            self._check_ddp(module)
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
        """Ranks of the mesh that are not on this rank's axes."""
        if self.mesh is None or len(self.ranks) < prod(axis.size for axis in self.axes):
            return frozenset()
        return mesh_ranks(self.mesh) - self.ranks

    def _check_ddp(self, module: DistributedDataParallel) -> None:
        ranks = frozenset(dist.get_process_group_ranks(module.process_group))
        if not compat.has_comm_hook(module):  # otherwise the hook decides over which ranks it reduces
            name = next((name for name, p in module.module.named_parameters() if p.requires_grad), "")
            self._check_ranks(name, "DistributedDataParallel", ranks)

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
        """Raises ValueError if a wrapper averages the gradient of a parameter over wrong ranks."""
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
    """Returns words for a parameter whose name is unknown, because its model is."""
    return f"a parameter of shape {tuple(parameter.shape)}"


def record_ddp(modules: set[DistributedDataParallel]) -> None:
    """Adds the DDP module whose forward is running to `modules`."""
    if (module := compat.active_ddp()) is not None:
        modules.add(module)


def parameters_of(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yields the parameters to which backward of `loss` accumulates gradients, one that is used last first."""
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
