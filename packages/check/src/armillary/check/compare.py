"""Errors of the records of ranks, compared with the record of one rank, by tensor, by token and by parameter.

Besides its size, an error has the numbers from which `diagnose.py` finds the mistake: the tokens that are wrong, and
the factor between a wrong gradient and the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.check.step import CheckRun, RankRecord
from armillary.core.testing import relative_error, root_mean_square

MODEL_LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Maximum relative error of a tensor, by dtype. It is higher for a model that amplifies rounding: see `NOISE_FACTOR`.
"""
NOISE_FACTOR = 4.0
"""Errors up to this multiple of one rank's own rounding error are right too, if that is more than `MODEL_LIMITS`."""
SMALLEST_LOSS = 1e-300
"""Errors of a loss that is zero are relative to this number."""
GRADIENT_FLOOR = 1e-3
"""Errors of a gradient that is nearly zero are relative to this fraction of the root mean square of all gradients."""


@dataclass(frozen=True)
class TensorError:
    """Error of a tensor, relative to the norm of the tensor on one rank (of a gradient: see `GRADIENT_FLOOR`).

    Args:
        limit: largest error that is right.
    """

    name: str
    error: float
    limit: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.limit  # True for a NaN


@dataclass(frozen=True)
class TokenError(TensorError):
    """Error of a tensor with one row per token.

    Args:
        by_token: [N], the error of each token, relative to the root mean square of all tokens. Gradients are first
            divided by a factor common to all ranks, because FSDP2 and DDP average over ranks later.
        factors: for gradients, each rank's gradient divided by the right one: the median over the rank's tokens.
        by_token_per_rank: `by_token` with each rank's gradient divided by its own factor instead.
    """

    by_token: Tensor = field(default_factory=lambda: torch.zeros(0))
    factors: tuple[float, ...] = ()
    by_token_per_rank: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def wrong_tokens(self) -> Tensor:
        """True for tokens whose error is above the limit, bool [N]."""
        return ~(self.by_token <= self.limit)


@dataclass(frozen=True)
class GradientError(TensorError):
    """Error of a parameter's gradient: the largest of all ranks.

    Args:
        factor: c if every rank's gradient is c times the right one; else None.
        ranks_differ: True if ranks have different gradients.
        sum_factor: c if the sum over ranks is c times the right gradient; else None.
    """

    factor: float | None = None
    ranks_differ: bool = False
    sum_factor: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All errors of one run.

    Args:
        tokens: errors of logits, of their gradient, and of the gradient of the embeddings' output, if both sides have
            them.
        activations: errors of activations, in the order of the forward pass.
        shards: global positions of each rank's tokens, or () if the step does not report them.
        untrained: parameters that are not compared, because they have no gradient in the run on one rank, and none or
            zeros on all ranks of the other run.
        loss_is_share: True if ranks report shares of the loss, which sum or average to the right one.
    """

    run: CheckRun
    loss: TensorError
    tokens: tuple[TokenError, ...]
    gradients: tuple[GradientError, ...]
    activations: tuple[TokenError, ...]
    shards: tuple[Tensor, ...]
    untrained: tuple[str, ...] = ()
    loss_is_share: bool = False

    @property
    def tensors(self) -> list[TensorError]:
        """Errors of loss, token tensors and parameters' gradients, which decide whether the run is right."""
        return [self.loss, *self.tokens, *self.gradients]

    @property
    def right(self) -> bool:
        return not any(x.wrong for x in self.tensors)

    @property
    def mean_error(self) -> float:
        return (sum(x.error**2 for x in self.tensors) / len(self.tensors)) ** 0.5

    @property
    def forward_right(self) -> bool:
        """True if the logits are right; without logits, if the loss is right."""
        logits = self.token_error("logits")
        return not (self.loss if logits is None else logits).wrong

    @property
    def wrong_gradients(self) -> list[GradientError]:
        return [x for x in self.gradients if x.wrong]

    def token_error(self, name: str) -> TokenError | None:
        return next((x for x in self.tokens if x.name == name), None)

    @property
    def first_wrong_activation(self) -> TokenError | None:
        """The error of the first module in the forward pass whose output is wrong; None if there is none."""
        return next((x for x in self.activations if x.wrong), None)


