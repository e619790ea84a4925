"""Machines, the links between them, and transfer times of concurrent sends."""

from armillary.plan.cluster.machines import EMULATED, MACHINES, Accelerator, Cluster
from armillary.plan.cluster.network import Delivery, Link

__all__ = ["EMULATED", "MACHINES", "Accelerator", "Cluster", "Delivery", "Link"]
