"""Facts about a running training step: the observations of all ranks, and the verdict that follows from them.

Every rank judges the same gathered observations, so that all ranks come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

import torch

from armillary.check.diagnose import Mistake, list_names

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference of a weight or a sum of gradients that is right, by dtype; `COARSE` for 16 bits."""
COARSE = 5e-2
MODULUS = 2**64
OTHER_LOSS = 0.5
"""If more than this share of the labels do not fit the gradient of a cross entropy, the loss is of another kind."""


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


@dataclass
class LabelTally:
    """One rank's labels, by the gradient of its logits or hidden states.

    Args:
        labelled: tokens with a label.
        lost: labels without a gradient; extra: tokens without a label that have one.
        other: labels whose gradient is not that of a cross entropy with this label.
        weights: sum, number, minimum and maximum of the labels' weights in the loss. Labels that the model predicts
            with near certainty are left out of `lost`, `other` and `weights`: their gradients vanish.
        loss: sum of the losses of this rank's labels.
    """

    labelled: int = 0
    lost: int = 0
    extra: int = 0
    other: int = 0
    weight_sum: float = 0.0
    weight_count: int = 0
    weight_min: float = float("inf")
    weight_max: float = float("-inf")
    loss: float = 0.0

    @property
    def weight(self) -> float:
        """The mean weight of a label."""
        return self.weight_sum / max(self.weight_count, 1)


@dataclass
class Observation:
    """What one rank saw of a step. Numbers and texts only: all ranks gather them.

    Args:
        peers: global ranks that share this rank's rows.
        length: N, tokens of the rows.
        tokens: T, tokens that this rank should have; None if not observed.
        position_sums: sums over this rank's positions and their squares, modulo `MODULUS`.
        wrong_ids: tokens at the embedding other than expected.
        embedded: True if the embedding of ids was observed.
        layer_tokens: most tokens at a decoder layer.
        position_offsets: (smallest, largest) difference of the position ids from those in the document, and from those
            in the row; None if no module gets any.
        positions_restart: True if the position ids count from 0, although the rank's tokens do not.
        labels: None if the gradient of logits was not observed.
        labelled: number of labels that the loss is averaged over; None for those of the peers.
        reported_loss: the loss that this rank reports.
        gradients: by parameter and the place of the shard in it, (norm, sum).
        dtype: the coarsest dtype of gradients, logits and hidden states.
        unused: trainable parameters without a gradient, or with zeros alone.
        head_gradient, head_sum: projections of the head's gradient, and of this rank's part of its closed form.
        reasons: by fact, why it was not observed.
    """

    peers: tuple[int, ...]
    length: int
    tokens: int | None = None
    position_sums: tuple[int, int] = (0, 0)
    wrong_ids: int = 0
    embedded: bool = False
    layer_tokens: int | None = None
    position_offsets: tuple[tuple[int, int], tuple[int, int]] | None = None
    positions_restart: bool = False
    labels: LabelTally | None = None
    labelled: int | None = None
    reported_loss: float | None = None
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    dtype: torch.dtype = torch.float64
    unused: list[str] = field(default_factory=list[str])
    head_gradient: list[float] = field(default_factory=list[float])
    head_norm: float = 0.0
    head_sum: list[float] = field(default_factory=list[float])
    reasons: dict[str, str] = field(default_factory=dict[str, str])


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, COARSE)


# A judge returns (verdict, detail) from the observations of the ranks that share rows, or of all ranks.
Judge = Callable[[Sequence[Observation]], tuple[Verdict, str]]


def judge(observations: Sequence[Observation]) -> tuple[Fact, ...]:
    """Returns the facts of a step. `observations` are those of all ranks, in their order."""
    groups = [list(group) for _, group in groupby(sorted(observations, key=lambda x: x.peers), key=lambda x: x.peers)]
    facts = list[Fact]()
    for name, rule in GROUP_RULES.items():
        verdicts = [_checked(name, rule, group) for group in groups]
        # A wrong group decides; one that saw nothing makes the fact unobserved.
        order = (Verdict.WRONG, Verdict.NOT_OBSERVED, Verdict.RIGHT)
        worst = min(range(len(groups)), key=lambda i: order.index(verdicts[i][0]))
        verdict, detail = verdicts[worst]
        where = f"ranks {list_names([str(r) for r in groups[worst][0].peers])}: " if len(groups) > 1 else ""
        facts.append(Fact(name, verdict, where + detail))
    facts += [Fact(name, *_checked(name, rule, observations)) for name, rule in WORLD_RULES.items()]
    return tuple(facts)


