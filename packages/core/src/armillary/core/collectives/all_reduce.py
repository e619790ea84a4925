"""All-reduce along one axis: asynchronous, on local tensors, without autograd."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.core.collectives.collective import Collective
from armillary.core.mesh import Axis
from armillary.core.observe import end_span_on_wait, record
from armillary.core.validation import check_tensor


def start_all_reduce(x: Tensor, axis: Axis) -> Collective[Tensor]:
    """Starts to sum a tensor over all ranks; every rank gets the same bits.

    Args:
        x: local tensor, of the same shape and dtype on each rank.
        axis: the axis to sum over, of C ranks.

    Bytes sent: 2 (C - 1) / C times the bytes of `x`, kind "all_reduce", as in a ring: a reduce-scatter of C - 1 steps,
    then an all-gather of C - 1 steps. Other algorithms of the backend may send other amounts.
    """
    check_tensor("x", x)
    if axis.size == 1:
        return Collective(axis, (x,), (), lambda: x)
    total = x.clone(memory_format=torch.contiguous_format)  # torch reduces in place
    steps = 2 * (axis.size - 1)
    traced = record(axis.name, "all_reduce", steps * x.nbytes // axis.size, steps)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    assert work is not None
    return Collective(axis, (total,), end_span_on_wait([work], traced), lambda: total)
