"""Facts about a running training step: the observations of all ranks, and the verdict that follows from them.

Every rank judges the same gathered observations, so that all ranks come to the same verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

import torch

from armillary.check.diagnose import Mistake, list_names

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference of a weight or a sum of gradients that is right, by dtype; `COARSE` for 16 bits."""
COARSE = 5e-2
MODULUS = 2**64
OTHER_LOSS = 0.5
"""If more than this share of the labels do not fit the gradient of a cross entropy, the loss is of another kind."""


OF_SCORES = re.compile(r"sink[^.]*$|(relative|position|score|attention)\w*_bias")
"""Matches names of parameters that a kernel adds to scores: sinks, and biases such as T5's."""


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    NOT_OBSERVED = "not observed"


@dataclass(frozen=True)
class Fact:
    """One line of a `VerifyReport`: its name, the verdict, and the numbers or the reason."""

    name: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class VerifyReport:
    """The facts that were verified in a run, the same on every rank.

    `right` is True if no fact is wrong and at least one was observed. `exit_code` is 0 if right, 1 if wrong, and 2 if
    nothing was observed.
    """

    facts: tuple[Fact, ...]

    @property
    def wrong(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.verdict is Verdict.WRONG]

    @property
    def right(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        if self.wrong:
            return 1
        return 0 if any(fact.verdict is Verdict.RIGHT for fact in self.facts) else 2

    def assert_right(self) -> None:
        """Raises AssertionError with all facts, unless `right`."""
        assert self.right, str(self)

    def to_dict(self) -> dict[str, Any]:
        facts = [{"name": x.name, "verdict": str(x.verdict), "detail": x.detail} for x in self.facts]
        return {"right": self.right, "exit_code": self.exit_code, "facts": facts}

    def __str__(self) -> str:
        return "\n".join(map(str, self.facts))


@dataclass(frozen=True)
class LabelTally:
    """One rank's labels, by the gradient of its logits or hidden states.

    Args:
        labelled: tokens with a label.
        lost: labels without a gradient; extra: tokens without a label that have one.
        other: labels whose gradient is that of a cross entropy with another label; unknown: of another loss, or where
            only the gradient of hidden states is known, of one or the other.
        weights: mean, minimum and maximum of the labels' weights in the loss; None if no label's is known. Labels that
            the model predicts with near certainty are left out, of `lost` and `other` too: their gradients vanish.
        loss: sum of the losses of this rank's labels.
    """

    labelled: int
    lost: int
    extra: int
    other: int
    unknown: int
    weights: tuple[float, float, float] | None
    loss: float


@dataclass
class Observation:
    """The observations of a step on one rank, as numbers and texts, which all ranks gather.

    Args:
        peers: global ranks that share this rank's rows.
        length: N, tokens of the rows.
        tokens: T, tokens that this rank should have.
        position_sums: sums over this rank's positions and their squares, modulo `MODULUS`.
        wrong_ids: tokens at the embedding other than expected; None if it was not observed.
        layer_tokens: by decoder layer, its tokens in the first micro-batch; empty if none was observed.
        position_offsets: (smallest, largest) difference of the position ids from those in the document, and from those
            in the row; None if no module gets any.
        positions_restart: True if the position ids count from 0, although the rank's tokens do not.
        labels: None if the gradient of logits was not observed.
        labelled: number of labels that the loss is averaged over; None for those of the peers.
        reported_loss: the loss that this rank reports.
        gradients: by parameter and the place of the shard in it, (norm, sum).
        dtype: the coarsest dtype of gradients, logits and hidden states.
        calls: by layer that called a method of Armillary, how its window or softcap differs; None if it does not.
        unused: trainable parameters without a gradient, or with zeros alone.
        head_gradient, head_sum: projections of the head's gradient, and of this rank's part of its closed form.
        reasons: by fact, why it was not observed.
        rows: digests of the whole rows that this rank was given; None if it was not.
    """

    peers: tuple[int, ...]
    length: int
    tokens: int = 0
    position_sums: tuple[int, int] = (0, 0)
    wrong_ids: int | None = None
    layer_tokens: dict[int, int] = field(default_factory=dict[int, int])
    position_offsets: list[tuple[int, int]] | None = None
    positions_restart: bool = False
    labels: LabelTally | None = None
    labelled: int | None = None
    reported_loss: float | None = None
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    dtype: torch.dtype = torch.float64
    calls: dict[str, str | None] = field(default_factory=dict[str, str | None])
    unused: list[str] = field(default_factory=list[str])
    head_gradient: list[float] = field(default_factory=list[float])
    head_norm: float = 0.0
    head_sum: list[float] = field(default_factory=list[float])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    rows: tuple[int, ...] | None = None


Judgement = tuple[Verdict, str]
Rule = Callable[[Sequence[Observation]], Judgement]


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, COARSE)


