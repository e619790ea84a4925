"""A machine, and what it computes with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from armillary.core.quantity import LARGEST
from armillary.plan.cluster.network import Link


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What one rank computes with.

    Args:
        name: for people.
        memory: bytes, as its driver reports them.
        flops: dense FLOP/s in bfloat16, the peak that MFU is counted by.
        memory_bandwidth: bytes a second of its own memory.
        host_bandwidth: bytes a second to and from the machine's memory, each way.
        matmul, attention, attention_backward: shares of the peak that large products and attention kernels attain.
        step: seconds that each step of a method costs beside its kernels: launches and merges.

    Raises:
        ValueError: a number that is not above 0.
    """

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    host_bandwidth: float
    matmul: float = 0.65
    attention: float = 0.55
    attention_backward: float = 0.45
    step: float = 60e-6

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "step") and not 0 < value < inf:
                raise ValueError(f"accelerator {self.name}: {each.name}={value} must be above 0, and finite")
        if not 0 <= self.step < inf:
            raise ValueError(f"accelerator {self.name}: step={self.step} must not be below 0, and finite")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine with identical accelerators, and their links to each other and to other machines.

    Args:
        name: for people.
        ranks_per_node: its accelerators.
        accelerator: each of them.
        host_memory: bytes of the machine.
        within: between accelerators of a machine: each has a port into a switch, each pair a link of its own, or all
            share a bus.
        between: between machines: a network card for each rank, one for each machine (per "group"), or a link for each
            pair of ranks.
        switch: where a machine's accelerators hang in groups of `switch_ranks` on switches of their own (PCIe), what
            those of one switch reach each other by; `within` is between switches then.

    Raises:
        ValueError: a number below 1, or switches that do not divide the machine.
    """

    name: str
    ranks_per_node: int
    accelerator: Accelerator
    host_memory: int
    within: Link
    between: Link
    switch: Link | None = None
    switch_ranks: int = 1

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.type == "int"):
            value = getattr(self, name)
            if not 1 <= value <= LARGEST or value != int(value):
                wanted = "a whole number" if 1 < value <= LARGEST else "at least 1"
                raise ValueError(f"{self.name}: {name}={value} must be {wanted}")
        if self.ranks_per_node % self.switch_ranks:
            raise ValueError(
                f"{self.name}: switch_ranks={self.switch_ranks} must divide ranks_per_node={self.ranks_per_node}"
            )

    @property
    def device_memory(self) -> int:
        """Bytes of each accelerator."""
        return self.accelerator.memory

    @property
    def host_memory_per_rank(self) -> int:
        """Bytes of a machine's memory for each of its accelerators."""
        return self.host_memory // self.ranks_per_node
