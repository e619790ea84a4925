"""The device of a rank, and the creation and connection of process groups, with stubs of CUDA and NCCL."""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.core import Axis, build_mesh, start_process_group
from armillary.core import mesh as core_mesh
from armillary.core.internal import compat
from armillary.core.mesh import THREAD_FOLDER, gloo_thread_states, own_device
from armillary.core.testing import World, fork_context, mesh


@pytest.fixture
def gpus(monkeypatch):
    """Stubs a machine with GPUs, one of which this rank may have chosen."""

    def make(count: int, local_rank: int | None, chosen: int | None = None) -> None:
        state = {"current": chosen}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["current"] is not None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: state.update(current=device))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return make


@pytest.mark.parametrize(
    ("count", "local_rank", "chosen", "device"),
    [(8, 3, None, 3), (1, 3, None, 0), (8, None, None, 0), (8, 3, 5, 5)],
    ids=["the launcher's", "the only one that is seen", "without a launcher", "the caller's"],
)
def test_rank_uses_its_chosen_device(gpus, count, local_rank, chosen, device):
    gpus(count, local_rank, chosen)
    assert own_device("cuda") == torch.device("cuda", device)
    assert torch.cuda.current_device() == device
    assert own_device("cpu") is None


def test_missing_device_raises_before_a_group_starts(gpus):
    gpus(0, 1)
    with pytest.raises(ValueError, match="'cuda'"):
        start_process_group("cuda")
    assert not dist.is_initialized()


def test_only_groups_with_nccl_as_single_backend_are_bound_to_the_device(gpus, monkeypatch):
    started = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: started.append((backend, options)))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(compat, "nccl_binds_devices", lambda: False)
    gpus(8, 3)
    start_process_group("cuda", timedelta(seconds=5))
    start_process_group("cuda", with_gloo=True)
    start_process_group("cpu", with_gloo=True)
    start_process_group("cuda", bind=False)
    assert [backend for backend, _ in started] == ["nccl", "cpu:gloo,cuda:nccl", "gloo", "nccl"]
    assert [options["device_id"] for _, options in started] == [torch.device("cuda", 3), None, None, None]
    assert started[0][1]["timeout"] == timedelta(seconds=5)

    monkeypatch.setattr(compat, "nccl_binds_devices", lambda: True)  # by default to LOCAL_RANK's
    gpus(8, 3, chosen=5)
    start_process_group("cuda", bind=False)
    start_process_group("cuda", with_gloo=True)
    assert [options["device_id"] for _, options in started[4:]] == [torch.device("cuda", 5)] * 2


def test_groups_are_connected_by_a_tensor_on_the_device(monkeypatch):
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: reduced.append((x.device.type, group)))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    monkeypatch.setattr(compat, "new_group", lambda ranks, name, timeout, like: Group(ranks))
    monkeypatch.setattr(dist, "barrier", None)
    axis = Axis("ring", 1, 3, Group([4, 5, 6]), None, "meta")  # type: ignore[arg-type] - no group is used
    copy, part = axis.duplicate(), axis.part([0, 1])
    assert copy.group.ranks == [4, 5, 6] and part.group.ranks == [4, 5] and copy.device == part.device == "meta"
    assert reduced == [("meta", axis.group), ("meta", copy.group), ("meta", part.group)]
    assert axis.duplicate().group is copy.group and len(reduced) == 3


class Options:
    """Stub of NCCL's group options."""

    def __init__(self, is_high_priority_stream: bool = False, max_ctas: int | None = None) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=max_ctas)


