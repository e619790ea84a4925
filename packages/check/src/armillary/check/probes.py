"""`verify`: one observed step of a run, and forwards with one change each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.check.compare import MODEL_LIMITS
from armillary.check.diagnose import Mistake
from armillary.check.facts import Fact, Observation, Verdict, VerifyReport, judge, tolerance
from armillary.check.forwards import Forward, Loss, Runner, gathered, undisturbed
from armillary.check.layers import CHOICE, layer_kinds
from armillary.check.observe import Proof, ShardTokens, trainable
from armillary.check.reach import attention_facts
from armillary.check.scores import bias_fact
from armillary.check.step import FINGERPRINT, CheckBatch, Reduce, StepOutput

NOISE_FACTOR, MOST_NOISE = 6.0, 0.3
"""Prefixes may differ by this multiple of the effect of rounding the embeddings; if that is more than `MOST_NOISE`, as
when routing flips, they are not compared."""
STEP_SIZES = (0.01, 0.001)
"""Relative changes of the loss by which weights move along the gradient; the second if the first shows curvature."""
LOSS_LIMIT, CURVED, ROUGH = 0.003, 0.03, 0.3
"""Largest relative error of the loss's change; of its change in half the step; and of a loss that jumps."""


def verify(
    model: nn.Module,
    batch: CheckBatch,
    loss: Loss,
    *,
    reduce: Reduce | None = None,
    peers: Sequence[int] | None = None,
    causal: bool = True,
) -> VerifyReport:
    """Verifies the context parallelism of a model inside its run, by one step and by probes. Trains nothing.

    The facts of `verifying`, from one forward and backward, and those of 9 more forwards, or 13 if the loss is curved:
    attention crosses shards, and stays within documents, windows and the past; a prefix has the same outputs in shorter
    rows, whose shards end elsewhere; the loss changes along the measured gradient as it should. A further forward for
    each kind of sinks and biases, which must reach all ranks.

    Gradients, buffers, random numbers and modes are restored, and weights from a copy of this rank's. A model with
    dropout is in evaluation mode meanwhile. Every rank of the world must call it.

    Args:
        batch: the whole rows, the same on all ranks that share them; with documents, if the run packs them.
        loss: `loss(model, batch)` shards rows of any length, runs forward, and returns the loss, or a `StepOutput` with
            the positions of this rank's tokens too; without them, common layouts are tried. If it runs backward too,
            as the step of `check_model`, every forward costs a step.
        reduce: reduces gradients after backward, if hooks of the model (FSDP2, DDP) do not.
        peers: global ranks that share the rows; by default all.
        causal: False if tokens see later ones.
    """
    observed, probed = probe(model, batch, loss, reduce=reduce, peers=peers, causal=causal)
    return VerifyReport(observed + probed)


def probe(
    model: nn.Module,
    batch: CheckBatch,
    loss: Callable[..., Tensor | StepOutput],
    *,
    head: Callable[..., Any] | None = None,
    reduce: Reduce | None = None,
    peers: Sequence[int] | None = None,
    causal: bool = True,
) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """Returns the facts of one step, and those of further forwards. Arguments as in `verify`.

    Args:
        head: the head function of a loss without logits. The step calls `loss(model, batch, head)` with it, observed.
    """
    kinds = layer_kinds(model)
    ranks = tuple(range(dist.get_world_size())) if peers is None else tuple(peers)
    runner = Runner(model, loss, ranks, {name: kind.layer for name, kind in kinds.items()})
    with undisturbed(model):
        # 1. One step, observed, which is also the forward that others are compared with.
        with Proof(model, batch, peers=ranks) as proof, Forward(model, batch, ranks, runner.layers) as base:
            output = loss(model, batch) if head is None else loss(model, batch, proof.head(head))
            result = output if isinstance(output, StepOutput) else StepOutput(output)
            if result.positions is not None:
                proof.tokens = ShardTokens.of(batch, result.positions.flatten().cpu())
            runner = replace(runner, runs_backward=any(p.grad is not None for p in model.parameters()))
            if not runner.runs_backward:
                result.loss.backward()
        if reduce is not None:
            reduce(model)
        base.positions = None if proof.tokens is None else proof.tokens.positions
        # Layers under tensor parallelism may have a part of the rank's tokens.
        tokens = 0 if base.positions is None else len(base.positions)
        base.outputs = {name: x for name, x in base.outputs.items() if x.shape[1] == tokens}
        observations = proof.gather(result.loss.detach())
        # 2. Forwards with one change each.
        with torch.no_grad():
            dtype = max((x.dtype for x in observations), key=tolerance)
            coarse = tolerance(dtype) > tolerance(torch.float32)
            # The same forward again: changes by another order of sums count as none.
            noise = runner.run(batch)
            probed = (
                *attention_facts(runner, batch, kinds, base, noise, causal, coarse),
                bias_fact(runner, batch, base, noise, coarse),
                _prefix(runner, batch, base, causal, dtype),
                _loss_along_gradient(runner, batch, result.loss.detach(), observations),
            )
    return judge(observations), probed


