"""The emulated cluster of benchmarks/cluster: its wires, their bandwidth limits and their removal."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launches import PATIENCE, Launch, environment

from armillary.plan import Cluster, Link

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "cluster"))
from contenders import RACES, race
from network import EmulatedCluster, leave_on_signals, obstacle
from verdict import verdict
from wiring import End, Wiring

needs_namespaces = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
CARDS, SHARED, MESH, MIXED = (Cluster.named(name) for name in RACES)
TWO = replace(CARDS, nodes=2, ranks_per_node=1, between=Link(bandwidth=1e6))


def keep_cluster() -> None:
    """Keeps a cluster with running processes until it is interrupted."""
    leave_on_signals()
    with EmulatedCluster(MESH) as cluster:
        processes = [cluster.hosts.run(i, ["sleep", "600"]) for i in range(3)]
        print("up", *(process.pid for process in processes), flush=True)
        processes[0].wait()


def test_routes_cross_the_expected_links():
    node, spine = [End(0, "port2")], [End(CARDS.nodes + CARDS.ranks, "port5")]
    assert list(Wiring(CARDS).way(1, 2)) == [End(Wiring(CARDS).host(1), "within"), *node]
    assert list(Wiring(CARDS).way(1, 5)) == [End(Wiring(CARDS).host(1), "card"), *spine]
    card = [End(0, "card"), End(Wiring(SHARED).spine, "port1"), End(1, "port5")]
    assert list(Wiring(SHARED).way(1, 5)) == [End(Wiring(SHARED).host(1), "within"), *card]
    assert list(Wiring(MESH).way(1, 5)) == [End(Wiring(MESH).host(1), "pair5")]
    for cluster in (CARDS, SHARED, MESH, MIXED):
        crossing = Wiring(cluster).crossing()
        assert set(crossing) == {end for wire in Wiring(cluster).wires() for end in (wire.one, wire.other)}
    crossing = Wiring(SHARED).crossing()
    assert sorted(crossing[End(1, "card")]) == [(a, b) for a in range(4, 8) for b in range(16) if b not in range(4, 8)]


def test_predictions_are_compared_with_measurements():
    figures = {"ring": (1.0, 1.0, 9.0), "a": (2.0, 2.2, 4.0), "b": (2.05, 2.3, 3.9), "c": (0.5, 1.1, 8.0)}
    keys = ("over ring", "predicted over ring", "predicted")
    rows = [{"shapes": "S", "contender": name, **dict(zip(keys, each, strict=True))} for name, each in figures.items()]
    assert verdict(rows) == (
        "S: not predicted: ring before c; predicted ratios over ring off by up to +120% (c); "
        "predicted best b, 0% slower than the measured best, b"
    )
    assert verdict(rows[:3]).startswith("S: ranking as predicted; predicted ratios over ring off by up to +12% (b)")


def test_each_contender_has_a_plan_for_its_shapes():
    for cluster in RACES:
        chosen = race(cluster, 32)
        for contender in chosen.contenders:
            for shapes in chosen.shapes:
                layout, plan = contender.layout(shapes), contender.comm_plan(shapes)
                assert layout.length == 32 * chosen.cluster.ranks and layout.shards == contender.ring
                assert all(plan.bytes(rank) for rank in range(chosen.cluster.ranks))


@pytest.mark.long  # the basis of docs/benchmarks/cluster-*.md
@needs_namespaces
def test_ring_over_wires_is_right_and_limited_by_bandwidth():
    with EmulatedCluster(TWO) as cluster:
        program = [sys.executable, str(Path(__file__).parent / "cluster_rank.py")]
        options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes = cluster.torchrun(program, **options)
        output = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    actual = json.loads(output[0][0])
    assert actual["error"] < 1e-5
    assert actual["sent"] == 64 * 4 * 64 * 4 * (2 + 4)  # k and v; again with their gradients
    assert actual["seconds"] > 0.8 * actual["sent"] / TWO.between.bandwidth  # token buckets let a small burst through


@needs_namespaces
def test_interrupted_cluster_removes_namespaces_and_processes(tmp_path):
    with Launch(keep_cluster, tmp_path) as launch:
        launch.wait_for(r"^up( \d+){3}\n")
        _, *pids = launch.printed.split()
        assert namespaces_of(launch.process.pid)
        launch.signal(signal.SIGTERM)
        assert launch.wait() not in (0, None)
    assert not namespaces_of(launch.process.pid)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"armillary-{pid}-")]
