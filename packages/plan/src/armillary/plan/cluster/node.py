"""A machine, and what it computes with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

import torch

from armillary.attention.kernels import Inputs, efficiency, rulings
from armillary.attention.kernels.efficiency import MULTIPROCESSORS, PERSISTENT
from armillary.core.quantity import LARGEST
from armillary.plan.cluster.network import Link

USUAL = (0.55, 0.45)
"""Shares of the peak where nothing is published: forward, backward."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What one rank computes with.

    Args:
        name: for people.
        memory: bytes, as its driver reports them.
        flops: dense FLOP/s in bfloat16, the peak that MFU is counted by.
        memory_bandwidth: bytes a second of its own memory.
        host_bandwidth: bytes a second to and from the machine's memory, each way.
        matmul: share of the peak that large products attain.
        capability: compute capability of a CUDA device, such as 9.0; with it, attention's shares of the peak are those
            published of the kernel that runs (`armillary.attention.kernels.efficiency`).
        attention, attention_backward: those shares, measured or fitted, in place of published ones.
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
    capability: float | None = None
    attention: float | None = None
    attention_backward: float | None = None
    step: float = 60e-6

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and each.name not in ("name", "step") and not 0 < value < inf:
                raise ValueError(f"accelerator {self.name}: {each.name}={value} must be above 0, and finite")
        if not 0 <= self.step < inf:
            raise ValueError(f"accelerator {self.name}: step={self.step} must not be below 0, and finite")

    def attention_shares(self, tokens: int, kernel: str | None = None, margin: int = 0) -> tuple[float, float]:
        """Shares of the peak that attention attains over a causal sequence of so many tokens: (forward, backward).

        Args:
            kernel: by name; unless given, the fastest that torch ships.
            margin: multiprocessors that a persistent kernel leaves to NCCL.
        """
        known = efficiency(kernel or self.kernel or "", self.compute_capability)
        forward, backward = USUAL if known is None else (known.forward(tokens), known.backward)
        if self.is_persistent(kernel):
            forward *= 1 - margin / MULTIPROCESSORS
        return self.attention or forward, self.attention_backward or backward

    def is_persistent(self, kernel: str | None = None) -> bool:
        """Whether the forward of a kernel, by default the fastest that torch ships, occupies all multiprocessors."""
        return (kernel or self.kernel) in PERSISTENT

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """(9, 0) of 9.0."""
        return None if self.capability is None else divmod(round(10 * self.capability), 10)

    @property
    def kernel(self) -> str | None:
        """The kernel of long sequences in 16 bits that needs no other package than torch; None: not known."""
        if self.compute_capability is None:
            return None
        inputs = Inputs("cuda", torch.bfloat16, 128, 128, capability=self.compute_capability)
        found = (each for each in rulings(inputs) if each.kernel.limits.module is None and each.refused is None)
        return next(found).kernel.name


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
