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
@pytest.mark.parametrize(("every", "count"), [(7, 40), pytest.param(1, 250, marks=pytest.mark.long)])
def test_fused_kernel_equals_torch_ops(every, count):
    command = [sys.executable, "-W", "ignore", CASES, str(every)]
    run = subprocess.run(command, env=INTERPRETED, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["failed"] == [] and result["tried"] >= count


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from armillary.core.collectives.fused_merge import _merge_rows as kernel

pointers = {"out": "*fp32", "lse": "*fp32", "part_out": "*bf16", "part_lse": "*fp32"}
signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
constants = {"ROWS": 32, "WIDTH": 128, "out_dim": 1, "part_dim": 1}
source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
for capability in (80, 90, 100):
    print(len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]) > 0)
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_compiles_the_kernel_for_three_generations_of_gpus(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED], env=environment, capture_output=True, text=True
    )
    assert run.stdout.split() == ["True"] * 3, run.stderr


def results(shape: tuple[int, ...] = (2, 5, 3, 8), dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Returns accumulators and a partial result."""
    return [torch.zeros(shape), torch.zeros(shape[:-1]), torch.ones(shape, dtype=dtype), torch.zeros(shape[:-1])]


@pytest.fixture
def fused(monkeypatch):
    """Replaces the fused kernel by a recorder of its shapes, available on every device."""
    called = list[tuple[int, ...]]()
    monkeypatch.setattr(merge, "fused_kernel", lambda device: lambda out, *_: called.append(tuple(out.shape)))
    return called


def test_plain_tensors_are_merged_by_the_fused_kernel(fused):
    for shape in ((8,), (3, 8), (5, 3, 8), (2, 5, 3, 8)):
        merge.merge_(*results(shape))
    assert fused == [(8,), (3, 8), (5, 3, 8), (2, 5, 3, 8)]


@pytest.mark.parametrize(
    "tensors",
    [
        [x.expand(2, *x.shape) for x in results()],
        [x.requires_grad_() if i == 2 else x for i, x in enumerate(results())],
        [x[:1] if i > 1 else x for i, x in enumerate(results())],
        results()[:2] + [x.double() for x in results()[2:]],
        [x.half() for x in results()],
        results()[:2] + [x.int() if i == 0 else x for i, x in enumerate(results()[2:])],
    ],
    ids=["five dims", "a gradient", "broadcast", "another dtype of lse", "a narrow accumulator", "integers"],
)
def test_fused_kernel_is_not_used_for_unsupported_tensors(tensors):
    assert merge.fuses(*results()) and not merge.fuses(*tensors)
    with torch.no_grad():
        assert merge.fuses(*tensors) == tensors[2].requires_grad


def test_torch_ops_merge_tensors_with_gradients(fused):
    out, lse, part, part_lse = results()
    merge.merge_(out, lse, part.requires_grad_(), part_lse)
    out.sum().backward()
    assert fused == [] and torch.equal(part.grad, torch.full_like(part, 0.5))


def test_fake_and_traced_tensors_are_merged_by_torchs_ops(fused):
    with FakeTensorMode() as mode:
        merge.merge_(*map(mode.from_tensor, results()))

    def traced(*tensors: torch.Tensor) -> torch.Tensor:
        merge.merge_(*tensors)
        return tensors[0]

    merged = torch.compile(traced, backend="eager", fullgraph=True)(*results())
    assert fused == [] and torch.equal(merged, torch.full_like(merged, 0.5))
    mapped = list[bool]()
    torch.func.vmap(lambda *tensors: mapped.append(merge.fuses(*tensors)) or tensors[0])(*results())
    assert mapped == [False]


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
