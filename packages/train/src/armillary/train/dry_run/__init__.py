"""Mesh, shards and shapes of a run, without running it. For memory and time see armillary-plan.

predict.py   the sharded model on the meta device
shapes.py    shapes on a rank
report.py    a table or JSON
"""

from armillary.train.dry_run.predict import MOST_RANKS, DryRun, dry_run
from armillary.train.dry_run.report import show_dry_run

__all__ = ["MOST_RANKS", "DryRun", "dry_run", "show_dry_run"]
