"""torch's distributed checkpoints (DCP), placed right, checked, complete or not there at all, and read as data.

planner.py   tensors that FSDP2 and tensor parallelism have both cut
writer.py    files with checksums of what was written
files.py     whether they are what was written
folder.py    names, retention, clean-up after a kill
metadata.py  which tensors there are, without pickle
reader.py    tensors, and nothing else
"""

from armillary.train.runtime.checkpoint.planner import LoadPlanner, SavePlanner

__all__ = ["LoadPlanner", "SavePlanner"]
