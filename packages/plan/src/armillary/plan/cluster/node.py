"""`Node` and `Accelerator`: one machine of a cluster, and the accelerator of each of its ranks."""

from __future__ import annotations

import torch
from pydantic.dataclasses import dataclass

from armillary.attention.parts import MULTIPROCESSORS, PERSISTENT, Inputs, efficiency, kernel_candidates
from armillary.plan.cluster.network import CHECKED, Bytes, BytesPerSecond, Count, Link, NotNegative, Positive

DEFAULT_SHARES = (0.55, 0.45)
"""Fractions of the peak FLOP/s that attention attains with kernels without published figures: (forward, backward)."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Accelerator:
    """The accelerator of one rank.

    Args:
        memory: bytes of device memory, as the driver reports them.
        flops: peak FLOP/s in bfloat16 without sparsity, to which MFU refers.
        memory_bandwidth: bytes per second of device memory.
        host_bandwidth: bytes per second between device and host memory, in each direction.
        matmul: fraction of the peak that large matrix products attain.
        capability: compute capability of a CUDA device, such as 9.0. Selects the published efficiency of the attention
            kernel (`armillary.attention.kernels`).
        attention, attention_backward: fractions of the peak that attention attains in forward and in backward, measured
            or fitted. They replace the published efficiency.
        step: seconds of overhead in each step of an attention method: kernel launches and merges of partial results.

    Raises:
        ValueError: a number outside its range.
    """

    name: str
    memory: Bytes
    flops: Positive
    memory_bandwidth: BytesPerSecond
    host_bandwidth: BytesPerSecond
    matmul: Positive = 0.65
    capability: Positive | None = None
    attention: Positive | None = None
    attention_backward: Positive | None = None
    step: NotNegative = 60e-6

    def attention_shares(self, tokens: int, kernel: str | None = None, margin: int = 0) -> tuple[float, float]:
        """Fractions of the peak that attention attains over a causal sequence of `tokens`: (forward, backward).

        Args:
            kernel: name of the kernel; by default the fastest that torch ships.
            margin: multiprocessors that a persistent kernel leaves to NCCL.
        """
        published_efficiency = efficiency(kernel or self.kernel or "", self.compute_capability)
        forward, backward = (
            DEFAULT_SHARES
            if published_efficiency is None
            else (published_efficiency.forward(tokens), published_efficiency.backward)
        )
        if self.is_persistent(kernel):
            forward *= 1 - margin / MULTIPROCESSORS  # it computes on the remaining multiprocessors only
        return self.attention or forward, self.attention_backward or backward

    def is_persistent(self, kernel: str | None = None) -> bool:
        """True if a kernel's forward occupies all multiprocessors. Default: the fastest that torch ships."""
        return (kernel or self.kernel) in PERSISTENT

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """The compute capability as two numbers, such as (9, 0) for 9.0."""
        return None if self.capability is None else divmod(round(10 * self.capability), 10)

    @property
    def kernel(self) -> str | None:
        """Name of the fastest kernel that torch ships, for long 16-bit sequences; None without a compute capability."""
        if self.compute_capability is None:
            return None
        inputs = Inputs("cuda", torch.bfloat16, 128, 128, capability=self.compute_capability)
        # Preferred kernels come first. A kernel with `limits.module` needs a package besides torch.
        return next(
            candidate.kernel.name
            for candidate in kernel_candidates(inputs)
            if candidate.kernel.limits.module is None and candidate.refusal is None
        )


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Node:
    """A machine with identical accelerators, and their links to each other and to other machines.

    Args:
        ranks_per_node: number of accelerators.
        host_memory: bytes of the machine's memory.
        within: link between accelerators of the machine. Its `per` is "rank" if each has a port into a switch, "pair"
            if each pair has a link, and "group" if all share a bus.
        between: link between machines. Its `per` is "rank" if each accelerator has a network card, "group" if they
            share one, and "pair" if each pair of ranks has a link.
        switch: link inside a group of `switch_ranks` accelerators that have a PCIe switch of their own. `within` then
            connects the switches. None: there are no such groups.

    Raises:
        ValueError: a number outside its range, or `switch_ranks` that do not divide `ranks_per_node`.
    """

    name: str
    ranks_per_node: Count
    accelerator: Accelerator
    host_memory: Bytes
    within: Link
    between: Link
    switch: Link | None = None
    switch_ranks: Count = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node % self.switch_ranks:
            raise ValueError(
                f"{self.name}: switch_ranks={self.switch_ranks} must divide ranks_per_node={self.ranks_per_node}"
            )

    @property
    def device_memory(self) -> int:
        """Bytes of memory of each accelerator."""
        return self.accelerator.memory
