"""What attention holds while it works, counted on live tensors: UPipe's stages against Ulysses, teams against rings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import AttentionMask, Method, Projected, Ring, Ulysses, UPipe, WallFacer, rotate_keys
from armillary.core import rehearsing
from armillary.models import Checkpointing, LlamaConfig
from armillary.models.projections import HeadProjections
from armillary.train.memory import Job, LiveBytes, Rehearsal, SimulatedFlash, fake_world

TOKENS, DIM, WIDTH = 1024, 128, 64
HEAD = TOKENS * DIM * 2
"""Bytes of a head of this rank's tokens."""


def projections(heads: int, key_heads: int) -> HeadProjections:
    query, key, value = (
        nn.Linear(WIDTH, n * DIM, bias=False, dtype=torch.bfloat16) for n in (heads, key_heads, key_heads)
    )
    return HeadProjections(query, key, value, heads, key_heads, DIM)


def intermediates(build: Callable[[DeviceMesh], Method], ranks: int, heads: int, key_heads: int) -> float:
    """Heads of q, k, v and out that a forward pass holds at most, travelling or not; without the full out and lse."""
    with fake_world(ulysses=ranks) as mesh:
        method = build(mesh["ulysses"])
        method.kernel = SimulatedFlash()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            source, x = projections(heads, key_heads), torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16)
            layout, mask = method.layout(TOKENS * ranks), AttentionMask()
            with LiveBytes(block=1) as live:
                if isinstance(method, UPipe):
                    kept = method.attend(Projected(x, source), method.call_for(x, source, mask=mask, layout=layout))
                else:
                    kept = [method.projected(x, source, mask=mask, layout=layout)]
            return (live.device.peak - sum(tensor.nbytes for tensor in kept)) / HEAD


@pytest.mark.parametrize(
    ("heads", "key_heads", "stage", "saved"),
    [(64, 64, 8, 0.875), (64, 8, 8, 0.778), (64, 8, 16, 0.667), (32, 8, 8, 0.6), (64, 64, 64, 0)],
)
def test_a_stage_holds_its_share_of_what_ulysses_does(heads, key_heads, stage, saved):
    """(2 S + 2 min(K, S)) / (2 H + 2 K), to the half percent that a kernel's lse and rows of weights take."""
    closed, whole = 2 * stage + 2 * min(key_heads, stage), 2 * heads + 2 * key_heads
    held = intermediates(lambda axis: UPipe(axis, heads_per_stage=stage), 8, heads, key_heads)
    assert closed <= held < closed * 1.01
    assert 1 - closed / whole == pytest.approx(saved, abs=1e-3)
    assert intermediates(Ulysses, 8, heads, key_heads) >= whole


def test_bringing_the_next_stage_early_costs_what_is_said():
    held = intermediates(lambda axis: UPipe(axis, heads_per_stage=8, prefetch=True), 8, 64, 8)
    assert 48 <= held < 48.5  # 4 S + 2 min(K, S), all keys in one round
    held = intermediates(lambda axis: UPipe(axis, heads_per_stage=8, prefetch=True), 8, 64, 64)
    assert 80 <= held < 80.5  # 4 S + 6 min(K, S), new keys each time


# -- the WallFacer paper's count --------------------------------------------------------------------------------------


@dataclass
class Moment:
    """When the last block's attention is about to begin in its recomputation: in units of A, one [T, E] in 16 bits."""

    checkpoints: float
    handed: float


def before_attention(monkeypatch: Any, build: Callable[[DeviceMesh], Method], layers: int) -> Moment:
    """Model M of the paper (arXiv 2407.00611, section 4.2) with fewer blocks: N 65,536, E 6,656, P 64."""
    unit, moments = 1024 * 6656 * 2, list[Moment]()
    config = LlamaConfig(vocab_size=256, dim=6656, layers=layers, heads=52, kv_heads=52, hidden_dim=256)
    options = Checkpointing("layer")
    job = Job(model=config, axes={"ring": 64}, attention=build, length=65_536, checkpointing=options, on_host=True)
    begin = rotate_keys.forward

    def noted(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        kept = live.device.current["checkpoints"] + live.device.current["other"]
        moments.append(Moment(kept / unit, sum(x.nbytes for x in (q, k, v)) / unit))
        return begin(q, k, v, *rest)

    monkeypatch.setattr(rotate_keys, "forward", noted)
    with fake_world(**job.axes) as mesh:
        rehearsal = Rehearsal.of(job, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), rehearsing(), LiveBytes() as live:
            rehearsal.start()
            rehearsal.loss().backward()
    return moments[layers]


@pytest.mark.parametrize(("team", "paper"), [(1, 68), (4, 77)])
def test_what_is_kept_and_gathered_is_what_the_wallfacer_paper_counts(monkeypatch, team, paper):
    """L checkpoints, the gradient that comes in, and 3 C for q, k and v: 68 A and 77 A for the paper's 64 blocks."""
    layers = 3
    build: Callable[[DeviceMesh], Method] = lambda mesh: Ring(mesh["ring"])  # noqa: E731
    if team > 1:
        build = lambda mesh: WallFacer(mesh["ring"], team=team)  # noqa: E731
    found = before_attention(monkeypatch, build, layers)
    assert found.handed == 3 * team
    incoming = 1
    assert round(found.checkpoints) == layers
    assert round(found.checkpoints) + incoming + found.handed + (64 - layers) == paper
