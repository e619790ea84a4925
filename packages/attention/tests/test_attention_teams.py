"""WallFacer's teams: each rank is one member of one team, and each team's keys are in one ring of every group."""

import pytest

from armillary.attention.methods.wallfacer import Teams

WORLDS = [(1, 1), (4, 1), (4, 2), (8, 2), (16, 2), (16, 4), (12, 2), (18, 3), (64, 4)]


@pytest.mark.parametrize("placement", ["collect_intra", "p2p_intra"])
@pytest.mark.parametrize(("ranks", "team"), WORLDS)
def test_members_and_key_targets(ranks, team, placement):
    teams = Teams(ranks, team, placement)
    seats = [teams.team_and_member(rank) for rank in range(ranks)]
    assert sorted(seats) == [(t, a) for t in range(ranks // team) for a in range(team)]
    assert [teams.rank(*seat) for seat in seats] == list(range(ranks))
    targets = [teams.key_target(*seat) for seat in seats]
    assert sorted(targets) == list(range(ranks))  # every rank receives the keys of one team
    for seat, target in zip(seats, targets, strict=True):
        assert teams.key_source(*teams.team_and_member(target)) == seat
    # The rings of a team's members start from all teams together.
    for t in range(ranks // team):
        group = t // teams.ring_size
        sources = [
            teams.key_source(group * teams.ring_size + j, b)[0] for j in range(teams.ring_size) for b in range(team)
        ]
        assert sorted(sources) == list(range(ranks // team))


def test_neighbours_are_in_one_team_or_one_ring():
    near = Teams(16, 2, "collect_intra")
    assert [near.team_and_member(rank)[0] for rank in range(4)] == [0, 0, 1, 1]
    far = Teams(16, 2, "p2p_intra")
    assert [far.team_and_member(rank) for rank in range(5)] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
