"""A training step (`Job`), and its memory by simulation: real model, FSDP2 and optimizer on fake tensors.

`simulate` builds a `SimulatedStep` in a process group that sends nothing, and runs it under `LiveBytes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import (
    BackwardTensors,
    Cudnn,
    Flash,
    FlashCall,
    Inputs,
    Kernel,
    MethodOptions,
    NamedMethod,
    Placement,
    named_method,
)
from armillary.core import SequenceLayout, clip_gradients, label
from armillary.core.internal import simulating
from armillary.core.testing import fake_world
from armillary.models import GPT, Checkpointing, GPTConfig, Llama, LlamaConfig, linear_token_loss, parallelize
from armillary.models.internal import meta_model, simulated_stream
from armillary.models.parallel import ZeroStage, begin_micro_batch
from armillary.plan.memory.live_bytes import CUDA_BLOCK, LiveBytes
from armillary.train import OptimizerConfig
from armillary.train.internal import build_optimizer

# Called with (number of items done, number of all items).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class AttentionChoice:
    """A method by name and options. Calling it with a mesh builds the method, as `build_attention(name, mesh)` does.

    Args:
        name: name in the registry, such as "ring", "usp" or "upipe+wallfacer".
        heads_per_stage, team, placement, nodes: options of the trainer's `ParallelConfig`.
    """

    name: str
    heads_per_stage: int | None = None
    team: int | None = None
    placement: Placement = "collect_intra"
    nodes: int | None = None

    @classmethod
    def of(cls, method: NamedMethod) -> AttentionChoice:
        """Returns the choice that builds this method."""
        options = method.options
        return cls(method.name, options.heads_per_stage, options.team, options.placement, options.nodes)

    @cached_property  # a search asks each choice for its method thousands of times
    def method(self) -> NamedMethod:
        """The method in the registry, with these options.

        Raises:
            ValueError: an unknown name, or an option that the method does not have.
        """
        return named_method(self.name, MethodOptions(self.heads_per_stage, self.team, self.placement, nodes=self.nodes))

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)  # without the cached method, whose registry entry has functions that cannot be pickled

    def __str__(self) -> str:
        return str(self.method)

    def __call__(self, mesh: DeviceMesh) -> Method:
        return self.method.build(mesh)

    def mesh_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns the axis sizes of the mesh on which the method is built. Methods over nodes split `ring` in two."""
        return self.method.mesh_axes(axes)


# Work buffers are padded to a multiple of this many tokens.
ROWS = 128


