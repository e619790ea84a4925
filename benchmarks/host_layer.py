"""Host cost of a LLaMA block: dispatched ops, calls of functions of this repository, and processor time.

The block runs under the policy "attention_output". It has few channels, so that the time is that of Python and the
dispatcher. Counts are of a warm call, forward and backward together.
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
    """The number of ops of a call."""
    with OpCount() as ops:
        run()
    return ops.count


def called(run: Callable[[], object]) -> int:
    """The number of calls of armillary's functions in this thread."""
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
    """Counts and times of a block with the method `attend` on `tokens` per shard."""
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

    def forward_and_backward() -> None:
        backward(forward())

    forward_time, backward_time = microseconds(forward, backward)
    counts = {"dispatched ops": dispatched(forward_and_backward), "Python calls": called(forward_and_backward)}
    return counts | {"forward us": forward_time, "backward us": backward_time}
