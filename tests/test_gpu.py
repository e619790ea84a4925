"""GPU tests: kernels, the trainer's step under each checkpointing policy, and host waits.

`pytest -m gpu` runs them on a GPU. The same code runs on the CPU: kernels in the rehearsal of benchmarks/gpu.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import armillary.train
from armillary.core.internal import dtensor
from armillary.core.testing import relative_error
from armillary.train import Config, DataConfig, ModelConfig, Run, TrainConfig, prepare, process_group
from armillary.train.step import backward, train_step

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from gpu.check import Setting
from gpu.device import CpuDevice, CudaDevice
from gpu.kernels import check_kernels
from gpu.model import POLICIES

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = pytest.param(CudaDevice, marks=ON_GPU, id="cuda")
CPU = pytest.param(CpuDevice, id="cpu")
LIMITS = {"float32": 1e-4, "bfloat16": 0.03}
READS = {"cuda": 2, "cpu": 3}
"""Device reads of a step: the loss and the gradient norm; on the CPU also the labels of the batch."""
SMALL = Config(
    model=ModelConfig(dim=256, layers=2, heads=4, kv_heads=2, hidden_dim=640),
    data=DataConfig(path=(Path(armillary.train.__file__).parent,), sequence_length=128, global_batch_size=2),
)


@pytest.mark.parametrize("device", [GPU])
def test_kernels_agree_with_float64(device):
    """Head dims 64 to 256, 32 query heads on 8, packed documents, windows, one query, over 2^31 elements."""
    rows = list(check_kernels(Setting(device(), fake=device is CpuDevice)))
    assert not [row for row in rows if not row.passed]


@contextmanager
def running(device: str, policy: str, precision: str, folder: Path) -> Iterator[Run]:
    train = TrainConfig(steps=2, device=device, precision=precision, output=folder)
    config = replace(SMALL, checkpointing=POLICIES[policy], train=train)
    with process_group(config) as chosen:
        yield prepare(config, chosen)


def gradients(run: Run) -> torch.Tensor:
    """Returns all local gradients as one vector on the host."""
    return torch.cat([dtensor.local_of(p.grad).cpu().flatten() for p in run.model.parameters()])


def policies() -> list:
    """Cases of device and policy. One policy also runs on the CPU."""
    cpu_case = pytest.param(CpuDevice, "attention_output, offloaded", id="cpu")
    return [cpu_case, *(pytest.param(CudaDevice, p, id=f"cuda-{p}", marks=ON_GPU) for p in POLICIES)]


@pytest.mark.parametrize(("device", "policy"), policies())
def test_a_step_of_the_trainer_equals_the_cpu_in_float32(device, policy, tmp_path):
    with running("cpu", "none", "float32", tmp_path / "exact") as exact:
        batch = next(exact.training)
        weights = [dtensor.local_of(p).detach().clone() for p in exact.model.parameters()]
        labelled = torch.tensor(batch.labelled)
        expected = float(backward(exact, batch, labelled)), gradients(exact)
    for precision, limit in LIMITS.items():
        with running(device.type, policy, precision, tmp_path / precision) as run:
            with torch.no_grad():
                for parameter, weight in zip(run.model.parameters(), weights, strict=True):
                    dtensor.local_of(parameter).copy_(weight)
            loss = float(backward(run, batch, labelled.to(run.device)))
            assert abs(loss / expected[0] - 1) < limit / 10
            assert relative_error(gradients(run), expected[1]) < limit
            run.optimizer.zero_grad()
            waits = device().syncs(partial(train_step, run, 1, [batch]))
            assert len(waits) <= READS[device.type], waits


def test_gpu_cases_are_collected_without_a_gpu():
    assert len([each for each in policies() if each.marks == ON_GPU]) == len(POLICIES) == 6
