"""Recomputation in the autocast state and with the random numbers of the first computation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.core.parts import is_simulating


def capture_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that makes a context with the present autocast state, for recomputation in backward.

    Autocast's cache is off in the context. The cache keeps the first cast of a weight. If that cast was made without
    autograd, the recomputation would use it, and the weight would get no gradient. So the first computation, which runs
    without autograd, must run in such a context too.
    """
    if device_type == "meta":
        return nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    options: dict[str, Any] = {"enabled": is_enabled, "cache_enabled": False}
    return partial(torch.autocast, device_type, dtype=torch.get_autocast_dtype(device_type), **options)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context without autocast, for computing in the dtypes of the inputs."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class RNGReplay:
    """Records the random states of the regions of a computation (for dropout), and restores them on recomputation.

    replay = RNGReplay()
    with replay.at("dropout", x.device): ...            # the first computation
    with replay.restart().at("dropout", x.device): ...  # a recomputation, after which the generator is as before it
    """

    def __init__(self, states: dict[Hashable, Tensor] | None = None) -> None:
        self._recomputes = states is not None
        self._states: dict[Hashable, Tensor] = {} if states is None else states

    def restart(self) -> RNGReplay:
        """Returns a replay that restores the recorded random states."""
        return RNGReplay(self._states)

    @contextmanager
    def at(self, region: Hashable, device: torch.device) -> Generator[None]:
        """Context of one region of the computation. Stores no state if the region draws no random numbers."""
        if is_simulating():
            yield
            return
        present_state, first_state = rng_state(device), self._states.get(region)
        if self._recomputes and first_state is not None:
            set_rng_state(first_state, device)
        try:
            yield
        finally:
            if self._recomputes:  # so that backward does not change the random numbers of the next forward
                set_rng_state(present_state, device)
            # Compared as lists: under FakeTensorMode, torch.equal has no values to compare.
            elif present_state.tolist() != rng_state(device).tolist():
                self._states[region] = present_state


def rng_state(device: torch.device) -> Tensor:
    """Returns the state of a CUDA device's random number generator, else of the CPU's, in host memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Sets the state of the random number generator that `rng_state` reads."""
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
