"""`Cluster`: identical machines, their accelerators and their links; from a preset's name or a TOML file.

Presets are at the end. Memory bandwidths are nominal. Other bandwidths are lower: those that large messages attain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from armillary.attention.internal import MULTIPROCESSORS, PERSISTENT, Inputs, efficiency, kernel_candidates
from armillary.attention.plans import Send
from armillary.core.internal import parse_toml, read_file
from armillary.plan.cluster.network import (
    CHECKED,
    Bytes,
    BytesPerSecond,
    Count,
    Delivery,
    Level,
    Link,
    NotNegative,
    Positive,
    Wiring,
    deliveries,
)

# Fractions of the peak FLOP/s that attention attains with kernels without published figures: (forward, backward).
DEFAULT_SHARES = (0.55, 0.45)


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
            kernel (`armillary.attention.kernels.efficiency`).
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
class Cluster:
    """A number of identical machines, each with accelerators and links to each other and to the other machines.

    Args:
        ranks_per_node: number of accelerators.
        host_memory: bytes of the machine's memory.
        within: link between accelerators of the machine. Its `per` is "rank" if each has a port into a switch, "pair"
            if each pair has a link, and "group" if all share a bus.
        between: link between machines. Its `per` is "rank" if each accelerator has a network card, "group" if they
            share one, and "pair" if each pair of ranks has a link.
        switch: link inside a group of `switch_ranks` accelerators that have a PCIe switch of their own. `within` then
            connects the switches. None: there are no such groups.
        nodes: number of machines.

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
    nodes: Count

    def __post_init__(self) -> None:
        if self.ranks_per_node % self.switch_ranks:
            raise ValueError(
                f"{self.name}: switch_ranks={self.switch_ranks} must divide ranks_per_node={self.ranks_per_node}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks, one for each accelerator of all machines."""
        return self.nodes * self.ranks_per_node

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the network, from the smallest groups of ranks (a PCIe switch, or a node) to all ranks."""
        switch = () if self.switch is None else (Level("switch", self.switch_ranks, self.switch),)
        node = Level("within", self.ranks_per_node, self.within)
        return (*switch, node, Level("between", self.ranks, self.between, card=self.ranks_per_node))

    def deliveries(self, sends: Iterable[Send]) -> list[Delivery]:
        """Timing of sends that start together. Ranks 0, 1, ... are on the first machine, the next on the second.

        Sends of 0 bytes, or from a rank to itself, are left out.
        """
        rows = [send for send in sends if send.bytes and send.source != send.target]
        table = np.array(rows, np.int64).reshape(-1, 3)
        timed = deliveries(self.levels, table, np.zeros(len(rows), np.int64))
        return [
            Delivery(source, target, seconds, sending, self.levels[level].link)
            for source, target, seconds, sending, level in zip(*(values.tolist() for values in timed), strict=True)
        ]

    def transit(self, sends: Iterable[Send]) -> float:
        """Seconds until all of these concurrent sends have arrived."""
        return max((delivery.seconds for delivery in self.deliveries(sends)), default=0.0)

    @classmethod
    def named(cls, name: str) -> Cluster:
        """Returns a preset: "8xh100", "64xh100-ethernet", "4xh100", "2x4xh100", "8xl20" or "emulated-...".

        The number counts accelerators, which fill whole nodes or a part of one; 2x4 are 2 nodes with 4 accelerators
        each. `MACHINES` lists the machines.

        Raises:
            ValueError: an unknown machine, more accelerators in a node than the machine has, or accelerators that do
                not fill whole nodes.
        """
        if name in EMULATED:
            return EMULATED[name]
        if (match := re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", name)) and (machine := MACHINES.get(match[3])):
            count = int(match[2])
            per_node = count if match[1] else min(count, machine.ranks_per_node)
            nodes, incomplete_node = (int(match[1]), 0) if match[1] else divmod(count, max(per_node, 1))
            if nodes and not incomplete_node and 1 <= per_node <= machine.ranks_per_node:
                switch_ranks = min(machine.switch_ranks, per_node)
                title = f"{' x '.join(filter(None, match.groups()[:2]))} x {machine.name}"
                return replace(machine, nodes=nodes, ranks_per_node=per_node, switch_ranks=switch_ranks, name=title)
        presets = [f"{machine.ranks_per_node}x{kind}" for kind, machine in MACHINES.items()]
        raise ValueError(
            f"no cluster {name!r}; known: {', '.join(presets)}, multiples of them, and nodes that are not full, such "
            f"as 4xh100 and 2x4xh100; {', '.join(EMULATED)}"
        )

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        """Reads a cluster from a TOML file.

            like = "8xh100"              # a preset, which the other lines change; by default none
            nodes = 4
            host_memory = "1.5TB"
            [between]
            bandwidth = "11GB"           # per second and direction
            latency = 5e-5
            per = "group"
            [accelerator]
            memory = "80GB"

        Raises:
            ValueError: invalid TOML, an unknown preset, unknown or missing keys, or values outside their range. Names
                the file.
            OSError: the file cannot be read.
        """
        try:
            settings = parse_toml(read_file(path))
            preset = settings.pop("like", None)
            if not isinstance(preset, str | None):
                raise ValueError(f"like = {preset!r} must be the name of a cluster")
            # A preset and the file's values are merged as plain data and validated together.
            base = {} if preset is None else asdict(cls.named(preset))
            return TypeAdapter(cls).validate_python(_merge(base, {"name": Path(path).stem, **settings}))
        except ValidationError as error:
            raise ValueError(f"{path}: {'; '.join(map(_describe_error, error.errors()))}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _merge(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` updated by `settings`, table by table."""
    tables = {key: _merge(base.get(key) or {}, value) for key, value in settings.items() if isinstance(value, dict)}
    return {**base, **settings, **tables}


# Tables of a cluster's file.
TABLES = {"accelerator": Accelerator, "within": Link, "between": Link, "switch": Link}


def _describe_error(detail: Any) -> str:
    """Describes one of pydantic's errors, with the key and its value or the known keys."""
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "unexpected_keyword_argument":
        table = TABLES.get(detail["loc"][0], Cluster) if len(detail["loc"]) > 1 else Cluster
        return f"unknown key {key}; known: {', '.join(field.name for field in fields(table))}"
    if detail["type"].startswith("missing"):
        return f"missing key {key}"
    return f"{key} = {detail['input']!r}: {detail['msg']}" if key else detail["msg"]


# -- presets -----------------------------------------------------------------------------------------------------------

GB, GiB, TB = 10**9, 2**30, 10**12

H100 = Accelerator(
    name="H100 80 GB",
    memory=int(79.1 * GiB),
    flops=989e12,
    memory_bandwidth=3.35e12,
    host_bandwidth=50e9,
    capability=9.0,
)
H200 = replace(H100, name="H200 141 GB", memory=int(139.7 * GiB), memory_bandwidth=4.8e12)
A100_80 = Accelerator(
    name="A100 80 GB", memory=int(79.2 * GiB), flops=312e12, memory_bandwidth=2e12, host_bandwidth=22e9, capability=8.0
)
A100_40 = replace(A100_80, name="A100 40 GB", memory=int(39.4 * GiB), memory_bandwidth=1.55e12)
L20 = Accelerator(
    name="L20 48 GB",
    memory=int(47.5 * GiB),
    flops=119.5e12,
    memory_bandwidth=864e9,
    host_bandwidth=17.5e9,
    capability=8.9,
    attention=0.85,
    attention_backward=0.7,
)

NVLINK_4 = Link(bandwidth=370e9, latency=8e-6, disturbs=0.1)
NVLINK_3 = Link(bandwidth=240e9, latency=8e-6, disturbs=0.1)
# InfiniBand, 400 Gb/s for each rank.
NDR = Link(bandwidth=46e9, latency=12e-6, disturbs=0.1)
# An A800 has 400 GB/s, both directions together; an A100 has 600.
NVLINK_A800 = Link(bandwidth=160e9, latency=8e-6, disturbs=0.1)
# InfiniBand, 200 Gb/s for each rank.
HDR = Link(bandwidth=23e9, latency=12e-6, disturbs=0.1)
# 100 Gb/s for each machine.
ETHERNET = Link(bandwidth=11e9, latency=50e-6, per="group", disturbs=0.1)
PCIE_SWITCH = Link(bandwidth=17.5e9, latency=10e-6, disturbs=1.0)
# Links between PCIe switches, through the machine's processors. Fitted to table 3 of USP (arXiv 2405.07719), where a
# rank attains 17 GB/s in a ring, about 3 in an all-to-all of four ranks and about 1 in one of eight, without overlap.
HOST_BRIDGES = Link(bandwidth=17.5e9, latency=20e-6, disturbs=1.0, crowding=1.6)

_H100 = Cluster(
    name="H100 80 GB", accelerator=H100, host_memory=2 * TB, within=NVLINK_4, between=NDR, ranks_per_node=8, nodes=1
)
_H200 = replace(_H100, name="H200 141 GB", accelerator=H200)
_A100 = Cluster(
    name="A100 80 GB", accelerator=A100_80, host_memory=TB, within=NVLINK_3, between=HDR, ranks_per_node=8, nodes=1
)
_A800 = replace(_A100, name="A800 80 GB", accelerator=replace(A100_80, name="A800 80 GB"), within=NVLINK_A800)
_A100_40 = replace(_A100, name="A100 40 GB", accelerator=A100_40)
_L20 = Cluster(
    name="L20 48 GB on PCIe",
    accelerator=L20,
    host_memory=TB,
    within=HOST_BRIDGES,
    between=ETHERNET,
    ranks_per_node=8,
    nodes=1,
)


def _over_ethernet(cluster: Cluster, machine: str = "", ranks: int = 8) -> Cluster:
    """Returns machines of `ranks` accelerators on Ethernet. `machine` describes them in the name."""
    return replace(cluster, name=f"{cluster.name}{machine} over Ethernet", ranks_per_node=ranks, between=ETHERNET)


MACHINES = {
    "h100": _H100,
    "h100-ethernet": _over_ethernet(_H100),
    "h200": _H200,
    "h200-ethernet": _over_ethernet(_H200),
    "a100-80": _A100,
    "a100-80-ethernet": _over_ethernet(_A100),
    "a800": _A800,
    "a100-40": _A100_40,
    "a100-40-ethernet": _over_ethernet(_A100_40),
    "a100-40x16-ethernet": _over_ethernet(_A100_40, ", 16 a machine,", ranks=16),
    "l20": replace(_L20, switch=PCIE_SWITCH, switch_ranks=2),
}
"""One machine of each kind; `Cluster.named` takes a number of accelerators and a kind, as in "16xh100"."""

# -- slow networks, which benchmarks emulate on one machine with network namespaces ------------------------------------

# Accelerator of one of 16 ranks that share two cores, in float32. Benchmarks that need its real speed measure it.
CORE = Accelerator(
    name="share of a processor",
    memory=GiB,
    flops=4e9,
    memory_bandwidth=2e9,
    host_bandwidth=2e9,
    matmul=1.0,
    attention=1.0,
    attention_backward=1.0,
    step=2e-3,
)

# Processor seconds per message, of sender and receiver together.
_SOFTWARE = 1e-4

# Seconds for gloo and for waking a process up. The emulated wires have no latency.
_LATENCY = 5e-4

# A gloo receiver requests data on the connection by which it sends, so a rank that is late for a collective queues
# its request behind its own data. Fitted, between no rank late (0) and every rank late (1).
_TURNS = 0.35

# Bytes of a socket's send buffer, as the emulation sets it.
_SOCKET = 1 << 18


def _emulated(title: str, nodes: int, per_node: int, within: tuple[float, Wiring], wiring: Wiring) -> Cluster:
    """Returns a cluster whose links between nodes have 2 MB/s.

    Args:
        within: (MB/s, `per`) of the links inside nodes.
        wiring: `per` of the links between nodes.
    """

    def link(megabytes: float, per: Wiring) -> Link:
        # All ranks send at once, and two processors handle their messages.
        software = _SOFTWARE * nodes * per_node / 2
        speed = megabytes * 1e6
        return Link(bandwidth=speed, latency=_LATENCY, per=per, message=software, turns=_TURNS, buffer=_SOCKET)

    return Cluster(
        name=f"emulated: {title}",
        nodes=nodes,
        ranks_per_node=per_node,
        accelerator=CORE,
        host_memory=4 * GiB,
        within=link(*within),
        between=link(2, wiring),
    )


EMULATED = {
    "emulated-4x4-card-per-rank": _emulated("4 nodes of 4, a card each rank", 4, 4, (8, "rank"), "rank"),
    "emulated-4x4-card-per-node": _emulated("4 nodes of 4, a card each node", 4, 4, (8, "rank"), "group"),
    "emulated-2x4-card-per-node": _emulated("2 nodes of 4, a card each node", 2, 4, (8, "rank"), "group"),
    "emulated-1x8-mesh": _emulated("8 ranks, a link each pair", 1, 8, (2, "pair"), "rank"),
}
