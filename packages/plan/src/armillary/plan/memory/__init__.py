"""Peak memory of a training step: simulated without a GPU, or estimated by formulas.

simulate.py          a step on fake tensors
live_bytes.py        live bytes by category
recurrent_memory.py  a layer with a state by itself, simulated on few tokens
tensor_sizes.py      sizes of a step's tensors
latent_sizes.py      the same for models with latent attention
formulas.py          closed formulas of the memory of a step
room.py              checkpoint policies and lengths that fit, and advice if nothing fits
cli.py               the command `armillary-plan memory`
"""

from armillary.plan.memory.formulas import Estimate, estimate
from armillary.plan.memory.live_bytes import Account, LiveBytes, measured_peak
from armillary.plan.memory.simulate import AttentionChoice, Job, SimulatedFlash, SimulatedStep, StepMemory, simulate

__all__ = [
    "Account",
    "AttentionChoice",
    "Estimate",
    "Job",
    "LiveBytes",
    "SimulatedFlash",
    "SimulatedStep",
    "StepMemory",
    "estimate",
    "measured_peak",
    "simulate",
]
