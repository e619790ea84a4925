"""The program of a rank in tests of the docs: runs a script in float64, with FSDP2 in place of accelerate's CPU DDP."""

import sys
from runpy import run_path

import torch

from armillary.integrations.testing import accelerated

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    with accelerated():
        run_path(sys.argv[1], run_name="__main__")
