"""Checks the arguments of a call and builds its `AttentionSpec`. All ValueErrors come before any communication."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor

from armillary.attention.call.qkv_sources import CacheableProjections, Projections, one_token
from armillary.attention.call.recompute import autocast_enabled
from armillary.attention.call.spec import AttentionMethod, AttentionOptions, AttentionSpec, key_heads_of
from armillary.attention.kernels import Inputs, Scores, check_softcap, choose_kernel
from armillary.attention.kernels.inputs import activated_implementation, is_deterministic
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.internal import check_tensor, compat, number

# -- calls ------------------------------------------------------------------------------------------------------------


def check_call(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    weight: Tensor | None = None,
) -> AttentionSpec:
    """Returns the spec of a call. Reads only shapes, dtypes and devices of the tensors. Equal calls share one spec.

    Args:
        options: checked by `check_options`.
        weight: of the expansion, if k and v are rotary keys and latents.
    """

    method.was_called = True

    def check() -> AttentionSpec:
        if weight is None:
            return _check_tensors_and_layout(method, q, k, v, sinks, options)
        check_latents(q, k, v, weight)
        return _check_tensors_and_layout(method, *expanded_shapes(q, k, v, weight), sinks, options)

    return _cached_spec(method, call_properties(method, q, k, v, sinks, weight), options, check)


def check_projected_call(
    method: AttentionMethod, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> AttentionSpec:
    """Returns the spec of a call on the projections of x [B, T, E].

    To learn dims and dtypes it projects one head (`one_token`). Equal calls share one spec if the projections have a
    `cache_key`.
    """

    method.was_called = True

    def check() -> AttentionSpec:
        q, k, v = one_token(x, projections)
        # The kernel is chosen from `inputs`, which have the true device. Everything else is checked on meta tensors of
        # full size, which take no memory.
        inputs = Inputs.of(q, v, options.softcap, options.mask)
        q, k, v = (
            torch.empty((*x.shape[:2], heads, y.shape[3]), dtype=y.dtype, device="meta")
            for heads, y in ((projections.heads, q), (projections.key_heads, k), (projections.key_heads, v))
        )
        return _check_tensors_and_layout(method, q, k, v, sinks, options, inputs)

    cache_key = cast(CacheableProjections, projections).cache_key() if hasattr(projections, "cache_key") else None
    if cache_key is None:
        return check()
    autocast_dtype = torch.get_autocast_dtype(x.device.type) if autocast_enabled(x) else None
    key = "projected", cache_key, autocast_dtype, *call_properties(method, x, sinks)
    return _cached_spec(method, key, options, check)


def call_properties(method: AttentionMethod, *tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Returns the properties on which checks and the choice of a kernel depend: shapes, dtypes, devices, settings."""
    settings = method.kernel, is_deterministic(), activated_implementation()
    return *settings, *[x if x is None else (x.shape, x.dtype, x.device) for x in tensors]


def _cached_spec(
    method: AttentionMethod, key: tuple[Hashable, ...], options: AttentionOptions, check: Callable[[], AttentionSpec]
) -> AttentionSpec:
    """Returns the spec of an earlier call with an equal key and options, or else the result of `check`."""
    try:
        hash(key)
    except TypeError:  # symbolic sizes, while a graph is traced
        return check()
    call = (key, options)
    return method.spec_cache.get(call) or method.spec_cache.add(call, check(), options.mask)


def _check_tensors_and_layout(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: AttentionOptions,
    inputs: Inputs | None = None,
) -> AttentionSpec:
    """Checks the arguments against each other, chooses the kernel, and returns the spec.

    Args:
        inputs: the properties by which the kernel is chosen, if q, k and v are meta tensors; None: those of q and v.
    """
    mask, layout, key_layout, scale, softcap, kernel, _ = options
    check_tensors(q, k, v, sinks)
    method.check(q, k, v)
    layout = check_sequence_layout(method, layout, q.shape[1])
    key_layout = check_sequence_layout(method, key_layout or layout, k.shape[1])
    mask.check(layout.length, key_layout.length, q.shape[0])
    spec = AttentionSpec(
        mask,
        layout,
        key_layout,
        Scores(q.shape[-1] ** -0.5 if scale is None else float(scale), softcap),
        key_heads_of(q.shape[2], k.shape[2]),
        choose_kernel(inputs or Inputs.of(q, v, softcap, mask), method.kernel if kernel is None else kernel),
    )
    # `plan_ahead` may have made an equal spec, which has its tiles and sends already.
    return method.planned_specs.get(spec.values) or spec


