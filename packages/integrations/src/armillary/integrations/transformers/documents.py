"""Documents and groups of tokens of whole rows, from position ids and token types of which each rank has a shard.

Ranks gather these integers, once for all layers and all steps with the same tensor. Every rank then reads whole rows by
the rules of one device, and raises the same errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import currentframe
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import (
    Documents,
    TensorCache,
    check_tokens,
    documents_of_positions,
    find_axes,
    gather_integers,
    gather_tokens,
)
from armillary.core import SequenceLayout
from armillary.integrations.transformers.mask_functions import Rule, ShardMask
from armillary.integrations.transformers.positions import gives_positions

POSITIONS_HINT = (
    "pass position_ids=layout.positions(attend.shard)[None], or position ids that restart at 0 in each document"
)
PADDED_POSITIONS_HINT = "after cp.prepare(model), cp.shard(ids) has position ids that count from padding_idx + 1"

# Models of transformers in which the group of a token is its type.
TYPE_IS_GROUP = frozenset({"hrm_text"})


class RowReader:
    """Reads documents and groups of tokens of whole rows, and checks position ids, on all ranks of a method."""

    def __init__(self, method: Method) -> None:
        self.method, self.cache = method, TensorCache()

    def documents(
        self, name: str, mask: ShardMask, tokens: int, position_ids: Tensor | None, documents: Documents | None
    ) -> Documents | None:
        """Returns `documents` or, if they are None, the documents in position ids; None if each row is one document."""
        # Some models pass their layers no position ids, or M-RoPE's [3, B, T]. The mask function may have found
        # position ids [B, T] in the model's frame.
        ids = mask.position_ids if position_ids is None or position_ids.ndim != 2 else position_ids
        reads_ids = documents is None and not (mask.rule is not None and mask.rule.bidirectional)
        if ids is not None and (ids.ndim == 2 or (ids.ndim == 3 and len(ids) == 3)):
            key = mask.layout, documents, reads_ids
            return self.cache.get(ids, key, lambda: self._read(name, mask, tokens, ids, documents, reads_ids))
        # No position ids: right for a model that adds positions before its tokens are sharded, such as an image tower.
        # A wrong number of tokens raises on its own rank only.
        check_tokens(self.method.shard, tokens, mask.layout)
        if mask.counts_from_shard and self.method.shards > 1:
            hint = POSITIONS_HINT
            if mask.first_position:
                hint = f"padding_idx={mask.first_position - 1}: {PADDED_POSITIONS_HINT}"
            raise ValueError(
                f"{name} gets no position ids, and the model counts its tokens as if they were the first of the "
                f"sequence; {hint}"
            )
        if reads_ids:
            raise ValueError(
                f"{name} gets no position ids [batch, tokens], so its documents are unknown; pass them to cp.shard or "
                f"`with sequence(layout=..., documents=...)`: [0, {mask.layout.length}] if there is only one"
            )
        return documents

    def _read(
        self, name: str, mask: ShardMask, tokens: int, ids: Tensor, documents: Documents | None, reads_ids: bool
    ) -> Documents | None:
        """Returns the documents of position ids [B, T] or [3, B, T], which are checked on all ranks."""
        layout, first = mask.layout, mask.first_position
        # 1. The ids of whole rows, if they are needed. With known documents, those of the shard may be enough.
        if documents is not None and (ids.ndim == 3 or find_axes(self.method) is None):
            self._check_shards(ids, tokens, layout)
            if ids.ndim == 3:  # M-RoPE's ids need not rise within a document
                return documents
            # Ranks of a method with unknown axes cannot communicate: each one checks its own tokens.
            positions, order = layout.positions(self.method.shard).sort()
            ids = ids.cpu()[:, order]
        else:
            positions, ids = torch.arange(layout.length), self._gather(ids, tokens, layout)
        # 2. The first position (RoBERTa).
        if first and (lowest := int(ids.min())) < first:
            raise ValueError(
                f"{name} gets position id {lowest}, but the model counts tokens from {first}: padding_idx={first - 1}; "
                f"{PADDED_POSITIONS_HINT}"
            )
        # 3. The documents, or ids that fit them.
        if ids.ndim == 3:
            check_multimodal(ids)
        elif reads_ids:
            return documents_of_ranks(ids, layout, first)
        else:
            check_rising(ids, positions, documents, layout.length)
        return documents

    def groups(self, rule: Rule, callers: Sequence[Caller], layout: SequenceLayout) -> Tensor | None:
        """Returns the group of every token [B, N] on the CPU, -1 for no group; None if the rule has no groups."""
        if rule.groups is None:
            return None
        if self.method.shards == 1:
            return rule.groups.cpu()
        # Models number images by their order in the row, which cannot be known from a shard. So every rank gathers the
        # token types of the whole row and calls the model's own numbering function on them.
        try:
            types, number_groups = _find_numbering(rule.groups, callers)
        except ValueError:
            # Text alone has no groups (GIT).
            if any(flag for (flag,) in gather_integers([[int((rule.groups >= 0).any())]], self.method)):
                raise
            return torch.full((len(rule.groups), layout.length), -1)
        tokens = layout.sizes[self.method.shard]
        return self.cache.get(types, layout, lambda: number_groups(self._gather(types.int(), tokens, layout)))

    def _gather(self, x: Tensor, tokens: int, layout: SequenceLayout) -> Tensor:
        """Gathers integers of tokens in sequence order: [..., T] -> [..., N], on the host. Collective."""
        self._check_shards(x, tokens, layout)
        return gather_tokens(x.reshape(-1, x.shape[-1]), self.method, layout).cpu().reshape(*x.shape[:-1], -1)

    def _check_shards(self, x: Tensor, tokens: int, layout: SequenceLayout) -> None:
        """Checks the tokens and rows of shards [..., T], on every rank; on its own if the method's axes are unknown."""
        shards = [[self.method.shard, tokens, x.shape[-1], x[..., 0].numel()]]
        if find_axes(self.method) is not None:
            shards = gather_integers(shards, self.method)
        for shard, token_count, id_count, row_count in shards:
            check_tokens(shard, token_count, layout)
            if id_count != token_count:
                raise ValueError(
                    f"shard {shard} has {token_count} tokens and {id_count} position ids; {POSITIONS_HINT}"
                )
            if row_count != shards[0][3]:
                raise ValueError(f"shard {shard} has {row_count} rows, and shard {shards[0][0]} has {shards[0][3]}")