@pytest.fixture
def nccl(monkeypatch):
    """Stubs torch's NCCL options."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": Options}), raising=False)


@pytest.fixture
def mesh_options(nccl, monkeypatch):
    """Stubs `init_device_mesh` on 8 ranks; returns the options of its calls."""
    requests = []

    def record_options(device, sizes, mesh_dim_names, **options):
        requests.append(options)
        return {name: SimpleNamespace(get_group=lambda: None) for name in mesh_dim_names}

    monkeypatch.setattr(core_mesh, "init_device_mesh", record_options)
    monkeypatch.setattr(core_mesh, "world_size", lambda: 8)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compat, "set_timeout", lambda timeout, group: None)
    monkeypatch.setattr(compat, "has_several_backends", lambda: False)
    return requests


def test_axes_of_high_priority_have_separate_groups(mesh_options, monkeypatch):
    minute = timedelta(minutes=1)
    build_mesh("cuda", ring=4, ulysses=2, timeout=minute, high_priority=["ring", "tp"])
    build_mesh("cuda", ulysses=8, high_priority=["ring"])
    build_mesh("cpu", ring=8, high_priority=["ring"])
    build_mesh("cuda", ulysses=8, high_priority=["ring", "ulysses"], max_ctas=16)
    overrides = [options["backend_override"] for options in mesh_options]
    ring, ulysses = overrides[0]["ring"], overrides[3]["ulysses"]
    assert [override and [*override] for override in overrides] == [["ring"], None, None, ["ulysses"]]
    assert ring.is_high_priority_stream and ring._timeout == minute
    assert (ring.config.max_ctas, ulysses.config.max_ctas) == (None, 16)

    monkeypatch.setattr(compat, "has_several_backends", lambda: True)  # options of NCCL do not reach gloo
    build_mesh("cuda", ring=8, high_priority=["ring"])
    backend, options = mesh_options[-1]["backend_override"]["ring"]
    assert backend == "nccl" and options.is_high_priority_stream


def test_thread_block_limit_is_an_option_of_torch():
    if not dist.is_nccl_available():
        pytest.skip("a torch without NCCL")
    assert compat.high_priority(timedelta(minutes=1), 16).config.max_ctas == 16
    assert compat.high_priority(timedelta(minutes=1)).config.max_ctas not in (0, 16)


def configured_timeouts() -> dict[str, timedelta | None]:
    """Returns the time-outs of the backends of all groups made from a mesh with a time-out of 46 minutes."""
    ranks = build_mesh("cpu", ring=2, ulysses=2, timeout=timedelta(minutes=46))
    axis = Axis.of(ranks["ring"])
    groups = {
        "axis": axis.group,
        "duplicate": axis.duplicate().group,
        "part": axis.part([axis.rank]).group,
        "flattened": compat.flatten(ranks, ("ring", "ulysses"), "fsdp").get_group(),
        "flattened, one axis": compat.flatten(ranks, ("shard",), "data").get_group(),
    }
    return {name: compat.group_timeout(group, "cpu") for name, group in groups.items()}


def test_groups_made_from_an_axis_have_its_timeout():
    with World(4) as world:  # shared ranks would keep the time-outs
        for timeouts in world.run(configured_timeouts):
            assert timeouts == dict.fromkeys(timeouts, timedelta(minutes=46))


@pytest.mark.parametrize("above", [True, False])
def test_groups_on_cuda_have_the_timeout_and_the_priority_of_their_axis(nccl, monkeypatch, above):
    """On CUDA the host has no time-out for an axis; the group's NCCL options have one."""
    new_groups, set_timeouts, minutes = [], [], timedelta(minutes=46)
    options = Options(above)
    options._timeout = minutes
    group = SimpleNamespace(group_name="ring", _get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: None)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(compat, "new_group", lambda *arguments: new_groups.append(arguments) or group)
    axis = Axis("ring", 0, 2, Weakable(group), None, "cuda")  # type: ignore[arg-type] - no group is used
    axis.duplicate(), axis.part([0, 1])
    assert [arguments[2:] for arguments in new_groups] == [(minutes, options if above else None)] * 2

    class Mesh:
        device_type = "cuda"

        def get_group(self, name: str) -> object:
            return group if name == "shard" else None

        def __getitem__(self, axes: tuple[str, ...]) -> object:
            return SimpleNamespace(_flatten=lambda name: SimpleNamespace(get_group=lambda: "flat group"))

    monkeypatch.setattr(compat, "set_timeout", lambda timeout, group: set_timeouts.append((timeout, group)))
    compat.flatten(Mesh(), ("shard", "ring"), "fsdp")  # type: ignore[arg-type]
    options._timeout = None
    compat.flatten(Mesh(), ("shard", "ring"), "fsdp")  # type: ignore[arg-type]
    assert set_timeouts == [(minutes, "flat group")]


