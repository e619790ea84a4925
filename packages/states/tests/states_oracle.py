"""Random cases of layers with a state, and the recurrences in float64, token by token, from the formulas alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import all_reduce, get_world_size

from armillary.attention import AttentionMask
from armillary.core import Axis, SequenceLayout
from armillary.core.testing import mesh
from armillary.states import gated_delta_rule, ssd
from armillary.states.chunks import StateKernel, TorchChunks


def previous_positions(ends: list[int], parents: list[int]) -> list[int]:
    """Returns each position's predecessor on the path from the root; -1 for none."""
    previous = list[int]()
    for segment, (a, b) in enumerate(pairwise(ends)):
        parent = parents[segment]
        previous += [ends[parent + 1] - 1 if parent >= 0 else -1, *range(a, b - 1)]
    return previous


def naive_delta_rule(q, k, v, g, beta, initial, scale, previous) -> tuple[Tensor, Tensor]:
    """q, k [N, K, Dk], v [N, H, Dv], g [N, H(, Dk)], beta [N, H], initial [H, Dk, Dv]: one row."""
    heads, (channels, width) = v.shape[1], (k.shape[2], v.shape[2])
    q, k = (x.repeat_interleave(heads // k.shape[1], 1) for x in (q, k))
    states, outputs = list[Tensor](), list[Tensor]()
    tokens = zip(q.unbind(), k.unbind(), v.unbind(), g.unbind(), beta.unbind(), previous, strict=True)
    for t, (q_t, k_t, v_t, g_t, beta_t, before) in enumerate(tokens):
        zero = torch.zeros(heads, channels, width, dtype=v.dtype)
        state = states[before] if before >= 0 else initial if t == 0 and initial is not None else zero
        a, beta_t = g_t.exp().view(heads, -1, 1), beta_t.view(-1, 1, 1)
        forget = torch.eye(channels, dtype=v.dtype) - beta_t * k_t.unsqueeze(2) * k_t.unsqueeze(1)
        state = forget @ (a * state) + beta_t * k_t.unsqueeze(2) * v_t.unsqueeze(1)
        states.append(state)
        outputs.append(scale * (state * q_t.unsqueeze(2)).sum(1))
    return torch.stack(outputs), states[-1]


def naive_ssd(x, dt, A, Bm, Cm, initial, previous) -> tuple[Tensor, Tensor]:
    heads, width = x.shape[1:]
    Bm, Cm = (y.repeat_interleave(heads // y.shape[1], 1) for y in (Bm, Cm))
    states, outputs = list[Tensor](), list[Tensor]()
    tokens = zip(x.unbind(), dt.unbind(), Bm.unbind(), Cm.unbind(), previous, strict=True)
    for t, (x_t, dt_t, B_t, C_t, before) in enumerate(tokens):
        zero = torch.zeros(heads, width, Bm.shape[2], dtype=x.dtype)
        state = states[before] if before >= 0 else initial if t == 0 and initial is not None else zero
        decay, step = (dt_t * A).exp().view(-1, 1, 1), dt_t.view(-1, 1, 1)
        state = decay * state + step * x_t.unsqueeze(2) * B_t.unsqueeze(1)
        states.append(state)
        outputs.append((state * C_t.unsqueeze(1)).sum(2))
    return torch.stack(outputs), states[-1]


@dataclass
class Case:
    """A layer's inputs for all tokens, with mask, layout and chunk size."""

    kind: str  # "delta", "channels" or "ssd"
    layout: SequenceLayout
    chunk: int  # largest chunk
    rows: list[tuple[list[int], list[int]]]  # (ends, parents) for each of two rows
    mask: AttentionMask | None
    inputs: dict[str, Tensor]
    initial: Tensor | None
    dout: Tensor
    dfinal: Tensor
    scale: float | None = None
    tokenwise: set[str] = field(default_factory=set)

    def oracle(self, inputs: dict[str, Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        results = []
        for row, (ends, parents) in enumerate(self.rows):
            values = [x[row] if name in self.tokenwise else x for name, x in inputs.items()]
            state, previous = None if initial is None else initial[row], previous_positions(ends, parents)
            if self.kind == "ssd":
                results.append(naive_ssd(*values, state, previous))
            else:
                scale = inputs["k"].shape[3] ** -0.5 if self.scale is None else self.scale
                results.append(naive_delta_rule(*values, state, scale, previous))
        return torch.stack([out for out, _ in results]), torch.stack([final for _, final in results])

    def call(self, inputs: dict[str, Tensor], initial: Tensor | None, **context) -> tuple[Tensor, Tensor]:
        if self.kind == "ssd":
            return ssd(**inputs, mask=self.mask, initial_state=initial, **context)
        return gated_delta_rule(**inputs, mask=self.mask, initial_state=initial, scale=self.scale, **context)


def random_segments(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Draws documents, or trees in depth-first order."""
    count = rng.choice([1, 2, 3, 5, 8])
    ends = [0, *sorted(rng.sample(range(1, length), min(count, length) - 1)), length]
    parents, path = list[int](), list[int]()
    branching = rng.random() < 0.5
    for segment in range(len(ends) - 1):
        parent = rng.choice([-1, *path, *path]) if branching else -1
        path = [*path[: path.index(parent) + 1], segment] if parent >= 0 else [segment]
        parents.append(parent)
    return ends, parents


def random_layout(rng: random.Random, length: int, shards: int) -> SequenceLayout:
    kind = rng.choice(["contiguous", "zigzag", "balanced", "ragged", "ragged"])
    if kind == "balanced":
        return SequenceLayout.balanced(length, shards)
    if kind in ("contiguous", "zigzag") and length >= 2 * shards:
        return getattr(SequenceLayout, kind)(length, shards)
    count = min(length, shards + rng.randrange(0, 2 * shards + 1))
    cuts = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
    holders = [*range(shards), *(rng.randrange(shards) for _ in range(count - shards))]
    rng.shuffle(holders)
    pieces = list(zip(pairwise(cuts), holders, strict=True))
    rng.shuffle(pieces)
    return SequenceLayout([[range(*piece) for piece, holder in pieces if holder == shard] for shard in range(shards)])


def random_case(seed: int, shards: int) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length, chunk = rng.choice([(8, 64), (24, 4), (24, 64), (40, 4), (40, 8), (40, 16), (90, 64)])
    key_heads, group = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
    heads, channels, width = key_heads * group, rng.choice([1, 3, 4, 5]), rng.choice([1, 2, 4])
    rows = [random_segments(rng, length) for _ in range(2)]
    if rng.random() < 0.4:
        rows = [rows[0]] * 2
    if rng.random() < 0.2:
        rows = [([0, length], [-1])] * 2
    masks = [AttentionMask.tree(*row) if max(row[1]) >= 0 else AttentionMask(documents=row[0]) for row in rows]
    mask = masks[0] if rows[0] == rows[1] else AttentionMask.rows(masks)
    if rows[0] == ([0, length], [-1]) == rows[1] and rng.random() < 0.5:
        mask = None

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    kind = rng.choice(["delta", "channels", "ssd"])
    if kind == "ssd":
        strength = rng.choice([0.1, 1.0, 30.0])
        inputs = {
            "x": normal(2, length, heads, width),
            "dt": torch.nn.functional.softplus(normal(2, length, heads)),
            "A": -strength * normal(heads).abs(),
            "Bm": normal(2, length, key_heads, channels),
            "Cm": normal(2, length, key_heads, channels),
        }
        state_shape = (2, heads, width, channels)
    else:
        g = (
            -rng.choice([0.01, 1.0, 20.0])
            * normal(2, length, heads, *((channels,) if kind == "channels" else ())).abs()
        )
        if rng.random() < 0.5:
            g = g.masked_fill(normal(*g.shape) > 1.5, -torch.inf if rng.random() < 0.7 else -900.0)
        beta = 2 * normal(2, length, heads).sigmoid()
        beta = beta.masked_fill(normal(2, length, heads) > 1, 0) if rng.random() < 0.5 else beta
        q, k = (torch.nn.functional.normalize(normal(2, length, key_heads, channels), dim=-1) for _ in range(2))
        inputs = {"q": q, "k": k, "v": normal(2, length, heads, width), "g": g, "beta": beta}
        state_shape = (2, heads, channels, width)
    layout = random_layout(rng, length, shards)
    initial = normal(*state_shape) if rng.random() < 0.6 else None
    scale = rng.choice([None, None, 0.7])
    dout, dfinal = normal(2, length, heads, width), normal(shards, *state_shape)
    return Case(kind, layout, chunk, rows, mask, inputs, initial, dout, dfinal, scale, {*inputs} - {"A"})


def errors(case: Case, kernel: StateKernel | None = None) -> dict[str, float]:
    """Relative errors of outputs, final state and gradients on this rank. Ranks weigh final states differently."""
    world = get_world_size()
    ring = mesh(ring=world)["ring"]
    rank = Axis.of(ring).rank

    inputs = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    initial = None if case.initial is None else case.initial.clone().requires_grad_()
    out, final = case.oracle(inputs, initial)
    leaves = [*inputs.values(), *([] if initial is None else [initial])]
    expected = torch.autograd.grad((out, final), leaves, (case.dout, case.dfinal.sum(0)), allow_unused=True)
    expected = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, expected, strict=True)]

    local_inputs = {
        name: (case.layout.take(x, rank) if name in case.tokenwise else x.clone()).requires_grad_()
        for name, x in case.inputs.items()
    }
    local_initial = None if case.initial is None else case.initial.clone().requires_grad_()
    local_out, local_final = case.call(local_inputs, local_initial, layout=case.layout, axis=ring, kernel=kernel)
    local_leaves = [*local_inputs.values(), *([] if local_initial is None else [local_initial])]
    grads = torch.autograd.grad(
        (local_out, local_final), local_leaves, (case.layout.take(case.dout, rank), case.dfinal[rank])
    )
    result = {"out": error(local_out, case.layout.take(out, rank), out), "final": error(local_final, final, final)}
    for name, grad, full_grad in zip([*local_inputs, "initial_state"], grads, expected, strict=False):
        if name in case.tokenwise:
            result[f"d{name}"] = error(grad, case.layout.take(full_grad, rank), full_grad)
        else:
            all_reduce(grad, group=ring.get_group())
            result[f"d{name}"] = error(grad, full_grad, full_grad)
    return result


def error(actual: Tensor, expected: Tensor, scale_of: Tensor) -> float:
    """Error relative to the norm of the full tensor, because a rank's part may be empty or tiny."""
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    return ((actual - expected).norm() / scale_of.norm()).item() if scale_of.any() else float(actual.any())


def worst_errors(
    seeds: list[int], kernel_of: Callable[[Case], StateKernel | None] = lambda case: None
) -> dict[int, tuple[float, str]]:
    """Returns the largest error of each random case, and the tensor's name."""
    results = {}
    for seed in seeds:
        case = random_case(seed, get_world_size())
        with patch.object(TorchChunks, "max_chunk", case.chunk):  # several chunks of a run in short sequences
            case_errors = errors(case, kernel_of(case))
        name = max(case_errors, key=lambda name: case_errors[name])
        results[seed] = case_errors[name], name
    return results


def each(function: Callable[..., object], cases: list[tuple]) -> list[object]:
    return [function(*case) for case in cases]
