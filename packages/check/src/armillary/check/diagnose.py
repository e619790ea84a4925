"""Diagnosis of wrong results: the mistake that a run's errors look like.

Each mistake has one or two signatures in the errors, and a rule that detects each. The docstring of a rule is the
signature. If the measured numbers fit, the rule returns them as text, else None. Rules for gradients apply only if the
logits are right, because wrong logits make every gradient wrong. P is the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite, log

import torch
from torch import Tensor

from armillary.check.compare import Comparison, TokenError

ROUNDINGS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Relative rounding error by dtype."""
SMALL = 2e-2
"""Largest error that rounding explains."""
MIN_GROWTH = 1.02
"""Minimum ratio of the mean error on more ranks to that on fewer ranks, if the errors are rounding errors."""
MIN_SCALE = 1e-4
"""Minimum difference from 1 of a factor on all gradients. One label more or less makes a larger difference."""
SAME_FACTOR = 1e-6
"""Largest relative difference of two factors that count as one."""
HALO = 8
"""Maximum reach of a convolution, in tokens."""


class Mistake(StrEnum):
    """The mistakes that `diagnose` can name."""

    AVERAGED = "gradients are averaged over ranks where they must be summed"
    SUMMED_TWICE = "gradients are summed over ranks twice"
    SCALED = "all gradients are off by one factor"
    NOT_REDUCED = "gradients are not reduced over ranks"
    LOSS_AVERAGED = "the loss is a mean of the ranks' means, which have different numbers of labels"
    LABELS = "labels are shifted after sharding"
    NO_HALO = "a convolution or shift has no halo"
    POSITIONS = "positions restart on every rank"
    OWN_SHARD = "each rank attends to its own shard alone"
    DOCUMENTS = "documents leak into each other"
    WINDOW = "the window is dropped"
    SHARED_MASK = "layers share a mask"
    LOW_PRECISION = "partial results are merged or accumulated in low precision"
    WRONG_TIME = "state is read at the wrong time"
    LOSS = "the loss alone is wrong"
    UNKNOWN = "no signature fits"


@dataclass(frozen=True)
class Diagnosis:
    """A mistake, and the numbers that fit its signature."""

    mistake: Mistake
    evidence: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.evidence}"


@dataclass(frozen=True)
class Evidence:
    """All comparisons of one check.

    Args:
        plain: the run with one document per row.
        documents: the run with packed documents, if there is one.
        variants: recompute, compile and two micro-batches, by name.
        other_ranks: the plain run on another number of ranks.
        longer: the plain run on twice the tokens.
        first_token_reaches: True if changing the first token changes logits on ranks without it; None if unknown.
    """

    plain: Comparison
    documents: Comparison | None = None
    variants: dict[str, Comparison] = field(default_factory=dict[str, Comparison])
    other_ranks: Comparison | None = None
    longer: Comparison | None = None
    first_token_reaches: bool | None = None

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """The comparisons that decide whether the model is right, by name."""
        packed = {} if self.documents is None else {"documents": self.documents}
        return {"plain": self.plain, **packed, **self.variants}

    @property
    def right(self) -> bool:
        return all(x.right for x in self.comparisons.values())

    @property
    def first_wrong(self) -> Comparison:
        """The simplest wrong run; the plain run if all are right."""
        return next((x for x in self.comparisons.values() if not x.right), self.plain)


Rule = Callable[[Evidence], str | None]


def diagnose(evidence: Evidence) -> tuple[Diagnosis, ...]:
    """Returns the mistakes whose signatures fit; none if everything is right."""
    if evidence.right:
        return ()
    comparison = evidence.first_wrong
    if comparison.run.variant != "plain":  # the same step is right without recompute, compile or two micro-batches
        wrong = [name for name, variant in evidence.variants.items() if not variant.right]
        text = f"right without, wrong with {list_names(wrong)}; {first_difference(comparison)}"
        return (Diagnosis(Mistake.WRONG_TIME, text),)
    rules = GRADIENT_RULES if comparison.forward_right else FORWARD_RULES
    diagnoses = [Diagnosis(mistake, text) for mistake, rule in rules if (text := rule(evidence)) is not None]
    if not comparison.forward_right:
        del diagnoses[1:]  # the rules are ordered from specific to general
    return tuple(diagnoses) or (Diagnosis(Mistake.UNKNOWN, first_difference(comparison)),)