def known_documents(mask: ShardMask, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None) -> Documents | None:
    """Returns the documents given to `sequence`, or else those of cu_seq_lens; None if position ids decide."""
    if mask.context.documents is not None or cu_seq_lens_q is None:
        return mask.context.documents
    packed = AttentionMask(documents=cu_seq_lens_q)
    if cu_seq_lens_k is not None and AttentionMask(documents=cu_seq_lens_k) != packed:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: no cross-attention on a sharded sequence")
    packed.check(mask.layout.length, mask.layout.length, 1)
    return packed.documents


def documents_of_ranks(ids: Tensor, layout: SequenceLayout, first_position: int) -> Documents | None:
    """Returns the documents of position ids [B, N] that ranks have given; None if each row is one document.

    Raises:
        ValueError: position ids neither are global positions nor restart at `first_position` in each document, or they
            restart exactly where shards start.
    """
    starts = torch.nn.functional.pad(ids.diff(dim=1) != 1, (1, 0), value=True)
    if len(errors := (starts & (ids != first_position)).nonzero()):
        row, position = errors[0].tolist()
        raise ValueError(
            f"the token at position {position} of row {row} has position id {int(ids[row, position])}, but position "
            f"ids rise by 1 from token to token, and restart at {first_position} in each document; {POSITIONS_HINT}"
        )
    documents = documents_of_positions(ids, None)
    # In a common mistake, a model counts its tokens on each rank, so that documents are exactly the shards. In layouts
    # with several spans per shard (zigzag) such position ids do not restart at `first_position`.
    shards = sorted((layout.spans(shard) for shard in range(layout.shards)), key=lambda spans: spans[0][0])
    shard_ends = (*(spans[0][0] for spans in shards), layout.length)  # 0, end of the first shard, ..., N
    if layout.shards > 1 and all(len(spans) == 1 for spans in shards) and shard_ends in (documents, *documents):
        raise ValueError(
            f"position_ids start at {first_position} on each of the {layout.shards} ranks, as a model's own do; "
            f"{POSITIONS_HINT}. If documents do end where shards do, pass "
            f"`sequence(documents={list(shard_ends[:4])}...)`"
        )
    return None if documents == (0, layout.length) else documents


