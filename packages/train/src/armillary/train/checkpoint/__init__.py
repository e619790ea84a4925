"""Checkpoints: tensors in safetensors files, everything else in JSON; written in the background, committed by a rename.

checkpoints           the training loop's interface: saving a run's state, restoring the newest intact checkpoint
tensors_and_manifest  the files: each rank's tensors, readable on any mesh, and the manifest with their checksums
output_folder         folder names, commit, retention and clean-up after a kill; the output folder and its config.json
dcp_planners          planners for torch's own checkpoints of tensors that FSDP2 and tensor parallelism both shard
export                Hugging Face folders
"""

from armillary.train.checkpoint.checkpoints import Checkpoints
from armillary.train.checkpoint.dcp_planners import LoadPlanner, SavePlanner
from armillary.train.checkpoint.output_folder import check_output

__all__ = ["Checkpoints", "LoadPlanner", "SavePlanner", "check_output"]
