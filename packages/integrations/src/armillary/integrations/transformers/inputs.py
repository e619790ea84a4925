"""Shards a batch of a Hugging Face collator into the inputs of one rank.

Masks, positions and labels mean what they mean to transformers on one device, so that its losses are had on shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from armillary.attention.context_parallel.batch import ShardedBatch, shard_batch
from armillary.attention.context_parallel.packing import gather
from armillary.attention.context_parallel.padding import IGNORED
from armillary.attention.methods.base import Method

TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Inputs with one value per token, which are sharded."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Inputs that state the documents of a packed row; `sequence` states them on a shard."""


def shard_inputs(
    attend: Method, inputs: Mapping[str, Any], padding_idx: int | None = None
) -> tuple[ShardedBatch, dict[str, Any]]:
    """Returns this rank's batch and its inputs to the model, labels among them where the batch has labels.

    Communicates: every rank of `attend` must call it.

    Args:
        padding_idx: of models that count position ids from padding_idx + 1 (`padding_idx_of`).

    Raises:
        ValueError: ranks were given different rows; inputs whose shard is unknown; what `shard_batch` refuses.
    """
    check_same_rows(attend, inputs)
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(f"the batch has no input_ids, only {', '.join(inputs)}: a shard is made of tokens")
    others = [name for name, x in inputs.items() if isinstance(x, Tensor) and name not in (*TOKENS, *PACKED)]
    if others or inputs.get("output_router_logits"):
        raise ValueError(
            f"the batch has {', '.join(others) or 'output_router_logits'}, of which a shard's part is unknown; what it "
            f"takes is {', '.join(TOKENS)}"
        )
    labels, packed = inputs.get("labels"), inputs.get("cu_seq_lens_q") is not None
    positions = inputs.get("position_ids")
    if positions is None and packed:
        first = 0 if padding_idx is None else padding_idx + 1
        positions = torch.arange(ids.shape[1], device=ids.device)[None] + first
    batch = shard_batch(
        attend,
        ids,
        documents=_documents(inputs),
        position_ids=positions,
        attention_mask=inputs.get("attention_mask"),
        shift_labels=_next_labels(inputs),
        padding_idx=padding_idx,
    )
    named = {"labels", "shift_labels"} if labels is None else set()
    flags = {name: x for name, x in inputs.items() if name not in (*TOKENS, *PACKED)}
    own = {name: x for name, x in batch.inputs.items() if name not in {*named, "num_items_in_batch"}}
    return batch, {**flags, **own, "use_cache": False}


def check_same_rows(attend: Method, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank if ranks were given different batches.

    Raises:
        ValueError: with the shards and the inputs that differ.
    """
    if attend.shards == 1:
        return
    mine = [attend.shard, *(value for name in TOKENS for value in _fingerprint(inputs.get(name)))]
    known = sorted(gather([mine], attend))
    for i, name in enumerate(TOKENS):
        said = [row[1 + 2 * i : 3 + 2 * i] for row in known]
        different = [shard for shard, values in enumerate(said) if values != said[0]]
        if different:
            raise ValueError(
                f"shards 0 and {different[0]} were given different {name}, but all ranks of a sequence need the same "
                "rows: a sampler, dataset or collator draws from random numbers of each rank, or the data loader was "
                "prepared without share_rows"
            )


def _fingerprint(x: Any) -> tuple[int, int]:
    """Two numbers of a tensor of integers, its size and a hash (integers of torch wrap around)."""
    if not isinstance(x, Tensor):
        return -1, 0
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 0x9E3779B97F4A7C1 | 1
    mixed = (x.flatten().long() + x.shape[-1]) * weights
    return x.numel(), int((mixed ^ (mixed >> 29)).sum())


def _next_labels(inputs: Mapping[str, Any]) -> Tensor:
    """Labels of the next token, as transformers shifts them: those of a document's first token count, if not -100."""
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    if labels is None:
        return torch.full_like(inputs["input_ids"], IGNORED)
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted


def _documents(inputs: Mapping[str, Any]) -> Tensor | list[int] | list[list[int]]:
    """Returns the documents of packed rows by transformers' rule: cu_seq_lens, or position ids without a mask."""
    ids, positions, ends = inputs["input_ids"], inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    if ends is not None:
        if ids.shape[0] != 1:
            raise ValueError(f"cu_seq_lens_q with {ids.shape[0]} rows: they say the documents of one row")
        return ends
    length = ids.shape[1]
    if positions is None:
        return [0, length]
    if positions.ndim != 2 or positions.shape[1] != length:
        raise ValueError(f"position_ids {tuple(positions.shape)}: [1, {length}] or [{ids.shape[0]}, {length}] would do")
    if (seen := inputs.get("attention_mask")) is not None:
        if bool(((positions.diff(dim=1) < 1) & (seen[:, 1:] != 0) & (seen[:, :-1] != 0)).any()):
            raise ValueError(
                "position_ids restart, but with an attention_mask transformers takes each row for one document: leave "
                "attention_mask out of packed rows"
            )
        return [0, length]
    starts = [(row.nonzero().flatten() + 1).tolist() for row in (positions.diff(dim=1) != 1).cpu()]
    found = [[0, *row, length] for row in starts]
    return found if len(found) > 1 else found[0]
