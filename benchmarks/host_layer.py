"""What one LLaMA block costs the host: dispatched ops, functions called in this repository, and processor time.

The block keeps what policy "attention_output" does. It has few channels, so that what is left is what Python and the
dispatcher do. Counted is a warm call, forward and backward together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.attention import AttentionMask, Method
from armillary.models import Checkpointing, Llama, LlamaConfig
from armillary.models.block import Context

CONFIG = LlamaConfig(vocab_size=64, dim=128, layers=1, heads=32, kv_heads=8, hidden_dim=128, head_dim=8)


class OpCount(TorchDispatchMode):
    """Counts the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def dispatched(run: Callable[[], object]) -> int:
    """Ops of a call."""
    with OpCount() as ops:
        run()
    return ops.count


def called(run: Callable[[], object]) -> int:
    """How often a call enters functions of armillary, of any thread that Python's profiler sees."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "/armillary/" in frame.f_code.co_filename

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def of_layer(attend: Method, tokens: int, microseconds: Callable[..., tuple[float, float]]) -> dict[str, Any]:
    """Of a block with this attention, on `tokens` of each shard."""
    model = Llama(CONFIG, attend).to(torch.bfloat16)
    Checkpointing("attention_output").apply(model)
    layout = attend.layout(tokens * attend.shards)
    rotation = model.model.rotation(layout.positions(attend.shard)[:tokens], torch.bfloat16)
    context = Context(tokens, rotation, AttentionMask(), layout)
    block = model.model.layers[0]
    x, parameters = torch.zeros(1, tokens, CONFIG.dim, dtype=torch.bfloat16).requires_grad_(), [*block.parameters()]

    def forward() -> Tensor:
        return block(x, context)

    def backward(y: Tensor) -> None:
        torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))

    def both() -> None:
        backward(forward())

    there, back = microseconds(forward, backward)
    counts = {"dispatched ops": dispatched(both), "Python calls": called(both)}
    return counts | {"forward us": there, "backward us": back}
