"""What a run will be, told without running it.

predict.py   mesh, shapes, memory and time of a step
report.py    all of it as a table or JSON
"""

from armillary.plan.dry_run.predict import Prediction, job_of, predict
from armillary.plan.dry_run.report import show_dry_run

__all__ = ["Prediction", "job_of", "predict", "show_dry_run"]
