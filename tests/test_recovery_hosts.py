"""Two hosts, each a network namespace of this machine, one of which is killed in the middle of a run."""

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from launches import Launch, forked
from recovery import SMALL, assert_same_end, folder

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "cluster"))

from namespaces import Namespaces, obstacle


def torchrun_on(hosts: Namespaces, i: int) -> list[str]:
    """Command line of torchrun for 2 of 4 ranks, on host `i`, with the rendezvous on host 0."""
    variables = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # or a new torchrun could not join the one on host 0
    rendezvous = f"--rdzv-backend c10d --rdzv-id run --rdzv-endpoint {hosts.addresses[0]}:29400"
    ranks = f"--nnodes 2 --nproc-per-node 2 --max-restarts 3 --local-addr {hosts.addresses[i]}"
    return [*variables.split(), *forked(*rendezvous.split(), *ranks.split(), flags=SMALL)]


@pytest.mark.long  # reproduces "Several hosts" and "A restarted torchrun" of docs/fault-tolerance.md, in a minute
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_run_on_two_hosts_resumes_after_one_restarts(undisturbed, tmp_path):
    run_folder = folder(tmp_path, "hosts")

    def start(i: int) -> Launch:
        return Launch(torchrun_on(hosts, i), run_folder, partial(hosts.run, i))

    with Namespaces(2) as hosts, start(0) as first:
        with start(1) as second:
            output = first.wait_for("^step: 10 ")  # not while the checkpoint of step 8 is being saved
            hosts.kill(1)
            assert second.wait() != 0
        end = first.wait_for("^.rank [01]. armillary-train: missing: rank [23]: no heartbeat since step", output)
        with start(1) as restarted:
            first.wait_for("resuming from", end)
            assert (first.wait(), restarted.wait()) == (0, 0), first.printed + restarted.printed
        output = first.printed
    assert_same_end(run_folder, output, undisturbed)
    assert not re.search(f"armillary-{os.getpid()}-", os.popen("ip netns list").read())
