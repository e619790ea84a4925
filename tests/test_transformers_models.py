"""Shards of transformers' models agree with one rank in the benchmark, or the library refuses the model."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import model_type_to_module_name  # noqa: E402

ROOT = Path(__file__).parent.parent
MODELS = Path(transformers.__file__).parent / "models"
OWN_POSITIONS = re.compile("create_position_ids_from|(Learned|Sinusoidal)Positional|trigram_input|token_dropout")
"""Matches the files of models that compute their own positions, or mix tokens without attention."""


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_models", ROOT / "benchmarks/transformers_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_a_shard(family: str, way: str):
    models = benchmark()
    models.quiet()
    return models.on_a_shard(family, way)


def unlike(worlds, families: list[str], ways: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """Returns the benchmark's differences from one rank, and the families that it could build."""
    models, wrong, built = benchmark(), [], set()
    models.quiet()

    def run(family: str, way: str):
        return worlds(models.RANKS).run(on_a_shard, family, way)

    for family in families:
        for way, answer, reason in models.verdicts(run, family, ways):
            wrong += [f"{family}, {way}: {reason}"] if answer == "unlike" else []
            built |= {family} if answer != "not built" else set()
    return wrong, built


def families_with_own_positions() -> list[str]:
    folders = {family: MODELS / model_type_to_module_name(family) for family in benchmark().families()}
    texts = {
        family: "".join(file.read_text() for file in folder.glob("modeling_*.py")) for family, folder in folders.items()
    }
    return [family for family, text in texts.items() if OWN_POSITIONS.search(text)]


NAMED = ["roberta", "camembert", "esm", "bart", "opt", "mobilebert"]
"""One family of each way to compute positions."""


@pytest.mark.long
def test_models_with_own_position_ids_are_right_or_refused(worlds):
    assert {*NAMED} <= {*families_with_own_positions()}
    wrong, built = unlike(worlds, NAMED, ("armillary", "from 0"))
    assert not wrong and built == {*NAMED}


@pytest.mark.long
def test_all_models_with_own_position_ids_are_right_or_refused(worlds):
    wrong, built = unlike(worlds, families_with_own_positions(), ("armillary", "from 0"))
    assert not wrong
    assert {*NAMED, "xlm-roberta", "xmod", "mbart"} <= built


@pytest.mark.long
def test_all_models_are_right_or_refused(worlds):
    models = benchmark()
    assert not unlike(worlds, models.families(), models.WAYS)[0]
