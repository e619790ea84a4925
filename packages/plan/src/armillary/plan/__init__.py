"""Predicts time and memory of training runs without a GPU, and measures candidates on a machine.

presets.py        models and clusters by name
cluster/          accelerators, nodes, links, and the time of concurrent sends
comm_time/        the time of a communication plan, and of a training step
memory/           the peak memory of a training step: simulated, or by formulas
search/           every mesh, method and checkpoint policy on a cluster, fastest first
tune.py           the command `armillary-tune`: meshes and methods measured on the machine that it runs on
dry_run.py        memory and time of a configuration of the trainer
cli.py            the command `armillary-plan`
commands.py       its commands
"""

from armillary.plan.cluster.cluster import Cluster
from armillary.plan.cluster.network import Delivery, Link
from armillary.plan.cluster.node import Accelerator

__all__ = ["Accelerator", "Cluster", "Delivery", "Link"]