def compare(
    run: CheckRun,
    records: Sequence[RankRecord],
    expected: RankRecord,
    rounded: RankRecord | None,
    limit: float | None = None,
) -> Comparison:
    """Compares the records of a world's ranks with the record of one rank.

    Args:
        expected: record of one rank in float64.
        rounded: record of one rank with other rounding. Errors up to `NOISE_FACTOR` times the errors of this record
            count as right.
        limit: maximum relative error; by default `MODEL_LIMITS` of the dtype.
    """
    dtype_limit = MODEL_LIMITS[run.dtype] if limit is None else limit
    # A deep or badly scaled model amplifies rounding, on one rank as on many.
    rounding_errors = _rounding_errors(rounded, expected) if rounded is not None else {}

    def limit_of(name: str) -> float:
        return max(dtype_limit, NOISE_FACTOR * rounding_errors.get(name, 0.0))

    loss, is_share = _loss_error([x.loss for x in records], expected.loss, limit_of("loss"))
    tokens = list[TokenError]()
    for name, attribute, allow_factor in TOKEN_TENSORS:
        shards = [getattr(x, attribute) for x in records]
        error = _token_error(name, records, shards, getattr(expected, attribute), limit_of(name), allow_factor)
        tokens += [] if error is None else [error]
    activations = list[TokenError]()
    for name, exact in expected.activations.items():
        shards = [x.activations.get(name) for x in records]
        error = _token_error(name, records, shards, exact, limit_of(name), False)
        activations += [] if error is None else [error]
    gradients, untrained = _gradient_errors(records, expected, limit_of)
    positions = tuple(x.positions for x in records if x.positions is not None)
    return Comparison(
        run, loss, tuple(tokens), gradients, tuple(activations), positions, untrained, loss_is_share=is_share
    )


TOKEN_TENSORS = (
    ("logits", "logits", False),
    ("gradient of logits", "logits_gradient", True),
    ("gradient of embeddings' output", "input_gradient", True),
)
"""(name, attribute of a record, True if a factor common to all ranks is allowed). FSDP2 and DDP average the gradients
of parameters, so the gradients of activations are larger by the number of ranks."""


def _rounding_errors(rounded: RankRecord, expected: RankRecord) -> dict[str, float]:
    floor = gradient_floor(expected.gradients)
    pairs = {name: (getattr(rounded, key), getattr(expected, key), 0.0) for name, key, _ in TOKEN_TENSORS}
    pairs |= {name: (rounded.activations.get(name), exact, 0.0) for name, exact in expected.activations.items()}
    pairs |= {name: (rounded.gradients.get(name), exact, floor) for name, exact in expected.gradients.items()}
    errors = {
        name: relative_error(x, exact, floor)
        for name, (x, exact, floor) in pairs.items()
        if x is not None and exact is not None and x.shape == exact.shape
    }
    return errors | {"loss": abs(rounded.loss - expected.loss) / max(abs(expected.loss), SMALLEST_LOSS)}


def gradient_floor(gradients: Mapping[str, Tensor | None]) -> float:
    """Returns the least root mean square by which errors of gradients are divided."""
    sizes = [root_mean_square(x) for x in gradients.values() if x is not None and x.numel()]
    return GRADIENT_FLOOR * (sum(size**2 for size in sizes) / max(len(sizes), 1)) ** 0.5


def _loss_error(losses: Sequence[float], expected: float, limit: float) -> tuple[TensorError, bool]:
    """Returns the loss's error, and True if ranks report shares of the right loss, which sum or average to it."""
    size = max(abs(expected), SMALLEST_LOSS)

    def error(values: Sequence[float]) -> float:
        largest = max(abs(value - expected) for value in values) / size
        return float("inf") if any(value != value for value in values) else largest  # max() may drop a NaN

    # A step may report this rank's share of the loss, or the mean over local labels if all ranks have as many.
    total = sum(losses)
    for combined in ([total], [total / len(losses)]):
        if error(losses) > limit and len(set(losses)) > 1 and error(combined) <= limit:
            return TensorError("loss", error(combined), limit), True
    return TensorError("loss", error(losses), limit), False


