"""Whole batches on ranks that share a sequence: compared between ranks, and sharded.

Every rank loads the same rows. `shard_inputs` compares them and makes this rank's inputs from the batch of a Hugging
Face collator. Masks, positions and labels mean the same as in transformers on one device, so that the losses are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from armillary.attention import ContextParallel
from armillary.attention.internal import IGNORED, ContextParallelBatch

# Inputs with one value per token, which are sharded.
TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")

# Inputs that describe the documents of a packed row. The model does not get them: `sequence` has the documents.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def shard_inputs(cp: ContextParallel, inputs: Mapping[str, Any]) -> tuple[ContextParallelBatch, dict[str, Any]]:
    """Returns this rank's batch and the model's inputs for it, with labels only if `inputs` have labels.

    Bytes sent: an `all_gather` of 88 bytes over the ranks of the sequence. Every rank of it must call this.

    Raises:
        ValueError: ranks have different rows; no input_ids [B, N]; a tensor that is not in `TOKENS` or `PACKED`;
            output_router_logits; cu_seq_lens_q with several rows; labels for a model that does not predict the next
            token; errors of `ContextParallel.shard`, such as position_ids that restart beside an attention_mask.
    """
    # Before all other checks, which ranks with different rows may fail or pass.
    with cp.rows_check.comparing({name: inputs.get(name) for name in (*TOKENS, *PACKED)}):
        return _shard_inputs(cp, inputs)


def _shard_inputs(cp: ContextParallel, inputs: Mapping[str, Any]) -> tuple[ContextParallelBatch, dict[str, Any]]:
    # 1. Inputs whose shards are known.
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(f"the batch has no input_ids, only {', '.join(inputs)}: a shard is made of tokens")
    unknown = [name for name, x in inputs.items() if isinstance(x, Tensor) and name not in (*TOKENS, *PACKED)]
    if unknown or inputs.get("output_router_logits"):
        raise ValueError(
            f"the batch has {', '.join(unknown) or 'output_router_logits'}, whose shard is unknown; "
            f"{', '.join(TOKENS)} are accepted"
        )
    # 2. Documents. If a row has cu_seq_lens but no position ids, transformers counts positions from the row's start,
    # across documents.
    position_ids, boundaries = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    if boundaries is not None and len(ids) != 1:
        raise ValueError(f"cu_seq_lens_q with {len(ids)} rows: they are the documents of one row")
    if boundaries is not None and position_ids is None:
        first = 0 if cp.padding_idx is None else cp.padding_idx + 1
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None] + first
    # 3. Labels of the next token. As in transformers, the last token of a document predicts the first token of the next
    # one, unless the label of that first token is -100.
    labels, next_labels = inputs.get("labels"), inputs.get("shift_labels")
    if labels is None:
        next_labels = torch.full_like(ids, IGNORED)
    elif not cp.shifts_labels:
        raise ValueError(
            "labels for a model whose loss is not of the next token (a masked language model, classification of "
            "tokens): its loss would be a mean over the labels of one shard"
        )
    elif next_labels is None:
        next_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    batch = cp.shard(
        ids,
        documents=boundaries,  # without these, `shard` finds documents in position ids, as transformers does
        position_ids=position_ids,
        attention_mask=inputs.get("attention_mask"),
        shift_labels=next_labels,
    )
    # 4. The model's inputs. The trainer passes its own num_items_in_batch.
    omitted = {"num_items_in_batch"} if labels is not None else {"num_items_in_batch", "labels", "shift_labels"}
    other_inputs = {name: x for name, x in inputs.items() if name not in (*TOKENS, *PACKED)}
    shard_of_tokens = {name: x for name, x in batch.inputs.items() if name not in omitted}
    return batch, {**other_inputs, **shard_of_tokens, "use_cache": False}