# -- options ----------------------------------------------------------------------------------------------------------


def check_options(options: AttentionOptions) -> AttentionOptions:
    """Returns the options.

    Raises:
        ValueError: an option of another type, or a number that is not finite or out of range.
    """
    mask, layout, key_layout, scale, softcap, _, return_lse = options
    # Fast path: if the options have these types, there is nothing else to check. Every layer comes here at every step.
    usual_types = type(mask) is AttentionMask and type(layout) in (SequenceLayout, type(None)) and key_layout is None
    if usual_types and scale is softcap is None and type(return_lse) is bool:
        return options
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        raise ValueError(
            f"mask is {_describe(mask)}; an AttentionMask is needed: AttentionMask(causal=False) for all keys, "
            f"AttentionMask(documents=...) for packed sequences. Its positions are global; dense masks are not accepted"
        )
    check_layout("layout", layout)
    check_layout("key_layout", key_layout)
    if scale is not None:
        number("scale", scale, "; multiply q by a scale that is learned")
    check_softcap(softcap)
    if return_lse is not True and return_lse is not False:
        raise ValueError(f"return_lse={return_lse!r}: True or False is needed")
    return options


def check_layout(name: str, layout: SequenceLayout | None) -> None:
    """Raises ValueError unless `layout` is a SequenceLayout or None."""
    if layout is not None and not isinstance(layout, SequenceLayout):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = str(layout) if type(layout) is str else "zigzag"
        raise ValueError(
            f'{name} is {_describe(layout)}; a SequenceLayout is needed, such as attend.layout(length, "{kind}")'
        )


def check_sequence_layout(method: AttentionMethod, layout: SequenceLayout | None, tokens: int) -> SequenceLayout:
    """Returns the layout over the sequence axis.

    Args:
        layout: layout over all ranks of the method, or over its sequence axis alone; None if there is one shard.
        tokens: number of tokens that this rank passed.

    Raises:
        ValueError: there are several shards but no layout; the layout is over another number of ranks, or over all
            ranks and not made by `refine`; its shard of this rank does not have `tokens` tokens.
    """
    shards, sequence_shards = method.shards, method.sequence_shards
    if layout is None:
        if shards > 1:
            raise ValueError(f"{shards} ranks hold the sequence; pass layout=, such as attend.layout(length)")
        layout = SequenceLayout.contiguous(tokens, 1)
    # The all-to-all of a head axis joins the shards of its ranks in order. So a layout over all ranks must be a layout
    # over the sequence axis with each shard cut by `refine`; otherwise the joined tokens would have other positions.
    coarse = layout.coarsen(shards // sequence_shards) if layout.shards == shards else layout
    fine = over_all_ranks(coarse, method)
    if layout.shards == shards and fine.sizes != layout.sizes:
        raise ValueError(f"{layout} is not what attend.layout gives: refine a layout over {sequence_shards}")
    if tokens != fine.sizes[method.shard]:
        raise ValueError(
            f"shard {method.shard} of {coarse} has {fine.sizes[method.shard]} tokens; this rank passed {tokens}. "
            f"Tensors are [batch, tokens, heads, head dim]; transpose(1, 2) turns [batch, heads, tokens, head dim] "
            f"into that"
        )
    return coarse


def over_all_ranks(layout: SequenceLayout, method: AttentionMethod) -> SequenceLayout:
    """Returns the layout over all ranks of a method.

    Args:
        layout: a layout over all ranks, or over the sequence axis alone.

    Raises:
        ValueError: the layout has another number of shards.
    """
    if layout.shards not in (method.shards, method.sequence_shards):
        accepted_counts = " or ".join(str(n) for n in sorted({method.shards, method.sequence_shards}))
        raise ValueError(f"the layout has {layout.shards} shards; this method needs one over {accepted_counts}")
    # Head-axis methods (Ulysses) cut each shard of the sequence axis once more.
    head_ranks = method.shards // layout.shards
    return layout if head_ranks == 1 else layout.refine(head_ranks)


# -- tensors ----------------------------------------------------------------------------------------------------------


def are_plain_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, expansion: Tensor | None = None) -> bool:
    """Returns True if q, k and v are of class `Tensor` itself, not of a subclass such as DTensor, and there are no
    sinks and no expansion.

    Raises:
        ValueError: an argument is not a dense tensor.
    """
    plain = sinks is expansion is None and type(q) is type(k) is type(v) is Tensor
    if plain and q.layout is k.layout is v.layout is torch.strided and not (q.is_nested or k.is_nested or v.is_nested):
        return True
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("expansion", expansion)):
        if name in "qkv" or x is not None:
            check_tensor(name, x)
    return False


