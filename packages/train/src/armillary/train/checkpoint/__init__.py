"""Checkpoints in torch's distributed format (DCP), written whole or not at all, while training goes on.

output.py       the output folder: its config.json, and that all ranks see the same one
folder.py       names, keeping, what a kill leaves: files alone, without torch
manifest.py     what a checkpoint must hold, byte by byte
state.py        what of a run is saved, and back
settings.py     what has changed since
random_state.py random number generators
saving.py       one save, and when there is one
restoring.py    the newest checkpoint that is whole
checkpoints.py  what the training loop sees of all this
export.py       Hugging Face folders
"""

from armillary.train.checkpoint.checkpoints import Checkpoints
from armillary.train.checkpoint.output import check_output

__all__ = ["Checkpoints", "check_output"]
