"""Machines by the names that people type. Bandwidths are what large messages attain, not what is printed on the box."""

from __future__ import annotations

from dataclasses import replace

from armillary.plan.cluster.network import Link, Wiring
from armillary.plan.cluster.node import Accelerator, Node

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
    name="A100 80 GB",
    memory=int(79.2 * GiB),
    flops=312e12,
    memory_bandwidth=2.0e12,
    host_bandwidth=22e9,
    capability=8.0,
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
NDR = Link(bandwidth=46e9, latency=12e-6, disturbs=0.1)
"""InfiniBand, 400 Gb/s for each rank."""
HDR = Link(bandwidth=23e9, latency=12e-6, disturbs=0.1)
"""InfiniBand, 200 Gb/s for each rank."""
ETHERNET = Link(bandwidth=11e9, latency=50e-6, per="group", disturbs=0.1)
"""100 Gb/s for each machine."""
PCIE_SWITCH = Link(bandwidth=17.5e9, latency=10e-6, disturbs=1.0)
HOST_BRIDGES = Link(bandwidth=17.5e9, latency=20e-6, disturbs=1.0, crowding=1.6)
"""From switch to switch through a machine's processors. What table 3 of USP (arXiv 2405.07719) comes to: a ring attains
17 GB/s a rank, an all-to-all of four ranks some 3, of eight about 1, and neither is hidden behind computation."""

_H100 = Node(name="H100 80 GB", ranks_per_node=8, accelerator=H100, host_memory=2 * TB, within=NVLINK_4, between=NDR)
_A100 = Node(name="A100 80 GB", ranks_per_node=8, accelerator=A100_80, host_memory=TB, within=NVLINK_3, between=HDR)
_A100_40 = replace(_A100, name="A100 40 GB", accelerator=A100_40)
_SLOW = "over Ethernet"

MACHINES = {
    "h100": _H100,
    "h100-ethernet": replace(_H100, name=f"{_H100.name} {_SLOW}", between=ETHERNET),
    "h200": replace(_H100, name="H200 141 GB", accelerator=H200),
    "h200-ethernet": replace(_H100, name=f"H200 141 GB {_SLOW}", accelerator=H200, between=ETHERNET),
    "a100-80": _A100,
    "a100-80-ethernet": replace(_A100, name=f"{_A100.name} {_SLOW}", between=ETHERNET),
    "a100-40": _A100_40,
    "a100-40-ethernet": replace(_A100_40, name=f"{_A100_40.name} {_SLOW}", between=ETHERNET),
    "a100-40x16-ethernet": replace(
        _A100_40, name=f"A100 40 GB, 16 a machine, {_SLOW}", ranks_per_node=16, between=ETHERNET
    ),
    "l20": Node(
        name="L20 48 GB on PCIe",
        ranks_per_node=8,
        accelerator=L20,
        host_memory=TB,
        within=HOST_BRIDGES,
        between=ETHERNET,
        switch=PCIE_SWITCH,
        switch_ranks=2,
    ),
}
"""By kind; a number of accelerators before it makes a cluster, as in "16xh100"."""

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
"""Of 16 ranks on two cores; in float32. What one has really is measured where it matters."""

_SOFTWARE = 1e-4
"""Seconds of a processor that a message costs at both ends together, while two of them serve all ranks."""

_LATENCY = 5e-4
"""Seconds: of gloo and of waking up, as the wires themselves have none."""

_TURNS = 0.35
"""With gloo a rank asks for what it is to be sent, on the connection by which it sends: whoever comes later to a
collective asks behind its own data. Sometimes nobody is late, sometimes all wait for it."""

_SOCKET = 1 << 18
"""Bytes of a connection's send buffer, as the emulation sets it."""


def _wire(megabytes: float, ranks: int, per: Wiring = "rank") -> Link:
    """So many MB a second, each way; messages of so many ranks wait for the two processors."""
    software = _SOFTWARE * ranks / 2
    return Link(bandwidth=megabytes * 1e6, latency=_LATENCY, per=per, message=software, turns=_TURNS, buffer=_SOCKET)


_NODE = Node(
    name="emulated: 4 nodes of 4, a card each rank",
    ranks_per_node=4,
    accelerator=CORE,
    host_memory=4 * GiB,
    within=_wire(8, ranks=16),
    between=_wire(2, ranks=16),
)

EMULATED = {
    "emulated-4x4-card-per-rank": (4, _NODE),
    "emulated-4x4-card-per-node": (
        4,
        replace(_NODE, name="emulated: 4 nodes of 4, a card each node", between=_wire(2, ranks=16, per="group")),
    ),
    "emulated-2x4-card-per-node": (
        2,
        replace(
            _NODE,
            name="emulated: 2 nodes of 4, a card each node",
            within=_wire(8, ranks=8),
            between=_wire(2, ranks=8, per="group"),
        ),
    ),
    "emulated-1x8-mesh": (
        1,
        replace(
            _NODE,
            name="emulated: 8 ranks, a link each pair",
            ranks_per_node=8,
            within=_wire(2, ranks=8, per="pair"),
            between=_wire(2, ranks=8),
        ),
    ),
}
"""How many machines, and which: networks slow enough to be made of network namespaces on one machine."""
