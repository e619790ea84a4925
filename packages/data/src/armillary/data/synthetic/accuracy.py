"""How many answers are right."""

from __future__ import annotations

from torch import Tensor

from armillary.data.loader.batch import IGNORE


def accuracy(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Right answers, and all that were asked for: two int64 scalars, to be summed over ranks and then divided.

    Args:
        output: logits [..., V], of which the largest counts, or predicted tokens [...] of an integer dtype.
        labels: [...]; where they are `IGNORE`, nothing is counted.

    Raises:
        ValueError: shapes that don't belong together, or predictions that are not integers.
    """
    predicted = output.argmax(-1) if output.dim() == labels.dim() + 1 else output
    if predicted.shape != labels.shape or predicted.is_floating_point():
        shape = tuple(labels.shape)
        raise ValueError(
            f"{output.dtype} {tuple(output.shape)} for labels {shape}; give logits {(*shape, 'V')} or integers {shape}"
        )
    asked = labels != IGNORE
    return ((predicted == labels) & asked).sum(), asked.sum()
