"""Conformance over the backend for ranks that share a GPU, with 4 ranks."""

import pytest
import torch

from armillary.core.testing import World
from conformance import METHODS, Trial, cases, compositions, drawn
from conformance.run import run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_method_conforms_on_a_shared_gpu():
    """One case per method and option; random DTensors, projections and sub-meshes."""
    trials = [Trial(one, cases(brief=i)[i % 7]) for i, one in enumerate(compositions(list(METHODS), [4]))]
    some = [trial for trial in map(drawn, [7] * 60, range(60)) if trial.composition.ranks in (2, 4)]
    trials += [trial for trial in some if not trial.case.compiled][:8]
    assert any(trial.case.dtensor for trial in trials) and any(trial.case.projected for trial in trials)
    with World(4, backend="staged") as world:
        assert not [(trial, verdict) for trial, verdict in run(world, trials, "cuda") if verdict.failure]
