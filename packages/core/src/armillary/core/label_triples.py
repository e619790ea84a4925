"""Labels with weights: a token may have several, as at the branch points of a token tree."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from armillary.core.argument_checks import check_local
from armillary.core.mesh import to_device


class LabelTriples:
    """The labels of tokens [B, T]: any number of labels at each position, each with a weight.

    In a tree, such as a prompt with several completions, the prompt's last token predicts the first token of each
    completion: several labels at one position. A label that several sequences share has the sum of their weights. A
    loss is the sum of weight times cross entropy, divided by the sum of the weights of all ranks.

    Args:
        positions: integers [M] on the CPU: b T + t for token t of row b, in any order; a position may be repeated.
        labels: integers [M] on the CPU, at least 0: the label that the hidden state at the position predicts.
        weights: numbers [M] on the CPU, finite and at least 0; converted to float64.
        shape: (B, T), rows and tokens per row of this rank.

    Raises:
        ValueError: DTensors, tensors of other shapes or not on the CPU, positions out of range, labels below 0, or
            invalid weights.
    """

    def __init__(self, positions: Tensor, labels: Tensor, weights: Tensor, shape: tuple[int, int]) -> None:
        for name, x in {"positions": positions, "labels": labels, "weights": weights}.items():
            check_local(name, x)
        tensors = positions, labels, weights
        shapes, devices = [tuple(x.shape) for x in tensors], {x.device.type for x in tensors}
        if positions.ndim != 1 or len({*shapes}) > 1 or devices != {"cpu"}:
            raise ValueError(f"positions, labels and weights must be [M] each, on the CPU; got {shapes} on {devices}")
        if positions.is_floating_point() or labels.is_floating_point():
            raise ValueError(f"positions and labels must be integers; got {positions.dtype} and {labels.dtype}")
        # Sorted, so that the labels of a chunk of tokens are found by binary search.
        order = torch.argsort(positions, stable=True)
        self.shape: tuple[int, int] = (int(shape[0]), int(shape[1]))
        """(B, T)"""
        self.host_positions: Tensor = positions.long()[order]
        """Copy of the positions, int64 [M] in ascending order, that stays on the CPU."""
        self.positions: Tensor = self.host_positions
        self.labels: Tensor = labels.long()[order]
        self.weights: Tensor = weights.double()[order]
        self.largest: int = int(self.labels.max()) if len(order) else -1
        """The largest label; -1 without labels."""
        if not len(order):
            return
        first, last, size = int(self.host_positions[0]), int(self.host_positions[-1]), self.shape[0] * self.shape[1]
        if first < 0 or last >= size:
            raise ValueError(f"positions from {first} to {last} for {self.shape} tokens; they must be 0 to {size - 1}")
        if (smallest := int(self.labels.min())) < 0:
            raise ValueError(f"label {smallest}: labels count from 0; leave out positions that predict nothing")
        if not (self.weights.isfinite() & (self.weights >= 0)).all():
            raise ValueError(f"weights must be finite and at least 0; got {self.weights.min()} to {self.weights.max()}")

    def __len__(self) -> int:
        """Number of labels, M."""
        return len(self.host_positions)

    def __repr__(self) -> str:
        return f"LabelTriples({len(self)} labels of {self.shape} tokens)"

    def to(self, device: torch.device) -> Self:
        """Returns a copy with positions, labels and weights on `device`. The host does not wait for the transfers."""
        result = copy(self)
        result.positions, result.labels, result.weights = (
            to_device(x, device) for x in (self.positions, self.labels, self.weights)
        )
        return result

    def row(self, i: int) -> LabelTriples:
        """Returns the labels of row `i` as a batch of one row. Call it before `to`, on CPU tensors."""
        tokens = self.shape[1]
        bounds = torch.searchsorted(self.host_positions, torch.tensor([i * tokens, (i + 1) * tokens]))
        triples = slice(*bounds.tolist())
        return LabelTriples(
            self.host_positions[triples] - i * tokens, self.labels[triples], self.weights[triples], (1, tokens)
        )
