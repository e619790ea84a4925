"""torch's distributed checkpoints (DCP), placed right, checked, and read as data.

planner.py   tensors that FSDP2 and tensor parallelism have both cut
writer.py    files with checksums of what was written
metadata.py  which tensors there are, without pickle
reader.py    tensors, and nothing else
"""

from armillary.core.checkpoint.planner import LoadPlanner, SavePlanner

__all__ = ["LoadPlanner", "SavePlanner"]
