"""Importing the package imports torch, and few of torch's modules that `import torch` does not."""

import subprocess
import sys

import armillary.core

SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "numpy")
CHECK = f"""
import sys, torch
before = set(sys.modules)
import armillary.core
print(sorted(name for name in {SLOW} if name in sys.modules and name not in before))
"""


def test_importing_core_imports_no_slow_module():
    """DTensor and FSDP2 take as long as torch; their users have imported them already."""
    actual = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert actual.stdout.strip() == "[]"


def test_public_names_are_few_and_importable():
    assert sorted(set(armillary.core.__all__)) == armillary.core.__all__ and len(armillary.core.__all__) <= 45
    assert all(hasattr(armillary.core, name) for name in armillary.core.__all__)
