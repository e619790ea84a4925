"""Models that call `torch.nn.functional.scaled_dot_product_attention`, unchanged, on a shard of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from armillary.attention.integrations.sequence import Sharding, current
from armillary.attention.mask import AttentionMask
from armillary.attention.method import Method


def sdpa_parallel(attend: Method) -> SdpaParallel:
    """Routes `scaled_dot_product_attention` to `attend`, for the calls made inside a `with` block.

        with sequence(layout=layout, documents=documents), sdpa_parallel(attend):
            loss = model(layout.take(ids, attend.shard), positions=layout.positions(attend.shard))
            loss.backward()

    Tensors are [B, H, T, D], this rank's tokens. `is_causal` is about global positions; without it, every query sees
    all keys of its document. However the model has imported the function, it is found.

    Backward needs neither block, unless activations are recomputed in it (activation checkpointing): then call
    `backward` inside of both. Called outside, or as `torch.autograd.grad`, non-reentrant checkpointing raises;
    reentrant checkpointing cannot tell that it recomputes something else.

    Raises:
        ValueError: at a call with `attn_mask` or dropout, or with shapes that `attend` refuses; at
            `nn.MultiheadAttention`, which attends without calling the function.
    """
    return SdpaParallel(attend)


class SdpaParallel(TorchFunctionMode):
    """The mode behind `sdpa_parallel`."""

    def __init__(self, attend: Method) -> None:
        super().__init__()
        self.attend = attend
        self.entered_in: list[Sharding | None] = []

    def __enter__(self) -> Self:
        # torch hands its modes on to the threads that run backward; context variables do not reach them.
        self.entered_in.append(current() or (self.entered_in[-1] if self.entered_in else None))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.entered_in.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._backward(func, *args, **(kwargs or {}))
        if func in ATTEND_THEMSELVES:
            raise ValueError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends to this rank's tokens "
                "alone; project q, k, v and call F.scaled_dot_product_attention, which sdpa_parallel routes"
            )
        return func(*args, **(kwargs or {}))

    def _backward(
        self,
        func: Callable[..., Any],
        tensors: Tensor | Iterable[Tensor],
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        grad_tensors: Any = None,
    ) -> None:
        """Backward with the mode on, for what is recomputed in it. torch turns a mode off while it handles a function,
        and this one for backward too; but gradient edges are not tensors, and of them it asks no mode."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = gradient if grad_tensors is None else grad_tensors
        known = all(getattr(root, "requires_grad", False) for root in roots)
        if inputs is not None or not known:  # checkpointing takes no inputs, or raises; what is left needs no mode
            func(tensors, gradients, retain_graph, create_graph, inputs=inputs)
            return
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        with self:
            torch.autograd.backward(edges, gradients, retain_graph, create_graph)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                f"attn_mask {tuple(attn_mask.shape)} cannot say what is visible on other ranks; use is_causal=True, "
                "and `with sequence(documents=...)` for packed or padded rows"
            )
        if dropout_p > 0:
            raise ValueError(f"dropout_p={dropout_p}: attention dropout is not done on a sharded sequence; pass 0")
        if not query.ndim == key.ndim == value.ndim == 4:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise ValueError(f"{shapes}: each needs 4 dims, [batch, heads, tokens, head dim]")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} query heads, {key.shape[1]} key heads: pass enable_gqa=True to share them"
            )
        held = current() or (self.entered_in[-1] if self.entered_in else None) or Sharding()
        layout = held.layout_for(self.attend, query.shape[2])
        mask = AttentionMask(causal=is_causal, documents=held.documents)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.attend(q, k, v, mask=mask, layout=layout, scale=scale).transpose(1, 2)


ATTEND_THEMSELVES: tuple[Callable[..., Any], ...] = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,  # pyright: ignore[reportPrivateUsage]
    torch._transformer_encoder_layer_fwd,  # pyright: ignore[reportPrivateUsage]
)
"""What attends without calling the function, or where torch hides the call from modes."""
