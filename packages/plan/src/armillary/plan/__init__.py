"""Planning a run before there is a machine for it, and measuring candidates where there is one.

presets.py   models and clusters by the names that people type
cluster/     accelerators, nodes, and how long sends take between them
comm_time/   the time of communication plans, and of a full step
memory/      the memory of a step: simulated, and by formulas
search/      every way to run a model on a cluster, best first
tune/        the same measured on the machine at hand
dry_run/     memory and time of a configuration of the trainer
"""

from armillary.plan.cluster.cluster import Cluster
from armillary.plan.cluster.network import Delivery, Link
from armillary.plan.cluster.node import Accelerator

__all__ = ["Accelerator", "Cluster", "Delivery", "Link"]
