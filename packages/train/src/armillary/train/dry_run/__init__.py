"""What a run will be, told without running it: mesh, shards and shapes. Memory and time are what armillary-plan tells.

predict.py   the model on its mesh, and a step in numbers
shapes.py    shapes on a rank
report.py    all of it as a table or JSON
"""

from armillary.train.dry_run.predict import MOST_RANKS, DryRun, dry_run
from armillary.train.dry_run.report import show_dry_run

__all__ = ["MOST_RANKS", "DryRun", "dry_run", "show_dry_run"]
