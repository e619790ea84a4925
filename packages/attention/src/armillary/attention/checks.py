"""What is refused of a call's arguments before anything is sent, by value and by type: on every rank alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armillary.attention.kernels import check_softcap
from armillary.attention.mask import AttentionMask
from armillary.core import SequenceLayout
from armillary.core.checked import check_tensor, number


def check_options(
    mask: AttentionMask,
    layout: SequenceLayout | None,
    key_layout: SequenceLayout | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool = False,
) -> None:
    """Refuses what is of another type than it should be, or no number that scores can be made with.

    Raises:
        ValueError: with what would do.
    """
    if not isinstance(mask, AttentionMask):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are people too
        raise ValueError(
            f"mask is {_named(mask)}; an AttentionMask is needed: AttentionMask(causal=False) for all keys, "
            f"AttentionMask(documents=...) for packed sequences. It is in global positions, and no dense mask will do"
        )
    for name, its in (("layout", layout), ("key_layout", key_layout)):
        check_layout(name, its)
    if scale is not None:
        number("scale", scale, "; multiply q by a scale that is learned")
    check_softcap(softcap)
    if return_lse is not True and return_lse is not False:
        raise ValueError(f"return_lse={return_lse!r}: True or False is needed")


def check_layout(name: str, layout: SequenceLayout | None) -> None:
    """Refuses what is no layout, where one is given."""
    if layout is not None and not isinstance(layout, SequenceLayout):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = str(layout) if type(layout) is str else "zigzag"
        raise ValueError(
            f'{name} is {_named(layout)}; a SequenceLayout is needed, such as attend.layout(length, "{kind}")'
        )


def are_plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """Whether all are dense tensors of torch's own class; refuses what `check_are_tensors` does."""
    plain = sinks is None and type(q) is type(k) is type(v) is Tensor
    if plain and q.layout is k.layout is v.layout is torch.strided and not (q.is_nested or k.is_nested or v.is_nested):
        return True
    check_are_tensors(q, k, v, sinks)
    return False


def check_are_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Refuses arrays, lists and tensors that are not dense."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if sinks is not None:
        check_tensor("sinks", sinks)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Refuses tensors that do not fit together. Looks at shapes, dtypes and devices only.

    Raises:
        ValueError: with the shapes, dtypes or devices, and what would do.
    """
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


def check_sinks(sinks: Tensor | None, heads: int, device: torch.device) -> None:
    """Raises ValueError for sinks that are not floating-point numbers [H] or [S, H] on the device of the queries."""
    if sinks is None:
        return
    if sinks.ndim not in (1, 2) or sinks.shape[-1] != heads:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be [H] or [S, H] for {heads} query heads")
    # Shapes alone, where a call is checked before there are tensors: those are on the meta device.
    elsewhere = sinks.device != device and "meta" not in (sinks.device.type, device.type)
    if not sinks.is_floating_point() or elsewhere:
        raise ValueError(f"sinks are {sinks.dtype} on {sinks.device}; floating-point numbers on {device} are needed")


def check_hidden(x: Tensor, projections: object, sinks: Tensor | None) -> None:
    """Refuses what `Method.projected` cannot project.

    Raises:
        ValueError: with what would do.
    """
    check_tensor("x", x)
    if sinks is not None:
        check_tensor("sinks", sinks)
    if x.ndim != 3:
        raise ValueError(f"x {tuple(x.shape)} needs 3 dims, [batch, tokens, model dim]")
    missing = [name for name in ("heads", "key_heads", "q", "kv", "parameters") if not hasattr(projections, name)]
    if missing:
        raise ValueError(f"projections are {_named(projections)} without {', '.join(missing)}; see Projections")


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; if they differ in dtype under autocast, in autocast's, as scaled_dot_product_attention has them."""
    return (q, k, v) if q.dtype == k.dtype == v.dtype else as_autocast(q, k, v)


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast hands them to scaled_dot_product_attention: in its dtype, where it is on, but float64."""
    if not autocasts(q) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where `x` is; the meta device knows none, and would raise."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _named(value: Any) -> str:
    """A value for a message, by its type where it is long."""
    return repr(value) if value is None or isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"
