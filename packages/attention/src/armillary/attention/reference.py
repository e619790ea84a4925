"""Attention by its formula, on one device, in float64: the oracle of the tests.

It shares only checks of arguments with the methods and kernels. Even the rule of visible pairs is written twice:
`visible_pairs` reads the arguments from which a mask was constructed, by the definition of each pattern, and shares no
code with slices, tiles and counts of pairs.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict, Unpack, overload

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from armillary.attention.call.spec import AttentionOptions
from armillary.attention.call.validation import are_plain_tensors, check_options, check_tensors
from armillary.attention.mask import AttentionMask, Blocks, Chunked, ImageSpans, Prefix, RowMasks, SliceList, Tree

Boundaries = tuple[int, ...]


class ReferenceArguments(TypedDict):
    """The keyword arguments of `reference_attention` except `return_lse`."""

    mask: AttentionMask
    scale: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    softcap: NotRequired[float | None]
    query_positions: NotRequired[Tensor | None]
    key_positions: NotRequired[Tensor | None]


@overload
def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **arguments: Unpack[ReferenceArguments]
) -> Tensor: ...


@overload
def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Unpack[ReferenceArguments]
) -> tuple[Tensor, Tensor]: ...


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax(scale * q k^T) v over the visible keys of each query. Dense and slow; plain autograd works.

    Query head h uses key/value head h // (H // K). A query that sees nothing gives 0, with zero gradients.

    Args:
        q: [B, T, H, D].
        k: [B, S, K, D]; K divides H.
        v: [B, S, K, Dv].
        mask: a mask in global positions.
        scale: softmax scale; 1 / sqrt(D) by default.
        sinks: logits that take part in each query's softmax without a value: one per head [H], n per head [n, H], or
            one per query and head [B, T, H].
        softcap: c of c * tanh(logit / c), applied to all logits except sinks.
        query_positions: [T], global positions of the queries; 0..T-1 by default.
        key_positions: [S], global positions of the keys; 0..S-1 by default.
        return_lse: also return the log-sum-exp of the logits, sinks included.

    Returns:
        out [B, T, H, Dv] in q's dtype; with `return_lse` also lse [B, T, H], -inf where a query sees neither key
        nor sink: float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes, positions or mask do not fit together; an argument has another type or is out of range.
    """
    check_options(AttentionOptions(mask, scale=scale, softcap=softcap))
    are_plain_tensors(q, k, v, sinks)  # raises ValueError for values that are not dense tensors
    check_tensors(q, k, v, None)
    sink = _sink_logits(q, sinks)
    i = _positions(query_positions, q, "query")
    j = _positions(key_positions, k, "key")
    visible = visible_pairs(mask, i, j, q.shape[0])[:, None]
    group = q.shape[2] // k.shape[2]
    keys, values = (repeat(x.double(), "b s k d -> b s (k g) d", g=group) for x in (k, v))
    logits = einsum(q.double(), keys, "b t h d, b s h d -> b h t s") * (q.shape[3] ** -0.5 if scale is None else scale)

    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    # Invisible logits become 0 before exp, and their weights 0 after it. So exp sees no infinity, whose gradient would
    # be NaN. `top`, the largest logit of a query, is subtracted so that exp does not overflow.
    top = torch.cat([logits.detach().masked_fill(~visible, -torch.inf), sink.detach()], -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (logits - top).masked_fill(~visible, 0).exp() * visible
    total = weights.sum(-1, keepdim=True) + (sink - top).exp().sum(-1, keepdim=True)
    has_weight = total > 0  # False for a query that sees neither key nor sink
    total = torch.where(has_weight, total, 1)
    out = einsum(weights / total, values, "b h t s, b s h d -> b t h d").to(q.dtype)
    if not return_lse:
        return out
    lse = rearrange(torch.where(has_weight, top + total.log(), -torch.inf), "b h t 1 -> b t h")
    return out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _sink_logits(q: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the logits [B, H, T, n] of n sinks; one sink of -inf, which has no effect, if there are none."""
    batch, tokens, heads, _ = q.shape
    if sinks is None:
        sinks = q.new_full((heads,), -torch.inf)
    if sinks.shape == q.shape[:3]:
        return rearrange(sinks.double(), "b t h -> b h t 1")
    if sinks.ndim not in (1, 2) or sinks.shape[-1] != heads:
        raise ValueError(
            f"sinks {tuple(sinks.shape)} must be [H], [n, H] or [B, T, H] for {heads} query heads; q {tuple(q.shape)}"
        )
    return repeat(sinks.double().reshape(-1, heads), "s h -> b h t s", b=batch, t=tokens)


def _positions(positions: Tensor | None, x: Tensor, name: str) -> Tensor:
    if positions is None:
        return torch.arange(x.shape[1], device=x.device)
    if positions.shape != x.shape[1:2]:
        raise ValueError(
            f"{name}_positions has shape {tuple(positions.shape)}; it must be ({x.shape[1]},), one per token"
        )
    return positions.to(x.device)


# -- visible pairs -----------------------------------------------------------------------------------------------------


def visible_pairs(mask: AttentionMask, query_positions: Tensor, key_positions: Tensor, batch: int = 1) -> Tensor:
    """Returns visibility, bool [1, T, S], or [B, T, S] if rows of the batch have different masks or documents.

    Args:
        query_positions: [T], global.
        key_positions: [S], global.
        batch: number of rows.

    Raises:
        ValueError: masks or documents for another number of rows, or positions beyond the end of the mask.
    """
    i, j = query_positions[:, None], key_positions[None, :]
    rows = range(_row_count(mask, batch))
    return torch.stack([_visible(mask, i, j, row).expand(i.shape[0], j.shape[1]) for row in rows])


def _row_count(mask: AttentionMask, batch: int) -> int:
    """Returns the number of rows for which the mask has separate masks or documents; 1 if it is the same for all."""
    if isinstance(mask.pattern, RowMasks):
        count, kind = len(mask.pattern.masks), "masks"
    elif mask.documents and isinstance(mask.documents[0], tuple):
        count, kind = len(mask.documents), "documents"
    else:
        return 1
    if count != batch:
        raise ValueError(f"the mask has {kind} for {count} rows; the batch has {batch}")
    return count


def _visible(mask: AttentionMask, i: Tensor, j: Tensor, row: int) -> Tensor:
    """Returns True where the query at i [T, 1] sees the key at j [1, S] in one row; broadcasts to [T, S]."""
    # `RowMasks` has one mask per row. The window and causality of the outer mask apply in addition.
    if isinstance(mask.pattern, RowMasks):
        row_mask = mask.pattern.masks[row]
        visible, distance = _visible(row_mask, i, j, 0), _distance(row_mask, i, j)
    else:
        row_mask = mask
        visible, distance = _by_pattern(mask, i, j, _documents(mask, row)), _distance(mask, i, j)
    before, after = mask.window or (None, None)
    if mask.causal and not isinstance(mask.pattern, (Prefix, ImageSpans)):
        visible = visible & (j <= i)
    if before is not None:
        visible = visible & (distance <= before)
    # The right side of a window does not cut image spans.
    if after is not None and not isinstance(row_mask.pattern, ImageSpans):
        visible = visible & (-distance <= after)
    return visible


def _by_pattern(mask: AttentionMask, i: Tensor, j: Tensor, documents: Boundaries | None) -> Tensor:
    """Returns visibility by pattern and documents. The caller applies the window and causality.

    `Prefix` and `ImageSpans` are causal by definition, with exceptions.
    """
    same_document = _locate(i, documents)[0] == _locate(j, documents)[0]
    match mask.pattern:
        case SliceList(bands=slices):
            return _union(i, j, [_in(i, s.queries) & _in(j, s.keys) & _band(j - i, s.low, s.high) for s in slices])
        case Tree(ends=ends, parents=parents):
            paths = _paths(parents)
            (query_segment, _), (key_segment, _) = _locate(i, ends), _locate(j, ends)
            on_path = torch.tensor([[b in paths[a] for b in range(len(parents))] for a in range(len(parents))])
            return on_path.to(i.device)[query_segment, key_segment]
        case Prefix(prefixes=prefixes):
            in_prefix = _in_prefix(i, documents, prefixes) & _in_prefix(j, documents, prefixes)
            return same_document & ((j <= i) | in_prefix)
        case Chunked(size=size, origin=origin):
            query_offset, key_offset = (x if origin == "row" else _locate(x, documents)[1] for x in (i, j))
            return same_document & (query_offset // size == key_offset // size)
        case ImageSpans(spans=spans):
            return same_document & ((j <= i) | _union(i, j, [_in(i, span) & _in(j, span) for span in spans]))
        case Blocks(visible=visible, block=block):
            _check_within(i, block * len(visible))
            _check_within(j, block * len(visible[0]))
            return torch.tensor(visible, device=i.device)[i // block, j // block]
        case _:
            return same_document


def _distance(mask: AttentionMask, i: Tensor, j: Tensor) -> Tensor:
    """Returns the number of tokens from a key to a query: along the path in a tree, else by position."""
    if isinstance(mask.pattern, Tree):
        return _depth(i, mask.pattern) - _depth(j, mask.pattern)
    return i - j


def _paths(parents: tuple[int, ...]) -> list[list[int]]:
    """Returns, for each segment of a tree, the segment and all its ancestors, nearest first."""
    paths = list[list[int]]()
    for segment in range(len(parents)):
        path = [segment]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path)
    return paths


def _depth(x: Tensor, tree: Tree) -> Tensor:
    """Returns the number of tokens before each position on its path from the root."""
    sizes = [end - start for start, end in zip(tree.ends, tree.ends[1:], strict=False)]
    ancestor_tokens = [sum(sizes[ancestor] for ancestor in path[1:]) for path in _paths(tree.parents)]
    segment, offset = _locate(x, tree.ends)
    return torch.tensor(ancestor_tokens, device=x.device)[segment] + offset


def _documents(mask: AttentionMask, row: int) -> Boundaries | None:
    """Returns the document boundaries of one row."""
    documents = mask.documents
    return documents[row] if documents and isinstance(documents[0], tuple) else documents  # pyright: ignore[reportReturnType]


def _locate(x: Tensor, boundaries: Boundaries | None) -> tuple[Tensor, Tensor]:
    """Returns the number of the document (or segment) of each position, and the offset in it."""
    if boundaries is None:
        return torch.zeros_like(x), x
    _check_within(x, boundaries[-1])
    number = torch.zeros_like(x)
    for start in boundaries[1:-1]:
        number = number + (x >= start)
    return number, x - torch.tensor(boundaries, device=x.device)[number]


def _check_within(x: Tensor, end: int) -> None:
    if x.numel() and int(x.max()) >= end:
        raise ValueError(f"position {int(x.max())} is beyond the end of the mask, {end}")


def _in_prefix(x: Tensor, documents: Boundaries | None, prefixes: tuple[int, ...]) -> Tensor:
    """Returns True for positions in the prefix of their document; `prefixes` are lengths."""
    document, offset = _locate(x, documents)
    return offset < torch.tensor(prefixes, device=x.device)[document]


def _in(x: Tensor, run: range) -> Tensor:
    return (x >= run.start) & (x < run.stop)


def _band(offset: Tensor, low: int | None, high: int | None) -> Tensor:
    """Returns low <= offset <= high, where None is unbounded."""
    not_below = torch.ones_like(offset, dtype=torch.bool) if low is None else offset >= low
    return not_below if high is None else not_below & (offset <= high)


def _union(i: Tensor, j: Tensor, conditions: list[Tensor]) -> Tensor:
    """Returns True where any condition is, [T, S]; False everywhere without conditions."""
    union = torch.zeros_like(i - j, dtype=torch.bool)
    for condition in conditions:
        union = union | condition
    return union