def start_and_leave(rank: int, folder: str, times: int) -> int:
    """Starts a process group and destroys it at once, `times` times. Returns the number of groups."""
    store = dist.FileStore(f"{folder}/store", 2)
    os.environ["WORLD_SIZE"] = "2"
    for start in range(times):
        # Without the polls of our own rendezvous, which take a hundred times as long as a start.
        dist.rendezvous = lambda url, timeout: iter([(store, rank, 2)])
        core_mesh.rendezvous = lambda store, *_, start=start: dist.PrefixStore(str(start), store)
        start_process_group("cpu", timedelta(seconds=30))
        dist.destroy_process_group()
    return times


def test_a_rank_may_leave_a_group_as_soon_as_it_has_started(tmp_path):
    """Without a wait for the slower rank, one of seven starts fails there with "connection closed by peer"."""
    with ProcessPoolExecutor(2, fork_context()) as ranks:
        starts = [ranks.submit(start_and_leave, rank, str(tmp_path), 25) for rank in range(2)]
        assert [start.result(timeout=120) for start in starts] == [25, 25]


def with_priority() -> list[Any]:
    """Returns the options with which torch creates a group of high priority and one of no priority."""
    c10d, calls = dist.distributed_c10d, []
    helper = c10d._new_process_group_helper
    c10d._new_process_group_helper = lambda *arguments, **options: (
        calls.append(options) or helper(*arguments, **options)
    )
    kind = type("ProcessGroupNCCL", (), {"Options": Options})
    previous, dist.ProcessGroupNCCL = getattr(dist, "ProcessGroupNCCL", None), kind
    try:
        for like in (Options(True, max_ctas=8), None):
            compat.new_group([0, 1], f"priority {like is not None}", timedelta(seconds=30), like)
    finally:
        c10d._new_process_group_helper, dist.ProcessGroupNCCL = helper, previous
    actual = [options["backend_options"] for options in calls]
    return [None if one is None else vars(one) | {"config": one.config.max_ctas} for one in actual]


def test_groups_are_created_with_their_priority(worlds):
    high = {"is_high_priority_stream": True, "_timeout": timedelta(seconds=30), "config": 8}
    assert worlds(2).run(with_priority) == [[high, None]] * 2


SCRIPT = """
import hashlib, json, sys, threading, time
import torch
before = set(sys.modules)
import armillary.core

slow = [name for name in sys.argv[1:] if name in sys.modules and name not in before]
print(json.dumps([slow, armillary.core.compat.nccl_binds_devices()]))

def compute():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("pt_gloo_runloop")
    started.set()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        hashlib.sha256(bytes(2**22))  # runs without the GIL
    print("the thread ended", flush=True)

started = threading.Event()
threading.Thread(target=compute, daemon=True).start()
started.wait()
"""
SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "numpy")


NCCL2 = hasattr(dist.distributed_c10d, "_create_nccl2_process_group")


@pytest.mark.skipif(not THREAD_FOLDER.exists(), reason="looks at threads as Linux shows them")
def test_a_process_imports_no_slow_module_knows_its_nccl_and_exits_after_gloo():
    """DTensor and FSDP2 take as long to import as torch; their users have imported them already."""
    environment = {**os.environ, "TORCH_DIST_USE_NCCL2": "0"}
    command = [sys.executable, "-c", SCRIPT, *SLOW]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    facts, *after = ran.stdout.splitlines()
    assert json.loads(facts) == [[], False] and after == ["the thread ended"]
    assert compat.nccl_binds_devices() == (NCCL2 and os.environ.get("TORCH_DIST_USE_NCCL2") != "0")


