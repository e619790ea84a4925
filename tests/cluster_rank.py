"""One of two ranks on an emulated cluster, running Ring Attention. Rank 0 prints its error, sent bytes and seconds."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "cluster"))
from contenders import Shapes
from measure import counted, elapsed, turn_of, worst

from armillary.attention import Ring
from armillary.core import build_mesh

SHAPES = Shapes(tokens=64, heads=4, key_heads=4, head_dim=64, causal=False)

attend = Ring(build_mesh("cpu", ring=2)["ring"])
turn = turn_of(attend, SHAPES)
measurements = {"error": worst(attend, turn, SHAPES), "sent": counted(turn)["most"], "seconds": elapsed(turn)}
if dist.get_rank() == 0:
    print(json.dumps(measurements), flush=True)
dist.barrier()
dist.destroy_process_group()
