"""Verification of running steps by armillary-check: `--check.verify-every`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from armillary.attention import Method
from armillary.attention.internal import observe_shard, over_all_ranks
from armillary.data import Batch
from armillary.data.internal import Documents
from armillary.models import linear_token_loss
from armillary.models.parallel import begin_micro_batch
from armillary.train.step import Run, batch_mask, forward, shards_states, sum_over_ranks


class Verification:
    """Context manager around forward and backward of a step; does nothing in steps that are not verified.

        verification = Verification(run)
        train_step(run, step, batches, verification.of(step, batches))

    The first step of a start is verified, and every `check.verify_every` steps. Before the first one, probes run on a
    prefix of a row, if they cost less than a step. Rows of trees are not verified: their tokens have several labels.

    Attributes:
        report: the facts of the last step, an `armillary.check.VerifyReport`; None if it was not verified.

    Raises:
        RuntimeError: at its end, on every rank: a fact is wrong.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.report: Any = None
        self._step, self._batches = 0, list[Batch]()
        self._started, self._proof, self._handle = False, None, None

    def of(self, step: int, batches: list[Batch]) -> Self:
        """Returns this context for a step, of which `batches` are this rank's micro-batches."""
        self._step, self._batches, self.report = step, batches, None
        return self

    def __enter__(self) -> Self:
        run, batch, every = self.run, self._batches[0], self.run.config.check.verify_every
        labels = batch.labels
        if every is None or not isinstance(labels, Tensor) or (self._started and self._step % every):
            return self
        # 1. The tokens that this rank should compute, and the method by which it attends.
        label_count = int(sum_over_ranks(run, sum(batch.labelled for batch in self._batches)))
        methods = (getattr(module, "attention", None) for module in run.model.modules())
        method = next(method for method in methods if isinstance(method, Method))
        proof: Any = observe_shard(
            run.model,
            method,
            batch.layout,
            ids=batch.tokens,
            labels=labels,
            position_ids=batch.positions,
            labelled=max(label_count, 1),
        )
        # 2. Probes, once. Layers with a state may have shards of their own, where these would look for other tokens.
        if not self._started and not run.config.parallel.contiguous_states:
            proof.probe(
                partial(probe_loss, run, method),
                linear_token_loss,
                documents=batch.documents[0] if run.config.data.documents else None,
                step_tokens=len(batch.tokens) * batch.layout.length * len(self._batches),
                unit=2 * method.shards * run.config.parallel.tp,
            )
        self._started = True

        # 3. The head of the model's forward computes the loss without logits, and tells of them.
        def observe_head(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            head: partial[Any] = kwargs["head"]
            return args, {**kwargs, "head": partial(proof.head(head.func), *head.args, **head.keywords)}

        self._handle = run.model.register_forward_pre_hook(observe_head, with_kwargs=True)
        self._proof = proof.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        proof, self._proof = self._proof, None
        if proof is None or self._handle is None:
            return
        self._handle.remove()
        proof.__exit__(*raised)
        if raised[0] is None:
            self.report = proof.report()
            if self.report.wrong:
                raise RuntimeError(f"step {self._step} is wrong\n{self.report}")


def probe_loss(run: Run, method: Method, rows: Any, head: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Returns this rank's share of the mean loss of an `armillary.check.CheckBatch`, and its tokens' positions [T]."""
    if run.config.parallel.zero_stage == 1:
        begin_micro_batch(run.model, last=True)
    data, length = run.config.data, rows.ids.shape[1]
    documents: Documents = (rows.documents or (0, length),)
    mask = batch_mask(documents, None, data.documents)
    layout = method.layout(length, data.layout, mask, shards_states(run.config, run.model.config))
    positions = over_all_ranks(layout, method).positions(method.shard)
    position_ids = rows.position_ids if data.reset_positions else torch.arange(length)[None]
    ids, labels, position_ids = (x[:, positions] for x in (rows.ids, rows.shifted_labels, position_ids))
    batch = Batch(ids, labels, position_ids, documents, layout)
    total, _ = forward(run, batch, head)
    return total / sum_over_ranks(run, batch.labelled).to(total.dtype), positions
