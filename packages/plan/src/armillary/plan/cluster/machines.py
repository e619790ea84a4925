"""Presets of machines. Memory bandwidths are nominal. Other bandwidths are lower: those that large messages attain."""

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
NDR = Link(bandwidth=46e9, latency=12e-6, disturbs=0.1)
"""InfiniBand, 400 Gb/s for each rank."""
NVLINK_A800 = Link(bandwidth=160e9, latency=8e-6, disturbs=0.1)
"""An A800 has 400 GB/s, both directions together; an A100 has 600."""
HDR = Link(bandwidth=23e9, latency=12e-6, disturbs=0.1)
"""InfiniBand, 200 Gb/s for each rank."""
ETHERNET = Link(bandwidth=11e9, latency=50e-6, per="group", disturbs=0.1)
"""100 Gb/s for each machine."""
PCIE_SWITCH = Link(bandwidth=17.5e9, latency=10e-6, disturbs=1.0)
HOST_BRIDGES = Link(bandwidth=17.5e9, latency=20e-6, disturbs=1.0, crowding=1.6)
"""Links between PCIe switches, through the machine's processors. Fitted to table 3 of USP (arXiv 2405.07719), where a
rank attains 17 GB/s in a ring, about 3 in an all-to-all of four ranks and about 1 in one of eight, without overlap."""

_H100 = Node(name="H100 80 GB", ranks_per_node=8, accelerator=H100, host_memory=2 * TB, within=NVLINK_4, between=NDR)
_H200 = replace(_H100, name="H200 141 GB", accelerator=H200)
_A100 = Node(name="A100 80 GB", ranks_per_node=8, accelerator=A100_80, host_memory=TB, within=NVLINK_3, between=HDR)
_A800 = replace(_A100, name="A800 80 GB", accelerator=replace(A100_80, name="A800 80 GB"), within=NVLINK_A800)
_A100_40 = replace(_A100, name="A100 40 GB", accelerator=A100_40)
_L20 = Node(
    name="L20 48 GB on PCIe", ranks_per_node=8, accelerator=L20, host_memory=TB, within=HOST_BRIDGES, between=ETHERNET
)


def _over_ethernet(node: Node, machine: str = "", ranks: int = 8) -> Node:
    """Returns a node of `ranks` accelerators on Ethernet. `machine` describes it in the name."""
    return replace(node, name=f"{node.name}{machine} over Ethernet", ranks_per_node=ranks, between=ETHERNET)


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
"""Nodes by kind; `Cluster.named` takes a number of accelerators and a kind, as in "16xh100"."""

# -- slow networks, which benchmarks emulate on one machine with network namespaces ------------------------------------

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
"""Accelerator of one of 16 ranks that share two cores, in float32. Benchmarks that need its real speed measure it."""

_SOFTWARE = 1e-4
"""Processor seconds per message, of sender and receiver together."""

_LATENCY = 5e-4
"""Seconds for gloo and for waking a process up. The emulated wires have no latency."""

_TURNS = 0.35
"""A gloo receiver requests data on the connection by which it sends, so a rank that is late for a collective queues its
request behind its own data. Fitted, between no rank late (0) and every rank late (1)."""

_SOCKET = 1 << 18
"""Bytes of a socket's send buffer, as the emulation sets it."""


def _emulated_nodes(
    title: str, nodes: int, per_node: int, within: tuple[float, Wiring], wiring: Wiring
) -> tuple[int, Node]:
    """Returns (number of nodes, node).

    Args:
        within: (MB/s, `per`) of the links inside nodes.
        wiring: `per` of the links between nodes, which have 2 MB/s.
    """

    def link(megabytes: float, per: Wiring) -> Link:
        # All ranks send at once, and two processors handle their messages.
        software = _SOFTWARE * nodes * per_node / 2
        speed = megabytes * 1e6
        return Link(bandwidth=speed, latency=_LATENCY, per=per, message=software, turns=_TURNS, buffer=_SOCKET)

    return nodes, Node(
        name=f"emulated: {title}",
        ranks_per_node=per_node,
        accelerator=CORE,
        host_memory=4 * GiB,
        within=link(*within),
        between=link(2, wiring),
    )


EMULATED = {
    "emulated-4x4-card-per-rank": _emulated_nodes("4 nodes of 4, a card each rank", 4, 4, (8, "rank"), "rank"),
    "emulated-4x4-card-per-node": _emulated_nodes("4 nodes of 4, a card each node", 4, 4, (8, "rank"), "group"),
    "emulated-2x4-card-per-node": _emulated_nodes("2 nodes of 4, a card each node", 2, 4, (8, "rank"), "group"),
    "emulated-1x8-mesh": _emulated_nodes("8 ranks, a link each pair", 1, 8, (2, "pair"), "rank"),
}
