"""Checkpoints: tensors in safetensors files, everything else in JSON; written in the background, committed by a rename.

checkpoints.py  the training loop's interface
saving.py       writing one checkpoint
restoring.py    resuming from the newest intact checkpoint
state.py        the state dict of a run
manifest.py     everything but tensors, and the files with their checksums
settings.py     the configuration in a checkpoint, and how the current one differs
planner.py      offsets of the chunks of tensors that FSDP2 and tensor parallelism both shard
writer.py       a rank's tensors as a safetensors file
reader.py       tensors from safetensors files
files.py        checksums: of files, and in JSON files
folder.py       folder names, commit, retention and clean-up after a kill
output.py       the output folder and its config.json
export.py       Hugging Face folders
"""

from armillary.train.checkpoint.checkpoints import Checkpoints
from armillary.train.checkpoint.output import check_output
from armillary.train.checkpoint.planner import LoadPlanner, SavePlanner

__all__ = ["Checkpoints", "LoadPlanner", "SavePlanner", "check_output"]
