"""Clusters: presets, files, and transfer times over their links."""

from dataclasses import replace

import pytest

from armillary.attention.plans import Send
from armillary.plan import Cluster, Link
from armillary.plan.cluster import EMULATED, MACHINES
from armillary.plan.cluster.network import concurrent_seconds
from armillary.train.device import PEAK_FLOPS

GB = 10**9
KINDS = {"h200": "h200", "h100": "h100", "a100": "a100-80", "l20": "l20"}
NODES = replace(
    Cluster.named("16xh100"),
    within=Link(bandwidth=100 * GB, latency=1e-6),
    between=Link(bandwidth=10 * GB, latency=1e-3),
)


def seconds(cluster: Cluster, *sends: tuple[int, int, int]) -> float:
    return cluster.transit(Send(*send) for send in sends)


def test_presets():
    nodes = {"8xh100": 1, "64xh100": 8, "32xa100-40x16-ethernet": 2, "8xl20": 1}
    assert {name: Cluster.named(name).nodes for name in nodes} == nodes
    assert Cluster.named("64xh100").name == "64 x H100 80 GB" and Cluster.named("64xh100").ranks == 64
    assert Cluster.named("16xh100").host_memory == 2000 * GB
    parts = {
        "4xh100": (1, 4),
        "2x4xh100": (2, 4),
        "1x8xh100": (1, 8),
        "1xl20": (1, 1),
        "2x16xa100-40x16-ethernet": (2, 16),
    }
    clusters = {name: Cluster.named(name) for name in parts}
    assert {name: (cluster.nodes, cluster.ranks_per_node) for name, cluster in clusters.items()} == parts
    assert clusters["2x4xh100"].name == "2 x 4 x H100 80 GB"
    assert all(Cluster.named(name).ranks in (8, 16) for name in EMULATED)
    assert all(Cluster.named(f"{machine.ranks_per_node}x{kind}").nodes == 1 for kind, machine in MACHINES.items())


def test_presets_and_the_trainer_have_the_same_peak_flops():
    peaks = {kind.upper(): MACHINES[name].accelerator.flops for kind, name in KINDS.items()}
    assert peaks == PEAK_FLOPS


def test_the_busiest_port_sets_the_time():
    nothing = (3, 3, GB), (0, 1, 0)
    assert seconds(NODES, *nothing) == 0 and NODES.transit([]) == 0
    assert seconds(NODES, (0, 1, GB), *nothing) == pytest.approx(1e-2 + 1e-6)  # a rank sends nothing to itself
    assert seconds(NODES, (0, 1, GB), (1, 2, GB), (2, 0, GB)) == pytest.approx(1e-2 + 1e-6)  # ports are full duplex
    assert seconds(NODES, (0, 1, GB), (0, 2, GB)) == pytest.approx(2e-2 + 1e-6)  # two sends from one port
    assert seconds(NODES, (1, 0, GB), (2, 0, GB)) == pytest.approx(2e-2 + 1e-6)  # two sends to one port
    assert seconds(NODES, (0, 8, GB), (1, 9, GB), (0, 1, GB)) == pytest.approx(0.1 + 1e-3)  # each rank has a card


def test_network_cards_buses_and_full_meshes():
    card = replace(NODES, between=Link(bandwidth=10 * GB, per="group"))
    assert seconds(card, (0, 8, GB), (1, 9, GB), (2, 3, GB)) == pytest.approx(0.2, rel=1e-4)
    assert seconds(card, (0, 8, GB), (9, 1, GB)) == pytest.approx(0.1, rel=1e-4)
    bus = replace(NODES, within=Link(bandwidth=100 * GB, per="group"))
    assert seconds(bus, (0, 1, GB), (2, 3, GB), (3, 2, GB), (8, 9, GB)) == pytest.approx(3e-2)
    mesh = replace(NODES, within=Link(bandwidth=GB, per="pair"))
    assert seconds(mesh, (0, 1, GB), (0, 2, GB), (1, 0, GB)) == pytest.approx(1.0)
    assert seconds(mesh, (0, 1, GB), (0, 1, GB)) == pytest.approx(2.0)


