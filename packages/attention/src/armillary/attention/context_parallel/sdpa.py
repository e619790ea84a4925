"""Context parallelism for unmodified models that call `torch.nn.functional.scaled_dot_product_attention`.

A `TorchFunctionMode` intercepts the calls and runs a method instead. Attention by any other function would silently see
only the local shard, so the known ones raise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from inspect import currentframe
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from armillary.attention.call.validation import cast_for_autocast
from armillary.attention.context_parallel.dense_masks import REMEDY, MaskReader
from armillary.attention.context_parallel.sequence import (
    SequenceContext,
    check_method,
    check_tokens,
    current_sequence,
    position_restarts,
    takes_documents,
)
from armillary.attention.mask import AttentionMask, Documents
from armillary.attention.methods.base import Method
from armillary.core import SequenceLayout
from armillary.core.internal import compat


def sdpa_parallel(attend: Method) -> SdpaParallel:
    """Routes `scaled_dot_product_attention` to `attend`, for the calls made inside a `with` block.

        with cp.shard(ids, documents=documents) as batch, sdpa_parallel(cp.method):
            loss = cp.loss(model(batch.ids, batch.position_ids), batch)
        loss.backward()

    Tensors are [B, H, T, D] with this rank's tokens, or DTensors, `Shard(2)` on the method's axes and `Shard(1)` on
    axes that divide heads (tp). `is_causal` refers to global positions; without it and without another mask, every
    query sees all keys of its document. It does not matter how the model imported the function. Autocast casts q, k and
    v as it does for the function itself.

    `with cp.shard(...)` gives the layout of the shards. Without it, use `with sequence(layout=attend.layout(length))`.

    `backward` may run after both blocks (`with batch` and `sdpa_parallel`) have ended. If it recomputes activations,
    call it inside of both: outside, reentrant checkpointing recomputes attention over the local shard without an error.
    Non-reentrant checkpointing raises there, and also inside, in `torch.autograd.grad` and `backward(inputs=...)`.

    Attention by other functions would see only the local shard, so it is an error where it can be detected. Ops named
    like attention (including flash-attn's) and `nn.MultiheadAttention` raise when they run. The end of the block raises
    after `flex_attention`, or if no call was routed. Attention written as matrix products and a softmax is not detected
    if other calls are routed.

    Models of Hugging Face transformers raise, because they drop their sliding window: if the shard is not longer than
    the window, they pass `is_causal` instead of a mask. A model prepared by `cp.prepare` may be called in the block.

    An `attn_mask` must cover the whole sequence, be the same for all heads, and only hide keys: bool, or 0 and -inf (or
    the dtype's lowest number), [B, H, N, N] or broadcastable to it. The host converts each tensor to an `AttentionMask`
    once, in N^2 steps; it is cheaper to give `cp.shard` a `mask`.

    Bytes sent: as by the method; and once for each `attn_mask` tensor, on one axis, 24 to each other rank.

    Raises:
        ValueError: `attend` is no method. A call with an invalid `attn_mask`; with `attn_mask` in a compiled graph,
            beside `is_causal`, or beside documents or a mask of the `sequence` block; with an `is_causal` that
            contradicts that mask; with dropout; on several ranks without a layout; with fewer key than query heads but
            not `enable_gqa`; or with shapes that the layout or `attend` does not support. A model of transformers,
            other attention that is not routed, or a block that ends without a routed call.
    """
    return SdpaParallel(attend)


class Routing(TorchFunctionMode):
    """Torch function mode that routes SDPA calls to a method and raises for other implementations of attention.

    Args:
        layout: layout of the sequence. If a `sequence` block around the call has a layout too, both must be equal.
        mask: replaces `is_causal`. Documents of the `sequence` block are added to it.

    Attributes:
        used: True once a call was routed or refused.
        unrouted: name of an implementation that ran without being routed; "" for none. Compiled code writes `used` and
            `unrouted` but does not read them. So a graph needs no guards on them, and sets them each time it runs.
        context_has_mask: True if the `sequence` block around the latest call had documents or a mask.
    """

    def __init__(self, method: Method, layout: SequenceLayout | None = None, mask: AttentionMask | None = None) -> None:
        check_method(method)
        super().__init__()
        self.method, self.layout, self.mask, self.reader = method, layout, mask, MaskReader(method)
        self.context_has_mask = False
        self.used, self.unrouted = False, ""

    def sequence_context(self) -> SequenceContext:
        """Returns the arguments of the innermost `sequence` block around the call; empty ones without a block.

        Raises:
            ValueError: backward recomputes attention outside of the block whose documents or mask forward used.
        """
        context = current_sequence()
        # Attention recomputed without the block's mask would be silently wrong.
        if context is None and self.context_has_mask and in_backward():
            raise ValueError(
                "attention whose documents or mask come from `with sequence(...)` is recomputed in backward outside of "
                "that block: call backward inside of it. Autograd's threads (GPU) do not see the block; there, give "
                "the mask to ContextParallelStyle(mask=AttentionMask(documents=...)), or use sdpa_parallel"
            )
        self.context_has_mask = context is not None and (context.documents is not None or context.mask is not None)
        return context or SequenceContext()

    def check_used(self, block: str = "an sdpa_parallel block") -> None:
        """Raises ValueError at the end of a block if no call in it was routed, or another implementation ran."""
        if self.unrouted:
            raise ValueError(
                f"{self.unrouted} ran in {block}, and attended to this rank's tokens alone; "
                "call F.scaled_dot_product_attention, or attend(q, k, v, mask=..., layout=...) itself"
            )
        if not self.used:
            raise ValueError(
                f"{block} ended without a call of F.scaled_dot_product_attention, so each rank attended to its own "
                "tokens alone, or not at all. Other implementations of attention are not routed. Backward alone needs "
                "no block"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.used = True
            return self._attend(*args, **(kwargs or {}))
        if func in UNROUTABLE_FUNCTIONS:
            self.used = True
            raise ValueError(
                f"{func.__name__} (nn.MultiheadAttention, nn.TransformerEncoderLayer) attends to this rank's tokens "
                "alone; project q, k, v and call F.scaled_dot_product_attention, which sdpa_parallel routes"
            )
        if func is torch.ops.higher_order.flex_attention:
            # flex_attention always runs in a graph, where an error would name neither the module nor the remedy:
            # `check_used` raises at the end of the block.
            self.unrouted = "flex_attention"
        if torch.compiler.is_compiling():
            return compat.traceable(func)(*args, **(kwargs or {}))
        # Dynamo cannot trace this walk over stack frames.
        if _is_attention_op(func):
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
            raise ValueError(f"dropout_p={dropout_p}: attention dropout is not supported on shards; pass 0")
        if not query.ndim == key.ndim == value.ndim == 4:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise ValueError(f"{shapes}: each needs 4 dims, [batch, heads, tokens, head dim]")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} query heads, {key.shape[1]} key heads: pass enable_gqa=True to share them"
            )
        context = self.sequence_context()
        layout = context.layout_for(self.method, query.shape[2], self.layout)
        if not compat.is_dtensor(query):  # the shape of a DTensor is global; the method checks it
            check_tokens(self.method.shard, query.shape[2], layout)
        mask = self._mask(query, attn_mask, is_causal, layout, context)
        # SDPA takes [B, H, T, D], methods take [B, T, H, D]. torch's autocast casts the inputs of SDPA, and methods
        # must do the same.
        q, k, v = cast_for_autocast(*(x.transpose(1, 2) for x in (query, key, value)))
        return self.method(q, k, v, mask=mask, layout=layout, scale=scale).transpose(1, 2)

    def _mask(
        self, query: Tensor, attn_mask: Tensor | None, is_causal: bool, layout: SequenceLayout, context: SequenceContext
    ) -> AttentionMask:
        """Returns the mask of the call: the style's mask, else the `sequence` block's, else `attn_mask` or `is_causal`.

        Raises:
            ValueError: two of these contradict each other; `attn_mask` beside another one, or in a compiled graph.
        """
        mask = context.mask if self.mask is None else with_documents(self.mask, context.documents)
        if context.mask not in (None, mask):
            raise ValueError(
                f"sequence(mask={context.mask}) around a module whose style has mask={mask}; leave one out"
            )
        if attn_mask is None:
            if self.mask is None and mask is not None:
                # A mask with a pattern (a tree, chunks) may be causal although its field `causal` is False.
                contradicts = not mask.causal and mask.pattern is None if is_causal else mask.causal
                if contradicts:
                    raise ValueError(f"is_causal={is_causal}, but sequence(mask=...) has causal={mask.causal}: {mask}")
            return mask or AttentionMask(causal=is_causal, documents=context.documents)
        sources = {"is_causal": is_causal, "mask": mask is not None, "documents": context.documents is not None}
        if any(sources.values()):
            names = ", ".join(name for name, present in sources.items() if present)
            raise ValueError(
                f"attn_mask {tuple(attn_mask.shape)} beside {names}, which are masks too; give one of them"
            )
        if torch.compiler.is_compiling():
            raise ValueError(f"attn_mask {tuple(attn_mask.shape)} in a compiled graph, which cannot read it; {REMEDY}")
        # Of a DTensor, only the global batch is known here and not which rows this rank has. So it needs one mask for
        # all rows.
        return self.reader.read(attn_mask, 1 if compat.is_dtensor(query) else query.shape[0], layout)


def with_documents(mask: AttentionMask, documents: Documents | None) -> AttentionMask:
    """Returns a mask with documents added, if it can have any; raises ValueError if it has others."""
    if documents is None:
        return mask
    if mask.documents is None and takes_documents(mask):
        return AttentionMask(mask.causal, mask.window, documents, mask.pattern)
    position_restarts(mask, documents)  # raises if the mask has other documents
    return mask


def in_backward() -> bool:
    """Returns True while autograd runs backward in this thread: attention called there is recomputed."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def unbound(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module's `forward` as a function of the module, so that it can be bound again."""

    def ignore_module(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)  # a plain function that a user or a hook has set as `forward`

    return getattr(forward, "__func__", ignore_module)


class SdpaParallel(Routing):
    """The mode that `sdpa_parallel` returns. Its `with` blocks may be nested; the outermost one checks its use at exit.

    Attributes:
        contexts: for each open `with` block of this mode, the `sequence` block around it.
        refusals: errors for models of transformers, until the outermost block ends.
    """

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.contexts: list[SequenceContext | None] = []
        self.refusals: list[Refusal] = []

    def sequence_context(self) -> SequenceContext:
        return self._innermost() or SequenceContext()

    def _innermost(self) -> SequenceContext | None:
        """Returns the `sequence` block around the call; in autograd's threads, the one around this mode's `with`."""
        # Autograd's threads inherit torch's modes but not context variables, so the mode keeps the `sequence` blocks.
        return current_sequence() or (self.contexts[-1] if self.contexts else None)

    def __enter__(self) -> Self:
        if not self.contexts:
            self.used, self.unrouted = False, ""
            self.refusals = refuse_models(TRANSFORMERS_ERROR)
        self.contexts.append(self._innermost())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.contexts.pop()
        if self.contexts:
            return
        for refusal in reversed(self.refusals):
            refusal.end()
        if not any(raised):  # an exception of the model must not be hidden by ours
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
        """Runs backward with the mode enabled, so that recomputed attention is routed."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = gradient if grad_tensors is None else grad_tensors
        all_require_grad = all(getattr(root, "requires_grad", False) for root in roots)
        if inputs is not None or not all_require_grad:
            # torch raises for a root without a gradient. With `inputs`, checkpointing raises: reentrant always, and
            # non-reentrant because the recomputed attention is not routed.
            func(tensors, gradients, retain_graph, create_graph, inputs=inputs)
            return
        # torch disables a mode while the mode handles a function, here `backward`, so the mode is entered again. Then
        # `torch.autograd.backward` of tensors would call this method again, without end. torch calls no mode if it gets
        # gradient edges instead of tensors.
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        with self:
            torch.autograd.backward(edges, gradients, retain_graph, create_graph)


def _is_attention_op(func: Any) -> bool:
    """Returns True for an op named like attention, unless one of our methods calls it, in forward or backward."""
    if not isinstance(func, OpOverload | OpOverloadPacket) or not re.search("attention|attn|flash", str(func)):
        return False
    # Our kernels call the same ops as models. A call is ours if a module of armillary.attention is on the stack; this
    # package does not count, because its routing mode is on the stack of every call.
    frame, method_modules = currentframe(), re.compile(r"armillary\.attention\.(?!context_parallel)")
    while frame is not None:
        if method_modules.match(frame.f_globals.get("__name__", "")):
            return False
        frame = frame.f_back
    return not str(func).startswith("armillary")


TRANSFORMERS_ERROR = (
    "a model of Hugging Face transformers inside sdpa_parallel, where its sliding window or chunk cannot be seen. Use "
    "ContextParallel(...).prepare(model); or, if it sees whole sequences, call it outside"
)

UNROUTABLE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,  # pyright: ignore[reportPrivateUsage]
    torch._transformer_encoder_layer_fwd,  # pyright: ignore[reportPrivateUsage]
)
"""Functions that attend without calling `scaled_dot_product_attention`, or call it where no mode intercepts it."""

# -- the registries in which Hugging Face transformers looks up attention, if it has been imported ---------------------


class Registries(NamedTuple):
    """The registries of attention functions and of the functions that make masks for them, both by name."""

    attention: Any
    masks: Any

    @staticmethod
    def find() -> Registries | None:
        """Returns the registries of transformers if this process has imported it, else None."""
        # Looked up, not imported: users of plain torch must not wait for the import of transformers.
        models, masks = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
        attention_functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
        mask_functions = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
        if attention_functions is None or mask_functions is None:
            return None
        return Registries(attention_functions, mask_functions)


class Refusal:
    """Replaces one function in a registry by a call that raises ValueError, until `end` restores the function."""

    def __init__(self, registry: Any, name: str, reason: str) -> None:
        self.registry, self.name, self.reason, self.active = registry, name, reason, True
        self.function = registry[name]
        registry.register(name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.function(*args, **kwargs)
        caller = type(kwargs["config"] if "config" in kwargs else args[0]).__name__
        raise ValueError(f"{caller}: {self.reason}")

    def end(self) -> None:
        """Restores the function. If another thread has replaced this object meanwhile, calls pass to the function."""
        self.active = False
        if self.registry[self.name] is self:
            self.registry.register(self.name, self.function)


def refuse_models(reason: str) -> list[Refusal]:
    """Makes models of transformers raise ValueError, except models prepared by our integration. Returns the refusals.

    A model raises when it makes its masks, or, if it makes none, when its first layer attends. The caller must `end`
    each refusal.
    """
    registries = Registries.find()
    if registries is None:
        return []
    functions = registries.attention
    # Our implementations get each layer's mask and window, so their models may be called inside sdpa_parallel.
    own_names = {name for name in functions if method_of_implementation(functions[name])}
    return [
        Refusal(registry, name, reason)
        for registry in registries
        for name in registry.valid_keys()
        if name not in own_names
    ]


class ShardedImplementation:
    """Base class of our implementations. `register_transformers` puts their bound methods into the registries."""

    def __init__(self, method: Method) -> None:
        self.method = method


def method_of_implementation(function: Any) -> Method | None:
    """Returns the attention method of a function that our integration registered; None for other functions."""
    implementation = getattr(function, "__self__", None)
    return implementation.method if isinstance(implementation, ShardedImplementation) else None