def judge(observations: Sequence[Observation]) -> tuple[Fact, ...]:
    """Returns the facts of a step. `observations` are those of all ranks, in their order."""
    by_peers: dict[tuple[int, ...], list[Observation]] = {}
    for observation in observations:
        by_peers.setdefault(observation.peers, []).append(observation)
    facts = list[Fact]()
    for name, rule in RULES.items():
        groups = list(by_peers.values()) if rule in RULES_OF_ROWS else [observations]
        judgements = [_apply(name, rule, ranks) for ranks in groups]
        # A wrong group of ranks decides; one that saw nothing makes the fact unobserved.
        order = (Verdict.WRONG, Verdict.NOT_OBSERVED, Verdict.RIGHT)
        i = min(range(len(groups)), key=lambda i: order.index(judgements[i][0]))
        ranks = f"ranks {list_names(list(map(str, groups[i][0].peers)))}: " if len(groups) > 1 else ""
        facts.append(Fact(name, judgements[i][0], ranks + judgements[i][1]))
    return tuple(facts)


def _apply(name: str, rule: Rule, ranks: Sequence[Observation]) -> Judgement:
    reason = next((x.reasons[name] for x in ranks if name in x.reasons), None)
    numbers = [number for x in ranks for pair in x.gradients.values() for number in pair]
    numbers += [x.labels.loss for x in ranks if x.labels is not None]
    if rule not in (_rows, _shares, _positions) and not all(map(isfinite, numbers)):
        reason = "the loss or a gradient is not finite"
    return rule(ranks) if reason is None else (Verdict.NOT_OBSERVED, reason)


# -- facts of the ranks that share rows --------------------------------------------------------------------------------


def _rows(ranks: Sequence[Observation]) -> Judgement:
    """Ranks that share rows were given the same ones."""
    if len(ranks) == 1 or any(x.rows is None for x in ranks):
        reason = "one rank has the whole sequence" if len(ranks) == 1 else "a rank read its own tokens alone"
        return Verdict.NOT_OBSERVED, reason
    different = [x.peers[i] for i, x in enumerate(ranks) if x.rows != ranks[0].rows]
    if different:
        return Verdict.WRONG, f"ranks {different} were given other rows than rank {ranks[0].peers[0]}"
    return Verdict.RIGHT, f"{len(ranks)} ranks"


def _shares(ranks: Sequence[Observation]) -> Judgement:
    """Each token is on one rank, and each layer computes it once, on that rank or on another."""
    length, tokens = ranks[0].length, [x.tokens for x in ranks]
    at_layers = {i: [x.layer_tokens.get(i, 0) for x in ranks] for i in ranks[0].layer_tokens}
    unsharded = [length] * len(ranks)
    if len(ranks) == 1:
        return Verdict.NOT_OBSERVED, "one rank has the whole sequence"
    if tokens == unsharded or unsharded in at_layers.values():
        return Verdict.WRONG, f"nothing is sharded: each of {len(ranks)} ranks has all {length} tokens"
    if wrong := sum(x.wrong_ids or 0 for x in ranks):
        return Verdict.WRONG, f"{wrong} token ids are not those of their positions in the rows"
    sums = [sum(x.position_sums[i] for x in ranks) % MODULUS for i in range(2)]
    positions = torch.arange(length)
    if sum(tokens) != length or sums != [int(positions.sum()) % MODULUS, int(positions.square().sum()) % MODULUS]:
        return Verdict.WRONG, f"ranks have {tokens} tokens, which are not each of {length} tokens once"
    for i, counts in at_layers.items():
        if sum(counts) > length:
            return Verdict.WRONG, f"layer {i} computes {counts} tokens on ranks that have {tokens}"
    if not at_layers and None in [x.wrong_ids for x in ranks]:
        return Verdict.NOT_OBSERVED, "neither the embedding nor a decoder layer was observed"
    return Verdict.RIGHT, f"{tokens} of {length} tokens" + ("" if at_layers else ", at the embedding alone")


