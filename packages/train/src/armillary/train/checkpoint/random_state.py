"""The random number generators of a rank: Python's, numpy's, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> bytes:
    """The states of all of them."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return pickle.dumps(state)


def set_random_state(saved: bytes, device: torch.device) -> None:
    """Back to what `random_state` returned; a GPU that was not there then stays as it is."""
    state = pickle.loads(saved)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_all(*numbers: int) -> None:
    """Seeds all of them, from several numbers: other numbers, other streams."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
