"""Ranks for tests, on any machine: `with World(4) as world: world.run(function, ...)`.

from armillary.core.testing.plugin import worlds   # in conftest.py: a fixture for the whole test session

def add_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)

def test_sum(worlds):
    assert worlds(4).run(add_ranks) == [6, 6, 6, 6]
"""

from armillary.core.testing.compare import LIMITS, commands_in, refusal, relative_error, root_mean_square, value_errors
from armillary.core.testing.dispatcher import Dispatched
from armillary.core.testing.groups import STAGED, fake_world
from armillary.core.testing.world import RankFailed, World, Worlds, fork_context, mesh

__all__ = [
    "LIMITS",
    "STAGED",
    "Dispatched",
    "RankFailed",
    "World",
    "Worlds",
    "commands_in",
    "fake_world",
    "fork_context",
    "mesh",
    "refusal",
    "relative_error",
    "root_mean_square",
    "value_errors",
]
