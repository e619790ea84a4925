"""Peak memory of a training step: simulated without a GPU, or estimated by formulas.

simulation/   runs a step on fake tensors and counts live bytes by category
estimate/     closed formulas, within a few percent of the simulation
room.py       available memory, and the longest sequence that fits
advice.py     the nearest changes with which a step fits
plan.py       the command `armillary-plan memory`
report.py     the output of this command
"""

from armillary.core.testing import fake_world
from armillary.plan.memory.simulation.attention_memory import (
    MemoryBeforeAttention,
    attention_intermediates,
    memory_before_attention,
)
from armillary.plan.memory.simulation.live_bytes import Account, LiveBytes, measured_peak
from armillary.plan.memory.simulation.simulate import Job, SimulatedStep, StepMemory, simulate
from armillary.plan.memory.simulation.simulated_flash import SimulatedFlash

__all__ = [
    "Account",
    "Job",
    "LiveBytes",
    "MemoryBeforeAttention",
    "SimulatedFlash",
    "SimulatedStep",
    "StepMemory",
    "attention_intermediates",
    "fake_world",
    "measured_peak",
    "memory_before_attention",
    "simulate",
]
