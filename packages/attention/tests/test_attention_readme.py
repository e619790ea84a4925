"""The README's first example, on the test's ranks, whose process group stays."""

import re
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from armillary.attention import AttentionMask, Local
from armillary.core.testing import mesh, relative_error

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLE = re.findall(r"^```python[^\n]*\n(.*?)^```", README, re.M | re.S)[0]


def run_example() -> float:
    mesh(ring=2, ulysses=2)
    names: dict[str, object] = {}
    with patch.object(dist, "destroy_process_group"):
        exec(EXAMPLE, names)
    expected = Local()(*names["sequence"], mask=AttentionMask(causal=True))
    return relative_error(names["out"], names["layout"].take(expected, names["attend"].shard))


def test_the_example_computes_attention(worlds):
    assert max(worlds(4).run(run_example)) < 2e-6
