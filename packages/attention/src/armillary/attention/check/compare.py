"""Compares the records of all ranks with those of one rank: which tensors, tokens and parameters differ, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.attention.check.method import relative_error, root_mean_square
from armillary.attention.check.step import CheckRun, RankRecord

LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Maximum relative error of a tensor, by dtype. A model's own rounding (`noise`) raises it."""
NOISE_FACTOR = 4.0
"""Maximum error, relative to the error of one rank in the same dtype."""
GRADIENT_FLOOR = 1e-3
"""Errors of a gradient that is nearly zero are relative to this share of the root mean square of all gradients."""


@dataclass(frozen=True)
class TensorError:
    """Error of a tensor, relative to the norm of the tensor on one rank."""

    name: str
    error: float
    limit: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.limit


@dataclass(frozen=True)
class TokenError(TensorError):
    """Error of a tensor with one row per token.

    Args:
        by_token: [N], the error of each token, relative to the root mean square of all tokens. For gradients, after
            division by a factor common to all ranks, because FSDP2 and DDP average over ranks later.
        factors: for gradients, the factor of each rank.
        by_token_per_rank: as `by_token`, but after division by a factor of each rank.
    """

    by_token: Tensor = field(default_factory=lambda: torch.zeros(0))
    factors: tuple[float, ...] = ()
    by_token_per_rank: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def wrong_tokens(self) -> Tensor:
        """bool [N]."""
        return ~(self.by_token <= self.limit)


@dataclass(frozen=True)
class GradientError(TensorError):
    """Error of a parameter's gradient: the largest of all ranks.

    Args:
        factor: all ranks' gradients divided by the right one, if that is one number; else None.
        ranks_differ: True if ranks have different gradients.
        sum_factor: the sum over ranks divided by the right gradient, if that is one number; else None.
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
        shards: the positions of each rank, or () if the step does not report them.
        untrained: parameters whose gradient is zero on one rank: nothing can be compared.
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
        """Root mean square of the errors of all tensors."""
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
        """The first module in the forward pass with a wrong output."""
        return next((x for x in self.activations if x.wrong), None)


def compare(
    run: CheckRun,
    records: Sequence[RankRecord],
    expected: RankRecord,
    noise: RankRecord | None,
    limit: float | None = None,
) -> Comparison:
    """Compares ranks with one rank.

    Args:
        expected: record of one rank in float64.
        noise: record of one rank with other rounding; errors up to `NOISE_FACTOR` times its own are right.
        limit: maximum relative error, in place of that for the dtype.
    """
    dtype_limit = LIMITS[run.dtype] if limit is None else limit
    noises = _noise(noise, expected) if noise is not None else {}

    def limit_of(name: str) -> float:
        return max(dtype_limit, NOISE_FACTOR * noises.get(name, 0.0))

    loss, is_share = _loss_error([x.loss for x in records], expected.loss, limit_of("loss"))
    tokens = list[TokenError]()
    for name, attribute, scaled in TOKEN_TENSORS:
        shards = [getattr(x, attribute) for x in records]
        error = _token_error(name, records, shards, getattr(expected, attribute), limit_of(name), scaled)
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
"""(name, attribute of a record, True if a factor common to all ranks is allowed): FSDP2 and DDP average parameters'
gradients, so gradients of activations are larger by the number of ranks."""


def _noise(record: RankRecord, expected: RankRecord) -> dict[str, float]:
    """Returns one rank's error by name of the tensor."""
    floor = gradient_floor(expected.gradients)
    pairs = {name: (getattr(record, key), getattr(expected, key), 0.0) for name, key, _ in TOKEN_TENSORS}
    pairs |= {name: (record.activations.get(name), exact, 0.0) for name, exact in expected.activations.items()}
    pairs |= {name: (record.gradients.get(name), exact, floor) for name, exact in expected.gradients.items()}
    errors = {
        name: relative_error(x, exact, floor)
        for name, (x, exact, floor) in pairs.items()
        if x is not None and exact is not None and x.shape == exact.shape
    }
    return errors | {"loss": abs(record.loss - expected.loss) / max(abs(expected.loss), 1e-300)}


def gradient_floor(gradients: Mapping[str, Tensor | None]) -> float:
    sizes = [root_mean_square(x) for x in gradients.values() if x is not None and x.numel()]
    return GRADIENT_FLOOR * (sum(size**2 for size in sizes) / max(len(sizes), 1)) ** 0.5


def _loss_error(losses: Sequence[float], expected: float, limit: float) -> tuple[TensorError, bool]:
    """Returns the loss's error, and True if ranks report shares of the right loss, which sum or average to it."""
    size = max(abs(expected), 1e-300)

    def error(values: Sequence[float]) -> float:
        largest = max(abs(value - expected) for value in values) / size
        return float("inf") if any(value != value for value in values) else largest

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
    scaled: bool,
) -> TokenError | None:
    """Returns the error of a tensor [B, T, ...] by token, or None where shards and one rank's have other shapes."""
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
    common = _median_factor([(x, exact) for x, exact, _ in pairs], 1.0) if scaled else 1.0
    factors = [_median_factor([(x, exact)], common) if scaled else 1.0 for x, exact, _ in pairs]
    by_token, beside_factors = torch.zeros(2, expected.shape[1], dtype=torch.float64)
    for (x, exact, positions), factor in zip(pairs, factors, strict=True):
        for errors, divisor in ((by_token, common), (beside_factors, factor)):
            difference = (x / divisor - exact).square().mean((0, 2)).sqrt().nan_to_num(float("inf"))
            errors[positions] = torch.maximum(errors[positions], difference)
    size = root_mean_square(expected) or 1.0
    error = float(by_token.square().mean().sqrt()) / size
    return TokenError(name, error, limit, by_token / size, tuple(factors) if scaled else (), beside_factors / size)


def _median_factor(pairs: Sequence[tuple[Tensor, Tensor]], default: float) -> float:
    """Returns the median over tokens of the factor between two tensors; `default` if it is 0 or the tensors are."""
    ratios = list[Tensor]()
    for x, exact in pairs:
        norms = exact.square().sum((0, 2))
        nonzero = norms > 0
        ratios.append(((x * exact).sum((0, 2)) / norms.masked_fill(~nonzero, 1))[nonzero])
    every = torch.cat(ratios)
    return (float(every.nanmedian()) if every.numel() else 0.0) or default


def _gradient_errors(
    records: Sequence[RankRecord], expected: RankRecord, limit_of: Callable[[str], float]
) -> tuple[tuple[GradientError, ...], tuple[str, ...]]:
    floor = gradient_floor(expected.gradients)
    errors, untrained = list[GradientError](), list[str]()
    for name, gradient in expected.gradients.items():
        copies = [record.gradients.get(name) for record in records]
        present = next((x for x in (gradient, *copies) if x is not None), None)
        if present is None or (gradient is None and not any(bool(x.any()) for x in copies if x is not None)):
            untrained.append(name)
            continue
        exact = torch.zeros_like(present, dtype=torch.float64) if gradient is None else gradient.double()
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
    """Returns c if x = c exact within the limit."""
    norm = float(exact.square().sum())
    if not norm:
        return None
    factor = float((x * exact).sum()) / norm
    return factor if factor and relative_error(x, factor * exact, floor) <= limit * max(1.0, abs(factor)) else None
