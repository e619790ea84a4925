"""Clusters, what their wires carry, and the files that describe them."""

from dataclasses import replace

import pytest

from armillary.core.network import Send
from armillary.core.peak import PEAK_FLOPS
from armillary.plan import Cluster, Link
from armillary.plan.cluster.machines import EMULATED, MACHINES

GB = 10**9
KINDS = {"h200": "h200", "h100": "h100", "a100": "a100-80", "l20": "l20"}
NODES = replace(
    Cluster.named("16xh100"),
    within=Link(bandwidth=100 * GB, latency=1e-6),
    between=Link(bandwidth=10 * GB, latency=1e-3),
)


def seconds(cluster: Cluster, *sends: tuple[int, int, int]) -> float:
    return cluster.transit(Send(*send) for send in sends)


def test_presets_know_their_nodes():
    assert [Cluster.named(name).nodes for name in ("8xh100", "64xh100", "32xa100-40x16-ethernet", "8xl20")] == [
        1,
        8,
        2,
        1,
    ]
    assert Cluster.named("64xh100").name == "64 x H100 80 GB" and Cluster.named("64xh100").ranks == 64
    assert Cluster.named("16xh100").host_memory_per_rank == 250 * GB
    for name in EMULATED:
        assert Cluster.named(name).ranks in (8, 16)
    for name in ("tpu", "12xh100", "0xh100", "xh100", "8x", "h100"):
        with pytest.raises(ValueError, match=f"no cluster {name!r}; known: 8xh100, .*emulated-"):
            Cluster.named(name)
    assert all(Cluster.named(f"{machine.ranks_per_node}x{kind}").nodes == 1 for kind, machine in MACHINES.items())


def test_the_trainer_counts_mfu_by_the_same_peaks():
    peaks = {kind.upper(): MACHINES[name].accelerator.flops for kind, name in KINDS.items()}
    assert peaks == PEAK_FLOPS


def test_the_busiest_port_decides():
    nothing = (3, 3, GB), (0, 1, 0)
    assert seconds(NODES, *nothing) == 0 and NODES.transit([]) == 0
    assert seconds(NODES, (0, 1, GB), *nothing) == pytest.approx(1e-2 + 1e-6)  # a rank sends nothing to itself
    assert seconds(NODES, (0, 1, GB), (1, 2, GB), (2, 0, GB)) == pytest.approx(1e-2 + 1e-6)  # each way at once
    assert seconds(NODES, (0, 1, GB), (0, 2, GB)) == pytest.approx(2e-2 + 1e-6)  # out of one port
    assert seconds(NODES, (1, 0, GB), (2, 0, GB)) == pytest.approx(2e-2 + 1e-6)  # into one
    assert seconds(NODES, (0, 8, GB), (1, 9, GB), (0, 1, GB)) == pytest.approx(0.1 + 1e-3)  # a card for each rank


def test_cards_of_nodes_buses_and_links_of_pairs():
    card = replace(NODES, between=Link(bandwidth=10 * GB, per="group"))
    assert seconds(card, (0, 8, GB), (1, 9, GB), (2, 3, GB)) == pytest.approx(0.2, rel=1e-4)
    assert seconds(card, (0, 8, GB), (9, 1, GB)) == pytest.approx(0.1, rel=1e-4)
    bus = replace(NODES, within=Link(bandwidth=100 * GB, per="group"))
    assert seconds(bus, (0, 1, GB), (2, 3, GB), (3, 2, GB), (8, 9, GB)) == pytest.approx(3e-2)
    mesh = replace(NODES, within=Link(bandwidth=GB, per="pair"))
    assert seconds(mesh, (0, 1, GB), (0, 2, GB), (1, 0, GB)) == pytest.approx(1.0)
    assert seconds(mesh, (0, 1, GB), (0, 1, GB)) == pytest.approx(2.0)


def test_accelerators_on_switches_of_their_own():
    pairs = replace(bus_of(2 * GB), switch=Link(bandwidth=20 * GB), switch_ranks=2)
    assert seconds(pairs, (0, 1, GB), (1, 0, GB), (2, 3, GB)) == pytest.approx(0.05)
    assert seconds(pairs, (1, 2, GB), (3, 4, GB)) == pytest.approx(1.0)


def bus_of(bandwidth: float) -> Cluster:
    return replace(NODES, within=Link(bandwidth=bandwidth, per="group"))


def test_sends_share_the_busiest_port_on_their_way_evenly():
    cluster = replace(NODES, between=Link(bandwidth=GB, disturbs=0.5))
    slow, fast, alone = cluster.deliveries([Send(0, 8, 2 * GB), Send(0, 9, GB), Send(1, 2, GB)])
    assert slow[2:] == (3.0, 3.0, cluster.between) and fast[2:] == (2.0, 2.0, cluster.between)
    assert alone.seconds == pytest.approx(1e-2, rel=1e-3)
    assert slow.beside(0.0) == 3.0 and slow.beside(4.0) == 5.5 and alone.beside(3.0) == 3.0


