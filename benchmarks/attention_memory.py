"""Attention's peak memory, and memory right before attention is recomputed, in the units that papers use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, Projected, Ring, UPipe
from armillary.core.internal import simulating
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.internal import HeadProjections
from armillary.plan.memory import Job, LiveBytes, SimulatedFlash, SimulatedStep

Build = Callable[[DeviceMesh], Method]
"""Builds an attention method on a mesh."""

TOKENS, DIM, WIDTH = 1024, 128, 64
"""Sizes of the simulated call: tokens of a rank, head dim, and width of hidden states."""


def attention_intermediates(build: Build, axes: Mapping[str, int], heads: int, key_heads: int) -> float:
    """Peak memory of q, k, v and communication buffers in a forward pass from hidden states.

    The unit is one head on one rank: [T, D] in 16 bits. Does not count the inputs (x and weights) and the results (out
    and lse).
    """
    with fake_world(**axes) as mesh:
        method = build(mesh)
        method.kernel = SimulatedFlash()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16)
            query, key, value = (
                nn.Linear(WIDTH, n * DIM, bias=False, dtype=torch.bfloat16) for n in (heads, key_heads, key_heads)
            )
            source = HeadProjections(query, key, value, heads, key_heads, DIM)
            layout, mask = method.layout(TOKENS * prod(axes.values())), AttentionMask()
            with LiveBytes(round_to=1) as live:
                if isinstance(method, UPipe):
                    results = method.attend(
                        Projected(x, source), method.check_projected(x, source, mask=mask, layout=layout)
                    )
                else:
                    results = [method.projected(x, source, mask=mask, layout=layout)]
            # The results exist at the peak, so they are subtracted.
            return (live.device.peak - sum(tensor.nbytes for tensor in results)) / (TOKENS * DIM * 2)


@dataclass(frozen=True)
class MemoryBeforeAttention:
    """Memory in backward right before the last block's attention is recomputed. The unit is the bytes of one [T, E].

    The gradient of the block's output takes one more unit, which is not counted.

    Args:
        checkpoints: stored inputs of blocks.
        qkv: q, k and v with which the ring starts.
        activations: checkpoints and all tensors of attention: q, k and v, and a buffer for out. WallFacer also has the
            rank's local q, k and v, from which it gathered those of the team.
    """

    checkpoints: float
    qkv: float
    activations: float


def memory_before_attention(
    model: LlamaConfig, axes: Mapping[str, int], build: Build, length: int
) -> MemoryBeforeAttention:
    """Simulates a step of one sequence in 16 bits, under policy "layer", with a method that rotates keys in a ring."""
    unit = length // prod(axes.values()) * model.dim * 2  # bytes of one [T, E]
    snapshots = list[MemoryBeforeAttention]()
    job = Job(
        model=model, axes=axes, attention=build, length=length, checkpointing=Checkpointing("layer"), on_host=True
    )

    def with_snapshot(forward: Callable[..., Any]) -> Callable[..., Any]:
        def take_snapshot(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
            sizes = {category: count / unit for category, count in live.device.current.items()}
            # Each block allocates the next block's input, under the label "checkpoints". The first block's input is the
            # output of the embedding, which has no label, so it counts as "other".
            checkpoints, qkv = sizes["checkpoints"] + sizes["other"], sum(x.nbytes for x in (q, k, v)) / unit
            snapshots.append(MemoryBeforeAttention(checkpoints, qkv, checkpoints + sizes["attention"]))
            return forward(ring, q, k, v, *args)

        return take_snapshot

    with fake_world(**axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, simulating(), LiveBytes() as live, patch.object(Ring, "forward", with_snapshot(Ring.forward)):
            step.allocate_state()
            step.loss().backward()
    # Forward takes one snapshot per block. Backward recomputes the last block first, so that is the next snapshot.
    return snapshots[model.layers]
