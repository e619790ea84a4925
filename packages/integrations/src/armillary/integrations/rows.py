"""Rows of the data for each rank under Hugging Face accelerate: ranks that share a sequence read the same rows.

Accelerate gives each process rows of its own, and gathers predictions from all of them. `share_rows` has one of its
accelerators do so by groups of ranks instead.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.attention.context_parallel.packing import gather
from armillary.attention.context_parallel.sequence import check_method
from armillary.attention.methods.base import Method


class Rows(NamedTuple):
    """This rank's place among those that read other rows: the groups that share a sequence, numbered.

    `across` has one rank of each, which are in the order of groups as `order` says; None where there is one group only.
    """

    own: int
    groups: int
    across: dist.ProcessGroup | None = None
    order: tuple[int, ...] = (0,)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all groups, one after the other: [B, ...] -> [B * count, ...]. A number becomes a row."""
        x = x.reshape(1) if x.ndim == 0 else x.contiguous()
        if self.across is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.groups)]
        dist.all_gather(parts, x, group=self.across)
        return torch.cat([parts[place] for place in self.order])

    def gather_objects(self, rows: list[Any]) -> list[Any]:
        """Returns the rows of all groups, of objects that pickle."""
        if self.across is None:
            return rows
        parts: list[Any] = [None] * self.groups
        dist.all_gather_object(parts, rows, group=self.across)
        return [row for place in self.order for row in parts[place]]


def find_rows(attend: Method) -> Rows:
    """Returns the place of this rank. Every rank of the default process group must call it, once for all.

    Raises:
        ValueError: on every rank, if the ranks of methods do not divide up all ranks.
    """
    check_method(attend)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Rows(0, 1)
    alone = [[attend.shard, dist.get_rank()]]
    shares = sorted(gather(alone, attend)) if attend.shards > 1 else alone
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shares)
    groups = sorted({tuple(rank for _, rank in share) for share in everyone})
    if sorted(rank for ranks in groups for rank in ranks) != list(range(len(everyone))):
        raise ValueError(
            f"ranks {groups} each share a sequence: all {len(everyone)} ranks need to be in one of these groups, once"
        )
    index = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
    if len(groups) == 1:
        return Rows(0, 1)
    if len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"ranks {groups} each share a sequence: groups of one size are needed")
    across = [[ranks[shard] for ranks in groups] for shard in range(attend.shards)]
    made: list[Any] = [dist.new_group(ranks) for ranks in across]  # every rank makes all of them
    mine = across[attend.shard]
    return Rows(index, len(groups), made[attend.shard], tuple(sorted(mine).index(rank) for rank in mine))


def share_rows(accelerator: Any, attend: Method) -> Rows:
    """Has an `accelerate.Accelerator` give all ranks that share a sequence the same rows, and other groups others.

        accelerator = Accelerator()
        share_rows(accelerator, attend)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Call it on every rank, before `prepare` is given a data loader. `accelerator.gather_for_metrics` then takes what all
    ranks of a sequence have the same of, such as whole predictions, and gives each row once. Loaders are read by each
    rank: what draws rows or changes them at random must draw alike.

    Raises:
        ValueError: the accelerator runs other processes than there are ranks, dispatches batches from one of them, or
            has context or tensor parallelism of its own; the ranks of methods do not divide up all ranks.
    """
    check_method(attend)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"accelerate runs {accelerator.num_processes} processes and torch.distributed {ranks}: start all of them "
            "with torchrun or `accelerate launch`, and make the accelerator after the mesh; without a GPU, with "
            "Accelerator(cpu=True), or ACCELERATE_USE_CPU=true in the environment"
        )
    if accelerator.dispatch_batches:
        raise ValueError("dispatch_batches=True: one process would send its rows to all; leave it out")
    check_parallelism(accelerator)
    rows = find_rows(attend)
    accelerator.prepare_data_loader = partial(_prepare, accelerator, rows)
    accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, rows)
    return rows


def check_parallelism(accelerator: Any) -> None:
    """Raises ValueError if accelerate splits sequences or rows a second time."""
    config = accelerator.parallelism_config
    sizes = {name: getattr(config, name, 1) for name in ("cp_size", "sp_size", "tp_size")}
    if config is not None and any(size > 1 for size in sizes.values()):
        raise ValueError(
            f"accelerate's parallelism_config has {', '.join(f'{name}={size}' for name, size in sizes.items())}: leave "
            "them at 1; how many ranks share a sequence is said by the mesh that attend is on (dp_shard_size and "
            "dp_replicate_size count all of them)"
        )


def _prepare(accelerator: Any, rows: Rows, loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
    prepare_data_loader: Any = import_module("accelerate.data_loader").prepare_data_loader
    if getattr(loader, "_is_accelerate_prepared", False):
        if loader not in accelerator._dataloaders:
            accelerator._dataloaders.append(loader)
        return loader
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=rows.groups,
        process_index=rows.own,
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


def _gather_for_metrics(accelerator: Any, rows: Rows, data: Any, use_gather_object: bool = False) -> Any:
    """Gathers like accelerate, without the rows that pad the last batches of all groups to one size."""
    recursively_apply: Any = import_module("accelerate.utils").recursively_apply
    objects = use_gather_object or not _only_tensors(data)
    gathered = rows.gather_objects(data) if objects else recursively_apply(rows.gather, data)
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return gathered
    if objects:
        return gathered[: state.remainder]
    return recursively_apply(partial(_first, state.remainder), gathered)


def _first(rows: int, x: Tensor) -> Tensor:
    return x[:rows]


def _only_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        return all(map(_only_tensors, data.values()))
    return all(map(_only_tensors, data)) if isinstance(data, (list, tuple)) else isinstance(data, Tensor)