def test_senders_may_go_on_before_it_has_arrived():
    cluster = replace(NODES, between=Link(bandwidth=GB, latency=0.5, buffer=GB, disturbs=0.5))
    slow, fast = cluster.deliveries([Send(0, 8, 2 * GB), Send(1, 9, GB)])
    assert (slow.seconds, slow.sending) == (2.5, 1.5) and (fast.seconds, fast.sending) == (1.5, 0.5)
    assert slow.beside(1.0) == 3.0 and slow.sending_beside(1.0) == 2.0


def test_messages_may_cost_something_besides():
    cluster = replace(NODES, within=Link(bandwidth=GB, message=0.25))
    assert seconds(cluster, (0, 1, GB), (0, 2, GB)) == pytest.approx(2.5)
    assert seconds(cluster, (0, 1, GB), (1, 2, GB)) == pytest.approx(1.25)
    pairs = replace(NODES, within=Link(bandwidth=GB, message=0.25, per="pair"))  # wires of their own, but one sender
    assert seconds(pairs, (0, 1, GB), (0, 2, GB), (0, 3, GB)) == pytest.approx(1.75)
    assert seconds(pairs, (1, 0, GB), (2, 0, GB)) == pytest.approx(1.5)


def test_a_port_that_serves_many_at_once_may_be_slower():
    crowded = replace(NODES, within=Link(bandwidth=GB, crowding=1.0))
    assert seconds(crowded, (0, 1, GB), (1, 0, GB)) == pytest.approx(1.0)
    assert seconds(crowded, (0, 1, GB), (0, 2, GB)) == pytest.approx(4.0)
    assert seconds(crowded, (1, 0, GB), (2, 0, GB)) == pytest.approx(4.0)


def test_files_say_it_in_full_or_by_what_differs(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text(
        'like = "8xh100"\nnodes = 4\nhost_memory = "1.5TB"\n[accelerator]\nmemory = "90GB"\n'
        '[between]\nbandwidth = "11GB"\nper = "group"\n'
    )
    found, like = Cluster.load(file), Cluster.named("8xh100")
    assert (found.name, found.nodes, found.host_memory) == ("ours", 4, 1_500_000_000_000)
    assert found.between == replace(like.between, bandwidth=11e9, per="group")
    assert found.accelerator == replace(like.accelerator, memory=90 * GB) and found.within == like.within
    file.write_text(
        'name = "box"\nnodes = 1\nranks_per_node = 4\nhost_memory = 8e9\n'
        "[accelerator]\nname = 'cpu'\nmemory = 1e9\nflops = 1e9\nmemory_bandwidth = 1e9\nhost_bandwidth = 1e9\n"
        "[within]\nbandwidth = 1e9\n[between]\nbandwidth = 1e8\n"
    )
    assert Cluster.load(file).ranks == 4 and Cluster.load(file).name == "box"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('like = "8xh100"\nnode = 2', r"unknown keys \['node'\], missing keys \[\]; known: name, ranks_per_node"),
        ("nodes = 2", r"missing keys \['ranks_per_node', 'accelerator'"),
        ('like = "8xh100"\n[between]\nspeed = 2', r"unknown keys \['between.speed'\]"),
        ('like = "8xh100"\n[between]\nbandwidth = "fast"', "'fast' is no whole number"),
        ('like = "8xh100"\n[between]\nbandwidth = true', "between.bandwidth = True must be a number"),
        ('like = "8xh100"\n[between]\nper = "node"', "per='node'; known: rank, pair, group"),
        ('like = "8xh100"\nbetween = 3', "between = 3 must be a table"),
        ('like = "8xh100"\nnodes = 0', "nodes=0 must be at least 1"),
        ('like = "8xh100"\nswitch_ranks = 3', "switch_ranks=3 must divide ranks_per_node=8"),
        ("nodes = ", "Invalid value"),
        ('like = "9xh100"', "no cluster '9xh100'"),
    ],
)
def test_files_that_describe_no_cluster_are_refused_by_name(tmp_path, text, said):
    file = tmp_path / "ours.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"ours.toml: .*{said}"):
        Cluster.load(file)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bandwidth=0 must be above 0"):
        Link(bandwidth=0)
    with pytest.raises(ValueError, match="latency=-1"):
        Link(bandwidth=1, latency=-1)
    with pytest.raises(ValueError, match="accelerator H100 80 GB: flops=0 must be above 0"):
        replace(Cluster.named("8xh100").accelerator, flops=0)
