"""torch's flight recorder: the latest collectives, sends and receives of this process. Uses private functions."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
import torch.distributed as dist


def recorded_collectives() -> list[dict[str, Any]]:
    """Returns the latest collectives, sends and receives of this process from torch's flight recorders.

    Operations of one process group and backend are in the order of their calls. Some keys of an entry: process_group
    (name, description); profiling_name, such as "nccl2:all_reduce"; collective_seq_id and p2p_seq_id, the group's
    numbers of collectives and of sends and receives so far; retired, True if the operation has completed.
    """
    private: Any = cast(Any, torch)._C._distributed_c10d
    options = {"includeCollectives": True, "onlyActive": False}
    dumps: list[bytes] = []
    if (dump := getattr(private, "_dump_fr_trace_json", None)) is not None:
        try:
            dumps = [dump(**options, backend=backend) for backend in backend_names()]
        except TypeError:  # before torch 2.15 this function takes no backend: it dumps gloo's recorder
            dumps = [dump(**options)]
    if (dump := getattr(private, "_dump_nccl_trace_json", None)) is not None:
        dumps.append(dump(**options))  # ProcessGroupNCCL has a recorder of its own
    return [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]


def backend_names() -> list[str]:
    """Returns the names of the backends of all process groups. torch 2.15 has one flight recorder for each name.

    A name is that of the backend's class: "nccl2" for a group that was created with "nccl".
    """
    groups: list[Any] = list(cast(Any, dist.distributed_c10d)._world.pg_map)
    return sorted({group._get_backend(device).name() for group in groups for device in group._device_types})