def _token_error(
    name: str,
    records: Sequence[RankRecord],
    shards: Sequence[Tensor | None],
    expected: Tensor | None,
    limit: float,
    allow_factor: bool,
) -> TokenError | None:
    """Returns the error of a tensor by token; None if a shard is missing, or its shape does not match."""
    # Each rank's shard is [B, T, ...], one rank's tensor [B, N, ...].
    if expected is None:
        return None
    expected = expected.double().flatten(2)
    pairs = list[tuple[Tensor, Tensor, Tensor]]()
    for record, x in zip(records, shards, strict=True):
        if x is None or record.positions is None:
            return None
        exact = expected[:, record.positions]
        x = x.double().flatten(2)
        if x.shape != exact.shape:
            return None
        pairs.append((x, exact, record.positions))
    # Two errors per token: with the factor of all ranks divided out, and with the factor of the token's rank.
    common_factor = _median_factor([(x, exact) for x, exact, _ in pairs], 1.0) if allow_factor else 1.0
    factors = [_median_factor([(x, exact)], common_factor) if allow_factor else 1.0 for x, exact, _ in pairs]
    by_token, by_token_per_rank = torch.zeros(2, expected.shape[1], dtype=torch.float64)
    for (x, exact, positions), factor in zip(pairs, factors, strict=True):
        for errors, divisor in ((by_token, common_factor), (by_token_per_rank, factor)):
            difference = (x / divisor - exact).square().mean((0, 2)).sqrt().nan_to_num(float("inf"))
            # Ranks of a head or tensor axis may have the same tokens: the largest error counts.
            errors[positions] = torch.maximum(errors[positions], difference)
    size = root_mean_square(expected) or 1.0
    error = float(by_token.square().mean().sqrt()) / size
    ratios = tuple(factors) if allow_factor else ()
    return TokenError(name, error, limit, by_token / size, ratios, by_token_per_rank / size)


def _median_factor(pairs: Sequence[tuple[Tensor, Tensor]], default: float) -> float:
    """Returns the median over tokens of the factor x / exact for pairs (x, exact); `default` if 0 or undefined."""
    # The median and not the mean: a few wrong tokens must not change the factor by which right tokens are divided.
    ratios = list[Tensor]()
    for x, exact in pairs:
        norms = exact.square().sum((0, 2))
        nonzero = norms > 0
        ratios.append(((x * exact).sum((0, 2)) / norms.masked_fill(~nonzero, 1))[nonzero])
    token_ratios = torch.cat(ratios)
    return (float(token_ratios.nanmedian()) if token_ratios.numel() else 0.0) or default


def _gradient_errors(
    records: Sequence[RankRecord], expected: RankRecord, limit_of: Callable[[str], float]
) -> tuple[tuple[GradientError, ...], tuple[str, ...]]:
    floor = gradient_floor(expected.gradients)
    errors, untrained = list[GradientError](), list[str]()
    for name, gradient in expected.gradients.items():
        copies = [record.gradients.get(name) for record in records]
        any_gradient = next((x for x in (gradient, *copies) if x is not None), None)
        if any_gradient is None or (gradient is None and not any(bool(x.any()) for x in copies if x is not None)):
            untrained.append(name)
            continue
        # A missing gradient counts as zeros, which a reduction over ranks may have filled in.
        exact = torch.zeros_like(any_gradient, dtype=torch.float64) if gradient is None else gradient.double()
        ranks = [torch.zeros_like(exact) if x is None else x.double() for x in copies]
        limit = limit_of(name)
        if any(x.shape != exact.shape for x in ranks):
            errors.append(GradientError(name, float("inf"), limit))
            continue
        error = max(relative_error(x, exact, floor) for x in ranks)
        differ = max(relative_error(x, ranks[0], floor) for x in ranks) > limit
        errors.append(
            GradientError(
                name,
                error,
                limit,
                factor=None if differ else _factor(ranks[0], exact, floor, limit),
                ranks_differ=differ,
                sum_factor=_factor(torch.stack(ranks).sum(0), exact, floor, limit),
            )
        )
    return tuple(errors), tuple(untrained)


def _factor(x: Tensor, exact: Tensor, floor: float, limit: float) -> float | None:
    """Returns c if x = c exact within the limit; None if not, or if c or exact is zero."""
    norm = float(exact.square().sum())
    if not norm:
        return None
    factor = float((x * exact).sum()) / norm  # least squares
    return factor if factor and relative_error(x, factor * exact, floor) <= limit * max(1.0, abs(factor)) else None