def check_rising(ids: Tensor, positions: Tensor, documents: Documents | None, length: int) -> None:
    """Raises ValueError if position ids do not rise from token to token of each document. They may skip numbers.

    Args:
        ids: [B or 1, n], in rising order of `positions`. One row may serve several rows of documents.
        positions: [n], global positions of the tokens.
        documents: None: each row of `length` tokens is one, because a bidirectional model has none.
    """
    mask = AttentionMask(documents=documents)
    row_count = max(len(ids), len(documents) if documents is not None and mask.per_row else 1)
    for row, row_ids in enumerate(ids.expand(row_count, -1)):
        ends = torch.tensor(mask.boundaries(row) or (0, length))
        is_start = torch.bucketize(positions, ends, right=True).diff() > 0
        if len(errors := ((row_ids.diff() < 1) & ~is_start).nonzero()):
            index = int(errors[0]) + 1
            hint = (
                ". In position ids of a bidirectional model transformers does not look for documents: give them to "
                "cp.shard or sequence(documents=...)"
            )
            raise ValueError(
                f"the token at position {int(positions[index])} of row {row} has position id {int(row_ids[index])}, "
                "which is not beyond those of the tokens before it in its document; "
                f"{POSITIONS_HINT}{hint if documents is None else ''}"
            )


def check_multimodal(position_ids: Tensor) -> None:
    """Raises ValueError unless position ids [3, B, N] of time, height and width (M-RoPE) are those of whole rows."""
    ids = position_ids.permute(1, 2, 0)
    before, after = ids[:, :-1], ids[:, 1:]
    (time, height, width), (next_time, next_height, next_width) = before.unbind(-1), after.unbind(-1)
    # 1. The ids of a token are greater than those of the token before it, by time, then height, then width.
    same_time, same_height = next_time == time, next_height == height
    rising = (next_time > time) | (same_time & ((next_height > height) | (same_height & (next_width > width))))
    # 2. Or it is the first token after a video, whose time can be ahead of height and width: then its ids need only be
    # greater than the last height and width.
    in_image = (time != height) | (height != width)  # text has three equal ids
    beyond_image = in_image & (after.amin(-1) > torch.maximum(height, width))
    errors = (~(rising | beyond_image)).nonzero()
    if len(errors):
        row, position = errors[0].tolist()
        raise ValueError(
            f"the token at position {position + 1} of row {row} has position ids {ids[row, position + 1].tolist()}, "
            f"which are not beyond {ids[row, position].tolist()} of the token before it: pass this rank's shard of the "
            "whole sequence's ids, `layout.take(position_ids, attend.shard, dim=2)`, or, for packed rows, "
            "sequence(documents=...)"
        )


