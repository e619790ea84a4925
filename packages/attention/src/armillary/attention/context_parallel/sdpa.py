"""Models that call `torch.nn.functional.scaled_dot_product_attention`, unchanged, on a shard of the sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from inspect import currentframe
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from armillary.attention.call.validation import cast_for_autocast
from armillary.attention.context_parallel.dense_masks import REMEDY, MaskReader
from armillary.attention.context_parallel.registries import Refusal, refuse_models
from armillary.attention.context_parallel.sequence import (
    Documents,
    Sharding,
    check_method,
    check_tokens,
    current,
    position_restarts,
    takes_documents,
)
from armillary.attention.mask import AttentionMask
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.compat import is_dtensor


def sdpa_parallel(attend: Method) -> SdpaParallel:
    """Routes `scaled_dot_product_attention` to `attend`, for the calls made inside a `with` block.

        with sequence(layout=layout, documents=documents), sdpa_parallel(attend):
            logits = model(layout.take(ids, attend.shard), positions=layout.positions(attend.shard))
            labels = layout.take(shifted, attend.shard)  # shifted before sharding: `shard_batch` does that too
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels_of_all_ranks
            loss.backward()

    Such a loss is this rank's share, and its gradients are to be summed over ranks, where FSDP2 and DDP average: call
    `armillary.core.sum_gradients(model)` after `fully_shard`.

    Tensors are [B, H, T, D], this rank's tokens; or DTensors, `Shard(2)` on the method's axes, and `Shard(1)` on those
    that divide heads (tp). `is_causal` is about global positions; without it, every query sees
    all keys of its document. However the model has imported the function, it is found. Autocast casts tensors as it
    does for the function itself.

    Backward needs neither block, unless activations are recomputed in it (activation checkpointing): then call
    `backward` inside of both. Called outside, or as `torch.autograd.grad`, non-reentrant checkpointing raises;
    reentrant checkpointing cannot tell that it recomputes something else.

    Attention that is computed by other means stays within a shard. It is refused where it can be seen: ops named like
    attention (flash-attn's among them) and `nn.MultiheadAttention` at once, `flex_attention` when the block ends, and a
    block that routed nothing at all. Attention written out as products and a softmax beside routed calls is not seen.

    Models of Hugging Face transformers are refused: with a window that is no shorter than the shard they leave their
    masks out and say `is_causal` alone. They are for `register_transformers`, with which they may be in the block.

    An `attn_mask` is taken if it is of the whole sequence, the same for all heads and no bias: bool, or of 0 and -inf,
    [N, N] or what broadcasts so. It is read as a value, exactly, once for each tensor and on the host, looking at each
    pair; a value from the start is cheaper (`sequence(mask=...)`).

    Raises:
        ValueError: at a call with another `attn_mask`, with one beside `is_causal` or what `sequence` says, with
            dropout, or with shapes that `attend` refuses; at a model of transformers; at attention that is not routed,
            and at the end of a block without a routed call.
    """
    return SdpaParallel(attend)


class Routing(TorchFunctionMode):
    """Routes calls to `attend`, and refuses attention by other means.

    Args:
        layout: how the sequence is sharded; the `sequence` block around a call, if it has a layout, must have the same.
        mask: replaces `is_causal`. Documents of the `sequence` block are added to it.
    """

    def __init__(self, attend: Method, layout: SequenceLayout | None = None, mask: AttentionMask | None = None) -> None:
        check_method(attend)
        super().__init__()
        self.attend, self.layout, self.mask, self.reader = attend, layout, mask, MaskReader(attend)
        self.block_has_mask = False
        self.used, self.beside = False, ""
        """Whether a call was routed or refused, and the name of what attended beside. Only set, not read, in what may
        be compiled: a graph sets them each time that it runs."""

    def block(self) -> Sharding:
        """Contents of the innermost `sequence` block around the call; empty without a block.

        Raises:
            ValueError: backward recomputes the call outside of the block that masked it in forward.
        """
        block = current()
        if block is None and self.block_has_mask and in_backward():
            raise ValueError(
                "attention whose documents or mask come from `with sequence(...)` is recomputed in backward outside of "
                "that block: call backward inside of it. Autograd's threads (GPU) do not see the block; there, give "
                "the mask to ContextParallelStyle(mask=AttentionMask(documents=...)), or use sdpa_parallel"
            )
        self.block_has_mask = block is not None and (block.documents is not None or block.mask is not None)
        return block or Sharding()

    def check_used(self, block: str = "an sdpa_parallel block") -> None:
        """Refuses a block that has ended, if not all attention in it was routed, or none."""
        if self.beside:
            raise ValueError(
                f"{self.beside} ran in {block}, and attended to this rank's tokens alone; "
                "call F.scaled_dot_product_attention, or attend(q, k, v, mask=..., layout=...) itself"
            )
        if not self.used:
            raise ValueError(
                f"{block} ended without a call of F.scaled_dot_product_attention, so that each rank "
                "attended to its own tokens alone, if at all. Attention that a model computes in other ways is not "
                "routed. Backward alone needs no block"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.used = True
            return self._attend(*args, **(kwargs or {}))
        if func in ATTEND_THEMSELVES:
            self.used = True
            raise ValueError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends to this rank's tokens "
                "alone; project q, k, v and call F.scaled_dot_product_attention, which sdpa_parallel routes"
            )
        if func is torch.ops.higher_order.flex_attention:  # in a graph always, where raising says too little
            self.beside = "flex_attention"
        if not torch.compiler.is_compiling() and _attends(func):
            raise ValueError(f"{func} attends to this rank's tokens alone; call F.scaled_dot_product_attention instead")
        return func(*args, **(kwargs or {}))

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
        if dropout_p != 0:
            raise ValueError(f"dropout_p={dropout_p}: attention dropout is not done on a sharded sequence; pass 0")
        if not query.ndim == key.ndim == value.ndim == 4:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise ValueError(f"{shapes}: each needs 4 dims, [batch, heads, tokens, head dim]")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} query heads, {key.shape[1]} key heads: pass enable_gqa=True to share them"
            )
        block = self.block()
        layout = block.layout_for(self.attend, query.shape[2], self.layout)
        if not is_dtensor(query):  # of a DTensor the method looks, for its shape is that of all shards
            check_tokens(self.attend.shard, query.shape[2], layout)
        mask = self._mask(query, attn_mask, is_causal, layout, block)
        q, k, v = cast_for_autocast(*(x.transpose(1, 2) for x in (query, key, value)))
        return self.attend(q, k, v, mask=mask, layout=layout, scale=scale).transpose(1, 2)

    def _mask(
        self, query: Tensor, attn_mask: Tensor | None, is_causal: bool, layout: SequenceLayout, block: Sharding
    ) -> AttentionMask:
        """Returns the mask of the style, of the `sequence` block or of the call; raises if two of them contradict."""
        mask = block.mask if self.mask is None else with_documents(self.mask, block.documents)
        if block.mask not in (None, mask):
            raise ValueError(f"sequence(mask={block.mask}) around a module whose style has mask={mask}; leave one out")
        if attn_mask is None:
            if self.mask is None and mask is not None:
                check_told(mask, is_causal)
            return mask or AttentionMask(causal=is_causal, documents=block.documents)
        beside = {"is_causal": is_causal, "mask": mask is not None, "documents": block.documents is not None}
        if any(beside.values()):
            names = ", ".join(name for name, is_there in beside.items() if is_there)
            raise ValueError(
                f"attn_mask {tuple(attn_mask.shape)} beside {names}, which say who sees whom too; give one of them"
            )
        if torch.compiler.is_compiling():
            raise ValueError(f"attn_mask {tuple(attn_mask.shape)} in a compiled graph, which cannot read it; {REMEDY}")
        return self.reader.read(attn_mask, 1 if is_dtensor(query) else query.shape[0], layout)


def with_documents(mask: AttentionMask, documents: Documents | None) -> AttentionMask:
    """Returns the mask of a style within the documents of a `sequence` block.

    Raises:
        ValueError: the mask has other documents.
    """
    if documents is None:
        return mask
    if mask.documents is None and takes_documents(mask):
        return AttentionMask(mask.causal, mask.window, documents, mask.pattern)
    position_restarts(mask, documents)
    return mask


def in_backward() -> bool:
    """Returns whether autograd is running backward in this thread: attention called there is recomputed."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def check_told(mask: AttentionMask, is_causal: bool) -> None:
    """Refuses a mask of `sequence(...)` that contradicts the call.

    Raises:
        ValueError: the call is causal and the mask, which could say so, is not; or the other way round.
    """
    if is_causal and not mask.causal and mask.pattern is None:
        raise ValueError(f"is_causal=True, but sequence(mask=...) has causal=False: {mask}")
    if not is_causal and mask.causal:
        raise ValueError(f"is_causal=False, but sequence(mask=...) has causal=True: {mask}")


def unbound(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's `forward` as a function of the module; of one that was put in its place, which knows it already."""

    def of_any(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return getattr(forward, "__func__", of_any)


class SdpaParallel(Routing):
    """The mode behind `sdpa_parallel`."""

    def __init__(self, attend: Method) -> None:
        super().__init__(attend)
        self.entered_in: list[Sharding | None] = []
        self.refusals: list[Refusal] = []

    def block(self) -> Sharding:
        return current() or (self.entered_in[-1] if self.entered_in else None) or Sharding()

    def __enter__(self) -> Self:
        if not self.entered_in:
            self.used, self.beside = False, ""
            self.refusals = refuse_models(TRANSFORMERS)
        # torch hands its modes on to the threads that run backward; context variables do not reach them.
        self.entered_in.append(current() or (self.entered_in[-1] if self.entered_in else None))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.entered_in.pop()
        if self.entered_in:
            return
        for refusal in reversed(self.refusals):
            refusal.end()
        if not any(raised):
            self.check_used()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._backward(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

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


def _attends(func: Callable[..., Any]) -> bool:
    """Whether it is an op that attends, by its name, and not on behalf of one of our methods (in backward, say)."""
    if not isinstance(func, OpOverload | OpOverloadPacket) or not re.search("attention|attn|flash", str(func)):
        return False
    frame, own = currentframe(), re.compile(r"armillary\.attention\.(?!context_parallel)")
    while frame is not None:
        if own.match(frame.f_globals.get("__name__", "")):
            return False
        frame = frame.f_back
    return not str(func).startswith("armillary")


TRANSFORMERS = (
    "a model of Hugging Face transformers inside sdpa_parallel, where its sliding window or chunk cannot be known. Use "
    'register_transformers(attend) and attn_implementation="armillary"; or, if it sees whole sequences, call it outside'
)

ATTEND_THEMSELVES: tuple[Callable[..., Any], ...] = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,  # pyright: ignore[reportPrivateUsage]
    torch._transformer_encoder_layer_fwd,  # pyright: ignore[reportPrivateUsage]
)
"""What attends without calling the function, or where torch hides the call from modes."""
