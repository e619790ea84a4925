"""The merge of partial attention: the choice between fused kernel and torch's ops, and their equality."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate

from armillary.core.collectives import merge
from armillary.core.testing import mesh

CASES = Path(__file__).parent / "interpreted_merge.py"
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1"}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(
    find_spec("triton") is not None and version("triton") < "3.7" and np.__version__ >= "2.4",
    reason="the interpreter of Triton 3.6, which torch 2.11 installs, needs NumPy 2.3",
)
def test_fused_kernel_equals_torch_ops():
    command = [sys.executable, "-W", "ignore", CASES, "13"]
    run = subprocess.run(command, env=INTERPRETED, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["failed"] == [] and result["tried"] >= 20


def results(shape: tuple[int, ...] = (2, 5, 3, 8), dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Returns accumulators and a partial result."""
    return [torch.zeros(shape), torch.zeros(shape[:-1]), torch.ones(shape, dtype=dtype), torch.zeros(shape[:-1])]


@pytest.fixture
def fused(monkeypatch):
    """Replaces the fused kernel by a recorder of its shapes, available on every device."""
    called = list[tuple[int, ...]]()
    monkeypatch.setattr(merge, "fused_kernel", lambda device: lambda out, *_: called.append(tuple(out.shape)))
    return called


def test_plain_tensors_are_merged_by_the_fused_kernel_and_others_by_torchs_ops(fused):
    for shape in ((8,), (3, 8), (5, 3, 8), (2, 5, 3, 8)):
        merge.merge_(*results(shape))
    assert fused == [(8,), (3, 8), (5, 3, 8), (2, 5, 3, 8)] and merge.fuses(*results())
    fused.clear()
    for name, tensors in {
        "five dims": [x.expand(2, *x.shape) for x in results()],
        "a gradient": [x.requires_grad_() if i == 2 else x for i, x in enumerate(results())],
        "broadcast": [x[:1] if i > 1 else x for i, x in enumerate(results())],
        "another dtype of lse": results()[:2] + [x.double() for x in results()[2:]],
        "a narrow accumulator": [x.half() for x in results()],
        "integers": results()[:2] + [x.int() if i == 0 else x for i, x in enumerate(results()[2:])],
    }.items():
        assert not merge.fuses(*tensors), name
        with torch.no_grad():
            assert merge.fuses(*tensors) == (name == "a gradient")

    out, lse, part, part_lse = results()
    merge.merge_(out, lse, part.requires_grad_(), part_lse)
    out.sum().backward()
    assert torch.equal(part.grad, torch.full_like(part, 0.5))

    with FakeTensorMode() as mode:
        merge.merge_(*map(mode.from_tensor, results()))

    def traced(*tensors: torch.Tensor) -> torch.Tensor:
        merge.merge_(*tensors)
        return tensors[0]

    merged = torch.compile(traced, backend="eager", fullgraph=True)(*results())
    assert torch.equal(merged, torch.full_like(merged, 0.5))
    mapped = list[bool]()
    torch.func.vmap(lambda *tensors: mapped.append(merge.fuses(*tensors)) or tensors[0])(*results())
    assert mapped == [False] and fused == []


def merges_dtensors() -> bool:
    tensors = [DTensor.from_local(x, mesh(ring=2)["ring"], [Replicate()]) for x in results()]
    return not merge.fuses(*tensors)


def test_dtensors_are_not_merged_by_the_fused_kernel(worlds):
    assert worlds(2).run(merges_dtensors) == [True, True]


def test_no_kernel_is_compiled_without_a_gpu(monkeypatch):
    assert merge.fused_kernel("cpu") is None
    monkeypatch.setattr(merge, "find_spec", lambda name: None)
    assert merge.fused_kernel.__wrapped__("cuda") is None


@pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="Triton compiles it, or is not there"
)
def test_torch_ops_merge_without_a_working_triton():
    with pytest.warns(UserWarning, match="Triton"):
        assert merge.fused_kernel.__wrapped__("cuda") is None


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_first_merge_under_fake_tensors_leaves_the_kernel_on(monkeypatch):
    """The trial of the kernel runs on real tensors, because its outcome is cached for the process."""
    from armillary.core.collectives import fused_merge

    make, tried = merge.trial_tensors, []
    monkeypatch.setattr(merge, "trial_tensors", lambda device: make("cpu"))
    monkeypatch.setattr(fused_merge, "fused_merge_", lambda *tensors: tried.extend(tensors))
    with FakeTensorMode():
        assert merge.fused_kernel.__wrapped__("cuda") is fused_merge.fused_merge_
    assert [type(x) for x in tried] == [torch.Tensor] * 4


def test_fake_tensors_do_not_start_the_trial(monkeypatch):
    tried = []
    monkeypatch.setattr(merge, "fused_kernel", tried.append)
    with FakeTensorMode() as mode:
        merge.merge_(*map(mode.from_tensor, results()))
    merge.merge_(*results())
    assert tried == ["cpu"]


def test_trial_compiles_a_program_for_common_models():
    out, lse, part_out, part_lse = merge.trial_tensors("cpu")
    assert merge.fuses(out, lse, part_out, part_lse) and out.ndim == merge.MAX_DIMS
    assert part_out.dtype == torch.bfloat16 and out.shape[-1] == 128
    # Triton compiles separate programs for arguments of 1 and for those that 16 does not divide.
    arguments = [*out.shape[1:], *(stride for x in (out, lse, part_out, part_lse) for stride in x.stride())]
    assert all(value % 16 == 0 for value in arguments if value != 1)
