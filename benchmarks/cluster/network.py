"""A `Cluster` emulated by network namespaces, one per rank, with wires of the cluster's bandwidth.

A wire is a veth pair with a token bucket (`tc tbf`) at either end, one per direction, at which all pairs of ranks
alternate packet by packet. Switches are bridges without delay. As in a network with credits no queue overflows: TCP's
window is too small to fill one, and TCP keeps its state between messages. Every rank has one address, and a route to
each other rank over its wire.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import namespaces
from namespaces import Namespaces
from wiring import End, Wiring

from armillary.plan import Cluster

MTU = 9000
"""Bytes of a packet. Segmentation offload is off, because a bucket takes complete packets."""
ETHERNET = 14
"""Bytes of the Ethernet header."""
LATE = 2.5e-4
"""Seconds by which a bucket's timer may be late without losing bandwidth: a bucket holds one packet and the traffic of
that time. As small as possible, because an idle sender may send that much at once."""
SMALL = 256
"""Packets of fewer bytes do not queue behind larger ones, because networks of accelerators have separate lanes for
requests and acknowledgements."""
QUEUE = 64 << 20
"""Capacity of a wire's queue in bytes: more than all connections have in flight."""
PATIENCE = "10s"
"""Time before TCP sends unacknowledged data again; it is still in a queue."""
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",  # other algorithms pace and probe for bandwidth
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_reordering": "300",  # a packet overtaken by small ones does not count as lost
    "net/ipv4/tcp_sack": "0",  # nor by the timer of selective acknowledgements
    "net/ipv4/tcp_rmem": "4096 524288 524288",
    "net/ipv4/tcp_wmem": "4096 262144 262144",
    "net/ipv4/conf/all/rp_filter": "0",  # replies may use another wire
    "net/ipv6/conf/all/disable_ipv6": "1",
}
"""Kernel settings of each rank's namespace."""
HOME = "home"
"""A rank's dummy interface with its address, which is reachable over all of its wires."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of the ranks: one thread, no accelerator, and no warnings about missing DNS."""