def first_difference(comparison: Comparison) -> str:
    """Describes the first wrong activation of a run; without one, its wrong tensors."""
    activation = comparison.first_wrong_activation
    if activation is not None:
        return f"the first wrong output is that of {activation.name}, at tokens {spans(activation.wrong_tokens)}"
    return "wrong: " + list_names([x.name for x in comparison.tensors if x.wrong])


# Rules for right logits with wrong gradients. Several of them may fit.


def averaged_gradients(evidence: Evidence) -> str | None:
    """All gradients are off by the factor 1 / P."""
    return _one_factor(evidence, 1 / evidence.first_wrong.run.ranks)


def doubly_summed_gradients(evidence: Evidence) -> str | None:
    """All gradients are off by the factor P."""
    return _one_factor(evidence, evidence.first_wrong.run.ranks)


def scaled_gradients(evidence: Evidence) -> str | None:
    """All gradients are off by one factor that is neither 1 / P nor P."""
    if averaged_gradients(evidence) or doubly_summed_gradients(evidence):
        return None
    return _one_factor(evidence, None)


def unreduced_gradients(evidence: Evidence) -> str | None:
    """Some parameters' gradients differ between ranks, and their sum is right up to a factor."""
    comparison = evidence.first_wrong
    partial = [x for x in comparison.wrong_gradients if x.ranks_differ and x.sum_factor is not None]
    if not partial:
        return None
    names = "all parameters" if len(partial) == len(comparison.gradients) else list_names([x.name for x in partial])
    factor = partial[0].sum_factor or 1.0
    times = "right" if abs(factor - 1) < SAME_FACTOR else f"{factor:.4g} times the right one"
    return f"ranks have different gradients, whose sum is {times}: {names}"


def labels_shifted_late(evidence: Evidence) -> str | None:
    """The gradient of the logits is wrong only at the last tokens of shards."""
    comparison = evidence.first_wrong
    gradient = comparison.token_error("gradient of logits")
    if gradient is None or not comparison.shards:
        return None
    # If labels are shifted within a shard, the shard's last token has no label, or the label of the shard's first
    # token. The number of labels changes too, and so the factor of each rank, which `by_token_per_rank` divides out.
    wrong = gradient.by_token_per_rank > gradient.limit
    if not wrong.any() or (wrong & ~shard_ends(comparison.shards)).any():
        return None
    return f"logits are right, their gradient is wrong at tokens {spans(wrong)}, where shards end"


def locally_averaged_loss(evidence: Evidence) -> str | None:
    """The gradient of the logits is off by one factor per rank, and the factors differ."""
    comparison = evidence.first_wrong
    gradient = comparison.token_error("gradient of logits")
    if gradient is None or not comparison.shards:
        return None
    wrong = gradient.by_token_per_rank > gradient.limit
    spread = max(gradient.factors) - min(gradient.factors)
    # Errors at shard ends are ignored: labels may in addition be shifted too late.
    if spread <= SAME_FACTOR * max(map(abs, gradient.factors)) or (wrong & ~shard_ends(comparison.shards)).any():
        return None
    factors = ", ".join(f"{x:.4g}" for x in gradient.factors)
    return f"the gradient of the logits is that of one rank times {factors} on the ranks"


def layers_share_backward(evidence: Evidence) -> str | None:
    """Gradients are the same on all ranks, wrong up to a layer, and right in the layers after it."""
    comparison = evidence.first_wrong
    if any(x.ranks_differ or x.factor is not None for x in comparison.wrong_gradients):
        return None
    # Backward runs from the last layer to the first, so a wrong layer makes all layers before it wrong.
    layers = {layer for x in comparison.gradients if (layer := _layer(x.name)) is not None}
    wrong = {layer for x in comparison.wrong_gradients if (layer := _layer(x.name)) is not None}
    right = sorted(layers - wrong)
    if not wrong or not right or max(wrong) > min(right):
        return None
    return f"logits are right; gradients are wrong in layers {sorted(wrong)} and right in layers {right}"


def loss_alone(evidence: Evidence) -> str | None:
    """Everything is right except the loss."""
    comparison = evidence.first_wrong
    wrong = [x for x in comparison.tensors if x.wrong]
    return f"off by {wrong[0].error:.2g}; all gradients are right" if wrong == [comparison.loss] else None


# Rules for wrong logits. The first one that fits in `FORWARD_RULES` names the mistake.


