"""A `Cluster` made of network namespaces: each rank has its own, and its wires are as fast as the cluster says.

A wire is a veth pair with a token bucket (`tc tbf`) at either end, one for each way. Switches are bridges; what they
forward, they forward at once. No queue overflows: TCP may have so little under way that none can (as in a network with
credits), and forgets nothing between messages. Every rank has one address, and to each other a route over its wire.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from armillary.core import Cluster
from armillary.core.testing import namespaces
from armillary.core.testing.namespaces import Namespaces

MTU = 9000
"""Bytes of a packet, and no larger ones to be cut up on the way: a bucket takes whole packets."""
BURST = 1e-3
"""Seconds of traffic that a bucket holds: a millisecond late, its timer has lost nothing."""
SMALL = 256
"""Packets of fewer bytes do not queue behind larger ones: accelerators' networks have lanes of their own for what asks
for data and acknowledges it."""
QUEUE = 64 << 20
"""Bytes that may wait at a wire: more than all connections have under way together."""
PATIENCE = "10s"
"""Before TCP sends again what has not been acknowledged: it is still in a queue."""
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",  # others pace, and probe for a bandwidth that is known here
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_reordering": "300",  # what small packets have overtaken is not lost
    "net/ipv4/tcp_sack": "0",  # and with it the clock that would say so
    "net/ipv4/tcp_rmem": "4096 524288 524288",
    "net/ipv4/tcp_wmem": "4096 262144 262144",
    "net/ipv4/conf/all/rp_filter": "0",  # answers may take another wire
    "net/ipv6/conf/all/disable_ipv6": "1",
}
"""Of each rank's namespace."""
HOME = "home"
"""A rank's interface that leads nowhere and has its address, whichever wires it is reached by."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Of the ranks' environment: one thread, no accelerator, and no warnings that namespaces have no DNS."""


class End(NamedTuple):
    """An interface of a host."""

    host: int
    name: str


class Wire(NamedTuple):
    """Two interfaces joined, so many bytes a second each way."""

    one: End
    other: End
    bandwidth: float


