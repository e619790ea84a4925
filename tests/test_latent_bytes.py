"""docs/choosing.md: the table of bytes with multi-head latent attention, in three forms."""

import re
from pathlib import Path

import pytest
import torch

from armillary.attention import AttentionMask, AttentionShape, CommPlan, build_comm_plan
from armillary.core import SequenceLayout

PAGE = Path(__file__).parent.parent / "docs" / "choosing.md"
ROW = re.compile(r"\| `(\w+)`(?:, ring (\d+) x ulysses (\d+)|, teams of 4)? \| (\d+) \| (.*) \| (.*) \| (.*) \|")
TABLE = [match.groups() for match in map(ROW.fullmatch, PAGE.read_text().splitlines()) if match]
HEADS, DIM, VALUES, ROTARY, LATENT = 128, 192, 128, 64, 512
KEYS = {"k", "v", "dk", "dv"}


def plan(name: str, ring: int, ulysses: int, heads: int, dim: int = DIM, latent: int | None = None) -> CommPlan:
    """Returns the plan of 65,536 tokens, with a rotary key and `latent` numbers instead of keys and values."""
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": dim, "value_dim": VALUES, "dtype": torch.bfloat16}
    sent = None if latent is None else (ROTARY, latent)
    work = AttentionShape.of(SequenceLayout.zigzag(65536, ring), AttentionMask(), **sizes, latent=sent)
    return build_comm_plan(name, work, ring, ulysses)


def sent(plan: CommPlan, phase: str, keys: bool | None = None, axis: str | None = None) -> int:
    """Returns the bytes that all ranks send, of keys or of other tensors alone if `keys` is True or False."""
    moves = [move for step in getattr(plan, phase) for move in (*step.moves, *step.later_moves)]
    kept = [move for move in moves if keys in (None, bool(KEYS & {*move.tensors})) and axis in (None, move.axis)]
    return sum(send.bytes for move in kept for send in move.sends)


def sent_with_one_rotary_key(name: str, ring: int, ulysses: int, phase: str) -> float:
    """Returns the bytes if the keys of a head have no rotary part, and a rotary key is sent once for all heads."""
    heads, rows = HEADS // ulysses, DIM - ROTARY + VALUES
    on_sequence = {"usp": "ring", "ulysses": "local"}.get(name, name)
    total = ulysses * sent(plan(on_sequence, ring, 1, heads, latent=heads * rows), phase)
    if ulysses > 1:
        total += sent(plan(name, ring, ulysses, HEADS), phase, keys=False, axis="ulysses")
        total += sent(plan(name, ring, ulysses, HEADS, dim=DIM - ROTARY), phase, keys=True, axis="ulysses")
        total += sent(plan("ulysses", 1, ulysses, HEADS, latent=0), phase, keys=True)  # all tokens, in one group of U
    return total


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-{row[3]}" for row in TABLE])
def test_the_table_has_the_bytes_of_the_plans(row):
    name, ring, ulysses, count, *cells = row
    ranks = int(count)
    axes = (int(ring), int(ulysses)) if ring else (1, ranks) if name == "ulysses" else (ranks, 1)
    for i, phase in enumerate(("forward", "backward")):
        forms = [sent(plan(name, *axes, HEADS, latent=latent), phase) for latent in (None, LATENT)]
        forms.insert(1, sent_with_one_rotary_key(name, *axes, phase))
        assert [int(cell.split(", ")[i]) for cell in cells] == [round(form / ranks / 2**20) for form in forms]


def test_the_page_has_a_table():
    assert len(TABLE) == 7