def low_precision(evidence: Evidence) -> str | None:
    """All errors are small. They grow with the number of ranks, but not with the number of tokens."""
    comparison, other, longer = evidence.plain, evidence.other_ranks, evidence.longer
    if comparison.right:
        return None
    errors = [x.error for x in comparison.tensors]
    if not all(isfinite(x) for x in errors) or max(errors) > SMALL:
        return None
    error = comparison.mean_error
    sizes = [f"mean error {error:.1e}"]
    # Errors of a few tokens, such as shard ends, shrink in the mean over more tokens. Rounding errors keep their order.
    if longer is not None:
        if not 0.3 < longer.mean_error / error < 3:
            return None
        sizes.append(f"{longer.mean_error:.1e} on twice the tokens")
    # More ranks merge more partial results, and each merge rounds.
    if other is not None:
        more_ranks, fewer_ranks = sorted((comparison, other), key=lambda x: -x.run.ranks)
        if more_ranks.mean_error < MIN_GROWTH * fewer_ranks.mean_error:
            return None
        sizes.append(f"{other.mean_error:.1e} on {other.run.ranks} ranks")
    # The first wrong activation was rounded the fewest times, so its error is closest to that of a single rounding.
    first = comparison.first_wrong_activation
    size = error if first is None else first.error
    dtype = min(ROUNDINGS, key=lambda name: abs(log(size / ROUNDINGS[name])))
    harmless = "; harmless where training is in 16 bits" if dtype == "float32" else ""
    return f"{', '.join(sizes)}; rounding to {dtype} leaves {ROUNDINGS[dtype]:.0e}{harmless}"


def documents_leak(evidence: Evidence) -> str | None:
    """Right with one document per row, wrong with several."""
    packed = evidence.documents
    if packed is None or not evidence.plain.right:
        return None
    logits = packed.token_error("logits")
    tokens = "" if logits is None else f", at tokens {spans(logits.wrong_tokens)}"
    return f"right with one document per row, wrong with documents {list(packed.run.documents or ())}{tokens}"