@dataclass(frozen=True)
class Wiring:
    """Which hosts there are and how they are joined: nodes first (each a switch), then ranks, then the spine.

    Raises:
        ValueError: links that cannot be made of wires and switches.
    """

    cluster: Cluster

    def __post_init__(self) -> None:
        cluster = self.cluster
        if cluster.switch or cluster.within.per == "group" or cluster.between.per == "pair":
            raise ValueError(
                f"{cluster.name}: within per {cluster.within.per}, between per {cluster.between.per}, switches of "
                f"{cluster.switch_ranks} ranks; can be emulated: within per rank or pair, between per rank or group, "
                "one switch in a node"
            )
        if cluster.between.per == "group" and cluster.within.per == "pair":
            raise ValueError(f"{cluster.name}: a card for each node needs a port for each rank within, not pairs")

    @property
    def spine(self) -> int:
        """The host that joins the nodes."""
        return self.cluster.nodes + self.cluster.ranks

    def host(self, rank: int) -> int:
        return self.cluster.nodes + rank

    def node(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_node

    def address(self, rank: int) -> str:
        return f"10.78.{rank // 250}.{rank % 250 + 1}"

    def wires(self) -> Iterator[Wire]:
        within, between, ranks = self.cluster.within, self.cluster.between, range(self.cluster.ranks)
        for rank in ranks:
            host = self.host(rank)
            if within.per == "rank":
                yield Wire(End(host, "within"), End(self.node(rank), f"port{rank}"), within.bandwidth)
            else:
                others = (r for r in ranks if r > rank and self.node(r) == self.node(rank))
                yield from (
                    Wire(End(host, f"pair{r}"), End(self.host(r), f"pair{rank}"), within.bandwidth) for r in others
                )
            if between.per == "rank" and self.cluster.nodes > 1:
                yield Wire(End(host, "card"), End(self.spine, f"port{rank}"), between.bandwidth)
        if between.per == "group" and self.cluster.nodes > 1:
            for node in range(self.cluster.nodes):
                yield Wire(End(node, "card"), End(self.spine, f"port{node}"), between.bandwidth)

    def interface(self, rank: int, other: int) -> str:
        """Through which a rank reaches another."""
        if self.node(rank) == self.node(other):
            return "within" if self.cluster.within.per == "rank" else f"pair{other}"
        return "card" if self.cluster.between.per == "rank" else "within"


class EmulatedCluster:
    """The namespaces of a cluster, wired up. A context manager: they go when it ends, with all that runs there.

    Beside its wires each host has an interface on a network without limits, by which torchrun finds its like.

    Raises:
        ValueError: a machine where this does not work, see `obstacle`; or see `Wiring`.
    """

    def __init__(self, cluster: Cluster) -> None:
        if (why := obstacle()) is not None:
            raise ValueError(why)
        self.cluster, self.wiring = cluster, Wiring(cluster)
        self.hosts = Namespaces(self.wiring.spine + 1)

    def __enter__(self) -> Self:
        try:
            self.hosts.__enter__()
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that runs there, first what starts others, and removes the namespaces. May be called again."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a second Ctrl-C must not leave half of them
        try:
            self.hosts.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def torchrun(self, program: Sequence[str], **kwargs: Any) -> list[subprocess.Popen[Any]]:
        """Starts `program` as every rank, under a torchrun for each node; `kwargs` as for `subprocess.Popen`."""
        meeting = f"--rdzv-backend c10d --rdzv-id run --rdzv-endpoint {self.hosts.addresses[0]}:29400"
        ranks = f"--nnodes {self.cluster.nodes} --nproc-per-node {self.cluster.ranks_per_node} --no-python"
        # A node's ranks run in namespaces of their own, which only the rank itself knows the number of.
        into = f"{self.hosts.names[0].removesuffix('0')}$((RANK + {self.cluster.nodes}))"
        enter = f'exec ip netns exec {into} env GLOO_SOCKET_IFNAME={HOME} "$@"'
        run = [sys.executable, "-m", "torch.distributed.run", *f"{meeting} {ranks}".split()]
        return [
            self.hosts.run(node, [*run, "--local-addr", address, "sh", "-c", enter, "sh", *program], **kwargs)
            for node, address in enumerate(self.hosts.addresses[: self.cluster.nodes])
        ]

    def _wire(self) -> None:
        wiring, names, wires = self.wiring, self.hosts.names, list(self.wiring.wires())
        switches = {*range(self.cluster.nodes), wiring.spine}
        for host in switches:
            _batch("ip", names[host], ["link add wires type bridge", "link set wires up"])
        for host, name in enumerate(names):
            veth = f"mtu {MTU} type veth peer mtu {MTU}"
            _batch(
                "ip",
                name,
                [
                    f"link add {a.name} {veth} name {b.name} netns {names[b.host]}"
                    for a, b, _ in wires
                    if a.host == host
                ],
            )
        for host, name in enumerate(names):
            ends = [(end.name, w.bandwidth) for w in wires for end in w[:2] if end.host == host]
            master = " master wires" if host in switches else ""
            _batch("ip", name, [f"link set {end} up gso_max_size {MTU} gso_max_segs 1{master}" for end, _ in ends])
            _batch("tc", name, [command for end, bandwidth in ends for command in shaped(end, bandwidth)])
        for rank in range(self.cluster.ranks):
            self._address(rank)

    def _address(self, rank: int) -> None:
        wiring, name = self.wiring, self.hosts.names[self.wiring.host(rank)]
        source, others = wiring.address(rank), (r for r in range(self.cluster.ranks) if r != rank)
        writes = [f'echo "{value}" > /proc/sys/{key}' for key, value in SETTINGS.items()]
        subprocess.run(["ip", "netns", "exec", name, "sh", "-ec", "\n".join(writes)], check=True)
        onward = f"src {source} scope link rto_min {PATIENCE}"
        routes = (f"route add {wiring.address(r)} dev {wiring.interface(rank, r)} {onward}" for r in others)
        home = (f"link add {HOME} type bridge", f"address add {source}/32 dev {HOME}", f"link set {HOME} up")
        _batch("ip", name, [*home, *routes])


def leave_on_signals() -> None:
    """From now on whoever ends this process, but by force, ends it as an exception does: context managers close.

    Once: what comes after the first signal, as from a parent that hands on what the terminal has sent already, would
    end them before they have closed.
    """

    def leave(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in SIGNALS:
        signal.signal(each, leave)


def wait(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Until all have ended well, or one has not.

    Raises:
        SystemExit: one has failed, and said why.
    """
    while None in (codes := [process.poll() for process in processes]) or any(codes):
        if any(codes):
            sys.exit(f"exit codes of the nodes: {codes}")
        time.sleep(0.1)


def shaped(end: str, bandwidth: float) -> tuple[str, ...]:
    """Commands of tc for a wire's end: what leaves there is `bandwidth` bytes a second, small packets first."""
    size = max(2 * (MTU + 14), int(bandwidth * BURST))
    return (
        f"qdisc add dev {end} root handle 1: tbf rate {int(bandwidth)}bps burst {size} limit {QUEUE}",
        f"qdisc add dev {end} parent 1:1 handle 2: htb default 2",  # for its priorities: its rates hold nothing up
        f"class add dev {end} parent 2: classid 2:1 htb rate 10gbit quantum {MTU} prio 0",
        f"class add dev {end} parent 2: classid 2:2 htb rate 10gbit quantum {MTU} prio 1",
        f"qdisc add dev {end} parent 2:2 bfifo limit {QUEUE}",
        f"filter add dev {end} parent 2: protocol ip u32 match u16 0 {(1 << 16) - SMALL:#x} at 2 flowid 2:1",  # length
    )


def obstacle() -> str | None:
    """Why this machine cannot have an `EmulatedCluster`; None where it can."""
    if shutil.which("tc") is None:
        return "shaped links need the program tc; install iproute2"
    return namespaces.obstacle()


def _batch(program: str, namespace: str, commands: Iterable[str]) -> None:
    """Commands of ip or tc, all in one namespace."""
    text = "\n".join(commands)
    ran = subprocess.run([program, "-n", namespace, "-batch", "-"], input=text, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{program} in {namespace}: {ran.stderr.strip()}\n{text}")
