"""What a rank of forked.py runs: the trainer. The environment that the kernel shows is torchrun's; so it says who it is."""

import os
import sys
from pathlib import Path

from armillary.train.cli import main

Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
main(sys.argv[1:])
