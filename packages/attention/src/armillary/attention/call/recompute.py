"""Recomputation in backward: pieces of tokens, autocast state, random numbers, and the sums of the pieces' gradients.

Computing pieces one after the other keeps the intermediate results of one piece in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.core import accumulation_dtype
from armillary.core.internal import compat, is_simulating

# -- autocast and random numbers --------------------------------------------------------------------------------------


def autocast_enabled(x: Tensor) -> bool:
    """Returns True if autocast is on for the device of x; False for the meta device, for which torch would raise."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def capture_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that makes a context with the present autocast state, for computation and recomputation."""
    if device_type == "meta":
        return nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    # Without the cache, which would keep the first cast of a weight, made without autograd: recomputation would use it,
    # and the weight would get no gradient.
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
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


# -- sums of gradients ------------------------------------------------------------------------------------------------


class GradientSums:
    """Sums the gradients of parameters in the accumulation dtype, so that 16-bit sums are rounded once.

    Args:
        parameters: the parameters that require a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._owned: set[int] = set()  # indices of sums that are copies, and may be changed in place
        self._indices = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._buffers = dict[int, Tensor]()

    def add(self, addends: Iterable[Tensor | None]) -> None:
        """Adds one gradient for each parameter; None adds nothing."""
        for i, addend in enumerate(addends):
            total = self._sums[i]
            if addend is None or total is None:
                self._sums[i] = addend if total is None else total
                continue
            if i not in self._owned:  # the total is the first addend itself, a caller's tensor: copy it
                total = total.to(accumulation_dtype(addend.dtype), copy=True)
                self._owned.add(i)
            self._sums[i] = total.add_(addend)

    def buffer(self, parameter: Tensor | None) -> Tensor | None:
        """Returns a buffer to which the caller may add gradients of some rows of `parameter` in place.

        It has the accumulation dtype, and for a DTensor the shape of the local part. None if the tensor is not one of
        the parameters.
        """
        i = self._indices.get(id(parameter))
        if i is not None and i not in self._buffers:
            local = compat.local_part(self.parameters[i].detach())
            self._buffers[i] = torch.zeros(local.shape, dtype=accumulation_dtype(local.dtype), device=local.device)
        return None if i is None else self._buffers[i]

    def result(self) -> list[Tensor | None]:
        """Returns the sum for each parameter, in the dtype of its gradient; None if nothing was added."""
        results: list[Tensor | None] = []
        for i, (parameter, total) in enumerate(zip(self.parameters, self._sums, strict=True)):
            if i in self._buffers:
                gradient = gradient_of(parameter, self._buffers[i])
                total = gradient if total is None else gradient + total
            # FSDP may request a float32 gradient of a bfloat16 parameter.
            dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
            results.append(None if total is None else total.to(parameter.dtype if dtype is None else dtype))
        return results


def gradient_of(parameter: Tensor, local_gradient: Tensor) -> Tensor:
    """Returns the gradient of a parameter from the gradient of its local part.

    The gradient of a DTensor is a DTensor, `Partial` on the axes on which the parameter is replicated.
    """
    if not compat.is_dtensor(parameter):
        return local_gradient
    from torch.distributed.tensor import DTensor, Partial

    mesh, shape = parameter.device_mesh, parameter.shape
    placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return DTensor.from_local(local_gradient, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
