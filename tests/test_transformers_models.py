"""Shards of transformers' models agree with one rank in the benchmark, or the library refuses the model."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_models", ROOT / "benchmarks/transformers_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_a_shard(family: str, way: str):
    models = benchmark()
    models.quiet()
    return models.on_a_shard(family, way)


@pytest.mark.long  # reproduces the table of docs/benchmarks/transformers.md
def test_all_models_are_right_or_refused(worlds):
    models = benchmark()
    models.quiet()
    wrong = []
    for family in models.families():
        for way, answer, reason in models.verdicts(
            lambda *case: worlds(models.RANKS).run(on_a_shard, *case), family, models.WAYS
        ):
            wrong += [f"{family}, {way}: {reason}"] if answer == "unlike" else []
    assert not wrong
