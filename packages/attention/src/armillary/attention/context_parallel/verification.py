"""The observation of a running step by armillary-check, which is installed or not."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from torch import Tensor, nn

from armillary.attention.call.validation import over_all_ranks
from armillary.attention.context_parallel.communication import AveragingCheck, method_axes
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout

VERIFIERS = "armillary.verify"
"""Group of entry points; armillary-check has the one that `observe_shard` calls."""


def observe_shard(
    model: nn.Module,
    method: Method,
    layout: SequenceLayout,
    *,
    ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    labelled: int | None = None,
    rows: tuple[int, ...] | None = None,
) -> Any:
    """Returns a context manager, `armillary.check.Proof`, around a step of this rank's shard, which can `probe` too.

    Args:
        layout: layout of the rows, over all ranks of the method or over its sequence axis.
        ids, labels: [B, T]; labels are shifted.
        position_ids: [B or 1, T].
        labelled: number of labels that the loss is averaged over; by default those of the rows.
        rows: digests of the whole rows; None if this rank has read its own tokens alone.

    Raises:
        ValueError: armillary-check is not installed.
    """
    verifier = next(iter(entry_points(group=VERIFIERS)), None)
    if verifier is None:
        raise ValueError(
            f"no installed package verifies a running step (entry points {VERIFIERS!r}): pip install armillary-check"
        )
    layout = over_all_ranks(layout, method)
    return verifier.load()(
        model,
        method=method,
        ids=ids,
        labels=labels,
        position_ids=position_ids,
        positions=layout.positions(method.shard),
        length=layout.length,
        labelled=labelled,
        rows=rows,
        peers=sorted(AveragingCheck(method_axes(method), None).ranks),
    )
