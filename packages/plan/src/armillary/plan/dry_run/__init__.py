"""`armillary-plan run`: what a configuration of the trainer takes, without running it.

predict.py   memory, simulated, and the time of a step
report.py    all of it as a table or JSON
"""

from armillary.plan.dry_run.predict import Prediction, RunPlan, job_of, predict
from armillary.plan.dry_run.report import as_json, show

__all__ = ["Prediction", "RunPlan", "as_json", "job_of", "predict", "show"]
