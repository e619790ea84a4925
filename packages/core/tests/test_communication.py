"""Mesh, groups of an axis, messages and exchanges, in worlds of gloo ranks."""

import gc
import os
import re
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from core_cases import counted

from armillary.core import Axis, FlatBuffer, ReceiveBuffers, build_mesh, merge_, start_exchange
from armillary.core.collectives.collective import pack
from armillary.core.collectives.exchange import finish
from armillary.core.internal import compat
from armillary.core.mesh import ALL_AXES
from armillary.core.testing import World, mesh

AXES = ("replicate", "shard", "ring", "ulysses", "tp")


def axes_of_meshes() -> tuple[list[tuple[str, ...]], list[int], list[int]]:
    built = mesh(shard=2, ring=2, ulysses=2)
    every = build_mesh("cpu", pipe=2, nodes=1, devices=2, ulysses=2)
    names = [built.mesh_dim_names, every.mesh_dim_names, build_mesh("cpu", ring=4, pipe=2).mesh_dim_names]
    return names, Axis.of(built["ring"]).ranks(), Axis.of(built["ulysses"]).ranks()


def test_a_mesh_has_the_default_and_the_requested_axes_innermost_last(worlds):
    answers = worlds(8).run(axes_of_meshes)
    assert all(names == [AXES, ALL_AXES, ("pipe", *AXES)] for names, *_ in answers)
    assert answers[5][1:] == ([5, 7], [4, 5])


def duplicates() -> tuple[bool, bool, list[int], float]:
    """Rank 0 has made other process groups by itself before."""
    axis = Axis.of(build_mesh("cpu", ring=4)["ring"])
    for _ in range(2 if axis.rank == 0 else 0):
        dist.new_group([0], use_local_synchronization=True)
    summed = torch.ones(1)
    dist.all_reduce(summed, group=axis.duplicate().group)
    pair = axis.part([0, 1] if axis.rank < 2 else [2, 3])
    groups = (axis.group, axis.duplicate().group, axis.part(range(4)).group)
    is_once = axis.duplicate().group is Axis.of(mesh(ring=4)["ring"]).duplicate().group
    return is_once, len(set(groups)) == 3, pair.ranks(), summed.item()


def test_duplicate_is_another_group_and_made_once(worlds):
    first, second = (True, True, [0, 1], 4), (True, True, [2, 3], 4)
    assert worlds(4).run(duplicates) == [first, first, second, second]


def test_merge_of_rows_without_visible_keys_on_one_or_both_sides():
    empty, visible = (torch.zeros(1, 4), torch.tensor([-torch.inf])), (torch.full((1, 4), 3.0), torch.tensor([0.5]))
    for base in (empty, visible):
        for part in (empty, visible):
            out, lse = base[0].clone(), base[1].clone()
            merge_(out, lse, *part)
            some = [x for x in (base, part) if x is visible]
            expected = 0.5 + torch.tensor([float(len(some))]).log() if some else empty[1]
            assert torch.equal(out, visible[0] if some else empty[0])
            torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("in_use", [(True,) * 7, (False,) * 7, (False, True, True, False, False, True, True)])
def test_buffers_of_a_repeated_exchange_reuse_two_blocks(dtypes, in_use):
    tensors = [torch.zeros(2, 9, 3, dtype=dtype) for dtype in dtypes]
    tokens = [4, 1, 0, 9, 2, 2, 0]
    buffers, last, blocks = ReceiveBuffers(tensors, tokens), None, list[int]()
    alive = []
    for count, busy in zip(tokens, in_use, strict=True):
        flat = buffers.take(busy)
        assert (flat is None) == (count == 0)
        if flat is not None:
            assert [(x.shape, x.dtype) for x in flat.tensors] == [((2, count, 3), dtype) for dtype in dtypes]
            assert flat.buffer.is_contiguous() and flat.tokens == count
            assert all(x.is_contiguous() and x.data_ptr() % x.element_size() == 0 for x in flat.tensors)
            block = flat.buffer.untyped_storage()
            assert last is None or (block.data_ptr() != last) == busy
            last = block.data_ptr()
            alive.append(flat)  # so that no other block has its address
            blocks.append(last)
            assert block.nbytes() == 9 * sum(6 * dtype.itemsize for dtype in dtypes) or len(set(blocks)) == 2
    assert len(set(blocks)) == (2 if any(in_use) else 1)


