"""Flight records of gloo, and of a backend that torch records through a hook like NCCL."""

import sys
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from armillary.core.internal import compat
from armillary.train import hang_diagnosis


class HookedBackend(cast(Any, torch)._C._distributed_c10d.Backend):
    """gloo under another name, which torch's flight recorder does not know."""

    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = cast(Any, dist).ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hooked-class"

    def allreduce(self, *args: Any) -> Any:
        return self.gloo.allreduce(*args)

    def send(self, *args: Any) -> Any:
        return self.gloo.send(*args)

    def recv(self, *args: Any) -> Any:
        return self.gloo.recv(*args)


def flight_records() -> tuple[list[str], dict[str, int]]:
    """Returns backends and entry counts by operation after collectives on both backends and messages on one."""
    dist.Backend.register_backend("hooked", HookedBackend, devices=["cpu"])
    group = cast(dist.ProcessGroup, dist.new_group(backend="hooked"))
    peer = 1 - dist.get_rank()
    for _ in range(2):
        dist.all_reduce(torch.ones(3), group=group)
    for work in compat.start_batch(group, {peer: torch.empty(3)}, {peer: torch.ones(3)}):
        work.wait()
    dist.all_reduce(torch.ones(3))
    counts: dict[str, int] = {}
    for entry in hang_diagnosis.recorded_collectives():
        if not entry["profiling_name"].startswith("gloo") or entry["process_group"][1] == "default_pg":
            operation = entry["profiling_name"].partition(" ")[0]
            counts[operation] = max(counts.get(operation, 0), entry["p2p_seq_id"] or entry["collective_seq_id"])
    return hang_diagnosis.backend_names(), counts


@pytest.mark.skipif(torch.__version__ < "2.15", reason="only torch 2.15 records backends that are not in its source")
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="torch crashes as it attaches its recorder to a Python backend")
def test_every_backend_is_read_from_its_own_recorder(worlds):
    for backends, counts in worlds(2).run(flight_records):
        assert {"gloo", "hooked-class"} <= set(backends)
        assert counts["hooked-class:all_reduce"] == 2 and counts["gloo:all_reduce"] >= 1
        assert {counts["hooked-class:send"], counts["hooked-class:recv"]} == {1, 2}


def test_a_torch_with_one_recorder_is_read_too(monkeypatch):
    """Before 2.15 `_dump_fr_trace_json` has no `backend`."""
    private = cast(Any, torch)._C._distributed_c10d

    def dump(includeCollectives: bool, onlyActive: bool) -> bytes:
        return b'{"entries": [{"profiling_name": "gloo:barrier"}]}'

    monkeypatch.setattr(hang_diagnosis, "backend_names", lambda: ["gloo"])
    monkeypatch.setattr(private, "_dump_fr_trace_json", dump)
    monkeypatch.setattr(private, "_dump_nccl_trace_json", dump)
    assert len(hang_diagnosis.recorded_collectives()) == 2
    monkeypatch.delattr(private, "_dump_nccl_trace_json")
    assert len(hang_diagnosis.recorded_collectives()) == 1
