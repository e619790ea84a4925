"""Memory at single moments of a training step: during attention, and right before it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, Projected, Ring, UPipe
from armillary.core.chunks import simulating
from armillary.core.fake_world import fake_world
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.layers.projections import HeadProjections
from armillary.plan.memory.simulation.live_bytes import LiveBytes
from armillary.plan.memory.simulation.simulate import Job, SimulatedStep
from armillary.plan.memory.simulation.simulated_flash import SimulatedFlash

Build = Callable[[DeviceMesh], Method]

TOKENS, DIM, WIDTH = 1024, 128, 64


def attention_intermediates(build: Build, axes: Mapping[str, int], heads: int, key_heads: int) -> float:
    """Heads of q, k, v and out that a forward pass from hidden states holds at most, travelling or not.

    One is a head of a rank's tokens in 16 bits. What stays is left out: x, weights, the full out and lse.
    """
    with fake_world(**axes) as mesh:
        method = build(mesh)
        method.kernel = SimulatedFlash()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x, source = torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16), _projections(heads, key_heads)
            layout, mask = method.layout(TOKENS * prod(axes.values())), AttentionMask()
            with LiveBytes(block=1) as live:
                if isinstance(method, UPipe):
                    kept = method.attend(Projected(x, source), method.call_for(x, source, mask=mask, layout=layout))
                else:
                    kept = [method.projected(x, source, mask=mask, layout=layout)]
            return (live.device.peak - sum(tensor.nbytes for tensor in kept)) / (TOKENS * DIM * 2)


def _projections(heads: int, key_heads: int) -> HeadProjections:
    query, key, value = (
        nn.Linear(WIDTH, n * DIM, bias=False, dtype=torch.bfloat16) for n in (heads, key_heads, key_heads)
    )
    return HeadProjections(query, key, value, heads, key_heads, DIM)


@dataclass(frozen=True)
class Before:
    """What is held when attention of the last block is about to begin in its recomputation, in units of one [T, E].

    Args:
        checkpoints: inputs of blocks that are kept. The gradient that has come in from above takes one more.
        handed: q, k and v that the ring begins with.
        activations: checkpoints, and all that attention holds: beside q, k and v, room for out, and of WallFacer the
            rank's own q, k and v, from which those of the team were gathered.
    """

    checkpoints: float
    handed: float
    activations: float


def before_attention(model: LlamaConfig, axes: Mapping[str, int], build: Build, length: int) -> Before:
    """That moment, for a method with a ring of keys, under policy "layer", with one row in 16 bits."""
    unit, found = length // prod(axes.values()) * model.dim * 2, list[Before]()
    job = Job(
        model=model, axes=axes, attention=build, length=length, checkpointing=Checkpointing("layer"), on_host=True
    )

    def note(_: Ring, q: Tensor, k: Tensor, v: Tensor, *__: object) -> None:
        held = {category: count / unit for category, count in live.device.current.items()}
        checkpoints, handed = held["checkpoints"] + held["other"], sum(x.nbytes for x in (q, k, v)) / unit
        found.append(Before(checkpoints, handed, checkpoints + held["attention"]))

    with fake_world(**axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, simulating(), LiveBytes() as live, watched(Ring, "forward", note):
            step.start()
            step.loss().backward()
    return found[model.layers]


@contextmanager
def watched(owner: type, name: str, note: Callable[..., None]) -> Generator[None]:
    """Meanwhile, `note` is called with the arguments of a method before the method is."""
    function = getattr(owner, name)

    def noted(*args: Any) -> Any:
        note(*args)
        return function(*args)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        setattr(owner, name, function)
