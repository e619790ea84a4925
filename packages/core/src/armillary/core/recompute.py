"""Computing again later as it was computed first: with the same autocast, and the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.core.chunks import is_simulating


def capture_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which autocast is what it is now; for backward passes, which compute again and run outside it.

    But for its cache: a weight that is cast without a gradient, and kept for the next who asks, loses its gradient
    there. So what is computed without autograd, to be computed again with it, is to be computed in this context too.
    """
    if device_type == "meta":
        return nullcontext
    enabled = torch.is_autocast_enabled(device_type)
    options: dict[str, Any] = {"enabled": enabled, "cache_enabled": False}
    return partial(torch.autocast, device_type, dtype=torch.get_autocast_dtype(device_type), **options)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast, for what is computed in the dtypes that its tensors have."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class RNGReplay:
    """The random numbers that parts of a computation draw (dropout), to be drawn again when they are computed again.

    replay = RNGReplay()
    with replay.at("norm", x.device): ...            # first
    with replay.again().at("norm", x.device): ...    # later, any number of times, without trace
    """

    def __init__(self, states: dict[Hashable, Tensor] | None = None) -> None:
        self._again = states is not None
        self._states: dict[Hashable, Tensor] = {} if states is None else states

    def again(self) -> RNGReplay:
        """The same, for computing again."""
        return RNGReplay(self._states)

    @contextmanager
    def at(self, part: Hashable, device: torch.device) -> Generator[None]:
        """Around one part of the computation. Parts that draw nothing cost no memory."""
        if is_simulating():
            yield
            return
        now, before = rng_state(device), self._states.get(part)
        if self._again and before is not None:
            set_rng_state(before, device)
        try:
            yield
        finally:
            if self._again:
                set_rng_state(now, device)
            elif now.tolist() != rng_state(device).tolist():  # as lists: on fake tensors, ops would compare nothing
                self._states[part] = now


def rng_state(device: torch.device) -> Tensor:
    """The state of the device's random number generator, in the host's memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Puts the device's random number generator into a state."""
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
