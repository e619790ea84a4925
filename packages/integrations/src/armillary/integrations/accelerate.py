"""`share_rows`: under Hugging Face accelerate, ranks that share a sequence read the same rows.

By default accelerate gives each process different rows, and gathers predictions from all processes. `share_rows` makes
an accelerator treat each group of ranks that share a sequence as one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from armillary.attention import ContextParallel, Method
from armillary.attention.internal import gather_integers
from armillary.integrations.versions import check_version


@dataclass(frozen=True)
class RowGroups:
    """Numbered groups of ranks that share a sequence. Different groups read different rows.

    Args:
        index: number of this rank's group.
        count: number of groups.
        peers: process group of this rank and the ranks of the same shard in other groups; None if there is one group.
        order: for each group, in order, the rank within `peers` (0 to count - 1) of its member.
    """

    index: int
    count: int
    peers: dist.ProcessGroup | None = None
    order: tuple[int, ...] = (0,)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers the rows of all groups in order: [B, ...] -> [B * count, ...]. A scalar counts as a row."""
        x = x.reshape(1) if x.ndim == 0 else x.contiguous()
        if self.peers is None:
            return x
        rows = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(rows, x, group=self.peers)
        return torch.cat([rows[peer] for peer in self.order])

    def gather_objects(self, rows: list[Any]) -> list[Any]:
        if self.peers is None:
            return rows
        rows_of_peers: list[Any] = [None] * self.count
        dist.all_gather_object(rows_of_peers, rows, group=self.peers)
        return [row for peer in self.order for row in rows_of_peers[peer]]


def find_row_groups(method: Method) -> RowGroups:
    """Returns the groups of ranks that share a sequence. Every rank of the default process group must call it.

    Bytes sent: a `gather_integers` of two integers, and the pickled ranks of the group to every rank.

    Raises:
        ValueError: on every rank, if a rank is in two groups, or groups differ in size.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RowGroups(0, 1)
    # 1. The ranks of this rank's group in the order of their shards, gathered over the method's axes.
    shard_and_rank = [[method.shard, dist.get_rank()]]
    pairs = gather_integers(shard_and_rank, method) if method.shards > 1 else shard_and_rank
    own_group = tuple(rank for _, rank in sorted(pairs))
    # 2. The groups of all ranks, gathered over the default process group.
    world_size = dist.get_world_size()
    group_of_rank: list[Any] = [None] * world_size
    dist.all_gather_object(group_of_rank, own_group)
    groups = sorted(set(group_of_rank))
    if sorted(rank for ranks in groups for rank in ranks) != list(range(world_size)):
        raise ValueError(
            f"ranks {groups} each share a sequence: each of the {world_size} ranks must be in exactly one of these "
            "groups"
        )
    if len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"ranks {groups} each share a sequence: groups of one size are needed")
    if len(groups) == 1:
        return RowGroups(0, 1)
    # 3. For each shard, a process group of the ranks that have it. `new_group` is collective: every rank makes all.
    peers = [[ranks[shard] for ranks in groups] for shard in range(method.shards)]
    process_groups: list[Any] = [dist.new_group(ranks) for ranks in peers]
    own_peers = peers[method.shard]
    return RowGroups(
        next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks),
        len(groups),
        process_groups[method.shard],
        tuple(sorted(own_peers).index(rank) for rank in own_peers),  # torch sorts the ranks of a group
    )


def share_rows(accelerator: Any, cp: ContextParallel) -> RowGroups:
    """Makes an `accelerate.Accelerator` give the ranks that share a sequence the same rows, and other ranks other rows.

        cp = ContextParallel("ring", build_mesh(device, shard=2, ring=4), data="shard")
        accelerator = Accelerator()
        share_rows(accelerator, cp)
        model, optimizer, loader = accelerator.prepare(cp.prepare(model), optimizer, loader)

    Call it on every rank, before `prepare` gets a data loader. `accelerator.gather_for_metrics` then takes tensors that
    are equal on all ranks of a sequence, such as whole predictions, and returns each row once. Every rank loads
    its rows itself, so random sampling and augmentation must be the same on all ranks that share a sequence.

    Returns:
        The groups of ranks.

    Raises:
        ValueError: a release of accelerate that is not tested; the accelerator's number of processes is not the number
            of ranks; its process 0 would dispatch batches to the others; its context, sequence or tensor parallelism is
            enabled; a rank is in two groups, or groups differ in size.
    """
    check_version("accelerate")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"accelerate runs {accelerator.num_processes} processes and torch.distributed {ranks}: start all of them "
            "with torchrun or `accelerate launch`, and create the accelerator after the mesh; without a GPU, with "
            "Accelerator(cpu=True), or ACCELERATE_USE_CPU=true in the environment"
        )
    if accelerator.dispatch_batches:
        raise ValueError("dispatch_batches=True: one process would send its rows to all; remove it")
    config = accelerator.parallelism_config
    sizes = {name: getattr(config, name, 1) for name in ("cp_size", "sp_size", "tp_size")}
    if any(size > 1 for size in sizes.values()):
        raise ValueError(
            f"accelerate's parallelism_config has {', '.join(f'{name}={size}' for name, size in sizes.items())}: leave "
            "them at 1; the mesh of the ContextParallel says how many ranks share a sequence (dp_shard_size and "
            "dp_replicate_size count all of them)"
        )
    groups = find_row_groups(cp.method)
    # Methods of this instance only: other accelerators in the process are not changed.
    accelerator.prepare_data_loader = partial(_prepare_data_loader, accelerator, groups)
    accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, groups)
    return groups


def _prepare_data_loader(
    accelerator: Any, groups: RowGroups, loader: Any, device_placement: bool | None = None, **_: Any
) -> Any:
    """Replaces `Accelerator.prepare_data_loader`: counts groups as processes."""
    prepare_data_loader: Any = import_module("accelerate.data_loader").prepare_data_loader
    # A copy of Accelerator.prepare_data_loader, which has no arguments for num_processes and process_index.
    if getattr(loader, "_is_accelerate_prepared", False):
        if loader not in accelerator._dataloaders:
            accelerator._dataloaders.append(loader)
        return loader
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=groups.count,
        process_index=groups.index,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def _gather_for_metrics(accelerator: Any, groups: RowGroups, data: Any, use_gather_object: bool = False) -> Any:
    """Replaces `Accelerator.gather_for_metrics`: gathers over groups, without the rows that fill up the last batch."""
    recursively_apply: Any = import_module("accelerate.utils").recursively_apply
    objects = use_gather_object or not all(isinstance(x, Tensor) for x in pytree.tree_leaves(data))
    gathered = groups.gather_objects(data) if objects else recursively_apply(groups.gather, data)
    state = accelerator.gradient_state
    # The last batch of all groups has `remainder` rows; accelerate has repeated rows to fill it up.
    if not state.end_of_dataloader or state.remainder <= 0:
        return gathered
    if objects:
        return gathered[: state.remainder]

    def first_rows(x: Tensor) -> Tensor:
        return x[: state.remainder]

    return recursively_apply(first_rows, gathered)
