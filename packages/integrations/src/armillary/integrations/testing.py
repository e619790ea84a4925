"""Hugging Face accelerate on the ranks of a test world."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def accelerated() -> Generator[None]:
    """Context in which accelerate sees the ranks as if torchrun had started them. Resets accelerate's earlier state.

    With an FSDP plugin, accelerate uses FSDP2 also on CPU ranks, where it would otherwise fall back to DDP.
    """
    states: Any = import_module("accelerate.state")
    original_init = states.AcceleratorState.__init__

    def init(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original_init(state, *args, **kwargs)
        if fsdp_plugin is not None:
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = states.PartialState._shared_state["distributed_type"] = states.DistributedType.FSDP

    with patch.dict(os.environ, _torchrun()), patch.object(states.AcceleratorState, "__init__", init):
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
        gc.freeze()  # each training run collects garbage, which takes 0.3 s over all imported modules
        yield
    gc.unfreeze()


def _torchrun() -> dict[str, str]:
    environment: dict[str, object] = {"OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": True}
    if dist.is_initialized():
        environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), dist.get_rank())
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), dist.get_world_size())
    return {name: str(value) for name, value in environment.items()}
