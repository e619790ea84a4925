"""Predicts time and memory of training runs without a GPU, and measures candidates on a machine.

arguments.py    models, clusters and quantities by name
cluster/        machines, links, and the time of concurrent sends
time/           the time of a communication plan, of a block's attention, and of a training step
memory/         the peak memory of a training step: simulated, or by formulas
search/         every mesh, method and checkpoint policy on a cluster, fastest first
trainer_run.py  memory and time of a run of the trainer
tune.py         the command `armillary-tune`: meshes and methods measured on the machine that it runs on
cli.py          the command `armillary-plan`
"""

from importlib.metadata import version

from armillary.plan.cluster import Accelerator, Cluster, Delivery, Link

__all__ = [
    "Accelerator",
    "Cluster",
    "Delivery",
    "Link",
    "__version__",
]

__version__ = version("armillary-plan")
