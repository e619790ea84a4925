"""Which device a rank has, and how groups are started and connected, with stand-ins for CUDA and NCCL."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from armillary.core import Axis, compat, start_process_group
from armillary.core.mesh import own_device
from armillary.core.testing import mesh


@pytest.fixture
def gpus(monkeypatch):
    """A machine with some GPUs, on which this rank has chosen one or none."""

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
def test_a_rank_has_the_device_that_was_chosen_for_it(gpus, count, local_rank, chosen, device):
    gpus(count, local_rank, chosen)
    assert own_device("cuda") == torch.device("cuda", device)
    assert torch.cuda.current_device() == device
    assert own_device("cpu") is None


def test_no_device_is_refused_before_anything_is_started(gpus):
    gpus(0, 1)
    with pytest.raises(ValueError, match="device type 'cuda', but no such device is here; 'cpu' would do"):
        start_process_group("cuda")
    assert not dist.is_initialized()


def test_nccl_alone_is_told_the_device_and_several_backends_are_not(gpus, monkeypatch):
    started = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: started.append((backend, options)))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gpus(8, 3)
    start_process_group("cuda", timedelta(seconds=5))
    start_process_group("cuda", host_too=True)
    start_process_group("cpu", host_too=True)
    assert [backend for backend, _ in started] == ["nccl", "cpu:gloo,cuda:nccl", "gloo"]
    assert [options["device_id"] for _, options in started] == [torch.device("cuda", 3), None, None]
    assert started[0][1]["timeout"] == timedelta(seconds=5)


def test_groups_are_connected_by_a_tensor_of_the_device(monkeypatch):
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: reduced.append((x.device.type, group)))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    monkeypatch.setattr(compat, "new_group", lambda ranks, name, timeout: Group(ranks))
    monkeypatch.setattr(dist, "barrier", None)
    axis = Axis("ring", 1, 3, Group([4, 5, 6]), None, "meta")  # type: ignore[arg-type] - nothing is sent
    copy, part = axis.duplicate(), axis.part([0, 1])
    assert copy.group.ranks == [4, 5, 6] and part.group.ranks == [4, 5] and copy.device == part.device == "meta"
    assert reduced == [("meta", axis.group), ("meta", copy.group), ("meta", part.group)]
    assert axis.duplicate().group is copy.group and len(reduced) == 3


class Group:
    """Of some ranks."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.group_name = ranks, "some"


class Batched:
    """A group whose backend has batches, or not; it writes down what it is asked to do."""

    def __init__(self, together: bool) -> None:
        self.supports_coalescing, self.asked = together, list[tuple]()

    def _get_backend(self, device: torch.device):
        self.asked.append((device.type,))
        return self

    def __getattr__(self, name: str):
        return lambda *given: self.asked.append((name, *given)) or name


def test_a_batch_is_one_where_the_backend_has_batches():
    first, second = torch.empty(2, device="meta"), torch.empty(3, device="meta")
    moved = [("recv", [first], 3, 0), ("send", [second], 1, 0), ("send", [first], 2, 0)]
    together, alone = Batched(True), Batched(False)
    assert compat.start_batch(together, {3: first}, {1: second, 2: first}) == ["_end_coalescing"]
    start, *asked, end = together.asked[1:]
    assert (start, end) == tuple((name, first.device) for name in ("_start_coalescing", "_end_coalescing"))
    assert [each[:1] for each in asked] == [each[:1] for each in moved] and asked[0][1][0] is first
    assert compat.start_batch(alone, {3: first}, {1: second, 2: first}) == ["recv", "send", "send"]
    assert [each[2:] for each in alone.asked[1:]] == [each[2:] for each in moved] == [each[2:] for each in asked]
    assert compat.start_batch(alone, {}, {}) == []


def bound_duplicates() -> tuple[bool, float]:
    """Duplicates of two axes of two ranks each, made under a bound device: whether it is bound again, and a sum."""
    world, axis = dist.group.WORLD, Axis.of(mesh(ring=2, ulysses=2)["ulysses"])
    world.bound_device_id = torch.device("cuda", 7)
    try:
        copy = axis.duplicate()
        apart = copy.group.bound_device_id is None and world.bound_device_id == torch.device("cuda", 7)
    finally:
        world.bound_device_id = None
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total, group=copy.group)
    return apart, total.item()


def test_groups_of_some_ranks_are_not_split_off_the_bound_one(worlds):
    assert worlds(4).run(bound_duplicates) == [(True, 3.0)] * 2 + [(True, 7.0)] * 2