def _prefix(runner: Runner, batch: CheckBatch, base: Forward, causal: bool, dtype: torch.dtype) -> Fact:
    """Compares the outputs of a prefix of the rows, in shards with other edges, with those of whole rows."""
    name, unit, whole_length = "same prefix in shorter rows", 2 * len(runner.peers), batch.ids.shape[1]
    length = whole_length * 3 // 4 // unit * unit
    if not causal or unit == 2 or not length:
        reason = "rows are too short, or on one rank" if causal else "the model is not causal"
        return Fact(name, Verdict.NOT_OBSERVED, reason)
    ends = None if batch.documents is None else (*(end for end in batch.documents if end < length), length)
    short = replace(batch, ids=batch.ids[:, :length], labels=batch.labels[:, :length], documents=ends)
    try:
        forwards = (base, runner.run(batch, rounded=True), runner.run(short))
    except ValueError as error:  # of a library whose lengths are limited, on every rank
        return Fact(name, Verdict.NOT_OBSERVED, f"{length} tokens were refused: {error}")
    groups = list(runner.of_peers([(x.positions, x.last) for x in forwards]).values())
    pairs = [pair for ranks in groups for forwards_of_rank in ranks for pair in forwards_of_rank]
    if any(positions is None or last is None or len(positions) != len(last) for positions, last in pairs):
        return Fact(name, Verdict.NOT_OBSERVED, "the outputs or the positions of their tokens are unknown")
    errors, limit = list[Tensor](), MODEL_LIMITS[dtype]
    for ranks in groups:
        rows = torch.zeros(3, whole_length, FINGERPRINT, dtype=torch.float64)
        for forwards_of_rank in ranks:
            for row, (positions, outputs) in zip(rows, forwards_of_rank, strict=True):
                row[positions] = outputs
        whole, rounded, prefix = rows / rows[0].square().mean().sqrt()
        limit = max(limit, NOISE_FACTOR * float((rounded - whole).norm(dim=1).max()))
        errors.append((prefix - whole)[:length].norm(dim=1))
    worst = torch.stack(errors).amax(0)
    if limit > MOST_NOISE:
        return Fact(name, Verdict.NOT_OBSERVED, f"rounding alone changes outputs by {limit / NOISE_FACTOR:.0e}")
    wrong = int((~(worst <= limit)).sum())
    detail = f"{wrong} of {length} tokens differ, by up to {float(worst.max()):.0e} (limit {limit:.0e})"
    return Fact(name, Verdict.WRONG if wrong else Verdict.RIGHT, detail)


def _loss_along_gradient(runner: Runner, batch: CheckBatch, loss: Tensor, ranks: Sequence[Observation]) -> Fact:
    """Moves all weights along their gradients: the loss must change by the sum of the gradients' norms.

    Each parameter moves by the same distance, so that the large gradients of few do not hide errors of others.
    """
    name, tallies = "loss along the gradient", [x.labels for x in ranks if x.labels is not None]
    labelled = sum(x.labelled for x in tallies)
    if not labelled or len(tallies) < len(ranks) or any(tolerance(x.dtype) > tolerance(torch.float32) for x in ranks):
        return Fact(name, Verdict.NOT_OBSERVED, "it needs float32, and the loss of each label")
    # Ranks report the loss of all labels, or shares of it.
    losses, mean = gathered(float(loss)), sum(x.loss for x in tallies) / labelled
    is_share = abs(sum(losses) - mean) < abs(losses[0] - mean)
    # Norms of whole gradients, of which ranks have parts: each part counts once.
    norms = dict[str, float]()
    for key, (norm, _) in {key: numbers for x in ranks for key, numbers in x.gradients.items()}.items():
        parameter = key.partition(" at ")[0]
        norms[parameter] = (norms.get(parameter, 0.0) ** 2 + norm**2) ** 0.5
    moved = [(p, p.detach().clone(), norms[key]) for key, p in trainable(runner.model) if norms.get(key)]
    expected = sum(norm for *_, norm in moved)
    if not expected:
        return Fact(name, Verdict.NOT_OBSERVED, "all gradients are zero")

    def ratio(step: float) -> float:
        values = list[float]()
        for signed_step in (step, -step):
            for p, weight, norm in moved:
                if p.grad is not None:
                    p.copy_(weight).add_(p.grad, alpha=signed_step / norm)
            output = runner.evaluate(batch)
            losses = gathered(float(output.loss if isinstance(output, StepOutput) else output))
            values.append(sum(losses) if is_share else sum(losses) / len(losses))
        for p, weight, _ in moved:
            p.copy_(weight)
        return (values[0] - values[1]) / (2 * step * expected)

    change, curvature = 0.0, float("inf")
    for size in STEP_SIZES:
        if curvature > CURVED:
            # Half the step has a quarter of the error by the loss's curvature, which the sum of both leaves out.
            step = size * abs(mean) / expected
            whole, half = ratio(step), ratio(step / 2)
            change, curvature = (4 * half - whole) / 3, abs(half - whole)
    detail = f"{change:.4g} times the expected change"
    if abs(change - 1) <= LOSS_LIMIT + curvature / 4:
        return Fact(name, Verdict.RIGHT, detail)
    jumps = any(CHOICE.search(f"{key} {type(x).__name__}") for key, x in runner.model.named_modules())
    if curvature > CURVED or (jumps and abs(change - 1) <= ROUGH):
        return Fact(name, Verdict.NOT_OBSERVED, f"the loss is not smooth: {detail}")
    factors = {Mistake.AVERAGED: len(losses), Mistake.SUMMED_TWICE: 1 / len(losses)}
    mistake = next((x for x, y in factors.items() if abs(change / y - 1) <= CURVED), "parts of gradients are wrong")
    return Fact(name, Verdict.WRONG, f"{mistake}: {detail}")
