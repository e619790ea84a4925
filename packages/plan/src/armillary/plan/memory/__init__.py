"""Memory of a training step, simulated without a GPU."""

from armillary.core.fake_world import fake_world
from armillary.plan.memory.accounts import Account
from armillary.plan.memory.intermediates import Before, attention_intermediates, before_attention
from armillary.plan.memory.live import LiveBytes
from armillary.plan.memory.measured import measured_peak
from armillary.plan.memory.simulate import Job, SimulatedStep, StepMemory, simulate
from armillary.plan.memory.simulated_flash import SimulatedFlash

__all__ = [
    "Account",
    "Before",
    "Job",
    "LiveBytes",
    "SimulatedFlash",
    "SimulatedStep",
    "StepMemory",
    "attention_intermediates",
    "before_attention",
    "fake_world",
    "measured_peak",
    "simulate",
]