def _positions(ranks: Sequence[Observation]) -> Judgement:
    """Position ids count within documents or within rows, from any number that is the same on all ranks."""
    offsets = [x.position_offsets for x in ranks if x.position_offsets is not None]
    if len(offsets) < len(ranks):
        return Verdict.NOT_OBSERVED, "no module gets position ids as integers [B or 1, T]"
    for i, name in enumerate(("documents", "rows")):
        if len({number for pairs in offsets for number in pairs[i]}) == 1:
            return Verdict.RIGHT, f"they count within {name}"
    restart = any(x.positions_restart for x in ranks)
    return Verdict.WRONG, Mistake.POSITIONS if restart else "they count neither within documents nor within rows"


def _labels(ranks: Sequence[Observation]) -> Judgement:
    """Each label has a gradient, that of its cross entropy, and no other token has one."""
    tallies = [x.labels for x in ranks if x.labels is not None]
    if len(tallies) < len(ranks):
        return Verdict.NOT_OBSERVED, "the gradient of the logits was not seen on every rank"
    labelled, lost, extra = (sum(getattr(x, key) for x in tallies) for key in ("labelled", "lost", "extra"))
    other, unknown = (sum(getattr(x, key) for x in tallies) for key in ("other", "unknown"))
    if not any(x.weights or x.lost or x.other or x.unknown for x in tallies):
        return Verdict.NOT_OBSERVED, "no label has a gradient that does not vanish"
    if unknown > OTHER_LOSS * labelled:
        return Verdict.NOT_OBSERVED, "the loss is not a cross entropy with one label per token"
    if lost or extra or other or unknown:
        return Verdict.WRONG, (
            f"of {labelled} labels, {lost} have no gradient and {other + unknown} that of another label; "
            f"{extra} tokens without a label have one; "
            f"by rank {[x.lost + x.extra + x.other + x.unknown for x in tallies]}"
        )
    return Verdict.RIGHT, f"{labelled} labels"


def _loss(ranks: Sequence[Observation]) -> Judgement:
    """All labels have one weight, and the reported loss is their mean, or the ranks' shares sum to it."""
    verdict, detail = _labels(ranks)
    tallies = [x.labels for x in ranks if x.labels is not None]
    weights = [x.weights for x in tallies if x.weights is not None]
    if not weights or verdict is Verdict.NOT_OBSERVED:
        return Verdict.NOT_OBSERVED, detail
    limit = max(tolerance(x.dtype) for x in ranks)
    means, lows, highs = zip(*weights, strict=True)
    # A rank's mean weight has less rounding than one label's weight.
    if max(means) - min(means) > limit / 10 * max(map(abs, means)):
        by_rank = ", ".join(f"{x:.4g}" for x in means)
        return Verdict.WRONG, f"{Mistake.LOSS_AVERAGED}: a label's weight is {by_rank} on the ranks"
    if max(highs) - min(lows) > limit * max(map(abs, means)):
        return Verdict.WRONG, f"labels have weights from {min(lows):.4g} to {max(highs):.4g}"
    count, losses = sum(x.labelled for x in tallies), [x.reported_loss for x in ranks if x.reported_loss is not None]
    # The mean over the labels of further rows is not known here.
    if len(losses) < len(ranks) or ranks[0].labelled not in (None, count):
        return Verdict.RIGHT, f"each label has the weight {means[0]:.4g}"
    mean = sum(x.loss for x in tallies) / count
    if all(abs(x - mean) <= limit * abs(mean) for x in losses):
        return Verdict.RIGHT, f"the mean over {count} labels"
    if abs(sum(losses) - mean) <= limit * abs(mean):
        return Verdict.RIGHT, f"the mean over {count} labels; each rank reports its share"
    reported = ", ".join(f"{x:.6g}" for x in losses)
    return Verdict.WRONG, f"ranks report the loss {reported}; the mean over all labels is {mean:.6g}"


# -- facts of all ranks ------------------------------------------------------------------------------------------------


