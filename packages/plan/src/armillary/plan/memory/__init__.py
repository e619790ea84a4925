"""Memory of a training step, simulated without a GPU."""

from armillary.core.fake_world import fake_world
from armillary.plan.memory.simulation.accounts import Account
from armillary.plan.memory.simulation.allocator_peak import measured_peak
from armillary.plan.memory.simulation.attention_memory import Before, attention_intermediates, before_attention
from armillary.plan.memory.simulation.live_bytes import LiveBytes
from armillary.plan.memory.simulation.simulate import Job, SimulatedStep, StepMemory, simulate
from armillary.plan.memory.simulation.simulated_flash import SimulatedFlash

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