def test_pcie_switches():
    pairs = replace(bus_of(2 * GB), switch=Link(bandwidth=20 * GB), switch_ranks=2)
    assert seconds(pairs, (0, 1, GB), (1, 0, GB), (2, 3, GB)) == pytest.approx(0.05)
    assert seconds(pairs, (1, 2, GB), (3, 4, GB)) == pytest.approx(1.0)


def bus_of(bandwidth: float) -> Cluster:
    return replace(NODES, within=Link(bandwidth=bandwidth, per="group"))


def test_concurrent_sends_share_a_port_evenly():
    cluster = replace(NODES, between=Link(bandwidth=GB))
    slow, fast, alone = cluster.deliveries([Send(0, 8, 2 * GB), Send(0, 9, GB), Send(1, 2, GB)])
    assert slow[2:] == (3.0, 3.0, cluster.between) and fast[2:] == (2.0, 2.0, cluster.between)
    assert alone.seconds == pytest.approx(1e-2, rel=1e-3)


def test_a_transfer_disturbs_a_concurrent_computation():
    assert [concurrent_seconds(3.0, compute, 0.5) for compute in (0.0, 1.0, 4.0)] == [3.0, 3.5, 5.5]
    assert concurrent_seconds(3.0, 4.0, 0.0) == 4.0


def test_a_send_buffer_releases_the_sender_early():
    cluster = replace(NODES, between=Link(bandwidth=GB, latency=0.5, buffer=GB))
    slow, fast = cluster.deliveries([Send(0, 8, 2 * GB), Send(1, 9, GB)])
    assert (slow.seconds, slow.sending) == (2.5, 1.5) and (fast.seconds, fast.sending) == (1.5, 0.5)


def test_software_overhead_per_message():
    cluster = replace(NODES, within=Link(bandwidth=GB, message=0.25))
    assert seconds(cluster, (0, 1, GB), (0, 2, GB)) == pytest.approx(2.5)
    assert seconds(cluster, (0, 1, GB), (1, 2, GB)) == pytest.approx(1.25)
    pairs = replace(NODES, within=Link(bandwidth=GB, message=0.25, per="pair"))  # separate wires, one sender
    assert seconds(pairs, (0, 1, GB), (0, 2, GB), (0, 3, GB)) == pytest.approx(1.75)
    assert seconds(pairs, (1, 0, GB), (2, 0, GB)) == pytest.approx(1.5)


def test_crowding_slows_a_port_with_several_peers():
    crowded = replace(NODES, within=Link(bandwidth=GB, crowding=1.0))
    assert seconds(crowded, (0, 1, GB), (1, 0, GB)) == pytest.approx(1.0)
    assert seconds(crowded, (0, 1, GB), (0, 2, GB)) == pytest.approx(4.0)
    assert seconds(crowded, (1, 0, GB), (2, 0, GB)) == pytest.approx(4.0)


def test_files_have_all_fields_or_the_differences_from_a_preset(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text(
        'like = "8xh100"\nnodes = 4\nhost_memory = "1.5TB"\n[accelerator]\nmemory = "90GB"\n'
        '[between]\nbandwidth = "11GB"\nper = "group"\n'
    )
    cluster, like = Cluster.load(file), Cluster.named("8xh100")
    assert (cluster.name, cluster.nodes, cluster.host_memory) == ("ours", 4, 1_500_000_000_000)
    assert cluster.between == replace(like.between, bandwidth=11e9, per="group")
    assert cluster.accelerator == replace(like.accelerator, memory=90 * GB) and cluster.within == like.within
    file.write_text(
        'name = "box"\nnodes = 1\nranks_per_node = 4\nhost_memory = 8e9\n'
        "[accelerator]\nname = 'cpu'\nmemory = 1e9\nflops = 1e9\nmemory_bandwidth = 1e9\nhost_bandwidth = 1e9\n"
        "[within]\nbandwidth = 1e9\n[between]\nbandwidth = 1e8\n"
    )
    assert Cluster.load(file).ranks == 4 and Cluster.load(file).name == "box"