def _agreement(ranks: Sequence[Observation]) -> Judgement:
    """Ranks that have the same part of a parameter have equal gradients."""
    copies: dict[str, list[tuple[float, float]]] = {}
    for x in ranks:
        for part, numbers in x.gradients.items():
            copies.setdefault(part, []).append(numbers)
    compared, wrong, limit = 0, set[str](), max(tolerance(x.dtype) for x in ranks)
    for part, numbers in copies.items():
        norms, sums = zip(*numbers, strict=True)
        compared += len(numbers) > 1
        if not max(max(norms) - min(norms), max(sums) - min(sums)) <= limit * max(norms):
            wrong.add(part.partition(" at ")[0])
    if wrong:
        return Verdict.WRONG, f"{Mistake.NOT_REDUCED}: {list_names(sorted(wrong))}"
    verdict = Verdict.RIGHT if compared else Verdict.NOT_OBSERVED
    return verdict, f"{compared} parts of parameters" if compared else "no part of a parameter is on two ranks"


def _head(ranks: Sequence[Observation]) -> Judgement:
    """The head's gradient is the sum over tokens of outer products of the logits' gradients and the hidden states."""
    total = torch.tensor([x.head_sum for x in ranks], dtype=torch.float64).sum(0)
    limit, factor = max(tolerance(x.dtype) for x in ranks), 0.0
    for x in ranks:
        gradient = torch.tensor(x.head_gradient, dtype=torch.float64)
        factor = float(gradient @ total / (total @ total))
        if not float((gradient - factor * total).norm()) <= limit * x.head_norm * len(gradient):
            return Verdict.WRONG, "it is not the sum over the ranks' tokens"
    tallies = [x.labels for x in ranks if x.labels is not None]
    if len(tallies) < len(ranks) or any(x.weights is None for x in tallies):
        return Verdict.RIGHT, f"the sum over ranks, times {factor:.4g}; the weights of labels were not observed"
    # For a mean loss, the weights of all labels, times the factor of the reduction, sum to 1.
    weights = [x.weights[0] for x in tallies if x.weights is not None]
    labelled, sizes = ranks[0].labelled, {len(ranks), len(ranks[0].peers)} - {1}
    sums = [weight * x.labelled for weight, x in zip(weights, tallies, strict=True)]
    scale = factor * (sum(sums) if labelled is None else weights[0] * labelled)
    if abs(scale - 1) <= limit:
        return Verdict.RIGHT, "the sum over all tokens, for the mean over all labels"
    factors = [
        (mistake, x) for size in sizes for mistake, x in ((Mistake.AVERAGED, 1 / size), (Mistake.SUMMED_TWICE, size))
    ]
    mistake = next((mistake for mistake, x in factors if abs(scale / x - 1) <= limit), None)
    if mistake is not None:
        return Verdict.WRONG, f"{mistake}: it is {scale:.4g} times that of the mean loss"
    return Verdict.RIGHT, f"the sum over all tokens, {scale:.4g} times the gradient of the mean loss"


def _use(ranks: Sequence[Observation]) -> Judgement:
    """Each trainable parameter has a gradient on some rank; sinks and biases of scores without one are dropped."""
    unused = sorted(set(ranks[0].unused).intersection(*(x.unused for x in ranks)))
    if dropped := [name for name in unused if OF_SCORES.search(name)]:
        return Verdict.WRONG, f"no gradient on any rank, so the kernel dropped them: {list_names(dropped)}"
    verdict = Verdict.NOT_OBSERVED if unused else Verdict.RIGHT
    return verdict, f"no gradient on any rank: {list_names(unused)}" if unused else "every parameter has a gradient"


def _calls(ranks: Sequence[Observation]) -> Judgement:
    """Windows and softcaps of the configuration are those of the layers' calls of a method."""
    calls = {f"{layer} has {x.calls[layer]}": x.calls[layer] for x in ranks for layer in x.calls}
    if wrong := [text for text, difference in calls.items() if difference]:
        return Verdict.WRONG, f"{list_names(wrong)}"
    layers = list(dict.fromkeys(layer for x in ranks for layer in x.calls))
    verdict = Verdict.RIGHT if layers else Verdict.NOT_OBSERVED
    return verdict, f"{len(layers)} layers" if layers else "no layer was seen to call a method of Armillary"


RULES_OF_ROWS: Sequence[Rule] = (_rows, _shares, _positions, _labels, _loss)
RULES: dict[str, Rule] = {
    "same rows": _rows,
    "share of tokens": _shares,
    "positions": _positions,
    "labels": _labels,
    "loss": _loss,
    "equal gradients": _agreement,
    "gradient of the head": _head,
    "parameters in use": _use,
    "windows and softcaps of calls": _calls,
}
