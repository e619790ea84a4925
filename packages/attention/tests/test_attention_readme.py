"""The README's example runs as it stands."""

from pathlib import Path

import torch

from armillary.attention import AttentionMask, Local
from armillary.core.testing import mesh, relative_error

EXAMPLE = (Path(__file__).parent.parent / "README.md").read_text().split("```python\n")[1].split("```")[0]


def run_example() -> float:
    length = 30
    mesh(ring=2, ulysses=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, 16, generator=generator) for heads in (8, 4, 4))
    names: dict[str, object] = {"length": length, "q": q, "k": k, "v": v}
    exec(EXAMPLE, names)
    expected = Local()(q, k, v, mask=AttentionMask(causal=True))
    return relative_error(names["out"], names["layout"].take(expected, names["attend"].shard))


def test_the_example_computes_attention(worlds):
    assert max(worlds(4).run(run_example)) < 2e-6
