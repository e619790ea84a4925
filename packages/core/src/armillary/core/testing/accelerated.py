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
    """Has accelerate see the ranks as if torchrun had started them, or none; what it knew of the process is forgotten.

    An accelerator with FSDP2 has it on CPU ranks too, where accelerate by itself falls back to DDP.
    """
    states: Any = import_module("accelerate.state")
    before = states.AcceleratorState.__init__

    def init(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(state, *args, **kwargs)
        if fsdp_plugin is not None:
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = states.PartialState._shared_state["distributed_type"] = states.DistributedType.FSDP

    with patch.dict(os.environ, _torchrun()), patch.object(states.AcceleratorState, "__init__", init):
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
        gc.freeze()  # each training run collects garbage: a third of a second, over all that is imported
        yield
    gc.unfreeze()


def _torchrun() -> dict[str, str]:
    told: dict[str, object] = {"OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": True}
    if dist.is_initialized():
        told |= dict.fromkeys(("RANK", "LOCAL_RANK"), dist.get_rank())
        told |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), dist.get_world_size())
    return {name: str(value) for name, value in told.items()}