def gloo_threads_and_backends() -> tuple[list[str], bool]:
    return gloo_thread_states(), compat.has_several_backends()


def test_gloo_threads_are_recognized_by_name(worlds):
    """An idle world of two ranks: torch starts two threads for each group."""
    assert gloo_thread_states() == []  # of this process, which has other threads
    for states, has_several_backends in worlds(2).run(gloo_threads_and_backends):
        assert len(states) >= 2 and set(states) <= {"S", "R"} and not has_several_backends


class Weakable:
    """An object with another's attributes that can be weakly referenced, as groups must be."""

    def __init__(self, like: Any) -> None:
        vars(self).update(vars(like))


class Group:
    """A group of some ranks, whose backend has no options."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.group_name = ranks, "some"

    def _get_backend(self, device: torch.device) -> object:
        return object()


class Batched:
    """A group whose backend may support batches, and records its calls."""

    def __init__(self, has_batches: bool) -> None:
        self.supports_coalescing, self.calls = has_batches, list[tuple]()

    def _get_backend(self, device: torch.device):
        self.calls.append((device.type,))
        return self

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments)) or name


def test_exchanges_are_one_batch_if_the_backend_has_batches():
    first, second = torch.empty(2, device="meta"), torch.empty(3, device="meta")
    moved = [("recv", [first], 3, 0), ("send", [second], 1, 0), ("send", [first], 2, 0)]
    batched, single = Batched(True), Batched(False)
    assert compat.start_batch(batched, {3: first}, {1: second, 2: first}) == ["_end_coalescing"]
    start, *calls, end = batched.calls[1:]
    assert (start, end) == tuple((name, first.device) for name in ("_start_coalescing", "_end_coalescing"))
    assert [each[:1] for each in calls] == [each[:1] for each in moved] and calls[0][1][0] is first
    assert compat.start_batch(single, {3: first}, {1: second, 2: first}) == ["recv", "send", "send"]
    assert [each[2:] for each in single.calls[1:]] == [each[2:] for each in moved] == [each[2:] for each in calls]
    assert compat.start_batch(single, {}, {}) == []


def groups_of_a_bound_world() -> tuple[list[torch.device | None], list[torch.device | None], float]:
    """Creates a duplicate and a part of an axis while the default group is bound to a device.

    Returns the default group's device while each group is created and afterwards, the device of each group, and a sum
    over the duplicate.
    """
    c10d: Any = dist.distributed_c10d
    world, axis = dist.group.WORLD, Axis.of(mesh(ring=2, ulysses=2)["ulysses"])
    world_devices, helper = list[torch.device | None](), c10d._new_process_group_helper
    c10d._new_process_group_helper = lambda *arguments, **options: (
        world_devices.append(world.bound_device_id) or helper(*arguments, **options)
    )
    world.bound_device_id = torch.device("cuda", 7)
    try:
        groups = [axis.duplicate().group, axis.part([axis.rank]).group]
        world_devices.append(world.bound_device_id)
    finally:
        world.bound_device_id, c10d._new_process_group_helper = None, helper
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total, group=groups[0])
    return world_devices, [group.bound_device_id for group in groups], total.item()


def test_groups_made_from_an_axis_are_bound_to_the_chosen_device_without_a_split():
    """torch would split the default group's communicator if that were bound meanwhile.

    nccl2 of torch 2.15 would bind a group without a device to the GPU with the number LOCAL_RANK.
    """
    chosen = torch.device("cuda", 7)
    with World(4) as world:  # shared ranks may have made these groups already
        for rank, result in enumerate(world.run(groups_of_a_bound_world)):
            assert result == ([None, None, chosen], [chosen, chosen], 3.0 if rank < 2 else 7.0)