def test_blocks_of_a_repeated_exchange_are_freed_with_its_last_buffers():
    buffers = ReceiveBuffers([torch.zeros(1, 4, 2)], [4, 4, 4, 0])
    first, second = (buffers.take(last_in_use=True) for _ in range(2))
    blocks = [weakref.ref(flat.buffer.untyped_storage()) for flat in (first, second)]
    del first, second
    gc.collect()
    assert [block() is None for block in blocks] == [False, False], "blocks must stay for the next exchange"
    last = buffers.take(last_in_use=True)
    gc.collect()
    assert [block() is None for block in blocks] == [False, True]
    del last
    gc.collect()
    assert blocks[0]() is None and buffers.take(last_in_use=True) is None


def threads_of_duplicates() -> tuple[int, int, int]:
    """Counts threads of this process: with a mesh, with duplicates too, and after destroying all groups."""
    built = build_mesh("cpu", ring=2)
    counts = [len(os.listdir("/proc/self/task"))]
    Axis.of(built["ring"]).duplicate()
    counts.append(len(os.listdir("/proc/self/task")))
    dist.destroy_process_group()
    del built
    gc.collect()
    counts.append(len(os.listdir("/proc/self/task")))
    return counts[0], counts[1], counts[2]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_duplicates_are_destroyed_with_their_mesh():
    with World(2) as world:
        for before, with_duplicates, after in world.run(threads_of_duplicates):
            assert with_duplicates > before > after


def rotate() -> tuple[list[float], int]:
    """Rotates two tensors of unequal sizes around the ring; then two ranks exchange a message without the others."""
    axis = Axis.of(mesh(ring=4)["ring"])
    other_axis = axis.duplicate()  # connects both groups
    current = FlatBuffer.of([torch.full((2, 3 + axis.rank), float(axis.rank)), torch.full((1,), 10.0 + axis.rank)])
    values: list[float] = []
    with counted() as ledger:
        for step in range(4):
            owner = (axis.rank - step - 1) % 4
            received = FlatBuffer.like(current.tensors[:1], 3 + owner)
            received = FlatBuffer.like([*received.tensors, current.tensors[1]])
            start_exchange(axis, {(axis.rank + 1) % 4: current}, {(axis.rank - 1) % 4: received}).wait()
            current = received
            assert torch.equal(current.tensors[0], torch.full((2, 3 + owner), float(owner)))
            values.append(current.tensors[1].item())
    flat = FlatBuffer.of([torch.full((5,), 7.0)]) if axis.rank == 0 else FlatBuffer.like([torch.empty(5)])
    with counted():
        send, receive = ({peer: flat} if axis.rank == own_rank else {} for own_rank, peer in ((0, 2), (2, 0)))
        start_exchange(other_axis, send, receive).wait()
    assert axis.rank % 2 or (flat.tensors[0] == 7).all()
    return values, ledger.bytes(axis="ring", kind="p2p", phase="forward")


def test_exchanges_rotate_each_shard_and_count_its_bytes(worlds):
    results = worlds(4).run(rotate)
    assert [values for values, _ in results] == [[10.0 + (r - s) % 4 for s in range(1, 5)] for r in range(4)]
    # A rank sends each of the ring's four shards once: 2 * (3 + 4 + 5 + 6) elements and 4 single ones, 4 bytes each.
    assert {sent_bytes for _, sent_bytes in results} == {(36 + 4) * 4}


def test_flat_buffer_is_one_aligned_message_without_gaps():
    tensors = [torch.randn(3, 5), torch.randn(2, 4, 8, dtype=torch.bfloat16), torch.randn(4, 8, 2).transpose(0, 1)]
    tensors.append(torch.randn(3, dtype=torch.float64))
    flat = FlatBuffer.of(tensors)
    assert flat.buffer.nbytes == sum(x.nbytes for x in tensors)
    for view, x in zip(flat.tensors, tensors, strict=True):
        assert torch.equal(view, x) and view.is_contiguous()
        assert view.untyped_storage().data_ptr() == flat.buffer.untyped_storage().data_ptr()
    offsets = [view.data_ptr() - flat.buffer.data_ptr() for view in flat.tensors]
    assert offsets[1] % 16 == offsets[2] % 16 == 0