class EmulatedCluster:
    """The connected namespaces of a cluster. A context manager: its end removes them and kills their processes.

    Besides its wires each host has an interface on an unlimited network, for torchrun's rendezvous.

    Raises:
        ValueError: an unsupported machine, see `obstacle`; or unsupported links, see `Wiring`.
    """

    def __init__(self, cluster: Cluster) -> None:
        if (reason := obstacle()) is not None:
            raise ValueError(reason)
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
        """Kills all processes, launchers first, and removes the namespaces. May be called again."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a second Ctrl-C must not interrupt the removal
        try:
            self.hosts.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def torchrun(self, program: Sequence[str], **kwargs: Any) -> list[subprocess.Popen[Any]]:
        """Starts `program` on every rank, with one torchrun per node; `kwargs` as for `subprocess.Popen`."""
        meeting = f"--rdzv-backend c10d --rdzv-id run --rdzv-endpoint {self.hosts.addresses[0]}:29400"
        ranks = f"--nnodes {self.cluster.nodes} --nproc-per-node {self.cluster.ranks_per_node} --no-python"
        # Each rank enters its namespace by itself, because only the rank knows its number.
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
        lanes = {
            end: [(wiring.address(source), wiring.address(target)) for source, target in pairs]
            for end, pairs in wiring.crossing().items()
        }
        for host, name in enumerate(names):
            ends = [(end.name, w.bandwidth) for w in wires for end in w[:2] if end.host == host]
            master = " master wires" if host in switches else ""
            _batch("ip", name, [f"link set {end} up gso_max_size {MTU} gso_max_segs 1{master}" for end, _ in ends])
            shaping = (shaped(end, bandwidth, lanes.get(End(host, end), ())) for end, bandwidth in ends)
            _batch("tc", name, chain.from_iterable(shaping))
        for rank in range(self.cluster.ranks):
            self._address(rank)

    def _address(self, rank: int) -> None:
        wiring, name = self.wiring, self.hosts.names[self.wiring.host(rank)]
        source, peers = wiring.address(rank), (r for r in range(self.cluster.ranks) if r != rank)
        writes = [f'echo "{value}" > /proc/sys/{key}' for key, value in SETTINGS.items()]
        subprocess.run(["ip", "netns", "exec", name, "sh", "-ec", "\n".join(writes)], check=True)
        onward = f"src {source} scope link rto_min {PATIENCE}"
        routes = (f"route add {wiring.address(r)} dev {wiring.interface(rank, r)} {onward}" for r in peers)
        home = (f"link add {HOME} type bridge", f"address add {source}/32 dev {HOME}", f"link set {HOME} up")
        _batch("ip", name, [*home, *routes])


def leave_on_signals() -> None:
    """Turns the first termination signal into an exception, so that context managers close.

    Later signals are ignored: a parent may forward a signal that the terminal has already sent, which would interrupt
    the closing.
    """

    def leave(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in SIGNALS:
        signal.signal(each, leave)


def results_of(cluster: Cluster, script: Path, *arguments: str) -> Any:
    """Runs a script on each rank of an emulated cluster. Returns the JSON that rank 0 writes to the file `--out`."""
    with TemporaryDirectory() as folder, EmulatedCluster(cluster) as emulated:
        path = Path(folder) / "results.json"
        program = [sys.executable, str(script.resolve()), *arguments, "--out", str(path)]
        wait(emulated.torchrun(program, env={**os.environ, **QUIET}, start_new_session=True))
        return json.loads(path.read_text())


def wait(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Waits until all processes have succeeded or one has failed.

    Raises:
        SystemExit: a process has failed and printed its error.
    """
    while None in (codes := [process.poll() for process in processes]) or any(codes):
        if any(codes):
            sys.exit(f"exit codes of the nodes: {codes}")
        time.sleep(0.1)


def shaped(end: str, bandwidth: float, lanes: Sequence[tuple[str, str]]) -> list[str]:
    """tc commands for the end of a wire: it sends `bandwidth` bytes a second, and all `lanes` alternate.

    Args:
        lanes: (sender, receiver) addresses.
    """
    size, handle = MTU + ETHERNET + int(bandwidth * LATE), "parent 2: protocol ip prio 1 u32 match"
    commands = [
        f"qdisc add dev {end} root handle 1: tbf rate {int(bandwidth)}bps burst {size} limit {QUEUE}",
        f"qdisc add dev {end} parent 1:1 handle 2: htb default 2",  # classes for lanes, whose rates do not limit
        *_lane(end, 1, priority=0),
        f"filter add dev {end} {handle} u16 0 {(1 << 16) - SMALL:#x} at 2 flowid 2:1",  # the packet's length
        *_lane(end, 2),  # packets other than IP
    ]
    for number, (source, target) in enumerate(lanes, start=3):
        commands += _lane(end, number)
        commands += [f"filter add dev {end} {handle} ip src {source} match ip dst {target} flowid 2:{number:x}"]
    return commands


def _lane(end: str, number: int, priority: int = 1) -> list[str]:
    return [
        f"class add dev {end} parent 2: classid 2:{number:x} htb rate 10gbit quantum {MTU + ETHERNET} prio {priority}",
        f"qdisc add dev {end} parent 2:{number:x} bfifo limit {QUEUE}",
    ]


def obstacle() -> str | None:
    """The reason why an `EmulatedCluster` does not work on this machine, or None."""
    if shutil.which("tc") is None:
        return "shaped links need the program tc; install iproute2"
    return namespaces.obstacle()


def _batch(program: str, namespace: str, commands: Iterable[str]) -> None:
    """Runs commands of ip or tc in one namespace."""
    text = "\n".join(commands)
    ran = subprocess.run([program, "-n", namespace, "-batch", "-"], input=text, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{program} in {namespace}: {ran.stderr.strip()}\n{text}")
