"""Compares an attention method (`check_method`), or a training step of any library (`check_model`), with one rank."""

from armillary.attention.check.diagnose import Diagnosis, Mistake
from armillary.attention.check.method import (
    LIMITS,
    MASKS,
    CheckedTensor,
    MethodReport,
    check_method,
    relative_error,
    root_mean_square,
)
from armillary.attention.check.model import check_model, error_line
from armillary.attention.check.report import ModelReport
from armillary.attention.check.step import CheckBatch, StepOutput

__all__ = [
    "LIMITS",
    "MASKS",
    "CheckBatch",
    "CheckedTensor",
    "Diagnosis",
    "MethodReport",
    "Mistake",
    "ModelReport",
    "StepOutput",
    "check_method",
    "check_model",
    "error_line",
    "relative_error",
    "root_mean_square",
]
