"""What a rank runs in tests of the docs' precision: a script in float64, and FSDP2 where accelerate has DDP on CPUs."""

import sys
from runpy import run_path

import torch

from armillary.integrations.testing import accelerated

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    with accelerated():
        run_path(sys.argv[1], run_name="__main__")
