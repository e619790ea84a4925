"""What a rank of forked.py runs: the trainer. It leaves its process id where the test finds it."""

import os
import sys
from pathlib import Path

from armillary.train.cli import main

Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
main(sys.argv[1:])
