"""What a training step holds in memory, found without a GPU."""

from armillary.train.memory.accounts import Account
from armillary.train.memory.intermediates import Before, attention_intermediates, before_attention
from armillary.train.memory.live import LiveBytes
from armillary.train.memory.measured import measured_peak
from armillary.train.memory.simulate import Job, Rehearsal, StepMemory, simulate
from armillary.train.memory.simulated_flash import SimulatedFlash
from armillary.train.memory.world import fake_world

__all__ = [
    "Account",
    "Before",
    "Job",
    "LiveBytes",
    "Rehearsal",
    "SimulatedFlash",
    "StepMemory",
    "attention_intermediates",
    "before_attention",
    "fake_world",
    "measured_peak",
    "simulate",
]
