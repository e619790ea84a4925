"""Compares an attention method, or a training step of any library on shards, with one rank, and names the mistake."""

from importlib.metadata import version

from armillary.check.architecture import Refused, check_architecture
from armillary.check.diagnose import Diagnosis, Mistake
from armillary.check.facts import Fact, Verdict, VerifyReport
from armillary.check.method import MASKS, CheckedTensor, MethodReport, check_method
from armillary.check.model import ModelReport, check_model, error_line
from armillary.check.observe import Proof, ShardTokens, verifying
from armillary.check.probes import verify
from armillary.check.step import CheckBatch, StepOutput

__all__ = [
    "MASKS",
    "CheckBatch",
    "CheckedTensor",
    "Diagnosis",
    "Fact",
    "MethodReport",
    "Mistake",
    "ModelReport",
    "Proof",
    "Refused",
    "ShardTokens",
    "StepOutput",
    "Verdict",
    "VerifyReport",
    "__version__",
    "check_architecture",
    "check_method",
    "check_model",
    "error_line",
    "verify",
    "verifying",
]

__version__ = version("armillary-check")