def _find_numbering(groups: Tensor, callers: Sequence[Caller]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns (token types [B, T] in a caller's frame, the function that numbers groups by them)."""
    for caller in callers:
        if caller.module.removeprefix("transformers.models.").split(".")[0] in TYPE_IS_GROUP:
            return groups, torch.clone  # the groups are the token types, so there is nothing to compute
        # The function of transformers from token types to groups, if the caller's file imports it.
        number_groups = caller.globals.get("get_block_sequence_ids_for_mask")
        for name in ("token_type_ids", "mm_token_type_ids"):
            types = caller.locals.get(name)
            # Accept only types that reproduce the groups of this mask: a frame may have the types of another input.
            if (
                number_groups is not None
                and isinstance(types, Tensor)
                and torch.equal(number_groups(types, device=groups.device), groups)
            ):
                return types, partial(number_groups, device=torch.device("cpu"))
    model = callers[-1].module if callers else "a model"
    raise ValueError(
        f"{model} numbers blocks of tokens that see each other in an unknown way, so a shard's numbers do not tell "
        "which tokens of other ranks are in them; give the mask: `cp.shard(ids, mask=AttentionMask.image_spans(...))`"
    )


# Arguments of the functions that call a mask function.

# More calls than there are between a model's forward and a mask function.
MAX_FRAMES = 12

# Python modules of the functions through which `compat.never_traced` calls a function.
WRAPPERS = ("torch._dynamo.", "torch._compile")


class Caller(NamedTuple):
    """A running function: its Python module's name, its local and global variables, its parameters' names."""

    module: str
    locals: dict[str, Any]
    globals: dict[str, Any]
    parameters: tuple[str, ...]


def calling_functions() -> list[Caller]:
    """Returns the callers of the function that calls this one, innermost first, up to the innermost `nn.Module`."""
    # transformers does not pass a mask function the model, its position ids and its token types.
    callers: list[Caller] = []
    frame: FrameType | None = currentframe()
    for _ in range(2):  # skips this function and the one that calls it
        frame = frame and frame.f_back
    while frame is not None and len(callers) < MAX_FRAMES:
        module_name, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        caller = Caller(module_name, frame.f_locals, frame.f_globals, parameters)
        # The innermost module makes the mask. Modules that call it may have other tokens, so the search stops there.
        module = calling_module(callers)
        if module is not None and caller.locals.get("self") is not module:
            break
        if not module_name.startswith(WRAPPERS):
            callers.append(caller)
        frame = frame.f_back
    return callers


def calling_module(callers: list[Caller]) -> nn.Module | None:
    owners = (caller.locals.get("self") for caller in callers)
    return next((owner for owner in owners if isinstance(owner, nn.Module)), None)


def position_ids_of(callers: list[Caller], shards: int) -> tuple[Tensor | None, bool]:
    """Returns (position ids in the callers' frames or None, True if the model would count positions itself)."""
    # Some models pass position ids to the function that makes masks but not to their layers, and some to neither. A
    # model without input_ids and inputs_embeds, such as an image tower, adds positions before its tokens are sharded.
    module_methods = [caller for caller in callers if isinstance(caller.locals.get("self"), nn.Module)]
    takes_position_ids = any("position_ids" in method.parameters for method in module_methods)
    tokens = [method.locals.get(name) for method in module_methods for name in ("input_ids", "inputs_embeds")]
    has_tokens = any(isinstance(x, Tensor) for x in tokens)
    if shards > 1 and has_tokens and not takes_position_ids:  # whatever position ids its layers get
        if gives_positions(calling_module(callers)):
            return None, False
        raise ValueError(
            f"{type(calling_module(callers)).__name__}.forward takes no position_ids: it counts positions from the "
            "first token of each shard; modules of it that take them get those of a batch, `with cp.shard(ids):`"
        )
    candidates = [ids for caller in callers if isinstance(ids := caller.locals.get("position_ids"), Tensor)]
    if candidates:
        return candidates[0] if candidates[0].ndim > 1 else candidates[0][None], False
    return None, takes_position_ids or has_tokens


def boundaries_of(callers: list[Caller]) -> tuple[Tensor | None, Tensor | None]:
    """Returns cu_seq_lens_q and cu_seq_lens_k of the callers, which models pass on to their layers; None without."""
    for caller in callers:
        arguments = {**caller.locals, **caller.locals.get("kwargs", {})}
        if isinstance(arguments.get("cu_seq_lens_q"), Tensor):
            return arguments["cu_seq_lens_q"], arguments.get("cu_seq_lens_k")
    return None, None
