"""Heads of transformers on two ranks equal one rank, or are refused: a sample of `benchmarks/model_heads.py`."""

from importlib import import_module
from pathlib import Path

import pytest

from armillary.core.testing import Worlds

pytest.importorskip("transformers")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# A term of the loss, an outer model without hooks of its own, a score of each row, labels of tokens, a router's loss.
SAMPLE = {
    "BambaForCausalLM": {"plain": "right", "z_loss_coefficient": "refused"},
    "GotOcr2ForConditionalGeneration": {"plain": "right"},
    "DiffLlamaForSequenceClassification": {"plain": "right", "padded": "right"},
    "BertForTokenClassification": {"plain": "right", "padded": "right", "token labels": "refused"},
    "MixtralForCausalLM": {"padded": "right", "router_aux_loss_coef": "refused"},
}


def test_heads_equal_one_rank_or_are_refused(monkeypatch):
    # Ranks that start from here on import the benchmark too, whose functions they run.
    monkeypatch.syspath_prepend(BENCHMARKS)
    model_heads, worlds = import_module("model_heads"), Worlds()
    families = model_heads.head_classes()
    for name, expected in SAMPLE.items():
        cases = model_heads.cases_of(name, families[name])
        done = {(name, case): "not in the sample" for case in cases if case not in expected}
        rows = list(model_heads.outcomes(name, families[name], done, worlds))
        assert {row["case"]: row["verdict"] for row in rows} == expected, rows
    worlds.close()
