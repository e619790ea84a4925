"""What a planner needs to know of the machines."""

from __future__ import annotations

from dataclasses import dataclass

GiB = 2**30
TB = 10**12


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of accelerators that are all alike.

    Args:
        name: for people.
        nodes: how many machines.
        ranks_per_node: accelerators of each.
        device_memory: bytes of each accelerator, as its driver reports them.
        host_memory: bytes of each machine.

    Raises:
        ValueError: a number below 1.
    """

    name: str
    nodes: int
    ranks_per_node: int
    device_memory: int
    host_memory: int

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node", "device_memory", "host_memory"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)} must be at least 1")

    @property
    def ranks(self) -> int:
        """Accelerators of all machines."""
        return self.nodes * self.ranks_per_node

    @property
    def host_memory_per_rank(self) -> int:
        """Bytes of a machine's memory for each of its accelerators."""
        return self.host_memory // self.ranks_per_node

    @classmethod
    def h100(cls, nodes: int = 1) -> Cluster:
        """Nodes of 8 x H100 80 GB with 2 TB of memory."""
        return cls(
            name=f"{8 * nodes} x H100 80 GB",
            nodes=nodes,
            ranks_per_node=8,
            device_memory=int(79.1 * GiB),
            host_memory=2 * TB,
        )

    @classmethod
    def h200(cls, nodes: int = 1) -> Cluster:
        """Nodes of 8 x H200 141 GB with 2 TB of memory."""
        return cls(
            name=f"{8 * nodes} x H200 141 GB",
            nodes=nodes,
            ranks_per_node=8,
            device_memory=int(139.7 * GiB),
            host_memory=2 * TB,
        )

    @classmethod
    def a100(cls, nodes: int = 1, gigabytes: int = 80) -> Cluster:
        """Nodes of 8 x A100, of 40 or 80 GB, with 1 TB of memory.

        Raises:
            ValueError: another size than these.
        """
        memory = {40: 39.4, 80: 79.2}
        if gigabytes not in memory:
            raise ValueError(f"A100s have 40 or 80 GB, not {gigabytes}")
        return cls(
            name=f"{8 * nodes} x A100 {gigabytes} GB",
            nodes=nodes,
            ranks_per_node=8,
            device_memory=int(memory[gigabytes] * GiB),
            host_memory=TB,
        )
