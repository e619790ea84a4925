"""The README's example runs as it stands, and its bytes are those that are sent."""

from pathlib import Path

import torch

from armillary.attention import AttentionMask, Local, Ring, Ulysses
from armillary.core import CommLedger
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


B, T, H, D = 2, 8, 8, 16  # T tokens on each of 4 ranks


def bytes_sent(key_heads: int, method: str, dtype: torch.dtype) -> dict[str, int]:
    axis = mesh(ring=4)["ring"] if method == "ring" else mesh(ulysses=4)["ulysses"]
    attend = Ring(axis) if method == "ring" else Ulysses(axis)
    q, k, v = (torch.randn(B, T, n, D, dtype=dtype, requires_grad=True) for n in (H, key_heads, key_heads))
    with CommLedger() as ledger:
        attend(q, k, v, mask=AttentionMask(), layout=attend.layout(4 * T)).sum().backward()
    return {phase: ledger.bytes(phase=phase) for phase in ("forward", "backward")}


def test_ring_sends_its_closed_form(worlds):
    for key_heads in (1, 2, 8):
        for dtype, e, a in ((torch.float32, 4, 4), (torch.bfloat16, 2, 4), (torch.float64, 8, 8)):
            shard = 2 * B * T * key_heads * D
            expected = {"forward": 3 * shard * e, "backward": 3 * shard * (e + a)}
            assert worlds(4).run(bytes_sent, key_heads, "ring", dtype) == [expected] * 4


def test_ulysses_sends_its_closed_form(worlds):
    for key_heads in (1, 2, 4, 8):
        for dtype, e in ((torch.float32, 4), (torch.bfloat16, 2)):
            once = 3 * (2 * H + 2 * max(key_heads, 4)) * B * T * D * e // 4
            assert worlds(4).run(bytes_sent, key_heads, "ulysses", dtype) == [{"forward": once, "backward": once}] * 4