def check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raises ValueError for shapes, dtypes and devices that do not fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}: each needs 4 dims, [batch, tokens, heads, head dim]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: q, k, v must agree in batch, k and v in tokens and heads, q and k in head dim")
    if 0 in (*q.shape[2:], *v.shape[2:]):
        raise ValueError(f"{shapes}: at least one head is needed, and head dims of at least 1")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads: K must divide H")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k, v must have one dtype and device; they are {kinds}")
    check_sinks(sinks, q.shape[2], q.device)


def check_latents(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless k are rotary keys, v latents and `weight` that of an expansion for queries q."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, expansion {tuple(weight.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4 and weight.ndim == 3 and k.shape[2] == v.shape[2] == 1):
        raise ValueError(
            f"{shapes}: with an expansion [K, D - Dr + Dv, L], k is one rotary key [B, S, 1, Dr] and v one latent "
            "[B, S, 1, L] for all heads"
        )
    if v.shape[3] != weight.shape[2] or not 0 < k.shape[3] <= q.shape[3] < k.shape[3] + weight.shape[1]:
        raise ValueError(
            f"{shapes}: the expansion [K, D - Dr + Dv, L] needs latents of {weight.shape[2]} numbers, and Dr of k from "
            "1 to D of q, with Dv of at least 1"
        )
    if weight.dtype != q.dtype or weight.device != q.device:
        raise ValueError(f"the expansion is {weight.dtype} on {weight.device}; q is {q.dtype} on {q.device}")


def expanded_shapes(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, and tensors without memory that have the shapes of expanded k and v; or finished k and v."""
    if weight is None:
        return q, k, v
    value_dim = weight.shape[1] - (q.shape[3] - k.shape[3])
    shapes = ((*x.shape[:2], weight.shape[0], dim) for x, dim in ((k, q.shape[3]), (v, value_dim)))
    k, v = (x.new_empty(1).expand(shape) for x, shape in zip((k, v), shapes, strict=True))
    return q, k, v


def check_sinks(sinks: Tensor | None, heads: int, device: torch.device) -> None:
    """Raises ValueError unless sinks are floating-point numbers [H] or [n, H] on `device`, that of the queries."""
    if sinks is None:
        return
    if sinks.ndim not in (1, 2) or sinks.shape[-1] != heads:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be [H] or [n, H] for {heads} query heads")
    # `check_projected_call` passes the meta device, which stands for any.
    wrong_device = sinks.device != device and "meta" not in (sinks.device.type, device.type)
    if not sinks.is_floating_point() or wrong_device:
        raise ValueError(f"sinks are {sinks.dtype} on {sinks.device}; floating-point numbers on {device} are needed")


def check_hidden(x: Tensor, projections: object, sinks: Tensor | None) -> None:
    """Raises ValueError for arguments of the wrong type or shape in `Method.projected`."""
    check_tensor("x", x)
    if sinks is not None:
        check_tensor("sinks", sinks)
    if x.ndim != 3:
        raise ValueError(f"x {tuple(x.shape)} needs 3 dims, [batch, tokens, model dim]")
    missing_names = [name for name in ("heads", "key_heads", "q", "kv", "parameters") if not hasattr(projections, name)]
    if missing_names:
        raise ValueError(
            f"projections are {_describe(projections)} without {', '.join(missing_names)}; see Projections"
        )


def check_transforms(*tensors: Tensor | None) -> None:
    """Raises ValueError for tensors under torch.func or forward-mode AD. Their tangents would silently be lost."""
    if any(x is not None and compat.is_transformed(x) for x in tensors):
        raise ValueError(
            "torch.func's transforms (jvp, grad, vjp, vmap) and forward-mode AD do not reach into attention; use "
            "backward() or torch.autograd.grad"
        )


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns q, k and v as autocast casts them for scaled_dot_product_attention, unless one is float64."""
    if not autocast_enabled(tensors[0]) or torch.float64 in [x.dtype for x in tensors]:
        return tensors
    return tuple([x.to(torch.get_autocast_dtype(x.device.type)) for x in tensors])


def _describe(value: Any) -> str:
    """Describes a value in a message: by its repr, or by its type if the repr may be long."""
    return repr(value) if value is None or isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"
