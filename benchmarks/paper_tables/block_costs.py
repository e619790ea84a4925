"""Bytes sent and stored by one transformer block under a parallelism, counted on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.core import CommLedger
from armillary.core.internal import simulating
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, GPTConfig
from armillary.models.internal import simulated_stream
from armillary.models.parallel import ZeroStage, begin_micro_batch
from armillary.plan.memory import AttentionChoice, Job, LiveBytes, SimulatedStep
from armillary.plan.memory.live_bytes import tensors_in

DIM, HEADS, LENGTH = 512, 16, 8192
BLOCK = 12 * DIM**2
"""Parameters of a GPT's block, without biases and norms."""
HIDDEN = LENGTH * DIM
"""Elements of all hidden states, bs * L * d."""
COLLECTIVES = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0, "all_reduce": 0}
"""Collectives of FSDP2 and of DTensor, and the argument with the unsharded tensor."""
ALGOBW = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2, "all_reduce": 2}
"""Factors of the tensor's elements, without (n - 1) / n."""


class Traffic(TorchDispatchMode):
    """Counts the elements of torch's collectives, times their algobw factor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            count = sum(x.numel() for x in tensors_in(args[COLLECTIVES[name]]))
            self.elements += ALGOBW[name] * count
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class BlockCosts:
    """Costs of one block, forward and backward.

    Args:
        parameters: elements sent for parameters and gradients, in d^2.
        activations: elements of 16 bits sent for activations, in bs * L * d.
        gathered: bytes of gathered parameters before backward, per parameter.
        gradients: bytes of gradients after backward, per parameter.
        optimizer: bytes of master weights and both moments, per parameter.
        stored: bytes of stored activations, per hidden state's element.
    """

    parameters: float
    activations: float
    gathered: float
    gradients: float
    optimizer: float
    stored: float


def block_costs(axes: Mapping[str, int], attention: str, zero_stage: ZeroStage = 3) -> BlockCosts:
    """Runs a model of two blocks and one of one block; returns the difference."""
    two, one = (step_costs(axes, attention, zero_stage, layers) for layers in (2, 1))
    difference = {name: two[name] - one[name] for name in two}
    return BlockCosts(
        parameters=difference["parameters"] / DIM**2,
        activations=difference["activations"] / 2 / HIDDEN,
        gathered=difference["gathered"] / BLOCK,
        gradients=difference["gradients"] / BLOCK,
        optimizer=difference["optimizer"] / BLOCK,
        stored=difference["stored"] / HIDDEN,
    )


def step_costs(axes: Mapping[str, int], attention: str, zero_stage: ZeroStage, layers: int) -> Counter[str]:
    """Costs of a step on rank 0; under ZeRO stage 1 of two micro-batches, with memory in the first."""
    model = GPTConfig(vocab_size=512, dim=DIM, layers=layers, heads=HEADS, max_positions=LENGTH)
    job = Job(
        model=model,
        axes=axes,
        attention=AttentionChoice(attention),
        length=LENGTH,
        checkpointing=Checkpointing("none"),
        zero_stage=zero_stage,
    )
    with fake_world(**job.mesh_axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, simulating(), LiveBytes() as live, simulated_stream():
            optimizer = step.allocate_state()
            live.pin("parameters", step.model.parameters())
            state = live.device.current.copy()
            with Traffic() as traffic:
                if zero_stage == 1:
                    begin_micro_batch(step.model, last=False)
                with CommLedger() as ledger:
                    loss = step.loss()
                    before = live.device.current.copy()
                    loss.backward()
                after = live.device.current.copy()
                if zero_stage == 1:
                    begin_micro_batch(step.model, last=True)
                    step.loss().backward()
            del optimizer  # frees its moments
    parameters = before["parameters"] - state["parameters"]
    stored = before.total() - state.total() - parameters
    sharded = prod(size for name, size in axes.items() if name != "tp") > 1
    gradients = sum(after[name] for name in ("gradients", "other")) - state["other"]
    return Counter(
        parameters=traffic.elements if sharded else 0,  # otherwise all are sent by tensor parallelism
        activations=ledger.bytes(),
        gathered=parameters,
        gradients=gradients,
        optimizer=state["parameters"] + state["optimizer"],
        stored=stored,
    )


# -- tensor parallelism without sharded tokens -------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """A GPT's block whose heads and hidden units are those of one tensor-parallel rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.heads = HEADS // ranks
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def plain_tensor_parallel(ranks: int = 8) -> tuple[float, float]:
    """Torch's tensor parallelism of one block: (elements sent for activations, bytes stored), per hidden element."""
    styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    with fake_world(tp=ranks) as mesh:
        with torch.device("meta"):
            block = PlainBlock(ranks).to(torch.bfloat16)
        parallelize_module(block, mesh["tp"], styles)
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            block.to_empty(device="cpu")
            x = torch.empty(1, LENGTH, DIM, dtype=torch.bfloat16, requires_grad=True)
            before = live.device.total
            with Traffic() as traffic:
                y = block(x)
                stored = live.device.total - before
                y.backward(torch.empty_like(y))
    return traffic.elements / HIDDEN, stored / HIDDEN