@dataclass(frozen=True)
class SimulatedFlash(Flash):
    """Allocates the tensors that a CUDA kernel allocates, without values. Splits and packs calls as CUDA kernels do.

    Args:
        version: 2 is torch's own kernel, and stands for cuDNN; 3 is the flash-attn package's.
    """

    name: str = "simulated_flash"
    version: Literal[2, 3] = 2

    def refuses(self, inputs: Inputs) -> str | None:
        device = "cuda" if inputs.device == "cpu" else inputs.device
        # cuDNN, on Hopper, also takes values of another head dim than keys.
        if self.version == 2 and Cudnn().refuses(replace(inputs, device=device, capability=(9, 0))) is None:
            return None
        return super().refuses(replace(inputs, device=device, capability=None))

    def pad(self, *tensors: Tensor) -> list[Tensor]:
        return super().pad(*tensors) if self.version == 3 else list(tensors)

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])  # heads first
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape, dtype=torch.float32)

    def call_backward(self, tensors: BackwardTensors, call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, _ = tensors
        # Version 2 also stands for cuDNN, whose backward allocates the same two float32 buffers, without padding
        # (`dQ_accum` and `softmax_sum` of cudnn-frontend 1.23, scaled_dot_product_flash_attention.h). The workspace of
        # its closed source, for example for dk and dv of each query head, is not published.
        if self.version == 2:
            dout, out = dout.contiguous(), out.contiguous()  # as torch's kernel copies them
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        heads, key_heads, ends = q.shape[-2], k.shape[-2], call.lengths
        # 1. For queries: an accumulator for dq, and the row sums of dout * out. Version 3 also stores lse in base 2.
        rows = padded_rows(q, ends.queries if ends else None)
        shapes = [(rows, heads, padded_head_dim(q.shape[-1])), *[(rows, heads)] * (self.version - 1)]
        # 2. For dk and dv, unless each query head has a key head of its own: version 2 has those of each query head and
        # then sums them, version 3 accumulates them in float32. All buffers are alive at once.
        per_query_head = list[Tensor]()
        if heads != key_heads and self.version == 2:
            per_query_head = [x.new_empty((*x.shape[:-2], heads, x.shape[-1])) for x in (k, v)]
        elif heads != key_heads:
            rows = padded_rows(k, ends.keys if ends else None)
            shapes += [(rows, key_heads, padded_head_dim(x.shape[-1])) for x in (k, v)]
        buffers = [*(q.new_empty(shape, dtype=torch.float32) for shape in shapes), *per_query_head]
        del buffers
        return dq, dk, dv


def padded_rows(x: Tensor, document_ends: Tensor | None) -> int:
    """Number of tokens of a work buffer for x [B, T, H, D], or for packed documents [tokens, H, D]."""
    if document_ends is None:
        return x.shape[0] * -(-x.shape[1] // ROWS) * ROWS
    return x.shape[0] + ROWS * (len(document_ends) - 1)  # each document may need up to ROWS tokens of padding


def padded_head_dim(head_dim: int) -> int:
    multiple = 32 if head_dim <= 128 else 64
    return -(-head_dim // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training step to simulate, as `rank` runs it.

    Args:
        axes: sizes of the mesh axes, such as {"ring": 2, "ulysses": 4}.
        attention: builds the method on the mesh.
        length: global sequence length N.
        rows: number of sequences in the batch of a rank, B.
        checkpointing: tensors that blocks store for backward.
        zero_stage: 1 to 3, as in `shard_parameters`.
        micro_batches: number of micro-batches of a step. Two are simulated under ZeRO stage 1, which keeps gathered
            parameters and unsharded gradients from one to the next; otherwise one is enough.
        on_host: True if master weights, their gradients and the optimizer's state are in the host's memory.
        precision: dtype of forward and backward; master weights, gradients and optimizer state are float32.
        contiguous_states: as in `parallelize`.
        kernel: attention kernel. With a real kernel, a `SimulatedStep` can also run on real tensors.
    """

    model: LlamaConfig | GPTConfig
    axes: Mapping[str, int]
    attention: Callable[[DeviceMesh], Method]
    length: int
    rows: int = 1
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    zero_stage: ZeroStage = 3
    micro_batches: int = 1
    on_host: bool = False
    precision: torch.dtype = torch.bfloat16
    contiguous_states: bool = False
    kernel: Kernel = field(default_factory=SimulatedFlash)

    @property
    def rank(self) -> int:
        """The rank that needs the most memory: rank 0, or for a hybrid the second rank of the sequence.

        States of other ranks enter all of the second rank's chunks, so it computes their effect on all chunks.
        """
        has_states = isinstance(self.model, LlamaConfig) and self.model.states is not None
        is_sharded = self.axes.get("ring", 1) * self.axes.get("ulysses", 1) > 1
        return self.axes.get("tp", 1) if has_states and is_sharded else 0

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis sizes of the mesh on which the method is built (`AttentionChoice.mesh_axes`)."""
        return getattr(self.attention, "mesh_axes", dict)(self.axes)

    @property
    def method(self) -> NamedMethod:
        """The method in the registry, whose plan predicts time and memory.

        Raises:
            ValueError: the attention is not an `AttentionChoice`.
        """
        if not isinstance(self.attention, AttentionChoice):
            raise ValueError(f"attention={self.attention!r} must be an AttentionChoice, so that its formulas are known")
        return self.attention.method


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes of a training step on one rank, in device memory and in host memory.

    Args:
        device_breakdown, host_breakdown: bytes at the peak by category: "parameters", "gradients", "optimizer", labels
            of computations such as "attention", and "other".
        label: label of the computation at the device's peak.
        seconds: duration of the simulation.
        ops: number of simulated ops.
    """

    device: int
    device_breakdown: dict[str, int]
    host: int
    host_breakdown: dict[str, int]
    label: str | None
    seconds: float
    ops: int


def simulate(job: Job, progress: Progress = lambda _done, _total: None) -> StepMemory:
    """Returns the peak memory of one training step. Needs no GPU; the process must not have a process group.

    Counts the bytes of tensors, rounded up as the CUDA allocator does. Does not count fragmentation, the CUDA context,
    NCCL's buffers, and workspaces inside of library kernels.

    Args:
        progress: called in backward with (number of parameters that have a gradient, number of all parameters).
    """
    with fake_world(job.rank, **job.mesh_axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), simulating():  # the mesh's own tensors are real
            return step.run(progress=progress)


@dataclass(frozen=True)
class SimulatedStep:
    """A model on the meta device, sharded over a mesh, and the layout of its tokens."""

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
        parallelize(
            model,
            mesh,
            checkpointing=job.checkpointing,
            precision=job.precision,
            cpu_offload=job.on_host,
            zero_stage=job.zero_stage,
            contiguous_states=job.contiguous_states,
        )
        return cls(job, model, method.layout(job.length), method.shard, mesh.device_type)

    def run(self, round_to: int = CUDA_BLOCK, progress: Progress = lambda _done, _total: None) -> StepMemory:
        """Allocates all state and trains for one step, on fake tensors in a `FakeTensorMode`, else on real ones."""
        start = time.perf_counter()
        parameters, gradient_numbers = list(self.model.parameters()), count(1)
        with LiveBytes(round_to) as live, simulated_stream():

            def pin_gradient(parameter: Tensor) -> None:
                # FSDP2 has just set the gradient. With CPU offload, a GPU would copy it to the host at this moment.
                progress(next(gradient_numbers), len(parameters))
                if parameter.grad is not None:
                    live.pin("gradients", [parameter.grad], self.job.on_host)

            # 1. The state of a run that has trained before: master weights and AdamW's moments.
            optimizer = self.allocate_state()
            live.pin("parameters", self.model.parameters(), self.job.on_host)
            # 2. One step. A gradient gets its category when it appears in `.grad`; before, it is a tensor like others.
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(pin_gradient)
            self.train_step(optimizer)
        return StepMemory(
            device=live.device.peak,
            device_breakdown=live.device.breakdown(),
            host=live.host.peak,
            host_breakdown=live.host.breakdown(),
            label=live.device.label_at_peak,
            seconds=time.perf_counter() - start,
            ops=live.ops,
        )

    def allocate_state(self) -> Optimizer:
        """Allocates parameters and optimizer state, as after a first step. Returns the optimizer."""
        host = self.job.on_host
        with label("parameters", host=host):
            self.model.to_empty(device="cpu" if host else self.device)
        with label("gradients", host=host):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer = build_optimizer(self.model, OptimizerConfig())
        with label("optimizer", host=host):
            optimizer.step()
        # This first step of AdamW has allocated its moments. Free the gradients, as after any step.
        optimizer.zero_grad()
        return optimizer

    def train_step(self, optimizer: Optimizer) -> None:
        """Runs the trainer's step (`armillary.train.step`), without reading values, which fake tensors do not have."""
        # The first micro-batch leaves gathered parameters and unsharded gradients. Further ones leave the same memory.
        if self.job.zero_stage == 1 and self.job.micro_batches > 1:
            begin_micro_batch(self.model, last=False)
            self.loss().backward()
            begin_micro_batch(self.model, last=True)
        self.loss().backward()
        with label("optimizer", host=self.job.on_host):
            clip_gradients(self.model, 1.0)
            optimizer.step()
        optimizer.zero_grad()

    def loss(self) -> Tensor:
        with label("batch"):
            positions = self.layout.positions(self.shard).to(self.device)
            tokens = torch.zeros(self.job.rows, len(positions), dtype=torch.long, device=self.device)
            labels = torch.zeros_like(tokens)

        def head(hidden: Tensor, weight: Tensor, **vocabulary: Any) -> tuple[Tensor, Tensor]:
            with label("loss"):
                return linear_token_loss(hidden, weight, labels, **vocabulary)

        mask = AttentionMask(causal=True)
        total, count = self.model(tokens, positions=positions, mask=mask, layout=self.layout, head=head)
        return total / count