def test_parts_of_any_strides_are_packed_in_order():
    full = torch.randn(2, 3, 5, 8).permute(0, 3, 1, 2)  # torch.stack would return "channels last" for these
    for parts in (full.split(4, 1), full.split((2, 6), 1)):
        assert torch.equal(pack(parts).view(-1), torch.cat([part.flatten() for part in parts]))


def wait_for_missing_rank(waited: Path) -> str:
    axis = Axis.of(build_mesh("cpu", ring=2, timeout=timedelta(seconds=1))["ring"])
    if axis.rank == 1:
        while not waited.exists():
            time.sleep(0.05)
        return ""
    with pytest.raises(TimeoutError) as error:
        start_exchange(axis, {1: FlatBuffer.of([torch.zeros(2)])}, {1: FlatBuffer.like([torch.zeros(2)])}).wait()
    waited.touch()
    return str(error.value)


def wait_for_ended_rank() -> str:
    axis = Axis.of(build_mesh("cpu", ring=2, timeout=timedelta(minutes=10))["ring"])
    if axis.rank == 1:
        dist.destroy_process_group(axis.group)
        return ""
    with pytest.raises(ConnectionError) as error:
        start_exchange(axis, {1: FlatBuffer.of([torch.zeros(2)])}, {1: FlatBuffer.like([torch.zeros(2)])}).wait()
    return str(error.value)


def test_errors_of_an_exchange_name_missing_and_ended_ranks(tmp_path):
    with World(2) as world, World(2) as another:
        missing = world.run(wait_for_missing_rank, tmp_path / "done")[0]
        ended = another.run(wait_for_ended_rank)[0]
    assert re.match(r"rank 0 timed out on axis 'ring', .*to receive from \[1\] and send to \[1\]: ", missing)
    assert re.match(r"rank 0 .*'ring'.* closed its connection, .*to receive from \[1\] and send to \[1\]: ", ended)


class FailingWork:
    """A work whose `wait` raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        raise self.error


KERNEL_ERROR = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
MISMATCH = RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 24 vs 16")
TIMED_OUT = [
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete",
    "Application timeout caused pair closure",
]
LOST = [
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3211",
    "[gloo/transport/tcp/pair.cc:543] Connection reset by peer",
    "NCCL communicator was aborted on rank 1.",
    "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error",
]
ERROR_TYPES = dict.fromkeys(TIMED_OUT, TimeoutError) | dict.fromkeys(LOST, ConnectionError)


def test_failed_works_blame_peers_only_for_timeouts_and_lost_connections(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5])
    axis = Axis("ring", 1, 2, None, None, "cuda")  # type: ignore[arg-type] - no group is used

    def raised(error: Exception, of_device: Exception | None = None) -> BaseException:
        monkeypatch.setattr(compat, "device_error", lambda: of_device)
        with pytest.raises(Exception) as info:
            finish([FailingWork(error)], axis, lambda: "to receive from 4")
        return info.value

    assert raised(KERNEL_ERROR) is KERNEL_ERROR and raised(MISMATCH) is MISMATCH
    for message, kind in ERROR_TYPES.items():
        error = raised(RuntimeError(message))
        assert type(error) is kind and str(error.__cause__) == message
        assert re.search(r"rank 5 .*'ring'.* to receive from 4", str(error))
    # A failed kernel replaces the communication error that it causes.
    lost = RuntimeError(LOST[0])
    error = raised(lost, of_device=KERNEL_ERROR)
    assert error is KERNEL_ERROR and error.__cause__ is lost


def test_device_errors_are_read_without_synchronizing(monkeypatch):
    def query() -> bool:
        raise KERNEL_ERROR

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(query=query))
    assert compat.device_error() is KERNEL_ERROR
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    assert compat.device_error() is None
