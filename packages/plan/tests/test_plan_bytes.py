"""`armillary-plan bytes`: communication volume for any number of ranks, for WallFacer's model M to the byte."""

import json
from dataclasses import replace

import pytest

from armillary.attention.plans import names
from armillary.plan.cli import main
from armillary.plan.comm_volume import BytesOptions, MethodBytes, PhaseBytes, candidates_of, plan_bytes
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.search.candidates import Candidate, Mesh

UNIT = 1024 * 6656 * 2
"""Bytes of one [T, E] of model M on one of 64 ranks: 13 / 1024 GiB."""
LSE = 1024 * 52 * 4
SMALL = BytesOptions(tokens="480", heads=8, kv_heads=4, head_dim=8, ranks=8, rows=2, of_ranks=(0, 5))


def figures(rows: list[MethodBytes]) -> dict[tuple[str, tuple[int, ...], str], PhaseBytes]:
    return {(str(row.candidate.attention), row.ranks, row.phase): row.counted for row in rows}


@pytest.fixture(scope="module")
def model_m() -> list[MethodBytes]:
    return plan_bytes(BytesOptions(attention=("ring", "wallfacer", "usp"), team=(4,)))


def test_bytes_of_model_m(model_m):
    volumes = figures(model_m)
    assert volumes["ring", (0, 1), "forward"] == PhaseBytes(63 * 2 * UNIT, 0)
    # queries, and dq in float32
    assert volumes["ring", (0, 1), "backward"] == PhaseBytes(63 * (3 * UNIT + LSE + 2 * UNIT), 0)
    collective = 3 * (3 * UNIT + UNIT + LSE)
    assert volumes["wallfacer C=4", (0,), "forward"] == PhaseBytes(3 * 4 * 2 * UNIT, collective)
    assert volumes["wallfacer C=4", (1,), "forward"] == PhaseBytes(4 * 4 * 2 * UNIT, collective)
    assert volumes["usp", (0, 1), "forward"] == PhaseBytes(15 * 2 * UNIT, 3 * UNIT)


def test_model_m_against_the_paper(model_m):
    gib = {key: (volume.p2p / 2**30, volume.collective / 2**30) for key, volume in figures(model_m).items()}
    assert gib["ring", (0, 1), "forward"] == (pytest.approx(1.5996, abs=5e-5), 0)
    assert gib["wallfacer C=4", (0,), "forward"] == (pytest.approx(0.3047, abs=5e-5), pytest.approx(0.1529, abs=5e-5))
    assert gib["wallfacer C=4", (1,), "forward"] == (0.40625, pytest.approx(0.1523 + 0.0006, abs=5e-5))
    paper = {str(row.candidate.attention): row.published for row in model_m if row.phase == "forward"}
    assert paper["usp"] is None and paper["ring"] and paper["wallfacer C=4"]
    assert paper["ring"].total == 1.625 * 2**30
    assert round(paper["wallfacer C=4"].collective / 2**30, 3) == 0.152
    assert round(paper["wallfacer C=4"].p2p / 2**30, 3) == 0.406
    assert paper["wallfacer C=4"].total / 2**30 == pytest.approx(0.558, abs=1e-3)


@pytest.mark.parametrize(
    ("dtype", "causal"), [pytest.param("bfloat16", False, marks=pytest.mark.long), ("float64", True)]
)
def test_closed_forms_equal_the_ledger(dtype, causal):
    every = tuple(name for name in names() if name != "local")
    for row in plan_bytes(replace(SMALL, causal=causal, dtype=dtype, attention=every)):
        assert row.counted == row.closed and row.counted.total > 0, row


def test_default_methods():
    assert [str(candidate.attention) for candidate in candidates_of(BytesOptions())] == [
        "ring",
        "token_ring",
        *(f"wallfacer C={team}" for team in (2, 4, 8)),
        *("all_gather", "ring+ring", "ring+token_ring"),
        "usp",
    ]
    candidates = list(candidates_of(BytesOptions(ranks=4, kv_heads=13)))
    assert Candidate(Mesh(1, 1, 4), AttentionChoice("ulysses")) in candidates
    assert Candidate(Mesh(1, 4, 1), AttentionChoice("usp")) in candidates
    assert Candidate(Mesh(1, 4, 1), AttentionChoice("wallfacer", team=2)) in candidates


def test_one_rank_sends_nothing():
    rows = plan_bytes(replace(SMALL, ranks=1, of_ranks=()))
    assert all(row.counted == row.closed == PhaseBytes(0, 0) and row.published is None for row in rows)


def test_the_command_prints_a_table_or_json(capsys):
    flags = ["--tokens", "64Ki", "--ranks", "16", "--attention", "ring", "wallfacer", "--team", "2"]
    main(["bytes", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "N 65,536, H 52, K 52, D 128, B 1, bfloat16, full mask, 16 ranks"
    assert " ".join(lines[3].split()) == (
        "method rank phase p2p (GiB) collective (GiB) all (GiB) closed form (GiB) sends paper (GiB)"
    )
    assert " ".join(lines[5].split()) == "ring 0, 1 forward 1.52344 0.00000 1.52344 1.52344 15 1.62500"
    assert " ".join(lines[9].split()).startswith("wallfacer C=2 1 forward 0.81250 0.20392 1.01642 1.01642 ")
    main(["bytes", *flags, "--json"])
    output = json.loads(capsys.readouterr().out)
    assert output["plan"]["ranks"] == 16
    first = output["rows"][0]
    assert first["counted"] == first["closed"] == {"p2p": 15 * 4 * 2 * UNIT, "collective": 0}
