# pyright: reportUnusedImport=false
# ruff: noqa: F401
"""Parts of the trainer that the planner runs on fake tensors."""

from typing import TYPE_CHECKING

from armillary.core.internal import imported_at_first_use
from armillary.train.axes import choose_axes
from armillary.train.device import kernel_with_sm_margin, sm_margin
from armillary.train.optimizer import build_optimizer
from armillary.train.watchdog import Watchdog, caused_by_peers

if TYPE_CHECKING:
    from armillary.train.build import collective_timeout, load_rows, mesh_of, open_stores, precision, shard_model
    from armillary.train.dry_run import MOST_RANKS, DryRun, dry_run, precision_of, print_dry_run
    from armillary.train.loop import watchdog_of
    from armillary.train.ranks import Ranks, check_consistent
    from armillary.train.step import batch_mask

# Modules that need FSDP2 or torch.compile, which take seconds to import, and their names here.
_SLOW_NAMES = {
    "armillary.train.build": ("collective_timeout", "load_rows", "mesh_of", "open_stores", "precision", "shard_model"),
    "armillary.train.dry_run": ("DryRun", "MOST_RANKS", "dry_run", "precision_of", "print_dry_run"),
    "armillary.train.ranks": ("Ranks", "check_consistent"),
    "armillary.train.step": ("batch_mask",),
    "armillary.train.loop": ("watchdog_of",),
}

__getattr__ = imported_at_first_use(__name__, _SLOW_NAMES)
