"""The recipe of docs/post-training.md: two ranks agree with one rank, and the reward rises."""

import re

import pytest
from launches import pages_agent
from test_docs import IN_FLOAT64, run, scripts


def steps_of(folder, ranks: int, count: int) -> tuple[list[float], list[float]]:
    """Returns the rewards and the gradient norms of the steps, in float64."""
    (folder / "grpo.py").write_text(
        scripts("docs/post-training.md")["grpo.py"].replace('"STEPS", "3"', f'"", "{count}"')
    )
    output = run(pages_agent("--nproc-per-node", str(ranks), script="grpo.py", wrapper=str(IN_FLOAT64)), folder)
    steps = re.findall(r"reward (\S+) norm (\S+)", output)
    return [float(reward) for reward, _ in steps], [float(norm) for _, norm in steps]


def test_two_steps_on_two_ranks_equal_one_rank(tmp_path):
    (rewards, norms), sharded = (steps_of(tmp_path, ranks, 2) for ranks in (1, 2))
    assert len(norms) == 2
    assert sharded[0] == rewards
    assert sharded[1] == pytest.approx(norms, rel=1e-7)


@pytest.mark.long  # reproduces the reward of docs/post-training.md
def test_the_reward_rises(tmp_path):
    rewards, _ = steps_of(tmp_path, 2, 50)
    assert sum(rewards[:3]) / 3 < 0.25 and sum(rewards[-3:]) / 3 > 0.8, rewards