def _checked(name: str, rule: Judge, observations: Sequence[Observation]) -> tuple[Verdict, str]:
    reason = next((x.reasons[name] for x in observations if name in x.reasons), None)
    return rule(observations) if reason is None else (Verdict.NOT_OBSERVED, reason)


def _shares(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    if len(ranks) == 1:
        return Verdict.NOT_OBSERVED, "one rank has the whole sequence"
    length, tokens = ranks[0].length, [x.tokens or 0 for x in ranks]
    at_layers = [x.layer_tokens for x in ranks]
    if all(count == length for count in at_layers) or all(count == length for count in tokens):
        return Verdict.WRONG, f"nothing is sharded: each of {len(ranks)} ranks has all {length} tokens"
    if wrong := sum(x.wrong_ids for x in ranks):
        return Verdict.WRONG, f"{wrong} token ids are not those of their positions in the rows"
    sums = [sum(x.position_sums[i] for x in ranks) % MODULUS for i in range(2)]
    positions = torch.arange(length)
    expected = [int(positions.sum()) % MODULUS, int(positions.square().sum()) % MODULUS]
    if sum(tokens) != length or sums != expected:
        return Verdict.WRONG, f"ranks have {tokens} tokens, which are not each of {length} tokens once"
    if any(count is None for count in at_layers):
        if all(x.embedded for x in ranks):
            return Verdict.RIGHT, f"{tokens} of {length} tokens at the embedding; layers were not observed"
        return Verdict.NOT_OBSERVED, "neither the embedding nor a decoder layer was observed"
    if any((x.layer_tokens or 0) > (x.tokens or 0) for x in ranks):
        return Verdict.WRONG, f"decoder layers compute {at_layers} tokens on ranks that hold {tokens}"
    return Verdict.RIGHT, f"{tokens} of {length} tokens"


def _positions(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    offsets = [x.position_offsets for x in ranks]
    if any(pair is None for pair in offsets):
        return Verdict.NOT_OBSERVED, "no module gets position ids as integers [B or 1, T]"
    # Position ids count within documents or within rows, from any number that is the same on all ranks.
    for i, name in enumerate(("documents", "rows")):
        if len({number for pair in offsets if pair is not None for number in pair[i]}) == 1:
            return Verdict.RIGHT, f"they count within {name}"
    if any(x.positions_restart for x in ranks):
        return Verdict.WRONG, Mistake.POSITIONS
    return Verdict.WRONG, "they count neither within documents nor within rows"


def _labels(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    tallies = [x.labels for x in ranks if x.labels is not None]
    if len(tallies) < len(ranks):
        return Verdict.NOT_OBSERVED, "the gradient of the logits was not seen on every rank"
    labelled, lost, other = (sum(getattr(x, name) for x in tallies) for name in ("labelled", "lost", "other"))
    extra, certain = sum(x.extra for x in tallies), sum(x.weight_count for x in tallies)
    if not labelled or not certain + lost + other:
        return Verdict.NOT_OBSERVED, "no label has a gradient that does not vanish"
    if other > OTHER_LOSS * labelled:
        return Verdict.NOT_OBSERVED, "the loss is not a cross entropy with one label per token"
    if lost or extra or other:
        by_rank = [x.lost + x.extra + x.other for x in tallies]
        return Verdict.WRONG, (
            f"of {labelled} labels, {lost} have no gradient and {other} that of another label; {extra} tokens without "
            f"a label have one; by rank {by_rank}"
        )
    return Verdict.RIGHT, f"{labelled} labels"


def _weights(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    verdict, detail = _labels(ranks)
    tallies = [x.labels for x in ranks if x.labels is not None]
    seen = [x for x in tallies if x.weight_count]
    if not seen or verdict is Verdict.NOT_OBSERVED:
        return Verdict.NOT_OBSERVED, detail
    limit = max(tolerance(x.dtype) for x in ranks)
    means = [x.weight for x in seen]
    # A rank's mean weight has less rounding than one label's weight.
    if max(means) - min(means) > limit / 10 * max(map(abs, means)):
        weights = ", ".join(f"{x:.4g}" for x in means)
        return Verdict.WRONG, f"{Mistake.LOSS_AVERAGED}: a label's weight is {weights} on the ranks"
    low, high = min(x.weight_min for x in seen), max(x.weight_max for x in seen)
    if high - low > limit * max(abs(low), abs(high)):
        return Verdict.WRONG, f"labels have weights from {low:.4g} to {high:.4g}"
    # The loss that ranks report is the mean over all labels, or each rank reports its share of it.
    losses = [x.reported_loss for x in ranks if x.reported_loss is not None]
    count = ranks[0].labelled or sum(x.labelled for x in tallies)
    mean = sum(x.loss for x in tallies) / max(count, 1)
    whole = ranks[0].labelled is None or count == sum(x.labelled for x in tallies)
    if len(losses) == len(ranks) and whole:
        error = max(abs(x - mean) for x in losses)
        if error > limit * abs(mean) and abs(sum(losses) - mean) > limit * abs(mean):
            reported = ", ".join(f"{x:.6g}" for x in losses)
            return Verdict.WRONG, f"ranks report the loss {reported}; the mean over all labels is {mean:.6g}"
        return Verdict.RIGHT, f"the mean over {count} labels" + (
            "; each rank reports its share" if error > limit * abs(mean) else ""
        )
    return Verdict.RIGHT, f"each label has the weight {sum(means) / len(means):.4g}"


def _agreement(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    """Ranks that hold the same part of a parameter need equal gradients."""
    copies: dict[str, list[tuple[float, float]]] = {}
    for x in ranks:
        for key, numbers in x.gradients.items():
            copies.setdefault(key, []).append(numbers)
    compared = {key: numbers for key, numbers in copies.items() if len(numbers) > 1}
    if not compared:
        return Verdict.NOT_OBSERVED, "no parameter is on two ranks"
    limit = max(tolerance(x.dtype) for x in ranks)
    wrong = list[str]()
    for key, numbers in compared.items():
        size = max(norm for norm, _ in numbers)
        spread = max(max(column) - min(column) for column in zip(*numbers, strict=True))
        if not spread <= limit * size:  # a NaN is wrong
            wrong.append(key.partition(" at ")[0])
    if wrong:
        return Verdict.WRONG, f"{Mistake.NOT_REDUCED}: {list_names(sorted(set(wrong)))}"
    return Verdict.RIGHT, f"{len(compared)} parts of parameters"


def _head(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    """The gradient of the head is the sum over ranks of outer products of the logits' gradients and hidden states."""
    total = torch.tensor([x.head_sum for x in ranks], dtype=torch.float64).sum(0)
    limit = max(tolerance(x.dtype) for x in ranks)
    factors = list[float]()
    for x in ranks:
        gradient = torch.tensor(x.head_gradient, dtype=torch.float64)
        factor = float(gradient @ total) / max(float(total @ total), 1e-300)
        if not float((gradient - factor * total).norm()) <= limit * x.head_norm * len(gradient):
            return Verdict.WRONG, "the head's gradient is not the sum over the ranks' tokens"
        factors.append(factor)
    groups = {x.peers: x for x in ranks}
    tallies = [x.labels for x in ranks if x.labels is not None and x.labels.weight_count]
    if len(tallies) < len(ranks):
        return Verdict.RIGHT, f"the sum over ranks times {factors[0]:.4g}; the weights of labels were not observed"
    # The weights of all labels, times the factor of the reduction, sum to 1 for a mean.
    labelled = ranks[0].labelled
    if labelled is None:
        labelled = sum(x.labels.labelled for x in ranks if x.labels is not None) * 1.0
        mean_weight = sum(x.labels.weight * x.labels.labelled for x in ranks if x.labels is not None) / max(labelled, 1)
    else:
        mean_weight = tallies[0].weight
    scale = factors[0] * mean_weight * labelled
    if abs(scale - 1) <= limit:
        return Verdict.RIGHT, "the sum over all ranks' tokens, for the mean over all labels"
    sizes = {len(ranks), *(len(peers) for peers in groups)} - {1}
    for size in sorted(sizes):
        for mistake, wrong_scale in ((Mistake.AVERAGED, 1 / size), (Mistake.SUMMED_TWICE, size)):
            if abs(scale / wrong_scale - 1) <= limit:
                return Verdict.WRONG, f"{mistake}: the head's gradient is {scale:.4g} times that of the mean loss"
    return Verdict.RIGHT, f"the sum over all ranks' tokens, {scale:.4g} times the gradient of the mean loss"


def _use(ranks: Sequence[Observation]) -> tuple[Verdict, str]:
    unused = set(ranks[0].unused).intersection(*(x.unused for x in ranks[1:]))
    if sinks := sorted(name for name in unused if "sink" in name.rpartition(".")[2]):
        return Verdict.WRONG, f"no gradient on any rank, so the kernel dropped them: {list_names(sinks)}"
    if unused:
        return Verdict.NOT_OBSERVED, f"without a gradient on any rank: {list_names(sorted(unused))}"
    return Verdict.RIGHT, "every trainable parameter has a gradient"


GROUP_RULES: dict[str, Judge] = {
    "share of tokens": _shares,
    "positions": _positions,
    "labels": _labels,
    "loss": _weights,
}
WORLD_RULES: dict[str, Judge] = {
    "equal gradients": _agreement,
    "gradient of the head": _head,
    "parameters in use": _use,
}
