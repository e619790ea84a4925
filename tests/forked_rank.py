"""The program of a rank of forked.py: the trainer. It writes its process id to a file for the test."""

import os
import sys
from pathlib import Path

from armillary.train.cli import main

Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
main(sys.argv[1:])
