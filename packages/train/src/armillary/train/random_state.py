"""The random states of a rank: of Python, numpy, and torch on the CPU and on this rank's GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

# State words of the Mersenne twister, which Python and numpy use.
WORDS = 624


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of all generators: int64 words, float64 stored normal numbers, uint8 for torch's."""
    # Python and numpy draw normal numbers in pairs, and store the second one of a pair in the state.
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached_gauss = cast(tuple[Any, ...], np.random.get_state())
    state = {
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores states that `random_state` returned. A generator without a state in `state` keeps its own.

    Raises ValueError if the tensors are no valid state.
    """
    try:
        if "python" in state:
            version, *words = state["python"].tolist()
            has_gauss, gauss = state["python_gauss"].tolist()
            random.setstate((version, tuple(words), gauss if has_gauss else None))
        if "numpy" in state:
            *keys, position, has_gauss = state["numpy"].tolist()
            if not (0 <= position <= WORDS and has_gauss in (0, 1)):  # numpy would read memory beyond its words
                raise ValueError(f"no state of random numbers (position {position} of {WORDS})")
            cached_gauss = state["numpy_gauss"].item()
            np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached_gauss))
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
    except (RuntimeError, TypeError, OverflowError, LookupError) as error:
        raise ValueError(f"no state of random numbers ({error})") from error


def seed_all(*numbers: int) -> None:
    # Each of the numbers changes the streams.
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