def no_halo(evidence: Evidence) -> str | None:
    """The first wrong output is wrong only at a few tokens around the ends of shards."""
    comparison = evidence.first_wrong
    activation = comparison.first_wrong_activation
    if activation is None or not comparison.shards:
        return None
    wrong, distance = activation.wrong_tokens, distance_from_ends(comparison.shards)
    reach = int(distance[wrong].max())
    # In a short piece of a shard every token is near an end, so wrong tokens near ends would prove nothing.
    _, lengths = owners(comparison.shards).unique_consecutive(return_counts=True)
    if reach > min(HALO, int(lengths.min()) // 3):
        return None
    return f"{activation.name} is wrong at tokens {spans(wrong)}, within {reach} of the end of a shard"


def local_attention(evidence: Evidence) -> str | None:
    """Another first token changes no logits on ranks that do not have it."""
    activation = evidence.first_wrong.first_wrong_activation
    if evidence.first_token_reaches is not False or activation is None:
        return None
    return f"another first token changes no logits of other ranks; {activation.name} is the first that is wrong"


def positions_restart(evidence: Evidence) -> str | None:
    """The first wrong output is wrong at exactly the tokens whose position is not their index in the shard."""
    comparison = evidence.first_wrong
    activation = comparison.first_wrong_activation
    if activation is None or not comparison.shards:
        return None
    moved = torch.zeros_like(activation.wrong_tokens)
    for positions in comparison.shards:
        moved[positions] |= positions != torch.arange(len(positions))
    if not torch.equal(activation.wrong_tokens, moved):
        return None
    tokens = spans(activation.wrong_tokens)
    return f"{activation.name} is wrong at tokens {tokens}, whose positions are not their indices in the shard"


def layers_share(evidence: Evidence) -> str | None:
    """The first wrong layer is not layer 0, and is wrong from some token on where no shard starts."""
    comparison = evidence.first_wrong
    activation, first = comparison.first_wrong_activation, _first_beyond_window(comparison)
    layer = None if activation is None else _layer(activation.name)
    if activation is None or not layer or first is None:
        return None
    return (
        f"layers before {layer} are right; {activation.name} is wrong from token {first} on, where no shard starts. "
        "If only this layer has a window, it may be dropped"
    )


def dropped_window(evidence: Evidence) -> str | None:
    """The first wrong output is wrong from some token on where no shard starts, the same one on twice the tokens."""
    activation, first = evidence.first_wrong.first_wrong_activation, _first_beyond_window(evidence.first_wrong)
    if activation is None or first is None:
        return None
    # A window does not depend on the length; ends of shards do.
    longer = evidence.longer and evidence.longer.first_wrong_activation
    if longer and _first_wrong_token(longer) != first:
        return None
    return f"{activation.name} is right up to token {first - 1} and wrong from {first} on, where no shard starts"


GRADIENT_RULES: Sequence[tuple[Mistake, Rule]] = (
    (Mistake.AVERAGED, averaged_gradients),
    (Mistake.SUMMED_TWICE, doubly_summed_gradients),
    (Mistake.SCALED, scaled_gradients),
    (Mistake.NOT_REDUCED, unreduced_gradients),
    (Mistake.LABELS, labels_shifted_late),
    (Mistake.LOSS_AVERAGED, locally_averaged_loss),
    (Mistake.LOW_PRECISION, low_precision),
    (Mistake.SHARED_MASK, layers_share_backward),
    (Mistake.LOSS, loss_alone),
)
FORWARD_RULES: Sequence[tuple[Mistake, Rule]] = (
    (Mistake.LOW_PRECISION, low_precision),
    (Mistake.DOCUMENTS, documents_leak),
    (Mistake.NO_HALO, no_halo),
    (Mistake.OWN_SHARD, local_attention),
    (Mistake.POSITIONS, positions_restart),
    (Mistake.SHARED_MASK, layers_share),
    (Mistake.WINDOW, dropped_window),
)


def _one_factor(evidence: Evidence, expected: float | None) -> str | None:
    """All gradients are off by the factor `expected`; None: by any factor, the same for all."""
    comparison = evidence.first_wrong
    factors = [x.factor for x in comparison.gradients]
    if not factors or not comparison.wrong_gradients or factors[0] is None:
        return None
    if abs(factors[0] - 1) < MIN_SCALE:
        return None
    if any(x is None or abs(x / factors[0] - 1) > SAME_FACTOR for x in factors):
        return None
    if expected is not None and abs(factors[0] / expected - 1) > SAME_FACTOR:
        return None
    loss = "and so is the loss" if comparison.loss.wrong else "the loss is right"
    return f"every gradient is {factors[0]:.6g} times that of one rank on {comparison.run.ranks} ranks; {loss}"


def _first_wrong_token(error: TokenError) -> int:
    return int(error.wrong_tokens.nonzero()[0])


def _first_beyond_window(comparison: Comparison) -> int | None:
    """Returns w if the first wrong activation is wrong from token w on, and no shard starts there."""
    activation = comparison.first_wrong_activation
    if activation is None or not comparison.shards:
        return None
    first = _first_wrong_token(activation)
    starts_shard = first > 0 and bool(shard_ends(comparison.shards)[first - 1])
    return first if first and not starts_shard and bool(activation.wrong_tokens[first:].all()) else None


def _layer(name: str) -> int | None:
    number = re.search(r"(?:^|\.)(\d+)\.", f"{name}.")
    return None if number is None else int(number[1])


# Positions of tokens in shards.


def owners(shards: Sequence[Tensor]) -> Tensor:
    """Returns the rank that has each token, [N]; the first one if several have it, -1 if none has."""
    owner = torch.full((1 + max(int(x.max()) for x in shards),), -1)
    for rank in reversed(range(len(shards))):
        owner[shards[rank]] = rank
    return owner


def shard_ends(shards: Sequence[Tensor]) -> Tensor:
    """Returns True for tokens whose next token is on another rank, bool [N]."""
    owner = owners(shards)
    return torch.cat([owner[1:] != owner[:-1], torch.tensor([False])])


def distance_from_ends(shards: Sequence[Tensor]) -> Tensor:
    """Returns the distance of each token from the nearest boundary between shards, [N]: 1 for the tokens next to it.

    N if there is no boundary.
    """
    tokens, ends = torch.arange(len(owners(shards))), shard_ends(shards).nonzero().flatten()
    if not len(ends):
        return torch.full_like(tokens, len(tokens))
    # Each boundary is after a token in `ends`. `before` is positive for tokens before it, `after` for tokens after it.
    before, after = ends[:, None] - tokens + 1, tokens - ends[:, None]
    return torch.where(before > 0, before, after).amin(0)


# Parts of messages.


def spans(tokens: Tensor) -> str:
    """Returns "4-7, 12" for a mask of tokens."""
    runs, start = list[str](), None
    values = [*tokens.tolist(), False]
    for i, value in enumerate(values):
        if value and start is None:
            start = i
        elif not value and start is not None:
            runs.append(str(start) if i == start + 1 else f"{start}-{i - 1}")
            start = None
    return list_names(runs, 6)


def list_names(names: Sequence[str], limit: int = 4) -> str:
    hidden_count = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {hidden_count} more" if hidden_count > 0 else "")
