"""One training step without a GPU and without its numbers: the real model, FSDP2 and optimizer on fake tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed._tools.fake_collectives  # pyright: ignore[reportUnusedImport] - collectives on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from armillary.attention import AttentionMask, Method
from armillary.attention.kernels import Kernel
from armillary.core import SequenceLayout, label
from armillary.core.chunks import simulating
from armillary.core.fake_world import fake_world
from armillary.core.gradients import clip_gradients
from armillary.models import GPT, Checkpointing, GPTConfig, Llama, LlamaConfig, linear_token_loss
from armillary.models.activation_checkpoint.offload import simulated_stream
from armillary.models.initialize import meta_model
from armillary.models.parallel import parallelize
from armillary.plan.memory.simulation.live_bytes import CUDA_BLOCK, LiveBytes
from armillary.plan.memory.simulation.simulated_flash import SimulatedFlash
from armillary.train.config import OptimizerConfig
from armillary.train.optimizer import build_optimizer

Progress = Callable[[int, int], None]
"""Called with how many of how many are done."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to simulate a step of, as rank 0 sees it.

    Args:
        axes: ranks on the mesh axes, such as {"ring": 2, "ulysses": 4}.
        attention: makes the method, from the mesh.
        length: tokens of a sequence, N, over all ranks that share it.
        rows: sequences of this rank, B.
        checkpointing: what blocks keep for backward.
        on_host: master weights, their gradients and the optimizer's state are in the host's memory.
        precision: of forward and backward; master weights, gradients and the optimizer's state are float32.
        kernel: what attention allocates. With a real one, a `SimulatedStep` can be run on real tensors.
    """

    model: LlamaConfig | GPTConfig
    axes: Mapping[str, int]
    attention: Callable[[DeviceMesh], Method]
    length: int
    rows: int = 1
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    on_host: bool = False
    precision: torch.dtype = torch.bfloat16
    kernel: Kernel = field(default_factory=SimulatedFlash)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one rank at the moment when the device held most, and when the host did.

    Breakdowns are by label and by "parameters", "gradients", "optimizer" and "other"; `label` was computed then.
    """

    device: int
    device_breakdown: dict[str, int]
    host: int
    host_breakdown: dict[str, int]
    label: str | None
    seconds: float
    """That the simulation took."""
    ops: int


def simulate(job: Job, progress: Progress = lambda _done, _of: None) -> StepMemory:
    """What one training step holds at most, and where. Needs no GPU, and a process without a process group.

    Tensors are counted, as the CUDA allocator rounds them. Not counted are the allocator's fragments, the CUDA context,
    buffers of NCCL, and what library kernels take for themselves.

    Args:
        progress: called in backward, with the numbers of parameters that have a gradient, and of all.
    """
    with fake_world(**job.axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        # The mesh's own tensors are real ones.
        with FakeTensorMode(allow_non_fake_inputs=True), simulating():
            return step.run(progress=progress)


@dataclass(frozen=True)
class SimulatedStep:
    """A model on the meta device, sharded over a mesh, and where the tokens lie that it is to be trained on."""

    job: Job
    model: Llama | GPT
    layout: SequenceLayout
    shard: int
    device: str = "cpu"

    @classmethod
    def of(cls, job: Job, mesh: DeviceMesh) -> SimulatedStep:
        method = job.attention(mesh)
        method.kernel = job.kernel
        model = meta_model(job.model, method)
        parallelize(model, mesh, checkpointing=job.checkpointing, precision=job.precision, cpu_offload=job.on_host)
        return cls(job, model, method.layout(job.length), method.shard, mesh.device_type)

    def run(self, block: int = CUDA_BLOCK, progress: Progress = lambda _done, _of: None) -> StepMemory:
        """Allocates everything and trains for a step: on fake tensors in a `FakeTensorMode`, else on real ones."""
        began = time.perf_counter()
        with LiveBytes(block) as live, simulated_stream():
            optimizer = self.start()
            live.pin("parameters", self.model.parameters(), self.job.on_host)
            self.book_gradients(live, progress)
            self.train_step(optimizer)
        return StepMemory(
            device=live.device.peak,
            device_breakdown=live.device.breakdown(),
            host=live.host.peak,
            host_breakdown=live.host.breakdown(),
            label=live.device.label_at_peak,
            seconds=time.perf_counter() - began,
            ops=live.ops,
        )

    def book_gradients(self, live: LiveBytes, progress: Progress) -> None:
        """Has each gradient counted as one once it is there."""
        parameters, done = list(self.model.parameters()), count(1)

        def book(parameter: Tensor) -> None:
            progress(next(done), len(parameters))
            book_gradient(live, self.job.on_host, parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(book)

    def start(self) -> Optimizer:
        """Allocates the parameters and what the optimizer keeps of them, so that the first step is like any other."""
        host = self.job.on_host
        with label("parameters", host=host):
            self.model.to_empty(device="cpu" if host else self.device)
        with label("gradients", host=host):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer = build_optimizer(self.model, OptimizerConfig())
        with label("optimizer", host=host):
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def train_step(self, optimizer: Optimizer) -> None:
        """As `armillary.train.trainer.train_step`, but for what reads numbers."""
        self.loss().backward()
        with label("optimizer", host=self.job.on_host):
            clip_gradients(self.model, 1.0)
            optimizer.step()
        optimizer.zero_grad()

    def loss(self) -> Tensor:
        """As `armillary.train.trainer.global_loss`."""
        with label("batch"):
            positions = self.layout.positions(self.shard).to(self.device)
            tokens = torch.zeros(self.job.rows, len(positions), dtype=torch.long, device=self.device)
            labels = torch.zeros_like(tokens)

        def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            with label("loss"):
                return linear_token_loss(hidden, weight, labels)

        mask = AttentionMask(causal=True)
        total, count = self.model(tokens, positions=positions, mask=mask, layout=self.layout, head=head)
        return total / count


def book_gradient(live: LiveBytes, host: bool, parameter: Tensor) -> None:
    """FSDP2 has just set it. On a GPU it would be copied to the host now, if it is to be there."""
    if parameter.grad is not None:
        live.pin("gradients", [parameter.grad], host)
