"""Checkpoints in torch's distributed format (DCP), written in the background, complete or not at all.

output.py       the output folder: its config.json
manifest.py     what a checkpoint says of itself, and whether its files are what was written
state.py        the state dict of a run
settings.py     the configuration in a checkpoint, and what has changed since
saving.py       one save
restoring.py    resuming from the newest complete checkpoint
checkpoints.py  the training loop's interface
export.py       Hugging Face folders
"""

from armillary.train.checkpoint.checkpoints import Checkpoints
from armillary.train.checkpoint.output import check_output

__all__ = ["Checkpoints", "check_output"]
