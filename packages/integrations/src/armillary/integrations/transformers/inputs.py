"""Shards a batch of a Hugging Face collator into the inputs of one rank.

Masks, positions and labels mean the same as in transformers on one device, so that the losses are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from armillary.attention import ContextParallel, Method
from armillary.attention.parts import IGNORED, ContextParallelBatch
from armillary.integrations.equal_values import unequal_values

TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Inputs with one value per token, which are sharded."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Inputs that describe the documents of a packed row. The model does not get them: `sequence` has the documents."""


def shard_inputs(cp: ContextParallel, inputs: Mapping[str, Any]) -> tuple[ContextParallelBatch, dict[str, Any]]:
    """Returns this rank's batch and the model's inputs for it, with labels only if `inputs` have labels.

    Bytes sent: a `gather_integers` of three integers for each of `TOKENS`. Every rank of the sequence must call it.

    Raises:
        ValueError: ranks have different rows; no input_ids [B, N]; a tensor that is not in `TOKENS` or `PACKED`;
            output_router_logits; cu_seq_lens_q with several rows; labels for a model that does not predict the next
            token; errors of `ContextParallel.shard`, such as position_ids that restart beside an attention_mask.
    """
    # This check comes first: ranks with different rows would fail different checks, or hang in attention.
    check_same_rows(cp.method, inputs)
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(f"the batch has no input_ids, only {', '.join(inputs)}: a shard is made of tokens")
    if ids.ndim != 2:
        raise ValueError(f"input_ids {tuple(ids.shape)}: [B, N] is accepted")
    unknown = [name for name, x in inputs.items() if isinstance(x, Tensor) and name not in (*TOKENS, *PACKED)]
    if unknown or inputs.get("output_router_logits"):
        raise ValueError(
            f"the batch has {', '.join(unknown) or 'output_router_logits'}, whose shard is unknown; "
            f"{', '.join(TOKENS)} are accepted"
        )
    position_ids, boundaries = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    if boundaries is not None and len(ids) != 1:
        raise ValueError(f"cu_seq_lens_q with {len(ids)} rows: they are the documents of one row")
    if boundaries is not None and position_ids is None:
        # If a row has cu_seq_lens but no position ids, transformers counts positions from its start, across documents.
        first = 0 if cp.padding_idx is None else cp.padding_idx + 1
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None] + first
    batch = cp.shard(
        ids,
        documents=boundaries,  # without these, `shard` finds documents in position ids, as transformers does
        position_ids=position_ids,
        attention_mask=inputs.get("attention_mask"),
        shift_labels=_next_labels(inputs, cp.shifts_labels),
    )
    other_inputs = {name: x for name, x in inputs.items() if name not in (*TOKENS, *PACKED)}
    omitted_names = {"num_items_in_batch"}  # the trainer passes its own
    if inputs.get("labels") is None:
        omitted_names |= {"labels", "shift_labels"}
    shard = {name: x for name, x in batch.inputs.items() if name not in omitted_names}
    return batch, {**other_inputs, **shard, "use_cache": False}


def check_same_rows(method: Method, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError on every rank, with the input and two shards, if `TOKENS` differ between ranks of a sequence.

    Bytes sent: those of `unequal_values`.
    """
    tokens = {name: inputs.get(name) if isinstance(inputs.get(name), Tensor) else "none" for name in TOKENS}
    if unequal := unequal_values(tokens, method):
        name, shard = next(iter(unequal.items()))
        raise ValueError(
            f"shards 0 and {shard} were given different {name}, but all ranks of a sequence need the same rows: a "
            "sampler, dataset or collator draws from random numbers of each rank, or the data loader was prepared "
            "without share_rows"
        )


def _next_labels(inputs: Mapping[str, Any], shifts_labels: bool) -> Tensor:
    """Returns the label of the token after each token, [B, N]; -100 everywhere if the inputs have no labels.

    As in transformers, the last token of a document predicts the first token of the next one, unless the label of that
    first token is -100.

    Raises:
        ValueError: labels for a model whose loss is not of the next token, as `shifts_labels` says.
    """
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    if labels is None:
        return torch.full_like(inputs["input_ids"], IGNORED)
    if not shifts_labels:
        raise ValueError(
            "labels for a model whose loss is not of the next token (a masked language model, classification of "
            "tokens): its loss would be a mean over the labels of one shard"
        )
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted
