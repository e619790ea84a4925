"""benchmarks/sent_bytes.py: bytes of WallFacer's model M on 64 ranks, and plans that equal the ledger."""

import sys
from pathlib import Path

import pytest

from armillary.plan.memory import AttentionChoice

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from sent_bytes import CallSizes, PhaseBytes, main, sent_bytes

UNIT = 1024 * 6656 * 2
"""Bytes of one [T, E] of model M on one of 64 ranks: 13 / 1024 GiB."""
LSE = 1024 * 52 * 4


def by_kind(sent: PhaseBytes) -> tuple[int, int]:
    return sent.p2p, sent.collective


def test_bytes_of_model_m():
    ring = sent_bytes(AttentionChoice("ring"), CallSizes())
    assert by_kind(ring["forward"]) == (63 * 2 * UNIT, 0)
    # queries, and dq in float32
    assert by_kind(ring["backward"]) == (63 * (3 * UNIT + LSE + 2 * UNIT), 0)
    assert ring["forward"].paper == (1.625 * 2**30, 0)
    collective = 3 * (3 * UNIT + UNIT + LSE)
    for rank, sends in ((0, 3), (1, 4)):
        team = sent_bytes(AttentionChoice("wallfacer", team=4), CallSizes(), rank)["forward"]
        assert by_kind(team) == (sends * 4 * 2 * UNIT, collective)
        assert team.paper is not None
        assert [size / 2**30 for size in team.paper] == pytest.approx([0.40625, 0.15234], abs=1e-5)
    usp = sent_bytes(AttentionChoice("usp"), CallSizes())["forward"]
    assert by_kind(usp) == (15 * 2 * UNIT, 3 * UNIT) and usp.paper is None


def test_one_rank_sends_nothing():
    for sent in sent_bytes(AttentionChoice("ring"), CallSizes(ranks=1)).values():
        assert (sent.total, sent.plan, sent.paper) == (0, 0, None)


def test_the_script_prints_a_table(capsys, monkeypatch):
    flags = ["--tokens", "64Ki", "--ranks", "16", "--attention", "ring", "wallfacer", "--team", "2", "--rank", "1"]
    monkeypatch.setattr(sys, "argv", ["sent_bytes.py", *flags])
    main()
    table = "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert "ring on ring 16 1 forward 1.52344 0.00000 1.52344 1.52344 15 1.62500" in table
    assert "wallfacer C=2 on ring 16 1 forward 0.81250 0.20392 1.01642 1.01642 " in table
