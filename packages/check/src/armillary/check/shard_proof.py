"""Verification of a trainer's step, by a rank that has only its shard: its own observation, and probes of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from armillary.attention import Method
from armillary.check.facts import Fact, Verdict, VerifyReport
from armillary.check.forwards import gathered
from armillary.check.layers import layer_kinds
from armillary.check.observe import Proof, ShardTokens
from armillary.check.probes import probe
from armillary.check.step import CheckBatch, StepOutput

FORWARDS = 16
"""Cost of the probes in forwards: a step, which is 3, and 13 more. So their tokens are at most 3 / 16 of a step's."""
LEAST_TOKENS, MOST_TOKENS = 8, 64
"""Tokens of each rank: with fewer no probe shows anything; more are taken for windows alone."""


class ShardProof(Proof):
    """The observation of one shard's step. `report` has the facts of `probe` too, if it was called before the step."""

    probed: tuple[Fact, ...] = ()

    def probe(
        self,
        loss: Callable[..., tuple[Tensor, Tensor]],
        head: Callable[..., Any],
        *,
        documents: Sequence[int] | None,
        step_tokens: int,
        unit: int,
    ) -> None:
        """Probes a prefix of the first row, if that costs less than a step. Trains nothing, as `verify`.

        Every rank of the world must call it. The number of tokens, and with it the choice, depends only on sizes.

        Args:
            loss: `loss(batch, head)` returns the loss of a `CheckBatch`, and the positions [T] of this rank's tokens.
            head: the head function of the run's loss, as in `Proof.head`.
            documents: boundaries (0, ..., N) of the first row's documents; None for one document.
            step_tokens: tokens of a step in the rows that the peers share.
            unit: the prefix is a multiple of this number.

        Bytes sent besides those of forwards: one `all_gather_object` of the prefix.
        """
        kinds, tokens = layer_kinds(self.model), self.tokens
        assert tokens is not None
        length = MOST_TOKENS * len(self.peers) + 2 * max((kind.window or 0 for kind in kinds.values()), default=0)
        length = min(length, step_tokens * 3 // FORWARDS, tokens.length) // unit * unit
        reason = None
        if not kinds:
            reason = "compiled layers are not observed"
        elif len(self.peers) == 1:
            reason = "one rank has the whole sequence"
        elif length < LEAST_TOKENS * len(self.peers):
            reason = f"they cost more than a step of {step_tokens} tokens on {len(self.peers)} ranks"
        if reason is not None:
            self.probed = (Fact("probes", Verdict.NOT_OBSERVED, reason),)
            return
        # 1. The prefix, from all ranks that share the row.
        inside, ids = tokens.positions < length, torch.zeros(1, length, dtype=torch.long)
        for peers, positions, local_ids in gathered(
            (self.peers, tokens.positions[inside], tokens.ids[0].cpu()[inside])
        ):
            if peers == self.peers:
                ids[0, positions] = local_ids
        ends = None if documents is None else (*(int(end) for end in documents if end < length), length)

        # 2. The probes. The step itself shows the facts of its own labels and gradients.
        def output_of(_: nn.Module, batch: CheckBatch, head: Callable[..., Any] = head) -> StepOutput:
            return StepOutput(*loss(batch, head))

        try:
            self.probed = probe(self.model, CheckBatch(ids, ids, ends), output_of, head=head, peers=self.peers)[1]
        except ValueError as error:  # of a length that the model refuses, on every rank
            self.probed = (Fact("probes", Verdict.NOT_OBSERVED, f"{length} tokens were refused: {error}"),)

    def report(self, loss: Tensor | float | None = None) -> VerifyReport:
        return VerifyReport((*super().report(loss).facts, *self.probed))


def observe_shard(model: nn.Module, *, method: Method, peers: Sequence[int], **tokens: Any) -> ShardProof:
    """Returns the observation of a step of one shard. `tokens` are the fields of `ShardTokens`."""
    return ShardProof(model, ShardTokens(**tokens), peers=peers, method=method)
