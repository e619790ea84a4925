"""Random numbers of a model on shards: dropout draws other numbers on each rank, because each rank has other tokens."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from armillary.attention.call.recompute import rng_state, set_rng_state
from armillary.core import Axis
from armillary.core.internal import compat

BY_LAYER_OR_ROW = re.compile(r"layer_?drop|drop_?path|stochastic_?depth", re.IGNORECASE)
"""Matches names of probabilities, and of modules with one, by which a model drops a whole layer or row."""
SEEDS = 2**63


@contextmanager
def draws_of_rank(axes: Sequence[Axis], device: torch.device) -> Generator[None]:
    """Context in which torch's default generator of a device draws other numbers on each rank of the axes.

    On one rank nothing changes. On several, the block's numbers follow from one number that the CPU's generator draws
    before, so they are reproducible from its seed. After the block both generators are as after that draw, or as before
    it if the block drew nothing: equal on ranks whose states were equal, whatever each drew. Checkpointing saves the
    generator's state in forward, so backward may recompute outside of the block.

    Raises:
        ValueError: the generator was seeded inside the block.
    """
    index, count = 0, 1  # of this rank, on the axes of more than one rank
    for axis in axes:
        index, count = index * axis.size + axis.rank, count * axis.size
    if count == 1 or compat.fakes_tensors():
        yield
        return
    host_state = torch.get_rng_state()
    base, next_host_state, state = int(torch.randint(SEEDS - 1, ())), torch.get_rng_state(), rng_state(device)
    # Ranks may have drawn equal numbers or, if their seeds differ, other ones: multiplied by an odd number, sums of
    # both and the rank's index collide by chance alone.
    seed = (base + (2 * index + 1) * 0x9E3779B97F4A7C15) % SEEDS
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)
    seeded_state = rng_state(device)
    try:
        yield
        if generator.initial_seed() != seed:
            raise ValueError(
                f"the generator of {device} was seeded inside the batch's block, so that ranks may have dropped the "
                "same elements of other tokens: call torch.manual_seed before `with batch`"
            )
    finally:
        drew = not torch.equal(rng_state(device), seeded_state)
        set_rng_state(state, device)
        if not drew and torch.equal(torch.get_rng_state(), next_host_state):
            torch.set_rng_state(host_state)  # a model without dropout leaves the numbers of one rank to the script


class SharedDraws:
    """The probabilities by which a model drops whole layers or rows, for which all ranks must draw the same numbers.

    Ranks that skip other layers would wait for each other. The names are searched once, their values read at each call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[tuple[str, Any, str]] = []
        for path, module in model.named_modules():
            for owner in (module, getattr(module, "config", None)):
                kind = type(owner).__name__ if owner is module else ""
                names = [name for name in vars(owner or object) if BY_LAYER_OR_ROW.search(f"{kind}.{name}")]
                self._owners += [(path or type(model).__name__, owner, name) for name in names]

    def refuse(self, model: nn.Module, *_: Any) -> None:
        """A forward pre-hook of the model.

        Raises:
            ValueError: the model is training and may drop a whole layer or row.
        """
        if not model.training:
            return
        for path, owner, name in self._owners:
            value = getattr(owner, name, None)
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name}={value} of {path} drops whole layers or rows, for which ranks of one sequence would draw "
                    f"different numbers: set {name} to 0"
                )
